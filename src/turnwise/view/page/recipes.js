// What differs between the recipes of the runs.

import { html, useRef } from "./vendor/preact-htm.js";
import { useAnswer } from "./api.js";
import { count } from "./format.js";
import { useKeys } from "./keys.js";
import { go } from "./route.js";
import { plain } from "./text.js";

export function Recipes({ runs, version, parameters }) {
  const field = useRef(null);
  const { value, error } = useAnswer("/api/recipes", version);
  useKeys({ "/": () => field.current.focus() });
  const set = (changes) => go(["recipes"], { ...parameters, ...changes }, true);
  const all = parameters.all === "1" || runs.length < 2;
  const words = (parameters.key || "").toLowerCase();
  const rows = (value?.rows || []).filter((row) => (all || row.differs) && row.key.toLowerCase().includes(words));
  return html`<section>
    <div class="toolbar">
      <input ref=${field} type="search" aria-label="key" placeholder="key" value=${parameters.key || ""} onInput=${(event) => set({ key: event.target.value })} />
      ${runs.length > 1 && html`<span class="segments" role="group" aria-label="Keys"><button aria-pressed=${!all} onClick=${() => set({ all: "" })}>what differs</button><button aria-pressed=${all} onClick=${() => set({ all: "1" })}>all keys</button></span>`}
      <span class="muted">${count(rows.length)} keys</span>
    </div>
    ${error && html`<p class="error">${error.message}</p>`}
    <div class="scroll">
      <table class="recipes">
        <thead><tr><th>key</th>${(value?.runs || []).map((name, nth) => html`<th><span class="dot" style=${{ "--swatch": `var(--run-${nth % 8})` }}></span>${name}</th>`)}</tr></thead>
        <tbody>
          ${rows.map((row) => html`<tr key=${row.key} class=${row.differs ? "differs" : ""}><td class="mono">${plain(row.key)}</td>${row.values.map((text) => html`<td class="mono">${text == null ? html`<span class="muted">absent</span>` : plain(text)}</td>`)}</tr>`)}
        </tbody>
      </table>
    </div>
    ${value && !rows.length && html`<p class="empty">${runs.length > 1 && !all ? "The recipes are the same." : "No key is like that."}</p>`}
  </section>`;
}
