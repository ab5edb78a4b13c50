// Colours of numbers. They are mixtures of variables of the style sheet, so a change of theme needs no new drawing.

const RUNS = 8;

export function runColour(place) {
  return `var(--run-${place % RUNS})`;
}

export function scaleOf(channel) {
  const { low, high, centre, scale } = channel;
  if (scale === "diverging") {
    const reach = Math.max(Math.abs(high - centre), Math.abs(low - centre)) || 1;
    return (value) => (value - centre) / reach;
  }
  // The rare end is the strong one: a low logprob, a high weight.
  if (channel.name === "logprob") return (value) => (low < 0 ? Math.min(1, value / low) : 0);
  return (value) => (high > low ? (value - low) / (high - low) : 0.5);
}

// The background of a token with a value.
export function background(channel, value) {
  if (channel == null || value == null) return "transparent";
  if (channel.scale === "steps") return `rgb(var(--step-${((value % 6) + 6) % 6}) / 0.34)`;
  const place = scaleOf(channel)(value);
  const strength = Math.min(1, Math.abs(place));
  const hue = channel.scale === "diverging" ? (place < 0 ? "negative" : "positive") : "sequential";
  if (strength < 0.004 && channel.scale === "diverging") return "rgb(var(--zero) / 0.16)";
  return `rgb(var(--${hue}) / ${(0.12 + 0.5 * strength).toFixed(3)})`;
}

// The colour of a bar with a value, stronger than a background.
export function ink(channel, value) {
  if (value == null) return "transparent";
  if (channel.scale === "steps") return `rgb(var(--step-${((value % 6) + 6) % 6}))`;
  const place = scaleOf(channel)(value);
  const hue = channel.scale === "diverging" ? (place < 0 ? "negative" : "positive") : "sequential";
  return `rgb(var(--${hue}) / ${(0.45 + 0.5 * Math.min(1, Math.abs(place))).toFixed(3)})`;
}
