"""The style of a report: light and dark, for a screen, a phone and paper."""

from __future__ import annotations

LIGHT = """
--ground: #ffffff; --card: #f6f7f9; --ink: #1f2430; --muted: #626a78; --grid: #e3e6eb;
--good: #1d7a46; --bad: #b3392f; --warn: #8a5a00;
--series-0: #3b6ea5; --series-1: #d2691e; --series-2: #2e8b62; --series-3: #8a5fb0; --series-4: #b5912b;
--series-5: #7d8590;
"""
DARK = """
--ground: #14171c; --card: #1d2128; --ink: #e4e7ec; --muted: #99a2b0; --grid: #2e343e;
--good: #5fc48c; --bad: #ef8a80; --warn: #e0b25a;
--series-0: #76a9e0; --series-1: #f0954f; --series-2: #5cc296; --series-3: #bb94e0; --series-4: #dcc05c;
--series-5: #a3abb7;
"""
SERIES = "".join(
    f".s{place} .line, .s{place} .bar {{ stroke: var(--series-{place}); }}"
    f".s{place} .dot, .s{place} .band, .key.s{place} i {{ fill: var(--series-{place}); "
    f"background: var(--series-{place}); }}\n"
    for place in range(6)
)
STYLE = f"""
:root {{ color-scheme: light dark; {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
@media print {{ :root {{ color-scheme: light; {LIGHT} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
main {{ max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--grid); }}
h3 {{ font-size: .95rem; margin: 1.25rem 0 .5rem; }}
p {{ margin: .5rem 0; max-width: 46rem; }}
.note, .muted {{ color: var(--muted); }}
.note {{ font-size: .87rem; }}
.warning {{ border-left: 3px solid var(--warn); padding-left: .75rem; }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: .75rem;
  margin: 1rem 0; }}
.card {{ background: var(--card); border-radius: 8px; padding: .8rem 1rem; }}
.card b {{ display: block; font-size: 1.5rem; line-height: 1.3; font-weight: 650; }}
.card small {{ display: block; color: var(--muted); font-size: .84rem; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); gap: 1.25rem; }}
.charts .wide {{ grid-column: 1 / -1; }}
figure {{ margin: 0; break-inside: avoid; min-width: 0; }}
figcaption {{ font-weight: 600; font-size: .92rem; margin-bottom: .15rem; }}
figcaption span {{ display: block; font-weight: 400; font-size: .82rem; color: var(--muted); }}
svg {{ display: block; width: 100%; height: auto; }}
.line, .bar, .grid, .dot {{ vector-effect: non-scaling-stroke; }}
svg text {{ fill: var(--muted); font-size: 11px; }}
.grid {{ stroke: var(--grid); stroke-width: 1; }}
.line {{ fill: none; stroke-width: 2; stroke-linejoin: round; }}
.faint .line {{ stroke-width: 1.1; opacity: .45; }}
.dashed .line {{ stroke-width: 1.2; stroke-dasharray: 4 3; opacity: .7; }}
.bar {{ stroke-width: 1.6; }}
.dot {{ stroke: var(--ground); stroke-width: 1.2; }}
.band {{ opacity: .16; }}
{SERIES}
.keys {{ display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .82rem; color: var(--muted); }}
.key i {{ display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }}
.scroll {{ overflow-x: auto; margin: .5rem 0; }}
table {{ border-collapse: collapse; font-size: .87rem; }}
th, td {{ padding: .22rem .75rem .22rem 0; text-align: right; vertical-align: top; font-weight: 400;
  font-variant-numeric: tabular-nums; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
thead th {{ color: var(--muted); border-bottom: 1px solid var(--grid); }}
tbody tr + tr > * {{ border-top: 1px solid var(--grid); }}
table.counts td:last-child {{ text-align: left; color: var(--muted); white-space: normal; }}
table.words td, table.words th {{ text-align: left; white-space: normal; overflow-wrap: anywhere; }}
table.words th:first-child {{ white-space: nowrap; }}
code, pre, .recipe td, .recipe th {{ font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  font-size: .82rem; }}
pre {{ margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }}
details {{ margin: .5rem 0; }}
summary {{ cursor: pointer; color: var(--muted); overflow-wrap: anywhere; }}
.attempt {{ background: var(--card); border-radius: 8px; padding: .5rem 1rem; margin: .6rem 0; }}
.attempt > summary {{ color: var(--ink); }}
.message {{ margin: .6rem 0; padding-left: .75rem; border-left: 3px solid var(--grid); }}
.message.assistant {{ border-left-color: var(--series-0); }}
.message .who {{ font-size: .78rem; color: var(--muted); }}
.thinking {{ font-style: italic; color: var(--muted); }}
@media (max-width: 34rem) {{ body {{ font-size: 14px; }} svg text {{ font-size: 15px; }}
  .wide svg text {{ font-size: 18px; }} }}
@media print {{ main {{ max-width: none; padding: 0; }} .scroll {{ overflow: visible; }} h2 {{ break-after: avoid; }}
  .charts, .cards {{ grid-template-columns: 1fr 1fr; }} }}
"""
