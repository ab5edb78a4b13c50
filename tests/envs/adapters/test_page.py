"""What the page of the adapters shows was really played."""

import runpy

import pytest

from support.paths import ROOT
from turnwise.envs.adapters import ADAPTERS

MAKER = runpy.run_path(str(ROOT / "docs" / "make_adapters.py"))
PAGE = (ROOT / "docs" / "guides" / "envs" / "adapters.md").read_text()


def test_every_adapter_has_a_section():
    assert {show.title for show in MAKER["SHOWS"]} | {"verifiers"} == set(ADAPTERS)  # which has a page of its own
    assert PAGE.startswith(MAKER["HEAD"])


@pytest.mark.parametrize("title", ["textarena", "gymnasium", "skyrl_gym", "bfcl"])
def test_the_attempt_that_is_shown_is_made_again(title):
    (show,) = [show for show in MAKER["SHOWS"] if show.title == title]
    assert MAKER["section"](show) in PAGE, "run: python docs/make_adapters.py"
