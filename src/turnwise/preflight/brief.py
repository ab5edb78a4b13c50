"""The first lines of a run: the short version of a preflight, by a rehearsal of a few layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from turnwise.preflight.model_config import config_of
from turnwise.recipe.schema import Recipe

if TYPE_CHECKING:
    from turnwise.preflight.card import Card
    from turnwise.preflight.rehearsal import Rehearsal

SMALL = 20e6
"""Parameters of a model of which no machine runs out of memory."""
DEPTHS = (1, 2)
"""Layers of the two rehearsals by which deeper models are predicted: what one more layer adds is the same each time."""


def brief(recipe: Recipe) -> Iterator[str]:
    """A line or two. What cannot be said in a moment is left to the command."""
    command = "turnwise preflight says more"
    try:
        named = config_of(recipe)
        text = named.config.get_text_config()
        if text.hidden_size * (12 * text.hidden_size * text.num_hidden_layers + text.vocab_size) < SMALL:
            return  # nobody asks, and it would take longer than what it could tell
        if len(set(getattr(text, "layer_types", None) or [0])) > 1:
            yield f"memory: not predicted here, because the layers of this model differ; {command}"
            return
        from turnwise.preflight.flight import device_for  # late: these take seconds to import
        from turnwise.preflight.rehearsal import rehearse

        device = device_for(recipe)
        one, two = (rehearse(recipe, named.config, device, depth, brief=True) for depth in DEPTHS)
        found = deeper(one, two, text.num_hidden_layers)
    except Exception as error:  # a prediction that fails must not stop the run that it is about
        yield f"memory: not predicted ({str(error).splitlines()[0][:120]}); {command}"
        return
    from turnwise.preflight.card import GB
    from turnwise.preflight.fit import fit
    from turnwise.preflight.formula import in_words

    where = f"{found.ranks} ranks, each" if found.ranks > 1 else "the learner"
    size, peak = in_words(found.num_parameters), found.peak / GB
    yield f"{size} parameters; {where} {peak:.1f} GB at its peak, predicted; {command}"
    if (card := card_here(device)) is not None and not (fits := fit(recipe, found, card)).fits:
        yield f"that does not fit on {card.name} ({card.memory / GB:.0f} GB): {fits.advice}"


def card_here(device: str) -> Card | None:
    """The first GPU of this machine, where the learner would be on one."""
    import torch

    from turnwise.preflight.card import Card, known_card

    if device != "cuda" or not torch.cuda.is_available():
        return None
    name, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    return known_card(name, memory) or Card(name, float(memory), 1.0, 1.0, 1.0)


def deeper(one: Rehearsal, two: Rehearsal, layers: int) -> Rehearsal:
    """What a model of so many layers needs, by what the second layer adds to the first."""
    more = layers - two.layers
    names = {*one.at_peak, *two.at_peak}
    at_peak = {
        name: max(0, two.at_peak.get(name, 0) + more * (two.at_peak.get(name, 0) - one.at_peak.get(name, 0)))
        for name in names
    }
    return replace(
        two,
        layers=two.layers + more,
        num_parameters=two.num_parameters + more * (two.num_parameters - one.num_parameters),
        num_trained=two.num_trained + more * (two.num_trained - one.num_trained),
        peak=two.peak + more * (two.peak - one.peak),
        at_peak=at_peak,
        kernels=extended(one.kernels, two.kernels, more),
        costs=extended(one.costs, two.costs, more),
        collectives=extended(one.collectives, two.collectives, more),
    )


def extended(one: Mapping[Any, int], two: Mapping[Any, int], more: int) -> dict[Any, int]:
    """Counts of the second rehearsal, and so many times what it has more than the first. What depends on the number of
    layers as a whole is in other places of the two, and stays as it is."""
    return {name: count + more * max(0, count - one.get(name, 0)) for name, count in two.items()}
