// The token inspector: every sampled token coloured by a number, all its numbers beside it.

import { Component, html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";
import { get, isFile } from "./api.js";
import { background, ink, scaleOf } from "./colour.js";
import { count, number, plural, signed } from "./format.js";
import { useKeys } from "./keys.js";
import { plain, visible } from "./text.js";

const STRIP = 10000;

// Pages of tokens, one after the other; `more` asks for the next.
export function useTokens(run, attempt, first = 0) {
  const [state, setState] = useState({ stretches: [], next: { turn: first, from: 0 }, error: null, loading: false });
  const busy = useRef(false);
  const latest = useRef(state);
  latest.current = state;
  const more = async () => {
    const { next } = latest.current;
    if (busy.current || !next) return;
    busy.current = true;
    setState((old) => ({ ...old, loading: true }));
    try {
      const page = await get(`/api/${encodeURIComponent(run)}/tokens/${attempt}?turn=${next.turn}&from=${next.from}`);
      setState((old) => ({ stretches: [...old.stretches, ...page.stretches], next: page.next, error: null, loading: false }));
    } catch (error) {
      setState((old) => ({ ...old, error, loading: false }));
    }
    busy.current = false;
  };
  useEffect(() => void more(), []);
  return { ...state, more };
}

export function Tokens({ run, attempt, value, parameters, set }) {
  const tokens = useTokens(run, attempt);
  const channels = value.channels;
  const channel = channels.find((one) => one.name === parameters.colour) || channels[0];
  const wanted = parameters.turn !== undefined && parameters.token !== undefined && parameters.turn !== "" ? [Number(parameters.turn), Number(parameters.token)] : null;
  const sampled = tokens.stretches.filter((stretch) => stretch.sampled);
  const order = sampled.flatMap((stretch) => stretch.tokens.map((_, nth) => [stretch.turn, stretch.start + nth]));
  const pin = (place) => set({ turn: place ? String(place[0]) : "", token: place ? String(place[1]) : "" });
  const [hovered, point] = useState(null);
  const setHovered = (place) => point((old) => (old && place && old[0] === place[0] && old[1] === place[1] ? old : place));
  const choose = (event) => {
    const place = placeOf(event);
    if (place) pin(wanted && wanted[0] === place[0] && wanted[1] === place[1] ? null : place);
  };
  const current = hovered || wanted;
  const last = tokens.stretches.at(-1)?.turn ?? -1;
  const isThere = (place) => order.some(([turn, token]) => turn === place[0] && token === place[1]);
  useEffect(() => {
    if (wanted && !isThere(wanted) && last <= wanted[0] && tokens.next && !tokens.loading) tokens.more();
  });
  const step = (by) => {
    if (!order.length) return;
    const at = wanted ? order.findIndex(([turn, token]) => turn === wanted[0] && token === wanted[1]) : by > 0 ? -1 : order.length;
    setHovered(null);
    pin(order[Math.max(0, Math.min(order.length - 1, at + by))]);
  };
  const chosen = wanted ? wanted.join(".") : "";
  const present = wanted !== null && isThere(wanted);
  useEffect(() => {
    const token = present && document.querySelector(`[data-token="${chosen}"]`);
    const around = token && token.getBoundingClientRect();
    const covered = innerWidth <= 1000 ? 230 : 20; // by the card at the bottom of a narrow page
    if (around && (around.top < 100 || around.bottom > innerHeight - covered)) token.scrollIntoView({ block: "center" });
  }, [chosen, present]);
  const nextChannel = () => channels.length && set({ colour: channels[(channels.indexOf(channel) + 1) % channels.length].name });
  useKeys({
    ArrowRight: () => step(1),
    ArrowLeft: () => step(-1),
    v: nextChannel,
    ...(wanted ? { Escape: () => pin(null) } : {}),
  });
  const given = parameters.given || "dim";
  return html`<div class="inspector" data-given=${given}>
    <div class="toolbar sticky">
      <span class="segments" role="group" aria-label="Colour by">
        ${channels.map((one) => html`<button key=${one.name} aria-pressed=${one === channel} title=${one.meaning} onClick=${() => set({ colour: one.name })}>${one.label}</button>`)}
      </span>
      ${channel && html`<${Legend} channel=${channel} />`}
      <span class="space"></span>
      <label class="choice">given text <select aria-label="given text" value=${given} onChange=${(event) => set({ given: event.target.value === "dim" ? "" : event.target.value })}>
        ${["dim", "plain", "hide"].map((one) => html`<option value=${one} selected=${one === given}>${one}</option>`)}
      </select></label>
    </div>
    ${channel && order.length > 0 && order.length <= STRIP && html`<${Strip} order=${order} stretches=${sampled} channel=${channel} current=${current} pin=${pin} hover=${setHovered} />`}
    ${!channels.length && html`<p class="empty">No token of this attempt has numbers.</p>`}
    <div class="with-panel">
      <div class="stream" onMouseOver=${(event) => setHovered(placeOf(event))} onMouseLeave=${() => setHovered(null)} onClick=${choose}>
        ${byTurn(tokens.stretches).map(
          ([turn, stretches]) => html`<section class="token-turn" key=${turn} id=${`tokens-${turn}`}>
            <header><b>turn ${turn}</b>${turnFacts(value.turns[turn])}</header>
            <div class="tokens">${stretches.map((stretch, nth) => html`<${Stretch} key=${nth + ":" + stretch.start} run=${run} attempt=${attempt} stretch=${stretch} channel=${channel} wanted=${wanted} />`)}</div>
          </section>`,
        )}
      </div>
      <${Panel} place=${current && isThere(current) ? current : null} stretches=${sampled} channels=${channels} channel=${channel} order=${order} isPart=${tokens.next !== null} pin=${pin} />
    </div>
    ${tokens.error && html`<p class="error">${tokens.error.message}</p>`}
    ${tokens.next && html`<${More} tokens=${tokens} turns=${value.turns.length} />`}
  </div>`;
}

// [turn, token] that an event is about.
function placeOf(event) {
  const token = event.target.closest?.("[data-token]");
  return token ? token.dataset.token.split(".").map(Number) : null;
}

function turnFacts(turn) {
  if (!turn) return null;
  return html`<span>${plural(turn.action_tokens, "sampled token")}</span>
    ${turn.reward !== 0 && html`<span class="number">reward ${signed(turn.reward)}</span>`}
    ${turn.lost_tokens > 0 && html`<span class="warn">prefix broken: ${turn.broke}</span>`}`;
}

function byTurn(stretches) {
  const turns = new Map();
  for (const stretch of stretches) turns.set(stretch.turn, [...(turns.get(stretch.turn) || []), stretch]);
  return [...turns];
}

// A stretch that the model was given is one text; a stretch that it sampled has an element for each token.
export function Stretch({ run, attempt, stretch, channel, wanted }) {
  const [between, setBetween] = useState([]);
  if (!stretch.sampled) {
    const after = between.at(-1);
    const left = after ? after.left_out : stretch.left_out || 0;
    const from = after ? after.start + after.tokens.length : stretch.start + stretch.tokens.length;
    const ask = async () => {
      const page = await get(`/api/${encodeURIComponent(run)}/span/${attempt}?turn=${stretch.turn}&from=${from}&to=${from + left}`);
      setBetween([...between, page]);
    };
    return html`<span class="given-tokens"
      >${[stretch, ...between].map((one, nth) => (nth ? plain(one.texts.join("")) : plain(one.texts.join("")).replace(/^\n/, "")))}${left > 0 && html`<span class="cut"> … ${count(left)} tokens ${!isFile && html`<button class="link" onClick=${ask}>show</button>`} … </span>`}</span
    >`;
  }
  const here = wanted && wanted[0] === stretch.turn ? wanted[1] - stretch.start : -1;
  return html`<${Sampled} stretch=${stretch} channel=${channel} chosen=${here >= 0 && here < stretch.tokens.length ? here : -1} />`;
}

// There may be thousands of tokens: they are drawn again only when one of them looks different.
class Sampled extends Component {
  shouldComponentUpdate(next) {
    const { stretch, channel, chosen } = this.props;
    const look = (one) => one && [one.name, one.low, one.high].join();
    return next.stretch !== stretch || next.chosen !== chosen || look(next.channel) !== look(channel);
  }

  render({ stretch, channel, chosen }) {
    const values = channel ? stretch.values[channel.name] || [] : [];
    return html`<span class="sampled-tokens">${stretch.texts.map(
      (text, nth) => html`<span key=${nth} class=${nth === chosen ? "token chosen" : "token"} data-token=${`${stretch.turn}.${stretch.start + nth}`} style=${{ backgroundColor: background(channel, values[nth]) }}>${tokenText(text)}</span>`,
    )}</span>`;
  }
}

// A newline is seen, and is one.
function tokenText(text) {
  if (text === "") return html`<span class="hidden-character">·</span>`;
  return visible(text).flatMap(([part, hidden]) => {
    if (hidden) return html`<span class="hidden-character">${part}</span>`;
    return part.split(/(\n)/).map((piece) => (piece === "\n" ? html`<span class="newline">↵</span>${"\n"}` : piece));
  });
}

function Legend({ channel }) {
  const ends = channel.scale === "diverging" ? [-reach(channel), channel.centre, reach(channel)] : channel.name === "logprob" ? [0, channel.low] : [channel.low, channel.high];
  if (channel.scale === "steps") {
    const steps = [];
    for (let value = channel.low; value <= channel.high && steps.length < 8; value++) steps.push(value);
    return html`<span class="scale">${steps.map((value) => html`<span class="token" style=${{ backgroundColor: background(channel, value) }}>${value}</span>`)}</span>`;
  }
  const shown = Array.from({ length: 24 }, (_, nth) => ends[0] + ((ends.at(-1) - ends[0]) * nth) / 23);
  return html`<span class="scale" aria-label=${`scale of ${channel.label}`}>
    <span class="number">${channel.scale === "diverging" ? signed(ends[0]) : number(ends[0])}</span>
    <span class="ramp">${shown.map((value) => html`<i style=${{ backgroundColor: background(channel, value) }}></i>`)}</span>
    <span class="number">${channel.scale === "diverging" ? signed(ends.at(-1)) : number(ends.at(-1))}</span>
  </span>`;
}

function reach(channel) {
  return Math.max(Math.abs(channel.high - channel.centre), Math.abs(channel.low - channel.centre)) || 1;
}

// All sampled tokens as bars: the shape of the attempt at a glance.
function Strip({ order, stretches, channel, current, pin, hover }) {
  const box = useRef(null);
  const width = order.length;
  const at = (event) => {
    const around = box.current.getBoundingClientRect();
    return order[Math.max(0, Math.min(width - 1, Math.floor(((event.clientX - around.left) / around.width) * width)))];
  };
  const here = current ? order.findIndex(([turn, token]) => turn === current[0] && token === current[1]) : -1;
  return html`<div class="strip" style=${{ maxWidth: `${24 * width + 14}px` }}>
    <div ref=${box} onMouseMove=${(event) => hover(at(event))} onMouseLeave=${() => hover(null)} onClick=${(event) => pin(at(event))}>
      ${here >= 0 && html`<i style=${{ left: `${(100 * here) / width}%`, width: `${100 / width}%` }}></i>`}
      <${Bars} stretches=${stretches} channel=${channel} width=${width} />
    </div>
  </div>`;
}

class Bars extends Component {
  shouldComponentUpdate(next) {
    return next.width !== this.props.width || next.channel !== this.props.channel;
  }

  render({ stretches, channel, width }) {
    const scale = scaleOf(channel);
    const diverging = channel.scale === "diverging";
    const middle = diverging ? 20 : 39;
    const bars = stretches.flatMap((stretch) => (stretch.values[channel.name] || stretch.tokens.map(() => null)).map((value, nth) => ({ value, first: nth === 0 && stretch.start === 0 })));
    return html`<svg viewBox=${`0 0 ${width} 40`} preserveAspectRatio="none" role="img" aria-label=${`${channel.label} of ${width} sampled tokens`}>
      ${bars.map(({ value, first }, nth) => {
        const size = value == null ? 0 : Math.max(0.04, Math.min(1, channel.scale === "steps" ? 1 : Math.abs(scale(value)))) * (diverging ? 19 : 37);
        return html`${first && nth > 0 && html`<line class="edge" x1=${nth} x2=${nth} y1="0" y2="40" />`}
          <rect x=${nth + 0.08} width="0.84" y=${diverging && value < channel.centre ? middle : middle - size} height=${size} style=${{ fill: ink(channel, value) }} />`;
      })}
      <line x1="0" x2=${width} y1=${middle} y2=${middle} />
    </svg>`;
  }
}

function More({ tokens, turns }) {
  const place = useRef(null);
  useEffect(() => {
    const observer = new IntersectionObserver((seen) => seen[0].isIntersecting && tokens.more(), { rootMargin: "600px" });
    observer.observe(place.current);
    return () => observer.disconnect();
  });
  return html`<p class="more" ref=${place}><button onClick=${tokens.more}>${tokens.loading ? "reading …" : `go on with turn ${tokens.next.turn} of ${turns}`}</button></p>`;
}

// The numbers of the token that is pointed at, and the tokens whose numbers stand out.
function Panel({ place, stretches, channels, channel, order, isPart, pin }) {
  const stretch = place && stretches.find((one) => one.turn === place[0] && place[1] >= one.start && place[1] < one.start + one.tokens.length);
  return html`<aside class="panel">
    ${stretch ? html`<${Numbers} place=${place} stretch=${stretch} channels=${channels} channel=${channel} />` : html`<p class="muted hint">Point at a token, or use <kbd>←</kbd> <kbd>→</kbd>.</p>`}
    ${isPart && html`<p class="muted hint">Of the ${plural(order.length, "sampled token")} that are shown so far; scroll for more:</p>`}
    ${channel && channel.scale !== "steps" && order.length > 2 && html`<${Extremes} stretches=${stretches} channel=${channel} pin=${pin} />`}
  </aside>`;
}

function Numbers({ place, stretch, channels, channel }) {
  const nth = place[1] - stretch.start;
  const logprob = stretch.values.logprob?.[nth];
  return html`<div class="card" role="status">
    <div class="card-text"><span class="token" style=${{ backgroundColor: background(channel, stretch.values[channel?.name]?.[nth]) }}>${tokenText(stretch.texts[nth])}</span></div>
    <dl>
      ${channels.map((one) => html`<dt class=${one === channel ? "strong" : ""}>${one.label}</dt><dd class=${"number" + (one === channel ? " strong" : "")}>${shown(one, stretch.values[one.name]?.[nth])}</dd>`)}
      ${logprob != null && html`<dt>probability</dt><dd class="number">${percent(Math.exp(logprob))}</dd>`}
      <dt>token id</dt><dd class="number">${stretch.tokens[nth]}</dd>
      <dt>turn, token</dt><dd class="number">${place[0]}, ${place[1]}</dd>
    </dl>
  </div>`;
}

function shown(channel, value) {
  return channel.scale === "diverging" && value != null ? signed(value) : number(value);
}

function percent(share) {
  return share > 0.9995 ? "100 %" : `${(100 * share).toPrecision(3)} %`;
}

// The tokens with the most extreme values; nothing to show where all are alike.
function Extremes({ stretches, channel, pin }) {
  const all = useMemo(() => valuesOf(stretches, channel), [stretches.length, channel.name]);
  const lowest = all.slice(0, 5);
  const highest = channel.name === "logprob" ? [] : all.slice(-5).reverse();
  if (channel.low === channel.high) return html`<p class="muted hint">All sampled tokens have ${channel.label} ${shown(channel, channel.low)}.</p>`;
  return [["lowest", lowest], ["highest", highest]].map(
    ([label, found]) => found.length > 0 && html`<div class="extremes">
      <h2>${label} ${channel.label}</h2>
      ${found.map(({ value, text, place }) => html`<button key=${place.join(".")} onClick=${() => pin(place)}><span class="token" style=${{ backgroundColor: background(channel, value) }}>${plain(text).trim() || "␣"}</span><span class="muted">turn ${place[0]}</span><span class="number">${shown(channel, value)}</span></button>`)}
    </div>`,
  );
}

// All values of a channel in order of size, with their tokens.
function valuesOf(stretches, channel) {
  return stretches
    .flatMap((stretch) => (stretch.values[channel.name] || []).map((value, nth) => ({ value, text: stretch.texts[nth], place: [stretch.turn, stretch.start + nth] })))
    .filter(({ value }) => value != null)
    .sort((one, other) => one.value - other.value);
}
