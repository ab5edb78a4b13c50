"""Writes docs/guides/why.md from the table of checks: python docs/make_why.py"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from turnwise.runs.why.check import KEYS, Check
from turnwise.runs.why.table import CHECKS

HEAD = """# Why a run does not learn

```
turnwise why runs/quickstart
turnwise why runs/quickstart --json
```

reads `metrics.jsonl` and `config.json` of a run, finished or under way, and names what keeps it from learning: what was
seen, what that means, and what to try. It loads no model and takes about a second. The exit code is 0 if nothing was
found, 1 if something was, and 2 if the folder cannot be read.

```
Actions end at the token limit
  seen   100% of the turns of the last 3 steps were cut off at rollout.max_action_tokens = 1.
  means  The environment hears unfinished messages, and credit goes to beginnings.
  try    Raise rollout.max_action_tokens and, with it, rollout.max_trajectory_tokens.
```

The same checks run after each step of training. Each cause is said once, in one line on the terminal and in
`events.log`, when it first appears. A resumed run knows the metrics from before, and says a cause again that is still
there. Checks never stop a run.

A cause hides what follows from it: if all actions are cut off, it is not reported that all attempts are paid alike.
`turnwise why` looks at each of the last 20 lines of metrics, because a cause may come and go by chance.

The checks are cautious. A run that is merely slow, at a high lag, or in an environment that fails now and then gets no
finding. Silence is therefore no proof: a reward that is wrong in a plausible way cannot be seen in metrics. See
[metrics](../reference/metrics.md) for all of them.

## How much it sees

`python benchmarks/why.py` trains broken and sound recipes, small ones, and prints what was said of each. Of 2026-11-17:

* Ten broken on purpose (learning rate 1, temperature 0.01, pays 0, pays 1, a filter that drops nearly all,
  max_action_tokens 1, max_prompt_tokens 10, a template of one message, a wrong end token, 3 tasks): 10 of 10, at steps
  0 to 4, and nothing else named.
* Five sound ones (quick start, longer warm start, three steps, max_lag 2, 5 % of environment calls fail): 5 of 5,
  nothing said.
* Ten more, written down before they were tried: 7 of 10 at the first try, 8 of 10 today.

Not seen are an entropy bonus that is too large and a reward by coin flip. Between the first try and today the model of
the benchmark was trained longer, two checks became stricter and one wider; none was changed for the ten more.

## Checks

All thresholds of a check must be exceeded, except where one begins with "or". "Steps in a row" are the last ones. This
page is made by `python docs/make_why.py`.
"""


def section(check: Check) -> list[str]:
    reads = ", ".join(f"`{name}*`" if name.endswith("/") else f"`{name}`" for name in check.reads)
    keys = {name: f"`{key}`" for name, key in KEYS.items()}
    words = f"`{check.name}`. {check.meaning} {check.remedy.format(**keys)}"
    lines = [f"### {check.cause}\n", wrapped(words), ""]
    lines += ["| threshold | value | |", "|---|---|---|"]
    lines += [f"| {name} | {limit.value:g} | {limit.meaning} |" for name, limit in check.thresholds.items()]
    hides = f" Hides {', '.join(f'`{name}`' for name in check.explains)}." if check.explains else ""
    return [*lines, "", wrapped(f"Reads {reads}.{hides}"), ""]


def wrapped(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def page() -> str:
    return "\n".join([HEAD, *(line for check in CHECKS for line in section(check))])


if __name__ == "__main__":
    (Path(__file__).parent / "guides" / "why.md").write_text(page())
