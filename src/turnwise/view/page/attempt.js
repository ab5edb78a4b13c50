// One attempt: as a conversation with its times, or token by token.

import { html } from "./vendor/preact-htm.js";
import { has, isFile, useAnswer } from "./api.js";
import { count, number, plural, seconds, signed } from "./format.js";
import { useKeys } from "./keys.js";
import { address, go } from "./route.js";
import { Status } from "./table.js";
import { LongText, plain, Text } from "./text.js";
import { Tokens } from "./tokens.js";

const PHASES = ["queued", "prefill", "decode", "environment"];

export function Attempt({ run, attempt, version, parameters }) {
  const key = attempt.join("/");
  const { value, error } = useAnswer(`/api/${encodeURIComponent(run)}/attempt/${key}`, version);
  const view = parameters.view === "tokens" ? "tokens" : "conversation";
  const set = (changes, replace = true) => go(["attempt", run, ...attempt], { ...parameters, ...changes }, replace);
  const others = value?.group || [];
  const own = others.findIndex((one) => one.key === key);
  const beside = (by) => {
    const next = others[own + by];
    if (own >= 0 && next && has(`/api/${run}/attempt/${next.key}`)) go(["attempt", run, ...next.key.split("/")], { ...parameters, turn: "", token: "" }, true);
  };
  useKeys({
    "[": () => beside(-1),
    "]": () => beside(1),
    t: () => set({ view: view === "tokens" ? "" : "tokens" }),
    b: () => (tree ? go(["group", run, ...attempt.slice(0, 3)]) : false),
    ...(isFile ? {} : {
      d: () => others.length > 1 && go(["difference", run, ...attempt.slice(0, 3), attempt[3], String((own + 1) % others.length)]),
    }),
  });
  const tree = has(`/api/${run}/tree/${attempt.slice(0, 3).join("/")}`);
  if (error && !value) return html`<p class="error">${error.message}</p>`;
  if (!value) return html`<p class="empty">reading the attempt …</p>`;
  return html`<article class="attempt">
    <${Head} value=${value} run=${run} attempt=${attempt} own=${own} parameters=${parameters} />
    <div class="toolbar">
      <span class="segments" role="tablist">
        <button role="tab" aria-selected=${view === "conversation"} aria-pressed=${view === "conversation"} onClick=${() => set({ view: "" })}>conversation</button>
        <button role="tab" aria-selected=${view === "tokens"} aria-pressed=${view === "tokens"} onClick=${() => set({ view: "tokens" })}>tokens</button>
      </span>
      ${tree && html`<a class="button" href=${address(["group", run, ...attempt.slice(0, 3)])}>tree of the group</a>`}
      ${!isFile && others.length > 1 && html`<a class="button" href=${address(["difference", run, ...attempt.slice(0, 3), attempt[3], String((own + 1) % others.length)])}>compare</a>`}
    </div>
    ${view === "tokens"
      ? html`<${Tokens} key=${key} run=${run} attempt=${key} value=${value} parameters=${parameters} set=${set} />`
      : html`<${Conversation} run=${run} attempt=${key} value=${value} />`}
  </article>`;
}

function Head({ value, run, attempt, own, parameters }) {
  const [kind, step, group, number_] = attempt;
  const tokens = value.turns.reduce((sum, turn) => sum + turn.action_tokens, 0);
  const step_ = isFile ? step : html`<a href=${address(["attempts", run], { kind, first_step: step, last_step: step })}>step ${step}</a>`;
  return html`<header class="head">
    <h1>${kind === "train" ? "Training" : `Evaluation (${kind})`}, ${step_}, group ${group}, attempt ${number_}</h1>
    <dl class="facts">
      <div><dt>reward</dt><dd class="number strong">${number(value.reward)}</dd></div>
      <div><dt>status</dt><dd><${Status} status=${value.status} /></dd></div>
      <div><dt>turns</dt><dd>${value.turns.length}</dd></div>
      <div><dt>sampled</dt><dd>${plural(tokens, "token")}</dd></div>
      <div><dt>trained</dt><dd>${value.trained ? "yes" : "no"}</dd></div>
      ${Object.entries(value.marks).map(([name, mark]) => html`<div><dt>${plain(name).replaceAll("_", " ")}</dt><dd class="number">${number(mark)}</dd></div>`)}
      <div><dt>task</dt><dd class="mono task">${plain(value.task.id)} <span class="muted">${plain(value.task.dataset)}</span></dd></div>
    </dl>
    ${value.failure.length > 0 && html`<p class="error failure"><${LongText} run=${run} attempt=${value.key} clip=${value.failure} /></p>`}
    <nav class="siblings" aria-label="Attempts of the group">
      ${value.group.map(
        (one, nth) => html`<a key=${one.key} class=${has(`/api/${run}/attempt/${one.key}`) ? "" : "plain"} href=${!has(`/api/${run}/attempt/${one.key}`) ? null : address(["attempt", run, ...one.key.split("/")], { ...parameters, turn: "", token: "" })} aria-current=${nth === own ? "true" : null} title=${`attempt ${one.attempt}: ${one.status}, reward ${number(one.reward)}, ${one.turns} turns`}
          ><span>${one.attempt}</span><b>${number(one.reward)}</b></a
        >`,
      )}
    </nav>
  </header>`;
}

// ---------------------------------------------------------------- conversation

function Conversation({ run, attempt, value }) {
  return html`<div class="columns">
    <div class="conversation">
      ${value.task.data.length > 2 && html`<details class="given"><summary>task data</summary><pre><${LongText} run=${run} attempt=${attempt} clip=${value.task.data} /></pre></details>`}
      ${value.opening.tokens > 0 && html`<details class="given" open=${value.opening.text.length < 1500}>
        <summary>prompt of the first turn, ${plural(value.opening.tokens, "token")}</summary>
        <pre><${Text} text=${value.opening.text} />${value.opening.shown < value.opening.tokens && html`<span class="cut">… ${count(value.opening.tokens - value.opening.shown)} more tokens; see tokens</span>`}</pre>
      </details>`}
      ${value.turns.map((turn) => html`<${TurnBlock} key=${turn.turn} turn=${turn} run=${run} attempt=${attempt} />`)}
      ${!value.turns.length && html`<p class="empty">The attempt ended before its first turn.</p>`}
    </div>
    ${value.turns.length > 0 && html`<${Waterfall} turns=${value.turns} outcome=${value.outcome} />`}
  </div>`;
}

function TurnBlock({ turn, run, attempt }) {
  return html`<section class="turn" id=${`turn-${turn.turn}`}>
    <header>
      <b>turn ${turn.turn}</b>
      <span title="tokens of the prompt, those that the turn before had already left out">${count(turn.prompt_tokens - turn.known_tokens)} given</span>
      <span>${count(turn.action_tokens)} sampled</span>
      ${turn.reward !== 0 && html`<span class="number reward">reward ${signed(turn.reward)}</span>`}
      ${turn.credit != null && html`<span class=${"number " + (turn.credit > 0 ? "positive" : turn.credit < 0 ? "negative" : "")} title="mean credit of its tokens">credit ${signed(turn.credit)}</span>`}
      ${turn.logprob != null && html`<span class="number" title="mean logprob of its tokens">logprob ${number(turn.logprob)}</span>`}
      ${turn.versions.length > 0 && html`<span title="version of the weights">v${turn.versions[0]}${turn.versions[1] !== turn.versions[0] ? `–${turn.versions[1]}` : ""}</span>`}
      ${turn.stop !== "end_token" && html`<span class="warn">${turn.stop.replaceAll("_", " ")}</span>`}
      ${turn.lost_tokens > 0 && html`<span class="warn" title="the prompt does not begin with the turn before">prefix broken: ${turn.broke}, ${count(turn.lost_tokens)} tokens lost</span>`}
    </header>
    <${MessageBlock} message=${turn.said} said run=${run} attempt=${attempt} />
    ${turn.heard.map((message, nth) => html`<${MessageBlock} key=${nth} message=${message} run=${run} attempt=${attempt} />`)}
  </section>`;
}

function MessageBlock({ message, said, run, attempt }) {
  const text = (clip) => html`<${LongText} run=${run} attempt=${attempt} clip=${clip} />`;
  return html`<div class=${said ? "message said" : "message heard"}>
    <span class="role">${plain(message.role)}</span>
    <div>
      ${message.thinking.length > 0 && html`<pre class="thinking">${text(message.thinking)}</pre>`}
      ${message.content.length > 0 && html`<pre>${text(message.content)}</pre>`}
      ${message.calls.map((call) => html`<div class="call"><b>${plain(call.name)}</b><pre>${text(call.arguments)}</pre></div>`)}
      ${message.fault.length > 0 && html`<pre class="warn">${text(message.fault)}</pre>`}
      ${!message.content.length && !message.calls.length && !message.thinking.length && html`<span class="muted">nothing</span>`}
    </div>
  </div>`;
}

function Waterfall({ turns, outcome }) {
  const lengths = turns.map((turn) => PHASES.reduce((sum, phase) => sum + (turn.timing[phase] || 0), 0));
  const total = lengths.reduce((sum, one) => sum + one, 0);
  let before = 0;
  const rows = turns.map((turn, nth) => {
    const start = before;
    before += lengths[nth];
    return { turn, start, length: lengths[nth] };
  });
  const sums = PHASES.map((phase) => [phase, turns.reduce((sum, turn) => sum + (turn.timing[phase] || 0), 0)]);
  const show = (place) => document.getElementById(`turn-${place}`)?.scrollIntoView({ block: "start", behavior: "smooth" });
  return html`<aside class="waterfall">
    <h2>Time <span class="muted">${seconds(total)}</span></h2>
    <div class="legend">${sums.map(([phase, sum]) => html`<span><i class=${phase}></i>${phase} <b>${seconds(sum)}</b></span>`)}</div>
    <div class="rows">
      ${rows.map(({ turn, start, length }) => {
        let left = start;
        return html`<button key=${turn.turn} class="row" onClick=${() => show(turn.turn)} title=${PHASES.map((phase) => `${phase} ${seconds(turn.timing[phase])}`).join(", ")}>
          <span>${turn.turn}</span>
          <span class="track"
            >${total > 0 &&
            PHASES.map((phase) => {
              const width = turn.timing[phase] || 0;
              const bar = html`<i class=${phase} style=${{ left: `${(100 * left) / total}%`, width: `${(100 * width) / total}%` }}></i>`;
              left += width;
              return width > 0 && bar;
            })}</span
          >
          <span class="number">${seconds(length)}</span>
        </button>`;
      })}
    </div>
    ${outcome !== 0 && html`<p class="muted">outcome, paid for the whole attempt: ${number(outcome)}</p>`}
  </aside>`;
}
