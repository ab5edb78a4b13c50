"""The vLLM engine over a played service, without vLLM; the other files of this folder start one."""

import asyncio
import importlib.util
import math
from typing import Any

import numpy as np
import pytest
import torch

from engines.conformance import CONTEXT, POISON, VOCABULARY
from support.acting import byte_tokenizer, renderer, run, tiny_model, until
from support.guiding import PADDED, guidance
from turnwise.assemble import checks
from turnwise.assemble.engines import vllm_engine
from turnwise.engines.base import EngineFailure, Sampling
from turnwise.engines.grammar import Grammar, GrammarKind
from turnwise.engines.vllm.engine import VllmEngine
from turnwise.engines.vllm.guided import config_problem, structured_outputs
from turnwise.engines.vllm.local import LocalSettings, child_variables, engine_arguments, environment, vllm_variables
from turnwise.engines.vllm.params import signed
from turnwise.engines.vllm.service import Span, VllmAnswer
from turnwise.recipe.parse import parse_recipe
from turnwise.types import StopReason
from turnwise.weights.vllm_file import FileTransfer

WEIGHTS = {"a": torch.zeros(2), "b": torch.ones(3)}
PROMPT = np.array([5, 6, 7], np.int32)


class Played:
    """A service whose calls wait until the test answers them."""

    guidance_problem = ""

    def __init__(self, *, deaf=0):
        self.version = "default"
        self.told = []
        self.calls = {}
        self.deaf = deaf
        self.broken = False

    async def start(self, context):
        self.told.append(f"start {context}")

    async def generate(self, call):
        future = asyncio.get_running_loop().create_future()
        self.calls[call.name] = (call, future)
        try:
            return await future
        finally:
            del self.calls[call.name]

    async def abort(self, name):
        """Forgotten at first, as one that comes before its call."""
        self.deaf -= 1
        if self.deaf < 0 and name in self.calls:
            self.answer([1], finish="abort", name=name)

    async def pause(self):
        self.told.append("pause")

    async def resume(self):
        self.told.append("resume")

    async def name_version(self, version):
        self.version = version

    async def start_update(self):
        if self.broken:
            raise OSError("gone")

    async def update(self, info):
        self.told.append("update")

    async def finish_update(self, version):
        self.version = version

    async def close(self):
        self.told.append("close")

    def answer(self, tokens, *, finish="length", stop=None, logprobs=None, spans=None, name=None):
        """End the first call under way, or one by name."""
        _, future = self.calls[name or next(iter(self.calls))]
        logprobs = [-0.5] * len(tokens) if logprobs is None else logprobs
        spans = [Span(self.version, 0, len(tokens))] if spans is None else spans
        future.set_result(VllmAnswer(tokens, logprobs, spans if tokens else [], finish, stop))

    @property
    def asked(self):
        return [call for call, _ in self.calls.values()]


def engine_on(service, **named):
    settings = {"slots": 2, "context": 20, "vocabulary": 50, "end_tokens": [2, 9], "tensors": WEIGHTS, **named}
    return VllmEngine(service, FileTransfer(torch.float32), **settings)


def ask(engine, session="s", seed=3, **sampling):
    call = engine.generate(PROMPT, Sampling(**{"max_tokens": 8, **sampling}), session=session, seed=seed)
    return asyncio.create_task(call)


async def answered(service, engine, *tokens, **how):
    """The completion of one call."""
    sampling = how.pop("sampling", {})
    call = ask(engine, **sampling)
    await until(lambda: service.calls or call.done())
    if service.calls:
        service.answer(list(tokens), **how)
    return await call


# ---------------------------------------------------------------- calls


def test_a_call_says_all_that_vllm_must_know():
    async def scene():
        service = Played()
        engine = engine_on(service, version=4)
        call = ask(engine, max_tokens=50, temperature=0.7, top_p=0.9, top_k=5, stop=("x",))
        await until(lambda: service.calls)
        [asked] = service.asked
        service.answer([1, 2], finish="stop", stop=2)
        return asked, await call

    asked, completion = run(scene())
    assert asked.prompt.tolist() == [5, 6, 7]
    assert asked.session == "s"
    expected = {"max_tokens": 17, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3, "logprobs": 0}
    expected |= {"stop": ["x"], "stop_token_ids": [2, 9], "ignore_eos": True, "detokenize": True}
    assert expected.items() <= asked.sampling.items()
    assert completion.versions.tolist() == [4, 4]
    assert completion.stop is StopReason.end_token


def test_a_grammar_is_passed_on_and_what_it_allowed_is_computed_again():
    grammar = Grammar(GrammarKind.regex, "[a-c]{2}[0-9]?")
    tokens = [*byte_tokenizer().encode("ab7", add_special_tokens=False), 2]

    async def scene():
        service = Played()
        engine = engine_on(service, vocabulary=PADDED, guidance=guidance(added_are_text=True))
        call = ask(engine, grammar=grammar)
        await until(lambda: service.calls)
        [asked] = service.asked
        service.answer(tokens, finish="stop", stop=2)
        completion = await call
        with pytest.raises(EngineFailure, match="same release of llguidance"):
            await answered(service, engine, *tokens[::-1], sampling={"grammar": grammar})
        with pytest.raises(ValueError, match="cannot be followed"):
            await ask(engine, grammar=Grammar(GrammarKind.regex, "("))
        service.guidance_problem = "this vLLM follows grammars with another library"
        with pytest.raises(ValueError, match="another library"):
            await ask(engine, grammar=grammar)
        with pytest.raises(ValueError, match="end token"):
            await ask(engine_on(Played(), vocabulary=PADDED, guidance=guidance(), end_tokens=[9]), grammar=grammar)
        with pytest.raises(ValueError, match="cannot follow a grammar"):
            await ask(engine_on(Played()), grammar=grammar)
        return asked, completion

    asked, completion = run(scene())
    assert asked.sampling["structured_outputs"] == {"regex": grammar.text}
    dense = completion.allowed.dense(PADDED)
    assert dense.sum(1).tolist() == [3, 3, 11, 1]
    assert dense[2:, 2].all()
    assert completion.allowed.allows(completion.tokens).all()


@pytest.mark.parametrize(
    ("grammar", "fields"),
    [
        (Grammar.of_schema({"type": "object"}), {"json": '{"type": "object"}'}),
        (Grammar.of_choices(["a", "b"]), {"choice": ["a", "b"]}),
        (Grammar(GrammarKind.lark, 'start: "x"'), {"grammar": 'start: "x"'}),
    ],
)
def test_grammars_have_the_names_that_vllm_gives_them(grammar, fields):
    assert structured_outputs(grammar) == fields


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"backend": "guidance", "disable_any_whitespace": False, "reasoning_parser": ""}, ""),
        ({"backend": "auto"}, "structured-outputs-config.backend guidance"),
        (None, "structured-outputs-config.backend guidance"),
        ({"backend": "guidance", "disable_any_whitespace": True}, "disable_any_whitespace"),
        ({"backend": "guidance", "reasoning_parser": "qwen3"}, "reasoning_parser"),
    ],
)
def test_a_server_whose_masks_could_not_be_told_is_named(config, text):
    problem = config_problem(config)
    assert text in problem if text else problem == ""


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", "x", StopReason.stop_string),
        ("stop", 9, StopReason.end_token),
        ("length", None, StopReason.length),
        ("abort", None, StopReason.abort),
    ],
)
def test_why_it_stopped(finish, stop, reason):
    service = Played()
    assert run(answered(service, engine_on(service), 1, finish=finish, stop=stop)).stop is reason


def test_spans_become_versions_of_tokens():
    service = Played()
    spans = [Span("0", 0, 2), Span("0", 2, 3)]
    completion = run(answered(service, engine_on(service), 1, 3, 4, spans=spans))
    assert completion.versions.tolist() == [0, 0, 0]
    assert not completion.versions.flags.writeable


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"finish": "error"}, "ended a call with 'error'"),
        ({"logprobs": [math.nan]}, "no finite logprob"),
        ({"logprobs": []}, "no finite logprob"),
        ({"spans": [Span("0", 0, 0)]}, "did not say which weights"),
        ({"spans": [Span("0x", 0, 1)]}, "this run has not loaded"),
        ({"spans": [Span("1", 0, 1)]}, "sampled with version 1, and has been given 0"),
    ],
)
def test_an_answer_that_is_none_is_a_failure(how, text):
    service = Played()
    with pytest.raises(EngineFailure, match=text):
        run(answered(service, engine_on(service, keep_cache=True), 1, **how))


def test_a_likeliest_token_is_certain():
    service = Played()
    completion = run(answered(service, engine_on(service), 1, 4, sampling={"temperature": 0.0}))
    assert completion.logprobs.tolist() == [0.0, 0.0]


def test_a_temperature_that_vllm_would_change_is_refused():
    service = Played()
    with pytest.raises(ValueError, match="temperature"):
        run(answered(service, engine_on(service), 1, sampling={"temperature": 0.001}))


def test_calls_that_cannot_be_served_never_reach_vllm():
    async def scene():
        service = Played()
        engine = engine_on(service, context=CONTEXT, vocabulary=VOCABULARY)
        good = ask(engine)
        await until(lambda: service.calls)
        refused = []
        for changes in POISON.values():
            given = {"prompt": PROMPT, "seed": 3, "max_tokens": 8, **changes}
            prompt, seed = given.pop("prompt"), given.pop("seed")
            with pytest.raises(ValueError) as caught:
                await engine.generate(prompt, Sampling(**given), session="poison", seed=seed)
            refused.append(str(caught.value))
        asked = len(service.asked)
        service.answer([1, 4])
        return refused, asked, (await good).tokens.tolist(), engine.slots.num_free

    refused, asked, tokens, free = run(scene())
    assert all(refused)
    assert (asked, tokens, free) == (1, [1, 4], 2)


def test_no_tokens_are_asked_of_vllm_where_none_are_wanted():
    service = Played()
    completion = run(answered(service, engine_on(service), sampling={"max_tokens": 0}))
    assert len(completion.tokens) == 0
    assert completion.stop is StopReason.length
    assert service.told == []


def test_seeds_fit_64_signed_bits_and_stay_apart():
    seeds = [0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 3, 2**64 - 1]
    numbers = [signed(seed) for seed in seeds]
    assert len(set(numbers)) == len(seeds)
    assert all(-(2**63) <= number < 2**63 for number in numbers)
    assert -1 not in numbers


def test_what_the_service_raises_is_a_failure():
    class Failing(Played):
        async def generate(self, call):
            raise OSError("the line is dead")

    service = Failing()
    with pytest.raises(EngineFailure, match="the line is dead"):
        run(answered(service, engine_on(service)))


# ---------------------------------------------------------------- slots


def test_no_more_calls_are_under_way_than_there_are_slots():
    async def scene():
        service = Played()
        engine = engine_on(service)
        calls = [ask(engine, f"s{i}") for i in range(5)]
        seen = []
        for i in range(5):
            await until(lambda: len(service.calls) == min(2, 5 - len(seen)))
            seen.append(len(service.calls))
            service.answer([i])
            await asyncio.sleep(0)
        return seen, [(await call).tokens.tolist() for call in calls], engine.slots.num_free

    seen, tokens, free = run(scene())
    assert seen == [2, 2, 2, 2, 1]
    assert sorted(tokens) == [[0], [1], [2], [3], [4]]
    assert free == 2


def test_callers_that_go_leave_their_slots_to_others():
    async def scene():
        service = Played()
        engine = engine_on(service)
        calls = [ask(engine, f"s{i}") for i in range(5)]
        await until(lambda: len(service.calls) == 2)
        for place in (0, 2, 3):
            calls[place].cancel()
        await until(lambda: {call.session for call in service.asked} == {"s1", "s4"})
        for _ in range(2):
            service.answer([7])
            await asyncio.sleep(0.001)
        return await asyncio.gather(*calls, return_exceptions=True), engine

    done, engine = run(scene())
    assert [isinstance(one, asyncio.CancelledError) for one in done] == [True, False, True, True, False]
    assert engine.slots.num_free == 2
    assert engine.calls == []


def test_an_abort_is_repeated_until_vllm_confirms_it():
    async def scene():
        service = Played(deaf=3)
        call = ask(engine := engine_on(service))
        await until(lambda: service.calls)
        await engine.abort("s")
        return await call

    completion = run(scene())
    assert completion.tokens.tolist() == [1]
    assert completion.stop is StopReason.abort


def test_a_call_that_waits_is_aborted_with_nothing():
    async def scene():
        service = Played()
        engine = engine_on(service)
        calls = [ask(engine, f"s{i}") for i in range(3)]
        await until(lambda: len(service.calls) == 2)
        await engine.abort("s2")
        completion = await calls[2]
        for _ in range(2):
            service.answer([7])
            await asyncio.sleep(0.001)
        await asyncio.gather(*calls)
        return completion, engine.slots.num_free

    completion, free = run(scene())
    assert completion.stop is StopReason.abort
    assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) == 0
    assert free == 2


# ---------------------------------------------------------------- weights


def test_a_load_comes_between_pause_and_resume_and_salts_what_follows():
    async def scene():
        service = Played()
        engine = engine_on(service)
        call = ask(engine)
        await until(lambda: service.calls)
        before = service.asked[0].salt
        await engine.load(WEIGHTS, 1)
        service.answer([1, 2], spans=[Span("0", 0, 1), Span("1", 1, 2)])
        first = await call
        ask(engine)
        await until(lambda: service.calls)
        after = service.asked[0].salt
        await engine.forget()
        ask(engine)
        await until(lambda: len(service.calls) == 2)
        return service.told, first.versions.tolist(), {before, after, service.asked[1].salt}

    told, versions, salts = run(scene())
    assert told == ["start 20", "pause", "update", "resume"]
    assert versions == [0, 1]
    assert len(salts) == 3


@pytest.mark.parametrize("keep_cache", [False, True])
def test_a_version_that_is_loaded_again_shares_no_prefix(keep_cache):
    async def scene():
        service = Played()
        engine = engine_on(service, keep_cache=keep_cache)
        before = engine.salt
        await engine.load(WEIGHTS, 0)
        return engine.salt == before

    assert run(scene()) is keep_cache


@pytest.mark.parametrize("keep_cache", [False, True])
def test_a_call_that_a_load_overtook_is_asked_anew(keep_cache):
    """It may have begun with keys and values of the older weights."""

    async def scene():
        service = Played()
        call = ask(engine := engine_on(service, keep_cache=keep_cache))
        await until(lambda: service.calls)
        await engine.load(WEIGHTS, 1)
        before = service.asked[0].salt
        service.answer([1])
        if keep_cache:
            return (await call).tokens.tolist(), None
        await until(lambda: [asked.salt for asked in service.asked] not in ([before], []))
        service.answer([3])
        return (await call).tokens.tolist(), (await call).versions.tolist()

    assert run(scene()) == (([1], None) if keep_cache else ([3], [1]))


def test_nothing_is_sampled_after_a_load_that_failed():
    async def scene():
        service = Played()
        engine = engine_on(service)
        service.broken = True
        with pytest.raises(EngineFailure, match="could not load version 1: OSError: gone"):
            await engine.load(WEIGHTS, 1)
        failed = list(service.told)
        service.broken = False
        await engine.load(WEIGHTS, 2)
        return failed, service.told, engine.version

    failed, told, version = run(scene())
    assert failed[-1] == "pause"
    assert told[-1] == "resume"
    assert version == 2


def test_a_load_that_lacks_a_tensor_is_refused():
    service = Played()
    with pytest.raises(EngineFailure, match="lacks 1 tensors, for instance b"):
        run(engine_on(service).load({"a": torch.zeros(2)}, 1))
    assert service.told == []


def test_a_load_while_paused_stays_paused():
    async def scene():
        service = Played()
        engine = engine_on(service)
        await engine.pause()
        await engine.load(WEIGHTS, 1)
        before = list(service.told)
        await engine.resume()
        return before, service.told

    before, told = run(scene())
    assert "resume" not in before
    assert told[-1] == "resume"


def test_a_service_that_starts_with_other_weights_gets_the_first():
    async def scene():
        service = Played()
        completion = await answered(service, engine_on(service, version=7, first_weights=WEIGHTS), 1)
        return service.told, completion.versions.tolist()

    assert run(scene()) == (["start 20", "pause", "update", "resume"], [7])


def test_close_fails_all_that_is_under_way_and_what_comes_later():
    async def scene():
        service = Played()
        engine = engine_on(service)
        calls = [ask(engine, f"s{i}") for i in range(4)]
        await until(lambda: len(service.calls) == 2)
        await engine.close()
        return [
            *await asyncio.gather(*calls, return_exceptions=True),
            *await asyncio.gather(ask(engine), return_exceptions=True),
        ], service.told

    done, told = run(scene())
    assert [type(one) for one in done] == [EngineFailure] * 5
    assert told[-1] == "close"


def test_a_file_holds_each_tensor_once_and_is_gone_afterwards(tmp_path):
    tied = torch.arange(6.0).reshape(2, 3)
    weights = {"embed": tied, "norm": torch.ones(2), "head": tied, "place": torch.arange(2)}
    found = {}

    class Reading(Played):
        async def update(self, info):
            from safetensors.torch import load_file

            found.update(load_file(info["path"]))

    transfer, service = FileTransfer(torch.bfloat16, tmp_path), Reading()

    async def load(version):
        prepared: Any = await transfer.prepare(weights, version)
        assert files() == [prepared.path]
        await transfer.send(prepared, version, service)

    def files():
        return list(tmp_path.glob("*/*.safetensors"))

    run(load(3))
    assert service.version == "3"
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "embed": torch.bfloat16,
        "norm": torch.bfloat16,
        "place": torch.int64,
    }
    assert files() == []
    service.broken = True
    with pytest.raises(OSError, match="gone"):
        run(load(4))
    assert files() == []
    run(transfer.close())
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- settings


def recipe(engine, **more):
    tree = {"env": {"name": "hops"}, "engine": {"name": "vllm", **engine}, **more}
    return parse_recipe(tree, "test")


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ({"name": "slots", "vllm": {"folder": "x"}}, "vllm.folder is ignored"),
        (
            {"vllm": {"servers": ["http://x"], "gpu_memory_utilization": 0.3}},
            "gpu_memory_utilization is a setting of the servers",
        ),
        ({"vllm": {"servers": ["http://x"]}, "memory": {"kv_cache": 9}}, "memory.kv_cache is a setting of the servers"),
        ({"vllm": {"servers": ["http://x"], "transfer": "ipc"}}, "ipc"),
        ({"vllm": {"transfer": "nccl"}}, "nccl"),
        ({"vllm": {"transfer": "ipc", "folder": "x"}}, "folder is ignored"),
        (
            {"vllm": {"gpu_memory_utilization": 0.3}, "memory": {"kv_cache": 9}},
            "vllm.gpu_memory_utilization is ignored with memory.kv_cache = 9",
        ),
        ({"vllm": {"url": "x"}}, "url"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(engine, text):
    with pytest.raises(ValueError, match=text):
        recipe(engine)


@pytest.mark.parametrize("own", [{"transfer": "ipc"}, {"gpu_memory_utilization": 0.3}, {"tensor_parallel_size": 2}])
def test_settings_of_gpus_are_refused_without_one(own):
    with pytest.raises(ValueError, match=rf"engine.vllm.{next(iter(own))} = .* needs a GPU"):
        checks.check_gpus(recipe({"vllm": own}))


def test_a_recipe_makes_an_engine_that_has_not_started():
    engine: Any = vllm_engine(recipe({"max_num_seqs": 5}), tiny_model(), renderer(), 3)
    assert (engine.slots.num_free, engine.version, engine.shares_weights, engine.started) == (5, 3, False, False)
    assert engine.first_weights is None
    assert engine.service.settings.eager


def test_overlapping_evaluation_needs_a_copy_of_the_weights():
    overlap = {"evaluation": {"every": 1}, "schedule": {"overlap_evaluations": True}}
    recipe({}, **overlap)
    with pytest.raises(ValueError, match="overlap"):
        recipe({"vllm": {"servers": ["http://x"]}}, **overlap)


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ({}, r'needs vllm: pip install "turnwise\[vllm\]"'),
        ({"vllm": {"servers": ["http://x"]}}, r'needs aiohttp: pip install "turnwise\[vllm-client\]"'),
    ],
)
def test_without_its_packages_one_line_says_what_to_install(engine, text, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=text) as caught:
        checks.check(recipe(engine))
    assert "\n" not in str(caught.value)


def test_vllm_gives_logprobs_of_the_sampling_distribution():
    arguments = engine_arguments(LocalSettings(4, "float32", "cpu", 1), 9000)
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["kv_cache_memory_bytes"] == 1 << 30
    assert not arguments["enable_chunked_prefill"]
    assert arguments["max_num_batched_tokens"] == arguments["max_model_len"] == 9000
    on_gpu = engine_arguments(LocalSettings(4, "bfloat16", "cuda", 1, tensor_parallel=2, transfer="ipc"), 9000)
    assert on_gpu["weight_transfer_config"] == {"backend": "ipc"}
    assert on_gpu["gpu_memory_utilization"] == 0.5
    assert not {"kv_cache_memory_bytes", "distributed_executor_backend", "enable_chunked_prefill"} & set(on_gpu)


def test_variables_of_children_are_gone_afterwards_and_a_persons_stay(monkeypatch):
    import os

    settings = LocalSettings(4, "float32", "cpu", 3)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with environment({**vllm_variables(settings), **child_variables(settings)}):
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "TORCHDYNAMO_DISABLE" not in os.environ
