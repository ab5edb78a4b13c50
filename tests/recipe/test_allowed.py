"""The values of every key in words, in the help and in the reference."""

import pytest

from turnwise.cli.commands import main
from turnwise.credit.estimators import ESTIMATORS
from turnwise.credit.failure import ON_FAILURE
from turnwise.credit.filters import FILTERS
from turnwise.credit.weighting import WEIGHTINGS
from turnwise.learn.losses import LOSSES
from turnwise.recipe.allowed import allowed_values, default_value, list_keys
from turnwise.recipe.built_in import CHOICES
from turnwise.recipe.keys import keys_of

KEYS = {f"{key.table}.{key.name}" if key.table else key.name: key for key in keys_of()}


@pytest.mark.parametrize(
    ("key", "values", "default"),
    [
        ("steps", "integer >= 1", "100"),
        ("layout", '"tree" | "packed" | "rows"', '"tree"'),
        ("optimizer.learning_rate", "number > 0", "1e-06"),
        ("engine.vllm.gpu_memory_utilization", "number > 0, <= 1", "0.5"),
        ("engine.vllm.enforce_eager", 'true | false | "auto"', '"auto"'),
        ("trackers", 'list of "tensorboard" | "wandb" | "mlflow" | "trackio"', "[]"),
        ("optimizer.adamw.betas", "[number, number]", "[0.9, 0.999]"),
        ("correction.token_band", "[number, number]", "none"),
        ("model.gradient_checkpointing", 'true | false | "auto"', '"auto"'),
        ("env.settings", "table", "{}"),
        ("loss", '"ppo_clip" | "gspo" | "reinforce" | "cispo" | "sapo" | "dppo"', '"ppo_clip"'),
        ("evaluation.sampling.top_k", "integer >= 0, < 2147483648", "0"),
        ("out", "text", '"runs/{recipe}-{seed}"'),
    ],
)
def test_values_in_words(key, values, default):
    assert allowed_values(KEYS[key]) == values.replace("2147483648", f"{1 << 31:g}")
    assert default_value(KEYS[key].field) == default


def test_every_key_has_words():
    tables = {name for name, key in KEYS.items() if allowed_values(key) == "table"}
    assert tables == {"env.settings", "env.tasks", "env.demonstrated"}


def test_the_lists_of_names_are_those_of_the_functions():
    tables = {"credit": ESTIMATORS, "filter": FILTERS, "loss": LOSSES, "weighting": WEIGHTINGS}
    found = {name: tuple(functions) for name, functions in tables.items()}
    assert {**found, "rollout.failures.on_failure": tuple(ON_FAILURE)} == CHOICES


def test_the_command_line_lists_keys(capsys):
    for arguments, expected in (
        (["train", "--help"], '  layout                    "tree" | "packed" | "rows"  (default: "tree")'),
        (["train", "--keys", "kl_penalty_of_nobody"], "no key has kl_penalty_of_nobody in its name"),
        (["train", "--keys", "vllm"], "GPUs that share one copy of the model."),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert " ".join(expected.split()) in printed
    assert len(list(list_keys(""))) == 2 * len(KEYS)
