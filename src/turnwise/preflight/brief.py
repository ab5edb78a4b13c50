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
DEPTHS = (3, 4)
"""Layers of the two rehearsals by which deeper models are predicted. From here on one more layer adds the same each
time: with fewer layers a rank does not yet gather one, compute with the next and reduce a third at once."""


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

        device = device_for(recipe)
        found = rehearse_a_few(recipe, named.config, device)
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


def rehearse_a_few(recipe: Recipe, config: Any, device: str) -> Rehearsal:
    """What the whole model needs, by rehearsals of a few of its layers."""
    from turnwise.preflight.rehearsal import rehearse

    layers = config.get_text_config().num_hidden_layers
    if layers <= max(DEPTHS):
        return rehearse(recipe, config, device, layers, brief=True)
    fewer, more = (rehearse(recipe, config, device, depth, brief=True) for depth in DEPTHS)
    return deeper(fewer, more, layers)


def deeper(fewer: Rehearsal, more: Rehearsal, layers: int) -> Rehearsal:
    """What a model of so many layers needs, by what the last layer of the second rehearsal adds to the first."""
    missing = layers - more.layers
    names = {*fewer.at_peak, *more.at_peak}
    at_peak = {
        name: max(0, more.at_peak.get(name, 0) + missing * (more.at_peak.get(name, 0) - fewer.at_peak.get(name, 0)))
        for name in names
    }
    return replace(
        more,
        layers=layers,
        num_parameters=more.num_parameters + missing * (more.num_parameters - fewer.num_parameters),
        num_trained=more.num_trained + missing * (more.num_trained - fewer.num_trained),
        peak=more.peak + missing * (more.peak - fewer.peak),
        at_peak=at_peak,
        kernels=extended(fewer.kernels, more.kernels, missing),
        costs=extended(fewer.costs, more.costs, missing),
        collectives=extended(fewer.collectives, more.collectives, missing),
    )


def extended(fewer: Mapping[Any, int], more: Mapping[Any, int], missing: int) -> dict[Any, int]:
    """Counts of the second rehearsal, and so many times what it has more than the first. What depends on the number of
    layers as a whole is in other places of the two, and stays as it is."""
    return {name: count + missing * max(0, count - fewer.get(name, 0)) for name, count in more.items()}
