"""Parts of tensors as the object store holds them, without a cluster."""

import pytest
import torch

from turnwise.weights.manifest import Outline
from turnwise.weights.object_store import AssembledWeights, StoredPart
from turnwise.weights.share import Part

WHOLE = {"a": torch.randn(4, 3), "norm": torch.randn(3), "one": torch.tensor(2.0), "none": torch.zeros(0, 3)}


def stored(start, stop, dtype):
    """What a rank with some rows of a matrix and all of the other tensors puts."""
    rows = Part("a", (slice(start, stop), slice(0, 3)), WHOLE["a"][start:stop])
    others = [
        Part(name, tuple(slice(0, n) for n in WHOLE[name].shape), WHOLE[name]) for name in ("norm", "one", "none")
    ]
    return [StoredPart.of(part, dtype) for part in (rows, *others)]


def outline(dtype):
    return Outline({name: (dtype, tuple(tensor.shape)) for name, tensor in WHOLE.items()}, {"b": "a"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_ranks_make_whole_tensors(dtype):
    found = AssembledWeights(outline(dtype), [stored(0, 3, dtype), stored(3, 4, dtype)])
    assert found.keys() == WHOLE.keys() | {"b"}
    assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in WHOLE.items())
    assert torch.equal(found["b"], found["a"])


def test_a_part_that_is_missing_is_an_error_and_never_noise():
    with pytest.raises(ValueError, match="9 of the 12 numbers of a are there; a rank put no part"):
        AssembledWeights(outline(torch.float32), [stored(0, 3, None)])
