// The keyboard: one listener, and what it calls is set by the view that is open.

import { html, useEffect, useRef } from "./vendor/preact-htm.js";

const HELP = [
  ["c a g r", "curves, attempts, groups, recipes"],
  ["j k  ↓ ↑", "next and previous row of a table"],
  ["Enter", "open the row"],
  ["Esc", "back to the table; leave a field"],
  ["/", "to the filter"],
  ["[ ]", "previous and next attempt of the group"],
  ["t", "conversation or tokens of an attempt"],
  ["v", "next number that colours the tokens"],
  ["← →", "previous and next token; parent and child in a tree"],
  ["b", "the tree of the group"],
  ["d", "difference to the next attempt of the group"],
  ["m", "light, dark or as the system"],
  ["?", "this list"],
];

const layers = [];

// Calls `handlers[key]` while the component is there. Later components come first.
export function useKeys(handlers) {
  const latest = useRef(handlers);
  latest.current = handlers;
  useEffect(() => {
    const layer = (key, event) => {
      const handler = latest.current[key];
      return handler ? handler(event) !== false : false;
    };
    layers.push(layer);
    return () => layers.splice(layers.indexOf(layer), 1);
  }, []);
}

export function listen() {
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    const field = event.target.closest?.("input, select, textarea");
    if (field) {
      if (event.key === "Escape") {
        field.blur();
        event.preventDefault();
      }
      return;
    }
    const pressed = event.target.closest?.("button, a");
    if (pressed && (event.key === "Enter" || event.key === " ")) return;
    for (const layer of [...layers].reverse()) {
      if (layer(event.key, event)) {
        event.preventDefault();
        return;
      }
    }
  });
}

export function Help({ close }) {
  const box = useRef(null);
  useEffect(() => box.current.focus(), []);
  useKeys({ Escape: close, "?": close });
  return html`<div class="veil" onClick=${close}>
    <div class="dialog" role="dialog" aria-label="Keyboard" tabindex="-1" ref=${box} onClick=${(event) => event.stopPropagation()}>
      <h2>Keyboard</h2>
      <dl class="keys">
        ${HELP.map(([keys, about]) => html`<dt>${keys.split(" ").filter(Boolean).map((key) => html`<kbd>${key}</kbd>`)}</dt><dd>${about}</dd>`)}
      </dl>
      <button onClick=${close}>close</button>
    </div>
  </div>`;
}
