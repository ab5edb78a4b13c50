// The tables of attempts and groups: filtered, sorted and paged by the server.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { isFile, useAnswer } from "./api.js";
import { count, number, plural, seconds } from "./format.js";
import { useKeys } from "./keys.js";
import { address, go } from "./route.js";
import { plain } from "./text.js";

const PAGE = 50;
const ATTEMPT_COLUMNS = [
  ["step", "step/group/attempt", (row) => place(row)],
  ["reward", "reward", (row) => html`<span class="number reward">${number(row.reward)}</span>`],
  ["status", "status", (row) => html`<${Status} status=${row.status} title=${row.failure} />`],
  ["task", "task", (row) => html`<span class="clip" title=${plain(row.task)}>${plain(row.task)}</span>`],
  ["", "dataset", (row) => plain(row.dataset)],
  ["turns", "turns", (row) => count(row.turns)],
  ["action_tokens", "sampled", (row) => count(row.action_tokens)],
  ["context_tokens", "context", (row) => count(row.context_tokens)],
  ["breaks", "breaks", (row) => (row.breaks ? html`<span class="warn">${count(row.breaks)}</span>` : "0")],
  ["seconds", "time", (row) => seconds(row.seconds)],
  ["", "trained", (row) => (row.trained ? "yes" : html`<span class="muted">no</span>`)],
];
const GROUP_COLUMNS = [
  ["step", "step/group", (row) => place(row)],
  ["", "attempts", (row) => count(row.attempt_count)],
  ["reward", "mean reward", (row) => html`<span class="number reward">${number(row.reward_mean)}</span>`],
  ["", "min to max", (row) => html`<${Spread} row=${row} />`],
  ["", "std", (row) => number(row.reward_stddev)],
  ["task", "task", (row) => html`<span class="clip" title=${plain(row.task)}>${plain(row.task)}</span>`],
  ["", "dataset", (row) => plain(row.dataset)],
  ["turns", "turns", (row) => number(row.turns_mean)],
  ["action_tokens", "sampled", (row) => count(row.action_tokens_sum)],
  ["", "slowest", (row) => seconds(row.seconds_max)],
  ["", "trained", (row) => (row.trained_max ? "yes" : html`<span class="muted">no</span>`)],
];
// By table and run: the row that was opened last, to come back to.
const opened = {};
const LEFT = new Set(["step/group/attempt", "step/group", "task", "dataset", "status", "trained"]);

function place(row) {
  const parts = row.key.split("/");
  return html`<span class="key"><span class="muted">${parts[0]}</span> ${parts[1]}<span class="muted">/${parts.slice(2).join("/")}</span></span>`;
}

export function Status({ status, title }) {
  const kind = status === "finished" ? "good" : ["failed", "timed_out", "prompt_too_long", "penalised"].includes(status) ? "bad" : "short";
  return html`<span class=${"status " + kind} title=${title ? plain(title) : status}>${status.replaceAll("_", " ")}</span>`;
}

function Spread({ row }) {
  return html`<span class="number">${number(row.reward_min)} … ${number(row.reward_max)}</span>`;
}

export function Table({ kind, run, runs, version, parameters }) {
  const groups = kind === "groups";
  const field = useRef(null);
  const body = useRef(null);
  const [cursor, setCursor] = useState(-1);
  const offset = Math.max(0, Number(parameters.offset) || 0);
  const path = `/api/${encodeURIComponent(run)}/${kind}?` + new URLSearchParams({ ...withoutEmpty(parameters), offset, limit: PAGE });
  const { value, error, loading } = useAnswer(path, version);
  const set = (changes) => go([kind, run], { ...parameters, offset: "", ...changes }, true);
  const turn = (by) => {
    const next = offset + by * PAGE;
    if (value && next >= 0 && next < value.total) go([kind, run], { ...parameters, offset: next || "" }, true), setCursor(by > 0 ? 0 : -1);
  };
  const rows = value?.rows || [];
  const remember = (row) => (opened[kind + "/" + run] = row.key);
  const open = (row) => row && remember(row) && go([groups ? "group" : "attempt", run, ...row.key.split("/")]);
  const move = (by) => {
    if (!rows.length) return;
    const next = Math.max(0, Math.min(rows.length - 1, cursor + by));
    setCursor(next);
    body.current?.children[next]?.scrollIntoView({ block: "nearest" });
  };
  useKeys({
    "/": () => (field.current ? field.current.focus() : false),
    j: () => move(1),
    ArrowDown: () => move(1),
    k: () => move(-1),
    ArrowUp: () => move(-1),
    Enter: () => (cursor >= 0 ? open(rows[cursor]) : false),
    n: () => turn(1),
    p: () => turn(-1),
  });
  useEffect(() => {
    const place = rows.findIndex((row) => row.key === opened[kind + "/" + run]);
    if (cursor < 0 && place >= 0) setCursor(place);
  }, [value]);
  const columns = groups ? GROUP_COLUMNS : ATTEMPT_COLUMNS;
  const order = parameters.order || "step";
  const descending = parameters.descending !== "0";
  const sort = (name) => name && set({ order: name === "step" ? "" : name, descending: name === order && descending ? "0" : "" });
  return html`<section class="table-view">
    ${!isFile && html`<${Filters} field=${field} kind=${kind} run=${run} runs=${runs} parameters=${parameters} set=${set} choices=${value?.choices} />`}
    ${error && html`<p class="error">${error.message}</p>`}
    <div class="scroll" aria-busy=${loading}>
      <table>
        <thead>
          <tr>
            ${columns.map(([name, label]) => {
              const sorted = name && name === order;
              const inside = name && !isFile ? html`<button onClick=${() => sort(name)}>${label}${sorted ? (descending ? " ↓" : " ↑") : ""}</button>` : label;
              return html`<th class=${LEFT.has(label) ? "" : "right"} aria-sort=${sorted ? (descending ? "descending" : "ascending") : "none"}>${inside}</th>`;
            })}
          </tr>
        </thead>
        <tbody ref=${body}>
          ${rows.map(
            (row, nth) => html`<tr key=${row.key} data-key=${row.key} class=${nth === cursor ? "cursor" : ""} onClick=${() => open(row)}>
              ${columns.map(([, label, show], column) => {
                const text = show(row);
                const link = address([groups ? "group" : "attempt", run, ...row.key.split("/")]);
                return html`<td class=${LEFT.has(label) ? "" : "right"}>${column ? text : html`<a href=${link} onClick=${(event) => (remember(row), event.stopPropagation())}>${text}</a>`}</td>`;
              })}
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${value && !rows.length && html`<p class="empty">${value.indexed ? `No ${kind === "groups" ? "group" : "attempt"} is like that.` : "The run has recorded no attempt yet."}</p>`}
    ${value && html`<div class="pager">
      <span>${rows.length ? `${count(offset + 1)} to ${count(offset + rows.length)} of ${plural(value.total, groups ? "group" : "attempt")}` : ""}</span>
      ${value.waiting_files > 0 && html`<span class="warn">${plural(value.waiting_files, "older file")} still to be read; the newest steps are here</span>`}
      ${value.total > PAGE && !isFile && html`<span class="segments"><button disabled=${offset <= 0} onClick=${() => turn(-1)}>previous</button><button disabled=${offset + PAGE >= value.total} onClick=${() => turn(1)}>next</button></span>`}
    </div>`}
  </section>`;
}

function withoutEmpty(parameters) {
  return Object.fromEntries(Object.entries(parameters).filter(([, value]) => value !== ""));
}

function Filters({ field, kind, run, runs, parameters, set, choices }) {
  const input = (name, label, type = "text", size = 5) =>
    html`<input type=${type} inputmode=${type === "text" ? "text" : "decimal"} size=${size} style=${{ width: `${size + 1.5}em` }} aria-label=${label} placeholder=${label} value=${parameters[name] || ""} onInput=${(event) => set({ [name]: event.target.value.trim() })} />`;
  const select = (name, label, names) =>
    html`<select aria-label=${label} value=${parameters[name] || ""} onChange=${(event) => set({ [name]: event.target.value })}>
      <option value="">${label}</option>
      ${names.map(([value, shown]) => html`<option value=${value} selected=${parameters[name] === value}>${plain(shown)}</option>`)}
    </select>`;
  const counted = (of) => Object.entries(choices?.[of] || {}).map(([value, total]) => [value, `${value.replaceAll("_", " ")} (${count(total)})`]);
  const any = Object.keys(parameters).some((name) => !["order", "descending", "offset"].includes(name) && parameters[name]);
  return html`<div class="toolbar filters">
    ${runs.length > 1 && html`<select aria-label="run" value=${run} onChange=${(event) => go([kind, event.target.value], parameters)}>${runs.map((one) => html`<option value=${one.name} selected=${one.name === run}>${one.name}</option>`)}</select>`}
    <input ref=${field} type="search" aria-label="task" placeholder="task id" size="14" value=${parameters.task || ""} onInput=${(event) => set({ task: event.target.value })} />
    ${select("kind", "any kind", counted("kind"))} ${select("status", "any status", counted("status"))}
    ${Object.keys(choices?.dataset || {}).length > 1 && select("dataset", "any dataset", counted("dataset"))}
    ${select("trained", "trained or not", [["1", "trained"], ["0", "not trained"]])}
    <span class="range">step ${input("first_step", "from")}${input("last_step", "to")}</span>
    <span class="range">reward ${input("min_reward", "min")}${input("max_reward", "max")}</span>
    <span class="range">turns ${input("min_turns", "min", "text", 3)}${input("max_turns", "max", "text", 3)}</span>
    <span class="range">sampled ${input("min_tokens", "min")}${input("max_tokens", "max")}</span>
    ${any && html`<button onClick=${() => go([kind, run], {}, true)}>clear</button>`}
  </div>`;
}
