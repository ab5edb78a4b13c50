// The page: bar, views, keyboard.

import { html, render, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { has, isFile, start, useRuns } from "./api.js";
import { Attempt } from "./attempt.js";
import { Curves } from "./curves.js";
import { Difference } from "./difference.js";
import { Help, listen, useKeys } from "./keys.js";
import { Recipes } from "./recipes.js";
import { address, go, useRoute } from "./route.js";
import { Table } from "./table.js";
import { chosenTheme, nextTheme, setTheme } from "./theme.js";
import { Tree } from "./tree.js";

const TABS = [
  ["curves", "Curves"],
  ["attempts", "Attempts"],
  ["groups", "Groups"],
  ["recipes", "Recipes"],
];
const SHOWN_AS = { auto: "◐", light: "○", dark: "●" };

function Page() {
  const { parts, parameters } = useRoute();
  const state = useRuns();
  const [theme, choose] = useState(chosenTheme());
  const [help, setHelp] = useState(false);
  const runs = (state.runs || []).map((run, place) => ({ ...run, place }));
  const view = parts[0] || "curves";
  const run = runs.find((one) => one.name === parts[1])?.name || runs[0]?.name;
  const table = run && has(`/api/${run}/attempts`);
  const switchTheme = () => {
    setTheme(nextTheme(theme));
    choose(nextTheme(theme));
  };
  const tables = useRef({});
  if (view === "attempts" || view === "groups") tables.current[view + run] = parameters;
  const to = (tab) => go(tab === "curves" || tab === "recipes" ? [tab] : [tab, run]);
  const back = (tab) => go([tab, run], tables.current[tab + run]);
  useKeys({
    "?": () => setHelp(true),
    m: switchTheme,
    ...(isFile ? {} : { c: () => to("curves"), a: () => to("attempts"), g: () => to("groups"), r: () => to("recipes") }),
    Escape: () => (["attempt", "group", "difference"].includes(view) && table ? (back(view === "group" && !isFile ? "groups" : "attempts"), true) : false),
  });
  useEffect(() => {
    document.title = [parts.slice(0, 6).join(" "), "turnwise view"].filter(Boolean).join(" · ");
  }, [parts.join("/")]);
  const current = { attempt: "attempts", difference: "groups", group: "groups" }[view] || view;
  return html`<header class="bar">
      <span class="brand">turnwise</span>
      ${isFile
        ? html`<span class="muted">${run}</span>${table && html`<nav aria-label="Views"><a href=${address(["attempts", run])} aria-current=${view === "attempts" ? "page" : null}>Attempts</a></nav>`}`
        : html`<nav aria-label="Views">${TABS.map(([tab, label]) => html`<a href=${address(tab === "curves" || tab === "recipes" || !run ? [tab] : [tab, run])} aria-current=${tab === current ? "page" : null}>${label}</a>`)}</nav>`}
      <span class="space"></span>
      ${state.error && html`<span class="error" title=${state.error.message}>no answer from the server</span>`}
      <button class="icon" title="light, dark or as the system (m)" aria-label=${`theme: ${theme}`} onClick=${switchTheme}>${SHOWN_AS[theme]}</button>
      <button class="icon" title="keyboard (?)" aria-label="keyboard help" onClick=${() => setHelp(true)}>?</button>
    </header>
    <main>${!state.runs ? html`<p class="empty">${state.error ? state.error.message : "reading the runs …"}</p>` : html`<${View} view=${view} parts=${parts} run=${run} runs=${runs} version=${state.version} parameters=${parameters} />`}</main>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

function View({ view, parts, run, runs, version, parameters }) {
  const known = parts[1] === undefined || parts[1] === run;
  const shared = { run, runs, version, parameters };
  if (view === "curves") return html`<${Curves} ...${shared} />`;
  if (view === "recipes") return html`<${Recipes} ...${shared} />`;
  if (!known) return html`<p class="error">There is no run ${parts[1]} here.</p>`;
  if (view === "attempts" || view === "groups") return html`<${Table} key=${view + run} kind=${view} ...${shared} />`;
  if (view === "attempt" && parts.length === 6) return html`<${Attempt} key=${parts.join("/")} attempt=${parts.slice(2)} ...${shared} />`;
  if (view === "group" && parts.length === 5) return html`<${Tree} key=${parts.join("/")} group=${parts.slice(2)} ...${shared} />`;
  if (view === "difference" && parts.length === 7) return html`<${Difference} key=${parts.join("/")} group=${parts.slice(2, 5)} one=${parts[5]} other=${parts[6]} ...${shared} />`;
  return html`<p class="empty">There is no such view. <a href="#/">Curves</a></p>`;
}

if (start && !location.hash) history.replaceState(null, "", start);
setTheme(chosenTheme());
listen();
render(html`<${Page} />`, document.getElementById("page"));
