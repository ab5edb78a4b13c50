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
from turnwise.types import Message, Task

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
| [textarena](#textarena) | 0.7.4 | `textarena:GuessTheNumber-v0` | seeds | once, at the end | GuessTheNumber |
| [gymnasium](#gymnasium), minigrid | 1.4.0, 3.2.0 | `gymnasium:MiniGrid-Empty-5x5-v0` | seeds | every turn | paths |
| [reasoning_gym](#reasoning_gym) | 0.1.25 | `reasoning_gym:chain_sum` | seeds | once | all |
| [skyrl_gym](#skyrl_gym) | 0.4.0 | `skyrl_gym:gsm8k` | rows of `env.data` | every turn | gsm8k, gsm8k_multi_turn |
| [textworld](#textworld) | 1.7.0 | `textworld:custom` | seeds | every turn, from a score that grows | all |
| [gem](#gem) | 0.1.0 | `gem:game:GuessTheNumber-v0-easy` | seeds | every turn | GuessTheNumber |
| [bfcl](#bfcl) | 2026.3.23 | `bfcl:multi_turn_base` | its 200 conversations | once, at the end | all |
| [openenv](#openenv) | 0.3.0 | `openenv:http://127.0.0.1:8000` | seeds | inside observations | none |
| [verifiers](verifiers.md) | 0.4.0 | `verifiers:textarena` | rows of a taskset | once, at the end | none |

`pip install "turnwise[envs]"` brings textarena, gymnasium, minigrid, reasoning-gym, skyrl-gym and what the client of
openenv needs. textworld is `pip install textworld`. gem and bfcl ask for versions of other packages that do not go
with ours: `pip install --no-deps gem-llm bfcl-eval` installs them; `requirements-envs.txt` is what the tests have.
verifiers plays its environments itself, in a Python of its own: it has [a page](verifiers.md).

*Tasks* are seeds of the library's own generator unless the table says otherwise. Training and held-out seeds are
different ones, always. Two seeds may still begin the same game where there are few: thirty numbers to guess are thirty
games. `env.tasks.count` says how many.

*Pay* is taken where the library pays: turn by turn as the turn's reward, or once as the attempt's outcome. What a
library counts up is taken apart again. `rollout.success_at` is what an attempt must have come to in all; MiniGrid, for
instance, takes a little off for every step, so that 0.5 says more than 1.0.

*An expert* is what `[sft]` asks for demonstrations. Where there is none, set `sft.updates = 0` or give `sft.data`.

*Settings* are `[env.settings]`: `options` are the library's own, the others are in the docstring of each adapter's
class (src/turnwise/envs/adapters/). A name or a setting that the library does not know is refused before anything
starts.

## Processes

Most of these libraries draw from global random numbers or keep state in their modules, so that two attempts in one
process would see each other. Each library is imported once, in a process that does nothing else, and every attempt is a
fork of that process: it begins with the same modules and with random numbers that depend on the task alone, whatever
other attempts do. A fork takes some milliseconds and about a megabyte. One that crashes fails its attempt and no other;
one that hangs is killed at the attempt's deadline; all end with the run, however that ends. What passes between them is
JSON, and never code. An exception there brings its traceback along. The environments behind an openenv server run where
the server runs.

At most eight forks for each core are alive at once, over all such environments of a recipe; `env.max_open` sets another
number for one of them. Attempts without a place wait, and their deadlines with them. Most forks wait for the model, and
the engine decodes as many requests together as there are forks, so a machine with memory to spare may want more.
`turnwise play` opens the one that is played.

## One that was trained

`turnwise train recipes/textarena-guess-tiny.toml`: a tiny model learns textarena's GuessTheNumber, six guesses for
thirty numbers. It imitates an expert whose every fourth guess is a wild one, then takes 40 steps of 24 x 8 attempts. On
256 held-out tasks:

```
before: held-out success 0.344 sampled, 0.574 greedy
after:  held-out success 0.621 sampled, 0.703 greedy
```

The 40 steps took 6 minutes on two cores, beside other work, with every attempt in a process of its own.
`recipes/textarena-guess.toml` is the same game for SmolLM2-135M.
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
        """Games for one player, and games for two in which the other one plays at random among the moves that the game
names in square brackets (`env.settings.player` is the model's seat). 49 of the games of version 0.7.4 open
without further downloads. The library's own wrappers repeat the whole conversation every turn; here the
model hears what is new, without the echo of its own words. An action without brackets gets them, as in the
library.""",
        "textarena:GuessTheNumber-v0",
    ),
    Show(
        "gymnasium",
        """Environments with discrete actions. MiniGrid's are shown as a picture of the cells in view, the agent at the
bottom looking up, and called by their names; others by their own text where they have one (`ansi`), or by
their numbers. `env.settings.actions` gives actions names. The last one that a message names is taken.""",
        "gymnasium:MiniGrid-Empty-Random-5x5-v0",
    ),
    Show(
        "reasoning_gym",
        """Questions from more than a hundred generators, one answer each, in `<answer>` tags or plain. Some generators
pay a little for wrong answers; the mark `correct` says which were right.""",
        "reasoning_gym:chain_sum",
        settings={"options": {"min_terms": 3, "max_terms": 3}},
    ),
    Show(
        "skyrl_gym",
        """SkyRL's environments on rows in SkyRL's form, which `env.data` names: `prompt`, `reward_spec`, and what else
the environment reads. `env.settings.config` is what SkyRL has under `environment.skyrl_gym`. An action that
the environment rewrites is shown rewritten from then on; what was sampled is what is trained.""",
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
        """Games and questions of GEM, which seeds the global generators of Python and numpy. Names have a colon of
their own. What the library would append to an observation is appended.""",
        "gem:game:GuessTheNumber-v0-easy",
    ),
    Show(
        "bfcl",
        """The four multi-turn categories of the Berkeley function calling leaderboard: `multi_turn_base`,
`multi_turn_miss_func`, `multi_turn_miss_param`, `multi_turn_long_context`. A message without a call ends
the model's turn, and the user's next question comes; the library's checker decides in the end. The library
evaluates what the model wrote as Python: only calls of functions on offer, with plain values, ever reach
it. With `env.settings.calls = "tools"` the functions go to the chat template instead, and `rollout.tools`
reads the calls.""",
        "bfcl:multi_turn_base",
    ),
    Show(
        "openenv",
        """A server that speaks OpenEnv's protocol, one session per attempt. The model's words go into the action's
only required field (or into `env.settings.field`); where there are several, the model writes the action as
JSON. A server whose sessions are all taken is asked again until the attempt's deadline: start it with as
many as attempts that run at once. Shown is the server of the tests, tests/envs/adapters/openenv_server.py.""",
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
