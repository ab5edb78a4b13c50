// The curves of all runs.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { useAnswer } from "./api.js";
import { Chart } from "./chart.js";
import { ago, count, plural } from "./format.js";
import { useKeys } from "./keys.js";
import { address, go } from "./route.js";
import { chosenTheme } from "./theme.js";

const MOST = 24;

export function Curves({ runs, version, parameters }) {
  const field = useRef(null);
  const [theme, setTheme] = useState(chosenTheme());
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setTheme(chosenTheme() + dark.matches);
    window.addEventListener("theme", changed);
    dark.addEventListener("change", changed);
    return () => {
      window.removeEventListener("theme", changed);
      dark.removeEventListener("change", changed);
    };
  }, []);
  const set = (changes) => go(["curves"], { ...parameters, ...changes }, true);
  useKeys({ "/": () => field.current.focus() });
  const metrics = useAnswer("/api/metrics", version);
  const hidden = new Set((parameters.hide || "").split(",").filter(Boolean));
  const shown = runs.filter((run) => !hidden.has(run.name));
  const axis = parameters.axis === "time" ? "seconds" : "step";
  const strength = Math.min(0.99, Math.max(0, Number(parameters.smooth || 0) || 0));
  const all = metrics.value || [];
  const chosen = select(all, parameters.metrics || "");
  const names = chosen.slice(0, MOST).map((metric) => metric.name);
  const data = useAnswer(names.length ? `/api/curves?names=${encodeURIComponent(names.join("\n"))}` : null, version);
  const toggle = (name) => {
    hidden.has(name) ? hidden.delete(name) : hidden.add(name);
    set({ hide: [...hidden].join(",") });
  };
  return html`<section class="curves">
    <div class="toolbar">
      <input ref=${field} type="search" aria-label="Metrics" placeholder="metrics: loss, eval/, seconds …" value=${parameters.metrics || ""} onInput=${(event) => set({ metrics: event.target.value })} />
      <label class="choice">smoothing <input type="range" min="0" max="0.98" step="0.02" value=${strength} onInput=${(event) => set({ smooth: event.target.value === "0" ? "" : event.target.value })} /><output>${strength.toFixed(2)}</output></label>
      <span class="segments" role="group" aria-label="Axis">
        <button aria-pressed=${axis === "step"} onClick=${() => set({ axis: "" })}>step</button>
        <button aria-pressed=${axis === "seconds"} title="Seconds of all training steps until then, without evaluations and warm start" onClick=${() => set({ axis: "time" })}>time</button>
      </span>
      <span class="muted">${count(chosen.length)} of ${plural(all.length, "metric")}</span>
    </div>
    <${RunList} runs=${runs} hidden=${hidden} toggle=${toggle} />
    ${metrics.error && html`<p class="error">${metrics.error.message}</p>`}
    <div class="charts">
      ${chosen.slice(0, MOST).map((metric) => {
        const of = data.value?.[metric.name];
        if (!of) return html`<figure class="chart" key=${metric.name}><figcaption><b>${metric.name}</b></figcaption><div class="plot"></div></figure>`;
        const lines = shown.filter((run) => of[run.name]).map((run) => ({ name: run.name, place: run.place, points: of[run.name] }));
        return html`<${Chart} key=${metric.name} metric=${metric} runs=${lines} axis=${axis} strength=${strength} theme=${theme} />`;
      })}
    </div>
    ${chosen.length > MOST && html`<p class="muted">The first ${MOST} of ${chosen.length} metrics are shown; write more of a name.</p>`}
    ${metrics.value && !all.length && html`<p class="empty">No run has written a metric yet.</p>`}
  </section>`;
}

// Metrics whose names contain one of the words; those of an overview where there is none.
function select(metrics, text) {
  const words = text.toLowerCase().split(/[\s,]+/).filter(Boolean);
  if (!words.length) return metrics.filter((metric) => metric.first != null).sort((one, other) => one.first - other.first);
  return metrics.filter((metric) => words.some((word) => metric.name.toLowerCase().includes(word)));
}

function RunList({ runs, hidden, toggle }) {
  return html`<ul class="runs">
    ${runs.map(
      (run) => html`<li key=${run.name} class=${hidden.has(run.name) ? "off" : ""}>
        <button class="swatch" aria-pressed=${!hidden.has(run.name)} aria-label=${`show ${run.name}`} style=${{ "--swatch": `var(--run-${run.place % 8})` }} onClick=${() => toggle(run.name)}></button>
        <a href=${address(["attempts", run.name])}><b>${run.name}</b></a>
        <${RunState} run=${run} />
        <span class="muted">${plural(run.attempts, "attempt")}${run.waiting_files ? ` and ${plural(run.waiting_files, "file")} to read` : ""}</span>
        <span class="muted where" title=${run.where}>${run.where}</span>
        ${run.trouble.length > 0 && html`<details class="trouble"><summary>${plural(Math.max(1, run.num_unreadable_files), "file")} not readable</summary>${run.trouble.map((text) => html`<p>${text}</p>`)}</details>`}
        ${run.num_unreadable_lines > 0 && html`<span class="warn">${plural(run.num_unreadable_lines, "unreadable line")} in metrics.jsonl</span>`}
      </li>`,
    )}
  </ul>`;
}

export function RunState({ run }) {
  const [, tick] = useState(0);
  useEffect(() => {
    const timer = run.finished ? null : setInterval(() => tick((old) => old + 1), 5000);
    return () => clearInterval(timer);
  }, [run.finished]);
  const step = run.steps ? `step ${count(run.step)} of ${count(run.steps)}` : `step ${count(run.step)}`;
  if (run.finished) return html`<span class="state done">finished</span><span class="muted">${step}</span>`;
  const fresh = run.written && Date.now() / 1000 - run.written < 120;
  return html`<span class=${fresh ? "state live" : "state still"}>${fresh ? "live" : "not finished"}</span
    ><span class="muted">${step}${run.written ? `, written ${ago(run.written)}` : ""}</span>`;
}
