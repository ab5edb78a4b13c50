"""Writes docs/reference/metrics.md from the table of metrics: python docs/make_metrics.py"""

from __future__ import annotations

from pathlib import Path

from turnwise.runs.metric_names import SECTIONS, Metric

HEAD = """# Metrics

`metrics.jsonl` in the run folder has one line per step: a JSON object with `step` and the metrics of that step. Line 0
is the evaluation before training. A value that is not finite is `null`, and `nonfinite` lists the names of such values;
a mean over nothing is NaN. Metrics of updates are means over the updates of the step; the token metrics among them
(`ratio`, `clipped`, `entropy`, `kl`, `distill`) are means under the token weights. `<word>` in a name stands for any
text; `<kind>` is `sampled` or `greedy`. Metrics marked *e* are also reported for evaluations, as `eval/<kind>/NAME`.

A metric appears only where the recipe computes it: `kl` needs a reference, `critic/*` a critic, `weight_check/*` an
engine with a copy of the weights. This page is made by `python docs/make_metrics.py`.
"""


def row(metric: Metric) -> str:
    mark = "e" if metric.in_evaluations else ""
    return f"| `{metric.name}` | {metric.unit} | {mark} | {metric.meaning} | {metric.healthy} |"


def page() -> str:
    lines = [HEAD]
    for title, metrics in SECTIONS.items():
        lines += [f"## {title}\n", "| name | unit | | meaning | healthy |", "|---|---|---|---|---|"]
        lines += [*map(row, metrics), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    (Path(__file__).parent / "reference" / "metrics.md").write_text(page())
