// The token inspector: every sampled token coloured by a number, all its numbers beside it.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";
import { get, isFile } from "./api.js";
import { background, ink, scaleOf } from "./colour.js";
import { count, number, plural, signed } from "./format.js";
import { useKeys } from "./keys.js";
import { plain, visible } from "./text.js";

const STRIP = 3000;

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
  const [hovered, setHovered] = useState(null);
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
    ${channel && order.length <= STRIP && html`<${Strip} stretches=${sampled} channel=${channel} current=${current} pin=${pin} hover=${setHovered} />`}
    ${!channels.length && html`<p class="empty">No token of this attempt has numbers.</p>`}
    <div class="stream">
      ${byTurn(tokens.stretches).map(
        ([turn, stretches]) => html`<section class="token-turn" key=${turn} id=${`tokens-${turn}`}>
          <header><b>turn ${turn}</b>${turnFacts(value.turns[turn])}</header>
          <div class="tokens">${stretches.map((stretch, nth) => html`<${Stretch} key=${nth + ":" + stretch.start} run=${run} attempt=${attempt} stretch=${stretch} channel=${channel} wanted=${wanted} pin=${pin} hover=${setHovered} />`)}</div>
        </section>`,
      )}
    </div>
    ${tokens.error && html`<p class="error">${tokens.error.message}</p>`}
    ${tokens.next && html`<${More} tokens=${tokens} turns=${value.turns.length} />`}
    ${current && isThere(current) && html`<${Card} key=${current.join(",")} place=${current} stretches=${sampled} channels=${channels} channel=${channel} />`}
  </div>`;
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
export function Stretch({ run, attempt, stretch, channel, wanted, pin, hover }) {
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
  const values = channel ? stretch.values[channel.name] || [] : [];
  return html`<span class="sampled-tokens">${stretch.texts.map((text, nth) => {
    const place = [stretch.turn, stretch.start + nth];
    const chosen = wanted && wanted[0] === place[0] && wanted[1] === place[1];
    return html`<span key=${nth} class=${chosen ? "token chosen" : "token"} data-token=${place.join(".")} style=${{ backgroundColor: background(channel, values[nth]) }} onMouseEnter=${() => hover?.(place)} onMouseLeave=${() => hover?.(null)} onClick=${() => pin?.(chosen ? null : place)}>${tokenText(text)}</span>`;
  })}</span>`;
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
function Strip({ stretches, channel, current, pin, hover }) {
  const scale = scaleOf(channel);
  const bars = stretches.flatMap((stretch) => (stretch.values[channel.name] || []).map((value, nth) => ({ value, place: [stretch.turn, stretch.start + nth], first: nth === 0 && stretch.start === 0 })));
  if (!bars.length) return null;
  const diverging = channel.scale === "diverging";
  const width = bars.length;
  const middle = diverging ? 20 : 39;
  return html`<svg class="strip" style=${{ maxWidth: `${24 * width + 14}px` }} viewBox=${`0 0 ${width} 40`} preserveAspectRatio="none" role="img" aria-label=${`${channel.label} of ${width} sampled tokens`}>
    ${bars.map(({ value, place, first }, nth) => {
      const size = value == null ? 0 : Math.max(0.04, Math.min(1, channel.scale === "steps" ? 1 : Math.abs(scale(value)))) * (diverging ? 19 : 37);
      const here = current && current[0] === place[0] && current[1] === place[1];
      const down = diverging && value < channel.centre;
      return html`<g key=${nth} onMouseEnter=${() => hover(place)} onMouseLeave=${() => hover(null)} onClick=${() => pin(place)}>
        <rect x=${nth} y="0" width="1" height="40" class=${here ? "here" : "back"} />
        ${first && nth > 0 && html`<rect x=${nth - 0.04} y="0" width="0.08" height="40" class="edge" />`}
        <rect x=${nth + 0.08} width="0.84" y=${down ? middle : middle - size} height=${size} style=${{ fill: ink(channel, value) }} />
      </g>`;
    })}
    <line x1="0" x2=${width} y1=${middle} y2=${middle} />
  </svg>`;
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

// All numbers of a token, beside it.
function Card({ place, stretches, channels, channel }) {
  const box = useRef(null);
  const stretch = stretches.find((one) => one.turn === place[0] && place[1] >= one.start && place[1] < one.start + one.tokens.length);
  const nth = place[1] - stretch.start;
  useLayoutEffect(() => {
    const token = document.querySelector(`[data-token="${place.join(".")}"]`);
    if (!token || !box.current) return;
    let around = token.getBoundingClientRect();
    if (around.bottom < 90 || around.top > innerHeight - 20) {
      if (box.current.dataset.pinned) token.scrollIntoView({ block: "center" });
      around = token.getBoundingClientRect();
    }
    const own = box.current.getBoundingClientRect();
    const beside = around.right + own.width + 24 < innerWidth;
    const top = beside ? around.top - 9 : around.bottom + own.height + 10 < innerHeight ? around.bottom + 7 : around.top - own.height - 7;
    box.current.style.left = `${Math.max(8, beside ? around.right + 14 : Math.min(innerWidth - own.width - 8, around.left))}px`;
    box.current.style.top = `${Math.max(8, Math.min(innerHeight - own.height - 8, top))}px`;
  }, [place.join(",")]);
  const logprob = stretch.values.logprob?.[nth];
  return html`<div class="card" role="status" ref=${box} data-pinned="1">
    <div class="card-text"><span class="token" style=${{ backgroundColor: background(channel, stretch.values[channel?.name]?.[nth]) }}>${tokenText(stretch.texts[nth])}</span></div>
    <dl>
      ${channels.map((one) => html`<dt class=${one === channel ? "strong" : ""}>${one.label}</dt><dd class=${"number" + (one === channel ? " strong" : "")}>${one.scale === "diverging" ? signed(stretch.values[one.name]?.[nth]) : number(stretch.values[one.name]?.[nth])}</dd>`)}
      ${logprob != null && html`<dt>probability</dt><dd class="number">${(100 * Math.exp(logprob)).toPrecision(3)} %</dd>`}
      <dt>token id</dt><dd class="number">${stretch.tokens[nth]}</dd>
      <dt>turn</dt><dd class="number">${place[0]}, token ${place[1]}</dd>
    </dl>
  </div>`;
}
