"""Every bug of the table has its file, and every file shows the bug put back and caught."""

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROWS = {
    "test_credit_of_the_last_turn_copied_to_others": "advantages on the last turn's positions, copied to the others",
    "test_padding_that_became_a_trajectory": "a last-step flag padded with zeros: padding without an end",
    "test_length_limit_of_the_turn_before": "the length limit, checked against the previous turn's prompt",
    "test_end_token_nobody_sampled": "an end token that the framework appended, trained on",
    "test_observations_in_the_padded_width": "observations in the response, which doubled the padded width",
    "test_updates_that_grew_with_turns": "optimizer steps by rows: more with every turn, or rows that do not divide",
    "test_merging_that_changed_the_objective": "merged turns: other means, other ratios, other returns",
    "test_temporal_credit_of_single_turns": "GAE and REINFORCE++, forbidden for samples that are turns",
    "test_turns_counted_as_trajectories": "metrics that counted turns as trajectories",
    "test_filter_that_looked_at_turns": "a zero-variance filter over turns that kept groups without a signal",
    "test_validation_that_lost_batching": "async validation that lost batched environment calls",
    "test_failed_rollout_in_the_baseline": "a failed rollout as a zero in the baseline, or the end of the process",
    "test_resume_pointer_before_the_state": "a resume pointer written before the state it points to",
    "test_tied_head_left_stale": "a weight sync that worked and left a tied head stale",
    "test_message_that_forged_a_turn": "a control token in a message's text that ended it and forged a turn",
}
"""What went wrong elsewhere, by the file that shows it cannot here."""


def test_every_bug_has_its_file():
    found = {path.stem for path in FOLDER.glob("test_*.py")} - {Path(__file__).stem}
    assert found == ROWS.keys()
    assert len(ROWS) == 15


@pytest.mark.parametrize("name", ROWS)
def test_every_file_checks_the_real_code_and_catches_the_bug(name):
    """Every check that raises an AssertionError where the bug is put back is one that a test also calls plainly."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    assert ast.get_docstring(tree)
    caught = {name for node in ast.walk(tree) if expects_an_assertion(node) for name in checks_in(node)}
    plain = checks_in(Plain().visit(tree))
    assert caught, "no test puts the bug back"
    assert caught <= plain, f"checked with the bug only: {caught - plain}"


class Plain(ast.NodeTransformer):
    """Leaves out what is expected to raise."""

    def visit_With(self, node):
        return None if expects_an_assertion(node) else self.generic_visit(node)


def expects_an_assertion(node):
    return isinstance(node, ast.With) and "raises(AssertionError" in ast.unparse(node.items[0])


def checks_in(tree):
    """Names of the checks that are called somewhere in a piece of code."""
    calls = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return {name for name in calls if name.startswith("check")}
