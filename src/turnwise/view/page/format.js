// Numbers as text.

export function number(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return count(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  if (size >= 100) return value.toFixed(1);
  return String(Number(value.toPrecision(size >= 1 ? 4 : 3)));
}

export function count(value) {
  return String(value).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

export function plural(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}

export function signed(value) {
  return value > 0 ? "+" + number(value) : number(value);
}

export function seconds(value) {
  if (value == null) return "–";
  if (value === 0) return "0";
  if (value < 0.001) return `${Math.max(1, Math.round(value * 1e6))} µs`;
  if (value < 1) return `${trim(value * 1000)} ms`;
  if (value < 120) return `${trim(value)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return `${Number((value / 3600).toFixed(1))} h`;
}

function trim(value) {
  return value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

export function ago(epoch) {
  const passed = Date.now() / 1000 - epoch;
  return passed < 5 ? "now" : `${seconds(Math.round(passed))} ago`;
}
