// Numbers for people: three digits that matter, and units that fit.

const whole = new Intl.NumberFormat("en");

export const count = (value) => whole.format(Math.round(value));

// Three significant digits, without an exponent for usual sizes.
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100) return count(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(size >= 10 ? 3 : 2)));
}

// Seconds as [number, unit].
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return ["–", "ms"];
  if (seconds === 0) return ["0", "ms"];
  if (seconds >= 1) return [short(seconds), "s"];
  const ms = seconds * 1000;
  return [ms >= 10 ? String(Math.round(ms)) : ms.toFixed(1), "ms"];
}

export const time = (seconds) => duration(seconds).join(" ");

export function bytes(value) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${short(value / size)} ${unit}`;
  }
  return `${value} B`;
}

export function big(value) {
  for (const [unit, size] of [["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= size) return `${short(value / size)}${unit}`;
  }
  return String(value);
}

export const percent = (share) => `${share > 0 && share < 0.1 ? (share * 100).toFixed(1) : Math.round(share * 100)}%`;

// How long a server has been up, or how long ago something was.
export function span(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
