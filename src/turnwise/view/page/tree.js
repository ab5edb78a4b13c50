// The tree of a group: what its attempts share, where they part, where prefixes broke.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { get, isFile, useAnswer } from "./api.js";
import { count, number, plural } from "./format.js";
import { useKeys } from "./keys.js";
import { address, go } from "./route.js";
import { Status } from "./table.js";
import { plain, Text } from "./text.js";

const ROW = 26;

export function Tree({ run, group, version, parameters }) {
  const key = group.join("/");
  const { value, error } = useAnswer(`/api/${encodeURIComponent(run)}/tree/${key}`, version);
  const colour = parameters.colour === "reward" ? "reward" : "origin";
  const chosen = parameters.node === undefined || parameters.node === "" ? null : Number(parameters.node);
  const set = (changes) => go(["group", run, ...group], { ...parameters, ...changes }, true);
  const choose = (place) => set({ node: place == null ? "" : String(place) });
  const nodes = value?.nodes || [];
  const child = (place) => nodes.findIndex((node) => node.parent === place);
  const beside = (by) => {
    const same = nodes.map((node, place) => [node, place]).filter(([node]) => node.parent === nodes[chosen]?.parent);
    const at = same.findIndex(([, place]) => place === chosen);
    return same[at + by]?.[1] ?? chosen;
  };
  const to = (place) => {
    if (place != null && place >= 0) {
      choose(place);
      document.getElementById(`node-${place}`)?.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
  };
  useKeys({
    ArrowRight: () => to(chosen == null ? 0 : child(chosen)),
    ArrowLeft: () => chosen != null && to(nodes[chosen]?.parent),
    ArrowDown: () => to(chosen == null ? 0 : beside(1)),
    ArrowUp: () => to(chosen == null ? 0 : beside(-1)),
    ...(chosen != null ? { Escape: () => choose(null) } : {}),
    d: () => value?.attempts.length > 1 && !isFile && go(["difference", run, ...group, "0", "1"]),
  });
  if (error && !value) return html`<p class="error">${error.message}</p>`;
  if (!value) return html`<p class="empty">reading the group …</p>`;
  const [kind, step, place] = group;
  const saved = value.turn_tokens ? 1 - value.unique_tokens / value.turn_tokens : 0;
  const broken = value.chains.filter((chain) => chain.broke !== "none" && chain.first_turn > 0);
  return html`<article class="tree-view">
    <header class="head">
      <h1>${kind === "train" ? "Training" : `Evaluation (${kind})`}, step ${step}, group ${place}</h1>
      <dl class="facts">
        <div><dt>unique tokens</dt><dd class="number strong">${count(value.unique_tokens)}</dd></div>
        <div title="one sequence for each attempt, or for each part of it that a broken prefix left"><dt>as sequences</dt><dd class="number">${count(value.chain_tokens)}</dd></div>
        <div title="prompt and action of every turn by itself"><dt>as single turns</dt><dd class="number">${count(value.turn_tokens)}</dd></div>
        <div><dt>shared</dt><dd class="number">${(100 * saved).toFixed(1)} %</dd></div>
        <div><dt>broken prefixes</dt><dd class=${broken.length ? "warn" : ""}>${broken.length}${broken.length > 0 && html` <span class="muted">${[...new Set(broken.map((chain) => chain.broke))].join(", ")}</span>`}</dd></div>
        <div><dt>trained</dt><dd>${value.trained ? "yes" : "no"}</dd></div>
        <div><dt>task</dt><dd class="mono task">${plain(value.task.id)} <span class="muted">${plain(value.task.dataset)}</span></dd></div>
      </dl>
    </header>
    <div class="toolbar">
      <span class="segments" role="group" aria-label="Colour by">
        <button aria-pressed=${colour === "origin"} onClick=${() => set({ colour: "" })}>given or sampled</button>
        <button aria-pressed=${colour === "reward"} onClick=${() => set({ colour: "reward" })}>mean reward</button>
      </span>
      ${colour === "origin" ? html`<span class="legend"><span><i class="node-given"></i>given</span><span><i class="node-sampled"></i>sampled</span><span><i class="node-break"></i>broken prefix</span></span>` : html`<span class="legend"><span>low <i class="node-ramp"></i> high</span></span>`}
      ${value.attempts.length > 1 && !isFile && html`<a class="button" href=${address(["difference", run, ...group, "0", "1"])}>compare two attempts</a>`}
    </div>
    ${nodes.length ? html`<${Icicle} value=${value} run=${run} group=${group} colour=${colour} chosen=${chosen} choose=${choose} />` : html`<p class="empty">No attempt of this group has a turn.</p>`}
    ${value.left_out > 0 && html`<p class="warn">${plural(value.left_out, "node")} far from the root are left out.</p>`}
    ${chosen != null && nodes[chosen] && html`<${NodeBox} key=${chosen} run=${run} group=${key} value=${value} node=${nodes[chosen]} />`}
    <h2>Attempts</h2>
    <${AttemptList} value=${value} run=${run} />
  </article>`;
}

// Rows are sequences, the horizontal axis is tokens; what several sequences share is drawn once, over all their rows.
function Icicle({ value, run, group, colour, chosen, choose }) {
  const place = useRef(null);
  const [width, setWidth] = useState(800);
  useEffect(() => {
    const measure = () => setWidth(Math.max(place.current.clientWidth - 124, 420));
    const observer = new ResizeObserver(measure);
    observer.observe(place.current);
    measure();
    return () => observer.disconnect();
  }, []);
  const deepest = Math.max(...value.chains.map((chain) => chain.tokens), 1);
  const across = (tokens) => (tokens / deepest) * width;
  const rewards = value.chains.map((chain) => chain.reward);
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const look = (node) => {
    if (colour === "origin") return node.sampled ? "node sampled" : "node";
    return "node by-reward";
  };
  const fill = (node) => {
    if (colour === "origin") return {};
    const at = high > low ? (2 * (node.reward - low)) / (high - low) - 1 : 0;
    return { backgroundColor: at < 0 ? `rgb(var(--negative) / ${(0.1 + 0.5 * -at).toFixed(2)})` : `rgb(var(--positive) / ${(0.1 + 0.5 * at).toFixed(2)})` };
  };
  const broken = (node) => node.first_chain === node.last_chain && value.chains[node.first_chain].broke !== "none" && value.chains[node.first_chain].first_turn > 0 && isFirstAlone(value, node);
  return html`<div class="icicle" ref=${place}>
    <div class="rows" style=${{ height: `${value.chains.length * ROW}px`, width: `${width}px` }}>
      ${value.nodes.map((node, nth) => {
        const box = { left: `${across(node.start)}px`, width: `${Math.max(2, across(node.count) - 1)}px`, top: `${node.first_chain * ROW}px`, height: `${(node.last_chain - node.first_chain + 1) * ROW - 1}px`, ...fill(node) };
        const about = `${plural(node.count, "token")}, ${node.sampled ? "sampled" : "given"}, in ${plural(node.attempts, "attempt")} and ${plural(node.uses, "turn")}`;
        return html`<button key=${nth} id=${`node-${nth}`} class=${look(node) + (broken(node) ? " broken" : "") + (nth === chosen ? " chosen" : "")} style=${box} title=${`${about}\n${plain(node.text)}`} onClick=${() => choose(nth === chosen ? null : nth)}><span>${plain(node.text).trim()}</span></button>`;
      })}
    </div>
    <div class="ends">
      ${value.chains.map((chain, nth) => html`<a key=${nth} style=${{ top: `${nth * ROW}px`, height: `${ROW - 1}px` }} href=${address(["attempt", run, ...group, String(chain.attempt)])} title=${`attempt ${chain.attempt}, turns ${chain.first_turn} to ${chain.last_turn}: ${chain.status}`}
        ><span class="muted">${chain.attempt}${chain.first_turn > 0 || chain.broke !== "none" ? html` <small>t${chain.first_turn}</small>` : ""}</span><b class="number">${number(chain.reward)}</b></a>`)}
    </div>
  </div>`;
}

// Whether a node is the first that only one sequence passes through.
function isFirstAlone(value, node) {
  return node.parent < 0 || value.nodes[node.parent].first_chain !== value.nodes[node.parent].last_chain;
}

function NodeBox({ run, group, value, node }) {
  const [text, setText] = useState(null);
  const chain = value.chains[node.first_chain];
  useEffect(() => {
    const asked = { attempt: chain.attempt, turn: chain.last_turn, from: node.start, to: node.start + node.count };
    get(`/api/${encodeURIComponent(run)}/node/${group}?` + new URLSearchParams(asked)).then(setText, () => setText({ texts: [node.text], left_out: 0 }));
  }, []);
  return html`<section class="node-box">
    <header>
      <b>${plural(node.count, "token")}, ${node.sampled ? "sampled" : "given"}</b>
      <span>from token ${count(node.start)}</span><span>first in turn ${node.turn}</span>
      <span>in ${plural(node.attempts, "attempt")}, ${plural(node.uses, "turn")}</span>
      <span>computed once instead of ${count(node.uses)} times</span>
      <span>mean reward <b class="number">${number(node.reward)}</b></span>
      ${chain.broke !== "none" && node.first_chain === node.last_chain && html`<span class="warn">after a broken prefix: ${chain.broke}, ${count(chain.lost_tokens)} tokens lost</span>`}
    </header>
    <pre>${text ? html`<${Text} text=${text.texts.join("")} />` : plain(node.text)}${text?.left_out > 0 && html`<span class="cut">… ${count(text.left_out)} more tokens</span>`}</pre>
  </section>`;
}

function AttemptList({ value, run }) {
  return html`<div class="scroll"><table>
    <thead><tr><th>attempt</th><th class="right">reward</th><th>status</th><th class="right">turns</th><th class="right">sampled</th><th></th></tr></thead>
    <tbody>${value.attempts.map((one, nth) => html`<tr key=${one.key} onClick=${() => go(["attempt", run, ...one.key.split("/")])}>
      <td><a href=${address(["attempt", run, ...one.key.split("/")])} onClick=${(event) => event.stopPropagation()}>${one.attempt}</a></td>
      <td class="right number">${number(one.reward)}</td><td><${Status} status=${one.status} /></td><td class="right">${one.turns}</td><td class="right">${count(one.action_tokens)}</td>
      <td>${value.attempts.length > 1 && !isFile && html`<a href=${address(["difference", run, ...value.key.split("/"), String(nth), String((nth + 1) % value.attempts.length)])} onClick=${(event) => event.stopPropagation()}>compare</a>`}</td>
    </tr>`)}</tbody>
  </table></div>`;
}
