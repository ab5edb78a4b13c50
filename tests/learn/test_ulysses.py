import pytest
import torch

from properties.test_tree_layout import WORKLOADS
from turnwise.learn.ulysses import Heads, heads_of, parts
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack


@pytest.mark.parametrize(
    ("queries", "keys", "ranks"), [(8, 4, 2), (8, 2, 4), (4, 1, 2), (9, 3, 2), (12, 4, 3), (6, 6, 4), (9, 3, 8)]
)
def test_every_query_finds_its_key(queries, keys, ranks):
    """Each query is on one rank, beside the key that it uses, and all keys of a rank are used there."""
    shares = heads_of(queries, keys, ranks)
    numbers = torch.arange(keys)[:, None, None].expand(keys, 2, 3)
    found = []
    for share, of_rank in zip(shares, parts(numbers, shares), strict=True):
        assert sorted(set(share.places)) == list(range(share.num_keys))
        found += of_rank[share.places, 0, 0].tolist()
    assert found == [head * keys // queries for head in range(queries)]


def test_what_attention_takes_as_it_is():
    """Equally many queries for each key; otherwise each query is given its own."""
    assert [share.is_regular for share in heads_of(8, 4, 2)] == [True, True]
    assert [share.is_regular for share in heads_of(8, 2, 4)] == [True] * 4
    assert [share.is_regular for share in heads_of(9, 3, 2)] == [False, False]
    assert heads_of(9, 3, 2)[0] == Heads(0, 4, 0, 2, 3)
    assert heads_of(9, 3, 2)[0].places == [0, 0, 0, 1]


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(ValueError, match=r"^cluster.cp = 8 is more than the 4 attention heads .* set cluster.cp to 4"):
        heads_of(4, 2, 8)


@pytest.mark.parametrize("layout", [cut, pack])
def test_parts_of_a_stretch_predict_each_action_token_once(layout):
    for turns in (workload() for workload in WORKLOADS.values()):
        for plan in layout(turns, 60):
            for stretch in plan.stretches:
                middle = (stretch.start + stretch.end) // 2
                halves = [plan.part(stretch.start, middle), plan.part(middle, stretch.end)]
                assert sorted([*halves[0].picked, *halves[1].picked]) == sorted(stretch.picked)
                for half in halves:
                    assert (plan.action_nodes[half.picked] == half.nodes[half.inverse]).all()
            assert len(plan.idle_part(0, 1).picked) == 0
