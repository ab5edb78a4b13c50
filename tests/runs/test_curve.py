import math
import subprocess
import sys
import warnings

import numpy as np
import pytest

from turnwise.runs.curve import draw_curve, smooth
from turnwise.runs.tracker import JsonLines, read_metrics


def size_of(path):
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


@pytest.mark.parametrize("num_steps", [0, 1, 60])
def test_a_picture_of_any_number_of_steps(tmp_path, num_steps):
    tracker = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(num_steps):
        tracker.log(step, {"success": step / num_steps, "eval/greedy/success": math.nan})
        if step % 20 == 0:
            tracker.log(step, {"eval/sampled/success": 0.5, "eval/greedy/success": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_curve(read_metrics(tmp_path / "metrics.jsonl"), tmp_path / "curve.png", "hops, seed 0")
    assert size_of(tmp_path / "curve.png") == (1200, 700)


def test_evaluations_are_where_their_weights_are_and_not_where_they_were_logged(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.extend(figure.axes[0].lines))
    lines = [{"step": step, "success": 0.1} for step in range(5)]
    lines[0] |= {"eval/sampled/success": 0.25, "eval/sampled/version": 0.0}
    lines[4] |= {"eval/sampled/success": 0.5, "eval/sampled/version": 2.0}
    lines.append({"step": 4, "eval/sampled/success": 0.75, "eval/sampled/version": 4.0})
    lines.append({"step": 5, "eval/greedy/success": 1.0})  # from before versions were logged
    draw_curve(lines, tmp_path / "curve.png", "hops, seed 0")
    points = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in drawn]
    assert [(0.0, 0.25), (2.0, 0.5), (4.0, 0.75)] in points
    assert [(5.0, 1.0)] in points


@pytest.mark.parametrize("size", [1, 2, 3, 10, 500])
def test_smoothing_keeps_a_constant_and_the_range(size):
    assert np.allclose(smooth(np.full(size, 0.7)), 0.7)
    noise = np.random.default_rng(0).random(size)
    smoothed = smooth(noise)
    assert smoothed.shape == noise.shape
    assert noise.min() <= smoothed.min() <= smoothed.max() <= noise.max()


def test_smoothing_does_not_lag():
    values = np.linspace(0, 1, 101)
    assert np.allclose(smooth(values)[20:-20], values[20:-20])


def test_the_package_imports_nothing_heavy():
    modules = ["archive", "checkpoint", "columns", "curve", "describe", "folder", "interval", "tracker"]
    code = "import sys\n" + "".join(f"import turnwise.runs.{name}\n" for name in modules)
    code += (
        "print([name for name in ('torch', 'pyarrow', 'matplotlib', 'wandb', 'tensorboardX') if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "[]"
