// One metric of several runs as a chart.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import uPlot from "./vendor/uPlot.esm.js";
import { number, seconds } from "./format.js";

const HEIGHT = 168;
const TIMES = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
const STEPS = Array.from({ length: 10 }, (_, nth) => [1, 2, 5].map((digit) => digit * 10 ** nth)).flat();
const sync = uPlot.sync("curves");

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// An exponential mean that does not lean on its first value.
export function smoothed(values, strength) {
  if (!strength) return values;
  let mean = 0;
  let weight = 0;
  return values.map((value) => {
    if (value == null) return value;
    mean = strength * mean + (1 - strength) * value;
    weight = strength * weight + (1 - strength);
    return mean / weight;
  });
}

// The aligned arrays of a plot: per run the values, and before them the raw ones where they are smoothed.
function arrays(runs, axis, strength) {
  const tables = [];
  for (const { points } of runs) {
    if (strength) tables.push([points[axis], points.value]);
    tables.push([points[axis], smoothed(points.value, strength)]);
  }
  return tables.length ? uPlot.join(tables) : [[]];
}

function series(runs, strength) {
  const found = [{}];
  for (const { colour } of runs) {
    const plain = { spanGaps: true, points: { size: 5 } };
    if (strength) found.push({ ...plain, stroke: colour, alpha: 0.25, width: 1, points: { show: false } });
    found.push({ ...plain, stroke: colour, width: 1.7 });
  }
  return found;
}

function options(runs, axis, strength, width, hover) {
  const line = { stroke: () => css("--muted"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { sync: { key: sync.key, setSeries: false }, drag: { x: true, y: false }, y: false, points: { size: 6 } },
    scales: { x: { time: false }, y: { range: span } },
    axes: [
      { ...line, size: 24, gap: 2, incrs: axis === "seconds" ? TIMES : STEPS, values: (plot, splits) => splits.map((value) => (axis === "seconds" ? seconds(value) : value)) },
      { ...line, size: 52, gap: 4, values: (plot, splits) => splits.map((value) => number(Number(value.toPrecision(6)))) },
    ],
    series: series(runs, strength),
    hooks: { setCursor: [(plot) => hover(plot.cursor.idx)] },
  };
}

// A little room above and below, also where all values are the same.
function span(plot, low, high) {
  if (low == null) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

export function Chart({ metric, runs, axis, strength, theme }) {
  const place = useRef(null);
  const plot = useRef(null);
  const [index, setIndex] = useState(null);
  const data = arrays(runs, axis, strength);
  const look = [axis, strength > 0, theme, ...runs.map((run) => run.name)].join("|");
  useEffect(() => {
    const colours = runs.map((run) => ({ ...run, colour: css(`--run-${run.place % 8}`) }));
    const made = new uPlot(options(colours, axis, strength, place.current.clientWidth, (where) => setIndex(where ?? null)), data, place.current);
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize({ width: place.current?.clientWidth || 300, height: HEIGHT }));
    observer.observe(place.current);
    return () => {
      observer.disconnect();
      made.destroy();
    };
  }, [look]);
  useEffect(() => {
    plot.current?.setData(data);
  });
  const at = index == null || index >= data[0].length ? null : index;
  const per = strength ? 2 : 1;
  return html`<figure class="chart" data-metric=${metric.name}>
    <figcaption title=${[metric.meaning, metric.healthy && `Healthy: ${metric.healthy}`].filter(Boolean).join("\n")}>
      <b>${metric.name}</b><span class="muted">${metric.unit && metric.unit !== "-" ? metric.unit : ""}</span>
      <span class="at">${at == null ? "" : axis === "seconds" ? seconds(data[0][at]) : `step ${data[0][at]}`}</span>
      <span class="values"
        >${runs.map((run, nth) => {
          const value = at == null ? lastOf(data[(nth + 1) * per]) : nearest(data[(nth + 1) * per], at);
          return html`<span style=${{ color: `var(--run-${run.place % 8})` }} title=${run.name}>${number(value)}</span>`;
        })}</span
      >
    </figcaption>
    <div class="plot" ref=${place}></div>
  </figure>`;
}

function lastOf(values) {
  return values?.findLast((value) => value != null);
}

function nearest(values, at) {
  for (let place = at; place >= 0; place--) if (values?.[place] != null) return values[place];
  return null;
}
