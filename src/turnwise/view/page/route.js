// The address of a view: a path and parameters after "#". Every view and its filter can be linked to.

import { useEffect, useState } from "./vendor/preact-htm.js";

export function parse(hash) {
  const [path, search] = hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decode);
  return { parts, parameters: Object.fromEntries(new URLSearchParams(search || "")) };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function address(parts, parameters = {}) {
  const chosen = Object.entries(parameters).filter(([, value]) => value !== "" && value != null);
  const search = new URLSearchParams(chosen).toString();
  return "#/" + parts.map(encodeURIComponent).join("/") + (search ? "?" + search : "");
}

// Go to a view. `replace` changes the address of this view without a new entry in the history.
export function go(parts, parameters = {}, replace = false) {
  const next = address(parts, parameters);
  if (next === location.hash) return;
  if (replace) history.replaceState(history.state, "", next);
  else history.pushState(null, "", next);
  window.dispatchEvent(new Event("route"));
}

export function useRoute() {
  const [route, setRoute] = useState(() => parse(location.hash));
  useEffect(() => {
    const changed = () => setRoute(parse(location.hash));
    for (const name of ["hashchange", "popstate", "route"]) window.addEventListener(name, changed);
    return () => {
      for (const name of ["hashchange", "popstate", "route"]) window.removeEventListener(name, changed);
    };
  }, []);
  return route;
}
