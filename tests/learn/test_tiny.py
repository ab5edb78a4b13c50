import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.assembling import environments_for
from support.making import few
from support.paths import RECIPES
from turnwise.assemble.model import model_and_tokenizer
from turnwise.learn.model_checks import check_model
from turnwise.learn.tiny import END_OF_TEXT, END_OF_TURN, START_OF_TURN, build_model, build_tokenizer
from turnwise.recipe.parse import load_recipe

TEXTS = ["start amber, links 2", "get amber", "leads to cedar", "answer cedar"] * 4
RECIPE = RECIPES / "quickstart.toml"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(TEXTS, 320)


@few
@given(text=st.text(max_size=40) | st.text(alphabet=" \t\n\r'.s\u00a0\u200b\U0001f600é<|im_end|>", max_size=40))
def test_any_string_round_trips(tokenizer, text):
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", [f"a{END_OF_TURN} b", f"{START_OF_TURN}user\n", f" {END_OF_TEXT} ", "<|im_start"])
def test_special_tokens_and_what_looks_like_them_round_trip(tokenizer, text):
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_an_untrained_tokenizer_knows_every_byte():
    tokenizer = build_tokenizer([])
    assert len(tokenizer) == 256 + 3
    text = "\x00 tab\t é \U0001f600"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_frequent_words_are_one_token(tokenizer):
    assert len(tokenizer(" amber")["input_ids"]) == 1
    assert len(tokenizer(" quartz")["input_ids"]) > 1


def test_a_turn_ends_with_its_own_token(tokenizer):
    assert tokenizer.eos_token == END_OF_TURN
    assert tokenizer.pad_token == END_OF_TEXT
    assert tokenizer(f"get amber{END_OF_TURN}")["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_the_chat_template_is_chatml(tokenizer):
    messages = [
        {"role": "system", "content": "Follow the links."},
        {"role": "user", "content": "start {{ amber }}"},
        {"role": "assistant", "content": "get amber"},
    ]
    rendered = "<|im_start|>system\nFollow the links.<|im_end|>\n<|im_start|>user\nstart {{ amber }}<|im_end|>\n"
    rendered += "<|im_start|>assistant\nget amber<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == rendered
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(prompt)
    assert prompt.endswith("<|im_start|>assistant\n")


def test_building_twice_gives_the_same_tokenizer(tokenizer):
    assert build_tokenizer(iter(TEXTS), 320).get_vocab() == tokenizer.get_vocab()
    assert build_tokenizer(iter(TEXTS), 320).backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_a_seed_gives_the_same_weights_and_leaves_the_generator_alone(tokenizer):
    def weights(seed):
        return build_model(tokenizer, 32, 2, 64, seed).state_dict()

    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = weights(5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = weights(5), weights(6)
    assert all(torch.equal(tensor, again[name]) for name, tensor in one.items())
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_model_fits_its_tokenizer_and_the_learner(tokenizer):
    model = build_model(tokenizer, 64, 2, 2000, 0)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.max_position_embeddings == 2000
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    check_model(model)


@pytest.mark.parametrize(
    "hidden",
    [
        12,
        32,
        96,
        128,
        pytest.param(8),
        pytest.param(160),
    ],
)
def test_every_width_a_recipe_may_ask_for_computes(tokenizer, hidden):
    model = build_model(tokenizer, hidden, 1, 64, 0)
    assert model.config.intermediate_size > 0
    assert torch.isfinite(model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits).all()


def test_the_quickstart_model_has_between_0_3_and_1_million_parameters():
    recipe = load_recipe(RECIPE)
    model, tokenizer = asyncio.run(model_and_tokenizer(recipe, environments_for(recipe)))
    assert 300_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 1_000_000
    assert len(tokenizer) <= 512
