import torch

from turnwise.weights.tied import tied_names


def test_a_tensor_with_two_names_is_found_under_the_first():
    embedding = torch.nn.Parameter(torch.ones(3, 2))
    tensors = {"embed": embedding.detach(), "norm": torch.ones(2), "head": embedding.detach()}
    assert tied_names(tensors) == {"head": "embed"}


def test_views_and_empty_tensors_are_separate_tensors():
    square = torch.ones(2, 2)
    views = {"all": square, "part": square[:1], "transposed": square.T, "bits": square.view(torch.int32)}
    assert tied_names(views) == {}
    assert tied_names({"a": torch.zeros(0), "b": torch.zeros(0)}) == {}
