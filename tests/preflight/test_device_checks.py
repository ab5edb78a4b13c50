"""The checks of a GPU, as far as a CPU runs them."""

import pytest
import torch

from turnwise.preflight import device_checks
from turnwise.preflight.device_checks import attempted, attention_check, run_checks, transfer_check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_attention_is_compared_with_dense(dtype):
    found, _, passed = attention_check("cpu", dtype, 400)
    assert passed
    assert found.endswith("output only")


def test_a_wrong_kernel_fails(monkeypatch):
    class Wrong(device_checks.FlexAttention):  # type: ignore[name-defined]
        def __call__(self, *states, **more):
            return super().__call__(*states, **more) * 1.1

    monkeypatch.setattr(device_checks, "FlexAttention", Wrong)
    assert not attention_check("cpu", torch.bfloat16, 400)[2]


def test_a_check_that_breaks_is_a_line_of_the_table():
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    line = attempted("flex", "H100", broken).line()
    assert "illegal memory access" in line
    assert line.endswith("FAILED, H100")


@pytest.mark.slow
def test_weights_arrive_in_another_process():
    assert transfer_check("cpu")[2]


@pytest.mark.slow
def test_all_checks_are_rehearsed_on_a_cpu():
    checks = list(run_checks("cpu"))
    assert len(checks) == 4
    assert all(check.passed and check.where == "rehearsed, not run" for check in checks), checks
