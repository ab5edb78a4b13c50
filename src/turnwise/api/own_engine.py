"""`turnwise.Engine`: the engine by itself, for a loop of one's own."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import Any, Self

import numpy as np

from turnwise.api.background import LoopThread
from turnwise.api.model_source import GivenModel, opened_model, settings_for
from turnwise.api.own_learner import OwnLearner
from turnwise.api.recipe_tree import RecipeTree
from turnwise.assemble.engines import REPLICAS
from turnwise.assemble.learner import device_of, policy_of
from turnwise.assemble.model import renderer_of
from turnwise.engines.base import Completion, Sampling
from turnwise.messages import Message, ToolSpec
from turnwise.pretrained import ChatTokenizer
from turnwise.seeds import seed_of
from turnwise.tokens import Tokens
from turnwise.types import Turn

GivenPrompt = str | Sequence[Message] | Sequence[int] | Tokens
"""A message of the user, a conversation, or tokens as they are."""


class OwnEngine:
    """An engine with a copy of a model: continuous batching, and prefixes that prompts share are computed once.

    Its weights change by `load` and by nothing else, whatever a learner does meanwhile, and every sampled token says
    which version sampled it. The keywords are the keys of a recipe: engine, rollout, sampling, and so on.

    Example:
        with Engine(learner) as engine:
            prompt = engine.render([Message("user", "2 + 3 =")])
            [completion] = engine.generate([prompt], max_tokens=8)
            engine.load(learner)
    """

    def __init__(
        self,
        model: GivenModel | OwnLearner,
        tokenizer: ChatTokenizer | None = None,
        /,
        *,
        recipe: RecipeTree | None = None,
        **keys: Any,
    ) -> None:
        version, source = 0, model
        if isinstance(model, OwnLearner):
            if model.recipe.lora.rank:
                raise ValueError(
                    "the model of this Learner has adapters; make the Engine of the model before, then engine.load it"
                )
            version, source, tokenizer = model.version, model.model, tokenizer or model.tokenizer
            if recipe is None and not keys:
                recipe = RecipeTree.of(model.recipe)
        given = settings_for(recipe, keys, None)
        found, tokenizer = opened_model(source, tokenizer, given)  # type: ignore[arg-type]
        if tokenizer is None:
            raise ValueError("an engine needs the tokenizer of its model; give Engine(model, tokenizer)")
        self.recipe = settings_for(recipe, keys, found)
        own = copy.deepcopy(found) if found is source else found
        own = own.to(device_of(self.recipe))
        policy_of(self.recipe, own)  # which refuses a model that an engine would not compute exactly
        self.renderer = renderer_of(self.recipe, own, tokenizer)
        self.engine = REPLICAS[self.recipe.engine.name](self.recipe, own, self.renderer, version)
        self.version = version
        """Of its weights."""
        self.calls = count()
        self.thread = LoopThread("turnwise engine")

    # ------------------------------------------------------------ sampling

    def generate(
        self,
        prompts: Sequence[GivenPrompt],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> list[Completion]:
        """A completion per prompt, sampled together. The same prompts and seed give the same tokens; the prompts of one
        call have noise of their own, also where they are equal."""
        sampling = self.sampling(max_tokens, temperature, top_p, top_k, stop)
        return self.thread.run(self.sample(self.tokens_of(prompts), sampling, seed))

    async def generate_async(
        self,
        prompts: Sequence[GivenPrompt],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> list[Completion]:
        """`generate` for a running event loop, which goes on meanwhile. Several may be under way at once."""
        sampling = self.sampling(max_tokens, temperature, top_p, top_k, stop)
        return await asyncio.wrap_future(self.thread.submit(self.sample(self.tokens_of(prompts), sampling, seed)))

    def sampling(
        self, max_tokens: int | None, temperature: float | None, top_p: float, top_k: int, stop: Sequence[str]
    ) -> Sampling:
        return Sampling(
            self.recipe.rollout.max_action_tokens if max_tokens is None else max_tokens,
            self.recipe.sampling.temperature if temperature is None else temperature,
            top_p,
            top_k,
            stop if isinstance(stop, str) else tuple(stop),  # type: ignore[arg-type]
            routes=0 if self.recipe.model.router_replay else None,
        )

    async def sample(self, prompts: Sequence[Tokens], sampling: Sampling, seed: int) -> list[Completion]:
        call = next(self.calls)
        return list(
            await asyncio.gather(
                *(
                    self.engine.generate(
                        prompt, sampling, session=f"{call}/{place}", seed=seed_of(seed, "generate", place)
                    )
                    for place, prompt in enumerate(prompts)
                )
            )
        )

    # ------------------------------------------------------------ weights

    def load(self, weights: OwnLearner | Mapping[str, Any], version: int | None = None) -> None:
        """Copy the weights of a learner, or weights by name, and sample with them from now on."""
        if isinstance(weights, OwnLearner):
            version = weights.version if version is None else version
            weights = weights.weights()
        chosen = self.version + 1 if version is None else version
        self.thread.run(self.engine.load(weights, chosen))
        self.version = chosen

    # ------------------------------------------------------------ text

    def tokens_of(self, prompts: Sequence[GivenPrompt]) -> list[Tokens]:
        if isinstance(prompts, (str, np.ndarray)) or (prompts and isinstance(prompts[0], (int, np.integer, Message))):
            raise ValueError("generate takes a list of prompts; write [prompt] for a single one")
        return [self.prompt_of(prompt) for prompt in prompts]

    def prompt_of(self, prompt: GivenPrompt) -> Tokens:
        if isinstance(prompt, str):
            return self.render([Message("user", prompt)])
        if len(prompt) and isinstance(prompt[0], Message):
            return self.render(prompt)  # type: ignore[arg-type]
        return np.asarray(prompt)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Tokens:
        """The tokens of a conversation up to where the model speaks, by its chat template."""
        return self.renderer.first(tuple(messages), tuple(tools)).tokens

    def text(self, tokens: Sequence[int] | Tokens) -> str:
        """The text of tokens, without control tokens."""
        return self.renderer.tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True)

    def turn(self, prompt: GivenPrompt, completion: Completion, *, reward: float = 0.0) -> Turn:
        """The turn that a completion of a prompt makes, for a Trajectory."""
        tokens = self.prompt_of(prompt)
        said = self.renderer.said(np.asarray(tokens, np.int32), completion.tokens)
        return Turn(
            tokens,
            completion.tokens,
            completion.logprobs,
            completion.versions,
            completion.stop,
            reward,
            said,
            timing=completion.timing,
            routes=completion.routes,
        )

    # ------------------------------------------------------------ its end

    def close(self) -> None:
        """End the engine and its thread. May be called again."""
        if not self.thread.loop.is_closed():
            self.thread.run(self.engine.close())
            self.thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
