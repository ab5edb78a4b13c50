"""The report of a preflight, line by line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.preflight.attempt_shape import AttemptShape
from turnwise.preflight.card import CARDS, GB, LINK_SHARE, MEMORY_SHARE, PRODUCT_SHARE, RESERVED, Card
from turnwise.preflight.engine_memory import EngineMemory
from turnwise.preflight.fit import Fit, fit
from turnwise.preflight.formula import in_words, terms_of
from turnwise.preflight.model_config import NamedConfig
from turnwise.preflight.operation_counter import HEAD, LAYERS
from turnwise.preflight.rehearsal import Rehearsal
from turnwise.preflight.step_time import StepTime, step_time
from turnwise.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is known of a run before it starts."""

    recipe: Recipe
    named: NamedConfig
    found: Rehearsal
    engine: EngineMemory
    cards: Sequence[Card] = CARDS

    @property
    def fits(self) -> list[Fit]:
        return [fit(self.recipe, self.found, card) for card in self.cards]

    def time_on(self, card: Card) -> StepTime:
        return step_time(self.recipe, self.found, self.engine, card)

    # ------------------------------------------------------------ lines

    def describe(self) -> Iterator[str]:
        yield from self.about()
        yield ""
        yield from self.memory()
        yield ""
        if self.found.device == "cpu":
            yield from self.machine()
        else:
            yield from self.fitting()
            yield ""
            yield from self.engines()
            yield ""
            yield from self.times()
        yield ""
        yield from self.counts()

    def about(self) -> Iterator[str]:
        recipe, found = self.recipe, self.found
        yield f"{recipe.model.path} ({self.named.origin}): {in_words(found.num_parameters)} parameters" + (
            f", {in_words(found.num_trained)} of them trained" if found.num_trained != found.num_parameters else ""
        )
        yield f"learner: {ranks_of(recipe)} on {found.device}, {recipe.model.dtype}" + (
            ", layers computed again in the backward pass" if found.checkpoints else ""
        )
        shape = AttemptShape.of(recipe)
        yield (
            f"a pass: {found.num_tokens} tokens, {found.num_actions} of them actions "
            f"(max_tokens_per_microbatch = {recipe.tokens_per_pass(found.device)}; attempts of {shape.turns} turns and "
            f"{shape.num_tokens} tokens, {shape.group} with the same first prompt)"
        )
        yield "rehearsed, not run: one update by the learner's own code on tensors without numbers"

    def memory(self) -> Iterator[str]:
        found = self.found
        terms = {term.name: term for term in terms_of(self.recipe, self.named.config, found)}
        yield f"{'GB of a rank':28}{'at most':>9}{'at peak':>9}{'formula':>9}"
        for name in sorted(found.most, key=lambda name: -found.most[name]):
            most, at_peak = found.most[name], found.at_peak.get(name, 0)
            term = terms.get(name)
            by_formula = f"{term.num_bytes / GB:9.2f}  {term.words}" if term else f"{'':9}"
            yield f"  {name:26}{most / GB:9.2f}{at_peak / GB:9.2f}{by_formula}".rstrip()
        if found.on_host:
            parts = ", ".join(f"{name} {size / GB:.2f}" for name, size in found.on_host.items())
            yield f"  on the host: {parts}; copies to and from it and its optimizer step are in no time below"
        total = sum(term.num_bytes for term in terms.values())
        yield (
            f"  {'peak':26}{found.peak / GB:9.2f}{found.peak / GB:9.2f}{total / GB:9.2f}  "
            f"the formula is {100 * (total / found.peak - 1):+.0f} % off; the count is what to trust"
        )

    def machine(self) -> Iterator[str]:
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        ranks, peak = self.found.ranks, self.found.peak / GB
        yield (
            f"this machine has {has / GB:.1f} GB; {ranks} rank{'s' * (ranks > 1)} of {peak:.2f} GB need "
            f"{ranks * peak:.2f} besides the process itself (about 0.5 GB each)"
        )
        card = Card("this machine", has / ranks + RESERVED, 1.0, 1.0, 1.0)
        if not (found := fit(self.recipe, self.found, card)).fits:
            yield f"it does not fit: {found.advice}"

    def fitting(self) -> Iterator[str]:
        peak, reserved = self.found.peak / GB, RESERVED / GB
        yield f"a rank of {peak:.1f} GB, and {reserved:.0f} GB for the driver, NCCL and the allocator:"
        for each in self.fits:
            words = f"fits, {each.left / GB:.1f} GB left" if each.fits else f"does not fit; {each.advice}"
            yield f"  {each.card.name:18}{words}"

    def engines(self) -> Iterator[str]:
        engine, tokens = self.engine, self.recipe.engine.memory.max_model_len or AttemptShape.of(self.recipe).num_tokens
        yield (
            f"an engine ({engine.name}): weights {engine.cards * engine.weights / GB:.1f} GB, keys and values "
            f"{engine.kv_token / 1e3:.0f} kB a token; with {engine.share:.0%} of a card's memory:"
        )
        for card in self.cards:
            there = engine.on(card, tokens)
            attempts = there.attempts(card, tokens)
            over = f"over {there.cards} cards, on each " if there.cards > 1 else ""
            words = f"{over}{there.weights / GB:.1f} GB of weights and {there.room(card) / GB:.1f} of cache"
            words += f": {attempts} texts of {tokens} tokens at once"
            if not attempts:
                words = "does not fit; raise engine.vllm.tensor_parallel_size"
            yield f"  {card.name:18}{words}"

    def times(self) -> Iterator[str]:
        yield (
            f"seconds of a step, predicted and never measured ({PRODUCT_SHARE:.0%} of the peak for products, "
            f"{MEMORY_SHARE:.0%} for memory, {LINK_SHARE:.0%} for links; a server has as many cards as the learner):"
        )
        columns = ("compute", "links", "launch", "passes", "learn", "sample", "step")
        yield f"  {'':18}{'a pass':>8} of" + "".join(f"{name:>8}" for name in columns)
        for each in self.fits:
            if not each.fits:
                continue
            time = self.time_on(each.card)
            yield (
                f"  {each.card.name:18}{time.of_pass:8.2f}   {time.compute:8.2f}{time.communicate:8.2f}"
                f"{time.launch:8.2f}{time.passes:8}{time.learning:8.1f}{time.sampling:8.1f}{time.total:8.1f}"
            )

    def counts(self) -> Iterator[str]:
        found = self.found
        flops, moved = sum(found.flops.values()), sum(found.bytes.values())
        of_head = found.bytes.get(HEAD, 0) / max(1, found.bytes.get(LAYERS, 1))
        yield (
            f"a pass: {flops / 1e12:.0f} TFLOP, {moved / GB:.0f} GB read and written by {sum(found.kernels.values())} "
            f"kernels; the head moves {of_head:.0%} of what the layers do"
        )
        dtypes = sorted({" x ".join(dtypes) for _, _, dtypes in found.products})
        yield f"products in {', '.join(dtypes)}; the host waits for the device {sum(found.waits.values())} times a pass"


def ranks_of(recipe: Recipe) -> str:
    cluster = recipe.cluster
    if cluster.ranks == 1:
        return "one process"
    sizes = {"replicate": cluster.replicate, "fsdp": cluster.fsdp, "tp": cluster.tp, "ep": cluster.ep}
    parts = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{cluster.ranks} ranks ({parts})"


def preflight_of(recipe: Recipe, named: NamedConfig, found: Rehearsal) -> Preflight:
    config: Any = named.config
    return Preflight(recipe, named, found, EngineMemory.of(recipe, config, found.num_parameters))
