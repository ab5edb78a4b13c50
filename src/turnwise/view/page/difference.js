// Two attempts of a group, from the token where they part.

import { html, useEffect, useRef } from "./vendor/preact-htm.js";
import { useAnswer } from "./api.js";
import { count, number, plural, signed } from "./format.js";
import { useKeys } from "./keys.js";
import { address, go } from "./route.js";
import { Status } from "./table.js";
import { Stretch, useTokens } from "./tokens.js";

export function Difference({ run, group, one, other, version, parameters }) {
  const place = group.join("/");
  const { value, error } = useAnswer(`/api/${encodeURIComponent(run)}/difference/${place}/${one}/${other}`, version);
  const total = value?.group.length || 0;
  const change = (left, right) => go(["difference", run, ...group, String(left), String(right)], parameters, true);
  useKeys({
    "[": () => total && change(one, (Number(other) + total - 1) % total),
    "]": () => total && change(one, (Number(other) + 1) % total),
    b: () => go(["group", run, ...group]),
  });
  if (error && !value) return html`<p class="error">${error.message}</p>`;
  if (!value) return html`<p class="empty">reading the group …</p>`;
  return html`<article class="difference">
    <header class="head">
      <h1>Step ${group[1]}, group ${group[2]}: attempts ${one} and ${other}</h1>
      <p class="verdict">${verdict(value, one, other)}</p>
    </header>
    <div class="pair">
      <${Side} key=${"l" + one} run=${run} value=${value} side=${0} attempt=${one} choose=${(next) => change(next, other)} colour=${parameters.colour} />
      <${Side} key=${"r" + other} run=${run} value=${value} side=${1} attempt=${other} choose=${(next) => change(one, next)} colour=${parameters.colour} />
    </div>
  </article>`;
}

function verdict(value, one, other) {
  if (value.same) return "Both attempts are the same, token by token.";
  const [left, right] = [value.group[one], value.group[other]];
  if (value.turn >= Math.min(left?.turns ?? 0, right?.turns ?? 0)) {
    return `They are the same for ${plural(value.turn, "turn")}; then one of them ends.`;
  }
  const how = value.sampled ? "the model sampled different tokens" : "their prompts differ";
  return `They part in turn ${value.turn}, after ${plural(value.shared, "token")} in common: ${how}.`;
}

function Side({ run, value, side, attempt, choose, colour }) {
  const key = value.keys[side];
  const page = useAnswer(`/api/${encodeURIComponent(run)}/attempt/${key}`);
  const about = value.group[attempt];
  const channels = page.value?.channels || [];
  const channel = channels.find((one) => one.name === colour) || channels[0];
  const ended = about && value.turn >= about.turns;
  return html`<section class="side">
    <header>
      <select aria-label=${side ? "right attempt" : "left attempt"} value=${String(attempt)} onChange=${(event) => choose(event.target.value)}>
        ${value.group.map((one) => html`<option value=${String(one.attempt)} selected=${String(one.attempt) === String(attempt)}>attempt ${one.attempt} (${number(one.reward)})</option>`)}
      </select>
      <b class="number">${number(about?.reward)}</b> ${about && html`<${Status} status=${about.status} />`}
      <span class="muted">${about && plural(about.turns, "turn")}</span>
      <a href=${address(["attempt", run, ...key.split("/")], { view: "tokens" })}>open</a>
    </header>
    ${value.turn > 0 && html`<p class="same">${value.turn > 1 ? `turns 0 to ${value.turn - 1}` : "turn 0"}: the same</p>`}
    ${page.error && html`<p class="error">${page.error.message}</p>`}
    ${page.value && !ended && !value.same && html`<${Rest} run=${run} attempt=${key} from=${value.turn} shared=${value.shared} channel=${channel} turns=${page.value.turns} />`}
    ${ended && !value.same && html`<p class="empty">ended here</p>`}
  </section>`;
}

function Rest({ run, attempt, from, shared, channel, turns }) {
  const tokens = useTokens(run, attempt, from);
  const place = useRef(null);
  useEffect(() => {
    const observer = new IntersectionObserver((seen) => seen[0].isIntersecting && tokens.more(), { rootMargin: "400px" });
    observer.observe(place.current);
    return () => observer.disconnect();
  });
  const shown = tokens.stretches.flatMap((stretch) => parted(stretch, from, shared, turns[from]?.prompt_tokens ?? 0));
  let turn = -1;
  return html`<div class="tokens">
    ${shown.map((stretch, nth) => {
      const begins = stretch.turn !== turn;
      turn = stretch.turn;
      return html`${begins && html`<div class="turn-edge">turn ${turn}${turns[turn]?.credit != null ? `, credit ${signed(turns[turn].credit)}` : ""}${turns[turn]?.reward ? `, reward ${signed(turns[turn].reward)}` : ""}</div>`}
        ${stretch.begins && html`<span class="part" title="they part here"></span>`}<span class=${stretch.common ? "common" : ""}><${Stretch} key=${nth} run=${run} attempt=${attempt} stretch=${stretch} channel=${stretch.common ? null : channel} /></span>`;
    })}
    <p ref=${place} class="more">${tokens.next && html`<button onClick=${tokens.more}>go on with turn ${tokens.next.turn}</button>`}</p>
    ${tokens.error && html`<p class="error">${tokens.error.message}</p>`}
  </div>`;
}

// A stretch of the turn in which attempts part, cut at the place where they do.
function parted(stretch, turn, shared, prompt) {
  const start = stretch.sampled ? prompt + stretch.start : stretch.start;
  const end = start + stretch.tokens.length;
  if (stretch.turn !== turn || shared < start) return [stretch];
  if (shared >= end) return [{ ...stretch, common: true }];
  if (shared === start) return [{ ...stretch, begins: true }];
  return [slice(stretch, 0, shared - start, { common: true, left_out: 0 }), slice(stretch, shared - start, undefined, { begins: true })];
}

function slice(stretch, from, to, more) {
  const values = Object.fromEntries(Object.entries(stretch.values).map(([name, list]) => [name, list.slice(from, to)]));
  return { ...stretch, ...more, start: stretch.start + from, tokens: stretch.tokens.slice(from, to), texts: stretch.texts.slice(from, to), values };
}
