// Recorded text as text nodes, never as HTML. Control characters, escapes and marks of direction become visible.

import { html, useState } from "./vendor/preact-htm.js";
import { get, isFile } from "./api.js";
import { count } from "./format.js";

// C0 and C1 controls but tab and newline; invisible marks; marks of direction; lone halves of surrogate pairs.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

// Their names instead of the pictures that Unicode has for them: not every font has those.
const NAMES = "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");

export function picture(character) {
  const code = character.charCodeAt(0);
  return `⟨${NAMES[code] || code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

// [text, whether it stands for a hidden character] for each part of a text.
export function visible(text) {
  const parts = [];
  let last = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > last) parts.push([text.slice(last, found.index), false]);
    // Neighbours are one part: a text of nothing else would be as many elements as characters.
    if (parts.length && parts.at(-1)[1] && found.index === last) parts.at(-1)[0] += picture(found[0]);
    else parts.push([picture(found[0]), true]);
    last = found.index + found[0].length;
  }
  if (last < text.length) parts.push([text.slice(last), false]);
  return parts;
}

export function plain(text) {
  return visible(text).map(([part]) => part).join("");
}

export function Text({ text }) {
  return visible(text).map(([part, hidden]) => (hidden ? html`<span class="hidden-character">${part}</span>` : part));
}

// A text of which the server sent the beginning; the rest comes when somebody asks.
export function LongText({ run, attempt, clip }) {
  const [more, setMore] = useState("");
  const [state, setState] = useState("");
  const text = clip.text + more;
  const left = clip.length - text.length;
  const ask = async () => {
    setState("loading");
    try {
      const path = `/api/${encodeURIComponent(run)}/text/${attempt}?part=${clip.part}&from=${text.length}`;
      const rest = await get(path);
      setMore(more + rest.text);
      setState("");
    } catch (error) {
      setState(error.message);
    }
  };
  return html`<${Text} text=${text} />${left > 0 &&
  html`<span class="cut">… ${count(left)} more characters of ${count(clip.length)}
    ${!isFile && html` <button class="link" onClick=${ask}>show ${left > 200000 ? "more" : "all"}</button>`}
    ${state && html` <span class="muted">${state}</span>`}</span
  >`}`;
}
