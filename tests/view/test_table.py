import pytest

from turnwise.inspect.attempts import Query
from turnwise.view.table import LARGEST_PAGE, place_of, query_of


def test_parameters_become_a_query():
    given = {"kind": "train", "status": "failed,too_long", "min_reward": "-0.5", "first_step": "3", "trained": "0"}
    expected = Query("train", first_step=3, statuses=("failed", "too_long"), min_reward=-0.5, trained=False)
    assert query_of({**given, "task": "", "view": "other"}) == expected
    assert query_of({}) == Query()
    assert query_of({"order": "turns", "descending": "0", "max_tokens": "9"}) == Query(
        order="turns", descending=False, max_tokens=9
    )


@pytest.mark.parametrize(
    "given",
    [{"order": "x"}, {"first_step": "1.5"}, {"max_turns": "9" * 99}, {"min_reward": "inf"}, {"max_reward": "a"}],
)
def test_what_is_no_filter_is_refused(given):
    with pytest.raises(ValueError):
        query_of(given)


def test_a_page_has_at_most_so_many_rows():
    assert place_of({}) == (0, 50)
    assert place_of({"offset": "100", "limit": "999999"}) == (100, LARGEST_PAGE)
    assert place_of({"offset": "-5", "limit": "0"}) == (0, 1)
