"""Writes docs/guides/envs/adapters.md: the adapters, each with an attempt that was really made.

python docs/make_adapters.py
"""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from turnwise.assemble.environments import environment_class
from turnwise.messages import Message
from turnwise.types import Task

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guides" / "envs" / "adapters.md"
SERVER = ROOT / "tests" / "envs" / "adapters" / "openenv_server.py"
LONGEST = 900
"""Characters of a message that are shown."""

HEAD = """# Other libraries' environments

`env.name = "LIBRARY:NAME"` in a recipe is all it takes:

```toml
[[env]]
name = "textarena:GuessTheNumber-v0"
```

| library | version tested | a name | tasks | pays | expert |
|---|---|---|---|---|---|
| [textarena](#textarena) | 0.7.4 | `textarena:GuessTheNumber-v0` | seeds | once, at the end | legal moves |
| [gymnasium](#gymnasium), minigrid | 1.4.0, 3.2.0 | `gymnasium:MiniGrid-Empty-5x5-v0` | seeds | every turn | paths |
| [reasoning_gym](#reasoning_gym) | 0.1.25 | `reasoning_gym:chain_sum` | seeds | once | all |
| [skyrl_gym](#skyrl_gym) | 0.4.0 | `skyrl_gym:gsm8k` | rows of `env.data` | every turn | gsm8k, gsm8k_multi_turn |
| [textworld](#textworld) | 1.7.0 | `textworld:custom` | seeds | every turn, from a score that grows | all |
| [gem](#gem) | 0.1.0 | `gem:game:GuessTheNumber-v0-easy` | seeds | every turn | GuessTheNumber |
| [bfcl](#bfcl) | 2026.3.23 | `bfcl:multi_turn_base` | its 200 conversations | once, at the end | all |
| [openenv](#openenv) | 0.3.0 | `openenv:http://127.0.0.1:8000` | seeds | inside observations | none |
| [verifiers](verifiers.md) | 0.4.0 | `verifiers:textarena` | rows of a taskset | once, at the end | none |

`pip install "turnwise[envs]"` installs textarena, gymnasium, minigrid, reasoning-gym, skyrl-gym and the client of
openenv. textworld needs `pip install textworld`. gem and bfcl require versions of other packages that conflict with
ours: `pip install --no-deps gem-llm bfcl-eval` installs them, and `requirements-envs.txt` lists what the tests use.
verifiers runs its environments in a separate Python; it has [another page](verifiers.md).

*Tasks* are seeds of the library's generator unless the table says otherwise. Training and held-out seeds always differ.
Two seeds may still give the same game if there are few games: thirty numbers to guess are thirty games.
`env.tasks.count` sets the number of tasks.

*Pays* says when the library pays: every turn, as the turn's reward, or once, as the attempt's outcome. A growing score
is split into the reward of each turn. `rollout.success_threshold` is the total that counts as success; MiniGrid, for
instance, subtracts a little for every step, so 0.5 is a better threshold than 1.0.

*Expert*: `[sft]` asks the expert for demonstrations. Without an expert, set `sft.updates = 0` or give `sft.data`.

*Settings* are `[env.settings]`: `options` are passed to the library, and the docstring of each adapter's class
(src/turnwise/envs/adapters/) lists the others. A name or a setting that the library does not know is refused before the
run starts.

## Processes

Most of these libraries use global random numbers or keep state in their modules, so two attempts in one process would
affect each other. Each library is imported once, in a process that does nothing else, and every attempt is a fork of
that process. It begins with the same modules and with random numbers that depend only on the task, whatever other
attempts do. A fork takes some milliseconds and about a megabyte. A fork that crashes fails only its attempt; one that
hangs is killed at the attempt's deadline; all end with the run, however that ends. The processes exchange JSON, never
code, and exceptions carry their traceback. The environments behind an openenv server run where the server runs.

At most eight forks per core are alive at once, over all such environments of a recipe; `env.concurrency.max_open` sets
another limit for one environment. Further attempts wait, and their deadlines have not started. Most forks wait for the
model, and the engine decodes as many requests together as there are forks, so a machine with spare memory may want
more.

## A trained example

`turnwise train recipes/textarena-guess-tiny.toml`: a tiny model learns textarena's GuessTheNumber, six guesses for
thirty numbers. It imitates an expert whose every fourth guess is random, and then takes 40 steps of 24 x 8 attempts. On
256 held-out tasks:

```
before: held-out success 0.344 sampled, 0.574 greedy
after:  held-out success 0.621 sampled, 0.703 greedy
```

The 40 steps took 6 minutes on two busy cores, with every attempt in a separate process. `recipes/textarena-guess.toml`
is the same game for SmolLM2-135M.
"""


@dataclass(frozen=True)
class Show:
    """A section: what to say of a library, and the attempt that is shown."""

    title: str
    text: str
    name: str
    script: tuple[str, ...] = ()
    """What is said; empty asks the expert."""
    settings: dict[str, Any] = field(default_factory=dict)
    task: Task | None = None


SHOWS = (
    Show(
        "textarena",
        """Games for one player, and games for two (`env.settings.player` is the model's side). `env.settings.opponent`
says who plays the other side: legal moves at random, a function of yours, a frozen copy of the model, or the
policy itself, whose turns train on both sides: [self-play](../selfplay.md). The start-up check plays whole
games of two players. Demonstrations are random legal moves, except in GuessTheNumber. The library's wrappers
repeat the whole conversation every turn; the adapter shows only the new part, without an echo of the model's
words. It adds missing brackets to an action, as the library does.""",
        "textarena:GuessTheNumber-v0",
    ),
    Show(
        "gymnasium",
        """Environments with discrete actions. MiniGrid is shown as a text picture of the visible cells, with the agent
at the bottom looking up, and its actions have names. The first message has a legend. Other environments are shown by
their text rendering (`ansi`) or by their numbers, each with its name where the environment, or gymnasium's
documentation, has one; `env.settings.actions` and `env.settings.observations` give other names. If a message
names several actions, the last one counts; the number of an action is understood too.""",
        "gymnasium:MiniGrid-Empty-Random-5x5-v0",
    ),
    Show(
        "reasoning_gym",
        """Questions from more than a hundred generators, one answer each, in `<answer>` tags or plain. Some generators
pay a little for wrong answers; the mark `correct` says which were right. Some of the library's scorers
evaluate the answer as Python. Here they read literals and formulas only, in a process with 5 seconds, 512 MiB
and few system calls: code in an answer is a wrong answer, and so is `9**9**9**9` (mark `stopped`).""",
        "reasoning_gym:chain_sum",
        settings={"options": {"min_terms": 3, "max_terms": 3}},
    ),
    Show(
        "skyrl_gym",
        """SkyRL's environments, on rows from `env.data` in SkyRL's format (`prompt`, `reward_spec`, and the other
fields that the environment reads) or in verl's (`prompt`, `reward_model`, `extra_info`).
`env.settings.config` is SkyRL's `environment.skyrl_gym`. If the environment rewrites an action, later prompts
show the rewritten action; the sampled tokens are trained.""",
        "skyrl_gym:gsm8k_multi_turn",
        ("Three dozens are 36. #### 35", "#### 36"),
        {"max_turns": 3},
        Task(
            "shown",
            "gsm8k",
            {
                "prompt": [{"role": "user", "content": "How many eggs are three dozen?"}],
                "reward_spec": {"ground_truth": "36"},
            },
        ),
    ),
    Show(
        "textworld",
        """Text adventures: `custom` with `nb_rooms`, `nb_objects` and `quest_length`, and the challenges `tw-simple`,
`tw-coin_collector` and `tw-treasure_hunter`. A game is compiled when its task is first met, which takes
seconds, and kept in the cache (`TURNWISE_CACHE`, or `~/.cache/turnwise`). A turn is paid the share of the
score that it added.""",
        "textworld:custom",
    ),
    Show(
        "gem",
        """Games and questions of GEM, which seeds the global generators of Python and numpy. Their names contain a
colon. Text that the library appends to observations is appended.""",
        "gem:game:GuessTheNumber-v0-easy",
    ),
    Show(
        "bfcl",
        """The four multi-turn categories of the Berkeley function calling leaderboard: `multi_turn_base`,
`multi_turn_miss_func`, `multi_turn_miss_param`, `multi_turn_long_context`. A message without a call ends
the model's turn, and the user's next question follows; the library's checker decides at the end. The
library evaluates the model's text as Python, so the adapter passes on only calls of offered functions with
plain values. With `env.settings.calls = "tools"` the functions go to the chat template instead, and
`rollout.tools` reads the calls.""",
        "bfcl:multi_turn_base",
    ),
    Show(
        "openenv",
        """A server that speaks OpenEnv's protocol, one session per attempt. The model's message goes into the action's
only required field, if that is a string (or into `env.settings.field`). If an action has other fields, the
first message lists all of them with their types, and the model may write the action as a JSON object;
`env.settings.calls = "tools"` offers the action as a tool instead. Types are checked, and the model hears what is
wrong. If all sessions of the server are taken, the adapter retries until the attempt's deadline: start the
server with as many sessions as concurrent attempts. The example uses the server of the tests,
tests/envs/adapters/openenv_server.py.""",
        "openenv:SERVER",
        ("m", "t", "w", "y", "z", "x", "v", "u", "s", "r", "q", "p", "o", "n"),
    ),
)


async def attempt(show: Show, name: str) -> list[str]:
    """The lines of an attempt."""
    kind = environment_class(name)
    task = show.task or next(iter(kind.tasks("heldout", 0)))
    kind.check_settings(**show.settings)
    environment = kind(**show.settings)
    random = Random(0)
    reply = await answer(environment.open(task))
    lines = [line for message in reply.messages for line in spoken(message.role, message.content)]
    for turn in range(30):
        said = show.script[turn] if show.script else environment.demonstrate(0.0, random)
        message = said if isinstance(said, Message) else Message("assistant", said)
        lines += spoken("assistant", message.content)
        reply = await answer(environment.step(message))
        lines += [line for message in reply.messages for line in spoken(message.role, message.content)]
        paid = [f"reward {reply.reward:g}"] if reply.reward else []
        paid += [f"outcome {reply.outcome:g}"] if reply.outcome or (reply.finished and not reply.reward) else []
        marks = [f"{name} {value:g}" for name, value in reply.marks.items()]
        if paid or marks or reply.finished:
            lines.append("-> " + ", ".join([*paid, *marks, *(["finished"] if reply.finished else [])]))
        if reply.finished:
            break
    await answer(environment.close())
    return lines


async def answer(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def spoken(role: str, text: str) -> list[str]:
    cut = text if len(text) <= LONGEST else f"{text[:LONGEST]} [...]"
    first, *rest = cut.splitlines() or [""]
    return [f"{role}: {first}".rstrip(), *(f"    {line}".rstrip() for line in rest)]


@contextmanager
def server() -> Iterator[str]:
    """The address of an OpenEnv server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), str(port), "8", "secret"])
    try:
        while process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def section(show: Show) -> str:
    if show.title == "openenv":
        with server() as address:
            lines = asyncio.run(attempt(show, f"openenv:{address}"))
    else:
        lines = asyncio.run(attempt(show, show.name))
    shown = show.name.replace("SERVER", "http://127.0.0.1:8000")
    settings = "".join(f"{key} = {toml(value)}\n" for key, value in show.settings.items())
    recipe = f'[[env]]\nname = "{shown}"\n' + (f"[env.settings]\n{settings}" if settings else "")
    rows = 'data = "rows.jsonl"\n' if show.task is not None else ""
    recipe = recipe.replace(f'"{shown}"\n', f'"{shown}"\n{rows}', 1)
    return f"## {show.title}\n\n{show.text}\n\n```toml\n{recipe}```\n\n```\n" + "\n".join(lines) + "\n```\n"


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value)


def page() -> str:
    return HEAD + "\n" + "\n".join(section(show) for show in SHOWS)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
