"""The border to engines: tokens in, sampled tokens out, each with its logprob and version."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeGuard

import numpy as np

from turnwise.allowed import Allowed
from turnwise.engines.grammar import Grammar
from turnwise.pretrained import CausalLM
from turnwise.routes import Routes
from turnwise.tokens import Floats, Tokens
from turnwise.types import StopReason, TurnTiming

MOST_TOKENS = (1 << 31) - 1
"""The largest number of tokens, top-k and token that 32 bits hold."""
COLDEST, HOTTEST = 1e-6, 1e6
"""Temperatures that leave differences between logits in float32."""
LEAST_TOP_P = 1e-6
MOST_STOPS, LONGEST_STOP = 64, 1024
"""Stop strings of a call, and characters of one: each is looked for after every token."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one action is sampled. Values that no engine can compute are refused here, before the call is in a batch with
    others.

    Example:
        Sampling(max_tokens=64, temperature=1.0, stop=("</answer>",))
    """

    max_tokens: int
    """0 samples nothing."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 for all tokens."""
    stop: tuple[str, ...] = ()
    """The action ends with the token that completes one of these."""
    grammar: Grammar | None = None
    """The form that the action must have; only tokens that it allows are sampled. A token limit or a stop string may
    end the action before it is complete. An engine that cannot follow it refuses the call."""
    routes: int | None = None
    """The token of the prompt from which on the completion has routes; None for none. An engine that cannot tell them
    refuses the call."""

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "max_tokens": whole("max_tokens", self.max_tokens, 0, MOST_TOKENS),
            "temperature": number("temperature", self.temperature, COLDEST, HOTTEST, or_zero=True),
            "top_p": number("top_p", self.top_p, LEAST_TOP_P, 1.0),
            "top_k": whole("top_k", self.top_k, 0, MOST_TOKENS),
            "stop": stop_strings(self.stop),
        }
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ValueError(f"grammar must be a Grammar, got {shown(self.grammar)}")
        if self.routes is not None:
            checked["routes"] = whole("routes", self.routes, 0, MOST_TOKENS)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number in a range, as a Python int."""
    try:
        integer = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {shown(value)}") from None
    if isinstance(value, (bool, np.bool_)) or not low <= integer <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, got {shown(value)}")
    return integer


def number(name: str, value: Any, low: float, high: float, *, or_zero: bool = False) -> float:
    """A number in a range, as a Python float."""
    rule = f"{name} must be {'0 or ' if or_zero else ''}between {low:g} and {high:g}"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise ValueError(f"{rule}, got {shown(value)}")
    try:
        real = float(value)
    except OverflowError:
        real = math.inf
    if not (low <= real <= high or (or_zero and real == 0)):
        raise ValueError(f"{rule}, got {shown(value)}")
    return real


def stop_strings(given: Any) -> tuple[str, ...]:
    """Stop strings that can be looked for."""
    if isinstance(given, str) or not isinstance(given, (tuple, list)):
        raise ValueError(f"stop must be a tuple of strings, got {shown(given)}")
    if len(given) > MOST_STOPS:
        raise ValueError(f"there may be {MOST_STOPS} stop strings, got {len(given)}")
    for text in given:
        if not isinstance(text, str) or not 1 <= len(text) <= LONGEST_STOP:
            raise ValueError(f"a stop string has 1 to {LONGEST_STOP} characters, got {shown(text)}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the stop string {shown(text)} has half of a surrogate pair") from None
    return tuple(given)


def shown(value: Any) -> str:
    """A value for an error message: one line, at most 40 characters."""
    try:
        text = ascii(value[:41] if isinstance(value, (str, bytes)) else value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:40]}..."


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The tokens that an engine sampled after one prompt."""

    tokens: Tokens
    logprobs: Floats
    """Under the distribution sampled from: after grammar, temperature, top-p and top-k."""
    versions: Tokens
    stop: StopReason
    timing: TurnTiming = TurnTiming()
    allowed: Allowed | None = None
    """The tokens that the grammar allowed for each token; None where the call has no grammar."""
    cached: int = 0
    """Tokens of the prompt that were not computed again, if the engine tells."""
    routes: Routes | None = None
    """[n, layers, k] of all tokens from `Sampling.routes` on but the last; None where the call asked for none."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledPart:
    """Tokens of an action that is still being sampled: those since the last report.

    Example:
        SampledPart(np.array([5], np.int32), np.array([-0.5], np.float32), np.array([3], np.int32))
    """

    tokens: Tokens
    logprobs: Floats
    versions: Tokens
    allowed: Allowed | None = None
    """The tokens that the grammar allowed for each of these; None where the call has no grammar."""


OnTokens = Callable[[SampledPart], None]
"""Is called in the event loop with each part of an action as it is sampled. It must not raise and must not wait."""


NO_ROUTES = "this engine was started without routes; set model.router_replay = true"


class EngineFailure(RuntimeError):
    """The engine could not serve a request: an infrastructure error, never a zero reward."""


def nothing(stop: StopReason) -> Completion:
    """The completion of a call for which no token was sampled."""
    tokens, logprobs, versions = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)
    for array in (tokens, logprobs, versions):
        array.flags.writeable = False
    return Completion(tokens, logprobs, versions, stop)


def checked_prompt(prompt: Any, seed: Any, *, context: int, vocabulary: int = MOST_TOKENS + 1) -> Tokens:
    """The prompt of a call as every engine reads it; a ValueError where no engine can serve it.

    An engine checks this before the call is in a batch with others. One that passes calls on may leave the vocabulary
    to the engine that has the model.
    """
    check_seed(seed)
    tokens = np.asarray(prompt)
    if tokens.ndim != 1:
        raise ValueError(f"a prompt is a row of tokens, got an array of {tokens.ndim} dimensions")
    if len(tokens) == 0:
        raise ValueError("an engine needs a prompt of at least one token")
    if len(tokens) >= context:
        raise ValueError(f"a prompt of {len(tokens)} tokens leaves no room in a context of {context}")
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"the tokens of a prompt are whole numbers of 32 bits, got {tokens.dtype}")
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < vocabulary:
            raise ValueError(f"a prompt has the token {token}, and those of the model are 0 to {vocabulary - 1}")
    return tokens.astype(np.int32, copy=False)


def check_seed(seed: Any) -> None:
    try:
        fits = 0 <= operator.index(seed) < 1 << 64
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"a seed has 64 bits, got {shown(seed)}")


def vocabulary_of(model: CausalLM) -> int:
    """How many tokens a model has."""
    return int(model.get_input_embeddings().weight.shape[0])


class BusyTime:
    """Wall-clock seconds during which at least one call was under way: calls that overlap count once.

    Example:
        with busy:
            answer = await service.generate(call)
        busy.seconds
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.since = 0.0
        """When the first of the calls under way began."""
        self.finished_seconds = 0.0

    def __enter__(self) -> None:
        if self.num_calls == 0:
            self.since = time.perf_counter()
        self.num_calls += 1

    def __exit__(self, *_: object) -> None:
        self.num_calls -= 1
        if self.num_calls == 0:
            self.finished_seconds += time.perf_counter() - self.since

    @property
    def seconds(self) -> float:
        running = time.perf_counter() - self.since if self.num_calls else 0.0
        return self.finished_seconds + running


class Engine(Protocol):
    """Serves model calls. `session` names an attempt, so that its turns can share computed prefixes; `seed` is 64 bits
    of sampling noise that depend on the attempt and never on other calls in the batch.

    The rules beyond these signatures are in tests/engines/test_conformance.py.
    """

    shares_weights: bool
    """Whether the engine reads the learner's module, so that a load is only a new version number."""
    context: int
    """Tokens that prompt and action may have together."""

    @property
    def seconds(self) -> float:
        """Wall-clock seconds spent inside the model so far, summed over the engine's processes. It never falls."""
        ...

    async def open(self) -> None:
        """Be ready for calls: start whatever takes long, so that no call's deadline counts it. May be called again;
        without it the first call starts the engine."""
        ...

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        """Sample after a prompt. A call that `checked_prompt` refuses is a ValueError; one that the engine could not
        serve is an EngineFailure. Neither affects other calls."""
        ...

    async def abort(self, session: str) -> None:
        """End the running call of a session; that call returns the tokens sampled so far."""
        ...

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        """Make these weights live between two sampled tokens; calls in flight go on with them."""
        ...

    async def forget(self) -> None:
        """Drop computed prefixes, so that later completions do not depend on calls before."""
        ...

    async def pause(self) -> None:
        """Sample nothing more until `resume`; calls in flight wait."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None:
        """End the engine; calls in flight fail. May be called again."""
        ...


class StreamingEngine(Engine, Protocol):
    """An engine that also reports tokens while it samples. The parts that it reports are, in order, the beginning of
    the completion; it need not report the last ones. Engines without this give a completion in one piece."""

    streams: bool

    async def generate(
        self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int, on_tokens: OnTokens | None = None
    ) -> Completion: ...


def can_stream(engine: Engine) -> TypeGuard[StreamingEngine]:
    """Whether an engine reports tokens while it samples."""
    return bool(getattr(engine, "streams", False))


class SleepingEngine(Engine, Protocol):
    """An engine that gives its memory to the learner while that works. The next load wakes it."""

    sleeps: bool

    async def sleep(self) -> None:
        """Give weights, keys and values away, which the next load brings back; nothing may be under way. A call that
        comes meanwhile waits for that load."""
        ...


def can_sleep(engine: Engine) -> TypeGuard[SleepingEngine]:
    """Whether an engine shall sleep while the learner works."""
    return bool(getattr(engine, "sleeps", False))


def copies_of(engine: Engine) -> dict[str, Engine]:
    """The engines that have a copy of the weights each, by name; an engine that has one copy is called "the engine"."""
    copies: Callable[[], dict[str, Engine]] | None = getattr(engine, "copies", None)
    return {"the engine": engine} if copies is None else copies()
