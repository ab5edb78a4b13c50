"""Writes docs/reference/transcripts.md: a row of each format of transcripts, and what a round trip loses.

python docs/make_transcripts.py
"""

from __future__ import annotations

import json
from pathlib import Path

from turnwise.interop.transcripts.formats import FORMATS, write_row
from turnwise.interop.transcripts.transcript import LOSSES, Transcript
from turnwise.messages import Message, ToolCall, ToolSpec

GET = ToolSpec(
    "get",
    "Where a name leads.",
    {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
)
SAMPLE = Transcript(
    messages=(
        Message("system", "Follow the links."),
        Message("user", "Start at amber. Follow 1 link."),
        Message("assistant", "", thinking="amber first", calls=(ToolCall("get", {"name": "amber"}),)),
        Message("tool", "amber: cedar"),
        Message("assistant", "cedar"),
    ),
    trained=(False, False, True, False, True),
    tools=(GET,),
    reward=1.0,
    marks={"lookups": 1.0},
    name="train/12/3/0",
)
ABOUT = {
    "openai": ("OpenAI chat", "the files of its fine-tuning; most other tools read them too"),
    "trl": ("TRL", "`prompt` and `completion`, as conversations or as text; `messages` are read like OpenAI's"),
    "sharegpt": ("ShareGPT", "`conversations` of `from` and `value`, with LLaMA-Factory's calls and observations"),
    "verl": ("verl", "`messages` of its supervised training; `prompt` with `response` or `responses` is read too"),
    "verifiers": ("verifiers", "`results.jsonl`; the traces of its version 1 are read too"),
    "art": ("ART", "trajectories; its logs as JSON lines and Parquet are read too"),
    "atif": ("ATIF", "the trajectories of Harbor"),
}
HEAD = """# Transcripts

Conversations of other systems, in and out. This page is made by `python docs/make_transcripts.py`; the tests read,
train and write every format, and compare what is lost with this page.

* **In**: `sft.data` names transcripts for a warm start or for `turnwise sft`. They may be JSON lines, JSON (a list or
  one object), Parquet, a folder that `save_to_disk` wrote, `hf:NAME`, or `module:function`. `sft.format` names the
  format; `auto` looks at each row, so one file may mix formats.
* **Out**: `turnwise export RUN --format NAME OUT` writes recorded attempts, as `.jsonl`, `.json` or `.parquet`.

## What is trained

Every message of the assistant that is trained becomes a turn of its own: its prompt is what the chat template writes
for the messages before it and the tools, and its action is what the template writes for the message, up to the end
token that the template writes. Nothing else is trained. A message with calls needs `rollout.tools`, and its action must
be read as the same calls.

* A message of the assistant is trained unless its `weight` is 0 (`trainable` or `train` false). In a completion all are
  trained, in a prompt none. In ART the choices are trained, in a trace of verifiers the sampled messages, and in ATIF
  the agent's steps that were not copied as context.
* The first message of a conversation is not trained unless its weight is 1: it answers nobody.
* A message that is trained and has no text, no thinking and no call is refused.

## How rows are read

* Content is text, `null`, or a list of text parts, which are joined. A refusal is text that the assistant said.
* Thinking is `reasoning_content`, `reasoning`, `thinking`, or a part of that type. `<think>` in a text stays there.
* Arguments of a call are a JSON object, or a text that holds one. Results follow their calls, in any order if they name
  the ids of the calls. In Parquet, `null` in arguments and tools is left out: it stands for a field of another row.
* The role `developer` is read as `system`, and `function` as `tool`. A prompt and a completion of TRL that are plain
  text are a question and an answer.
* What cannot be read is an error that names the row and the field: images and audio, unknown roles, calls without a
  result, results without a call, arguments that are no JSON object, weights other than 0 and 1, preferences (`chosen`
  and `rejected`), broken characters. Fields that mean nothing to turnwise are listed once, with the number of times:

```
turnwise: talks.jsonl, row 3: messages[1].content[0]: a part of the type 'image_url' cannot be read: only text can
turnwise: talks.jsonl, row 7: messages[2]: call 1 (get) has no result
talks.jsonl: 120 transcripts, of which 340 messages are trained
talks.jsonl: fields that are not read, with the number of times: user (3), messages[].name (12)
```

## What a round trip loses

A conversation that is written in a format and read again is the same, but for what that format cannot hold:

"""
TAIL = """
No format but turnwise's own keeps the rewards of single turns, versions of the weights, times, credit, routes of
mixtures and the tools of later turns. ATIF holds the exact tokens and logprobs of each turn with `--tokens`; they are
written, and not read. `turnwise export` leaves out, with a line that says how many and why: attempts whose history was
rewritten, so that the model saw another conversation, attempts of an archive from before the first prompt's messages
were recorded, and those with a call that has no result.

## turnwise's own archive

`--format turnwise` writes a Parquet file like those in `archive/` of a run ([runs.md](runs.md)): exact tokens, logprobs
and rewards. `sft.data` recognises it and imitates the exact tokens, so the model must have the same vocabulary. Nothing
is lost but credit and token weights, which belong to the step that trained.

## verl rows as tasks

Rows of verl's reinforcement learning (`prompt`, `reward_model`, `data_source`, `extra_info`) are tasks of the
environment `verl`, which shows the prompt and scores one answer:

```toml
[[env]]
name = "verl"
data = "train.parquet"
heldout = "test.parquet"
settings = { scorer = "auto" }
```

| `scorer` | an answer is right if |
|---|---|
| `gsm8k` | the last number after `####` is the ground truth |
| `boxed` | the last `\\\\boxed{...}` holds the ground truth; spaces, `$` and sizes of brackets do not count |
| `number` | its last number is the ground truth |
| `search` | its last `<answer>` is one of the targets; case, articles and punctuation do not count |
| `exact` | it is the ground truth |
| `auto` | by `data_source`: `openai/gsm8k` is gsm8k; `math...`, `aime...`, MATH are boxed; `searchR1_...` is search |
| `module:function` | your function says so |

Such a function has the parameters of verl's `compute_score` (data_source, solution_str, ground_truth, extra_info) and
returns a number, or a mapping with `score`, whose other numbers become marks. The scorers above follow verl's, but are
not its code: for verl's own numbers, set `scorer = "verl.utils.reward_score:default_compute_score"`.

## A row of each format

The same conversation, with reward 1, as `turnwise export` writes it.
"""


def page() -> str:
    lines = ["| `--format` | is | lost |", "|---|---|---|"]
    for name, (title, about) in ABOUT.items():
        lost = "; ".join(LOSSES[loss][1] for loss in FORMATS[name].loses)
        lines.append(f"| `{name}` | {title}: {about} | {lost} |")
    lines.append("| `turnwise` | turnwise's archive | nothing of a conversation |")
    rows = [
        f"\n### {title}\n\n```json\n{json.dumps(write_row(SAMPLE, name), indent=1)}\n```\n"
        for name, (title, _) in ABOUT.items()
    ]
    return HEAD + "\n".join(lines) + "\n" + TAIL.replace("\\\\", "\\") + "".join(rows)


if __name__ == "__main__":
    path = Path(__file__).parent / "reference" / "transcripts.md"
    path.write_text(page())
    print(f"wrote {path}")
