// Questions to the server. A page that was written to a file has the answers in itself.

import { useEffect, useRef, useState } from "./vendor/preact-htm.js";

const block = document.getElementById("answers");
const answers = block ? JSON.parse(block.textContent) : null;

export const isFile = answers !== null;

// Where a file opens.
export const start = block ? block.dataset.start : "";

// Whether a question can be answered; a server can answer all.
export function has(path) {
  return !answers || path in answers;
}

export async function get(path) {
  if (answers) return answered(path);
  const response = await fetch(path, { credentials: "same-origin" });
  const type = response.headers.get("content-type") || "";
  const value = type.startsWith("application/json") ? await response.json() : { error: await response.text() };
  if (!response.ok) throw new Error(value.error || `the server answered ${response.status}`);
  return value;
}

// A file has one answer for each path: what depends on parameters that it was not made for is answered alike.
function answered(path) {
  const found = answers[path] ?? answers[path.split("?")[0]];
  if (found === undefined) throw new Error("this is not in the file; open the run with turnwise view");
  return found;
}

// The answer to a question, asked again whenever `version` changes; the last answer stays until the next is there.
export function useAnswer(path, version = 0) {
  const [state, setState] = useState({ path: null, value: null, error: null });
  const current = useRef(null);
  useEffect(() => {
    if (!path) return;
    current.current = path;
    const mine = () => current.current === path;
    Promise.resolve()
      .then(() => get(path))
      .then((value) => mine() && setState({ path, value, error: null }))
      .catch((error) => mine() && setState((old) => ({ path, value: old.path === path ? old.value : null, error })));
  }, [path, version]);
  return { value: state.value, error: state.error, loading: state.path !== path };
}

// What changes without anybody asking: the runs, every two seconds while the page is seen.
export function useRuns() {
  const [state, setState] = useState({ runs: null, version: 0, error: null });
  useEffect(() => {
    let timer = null;
    let ended = false;
    async function look() {
      if (document.visibilityState !== "hidden") {
        try {
          const { runs, version, turnwise } = await get("/api/runs");
          if (!ended) setState((old) => (old.version === version && old.runs && !old.error ? old : { runs, version, turnwise, error: null }));
        } catch (error) {
          if (!ended) setState((old) => ({ ...old, error }));
        }
      }
      if (!ended && !isFile) timer = setTimeout(look, 2000);
    }
    look();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, []);
  return state;
}
