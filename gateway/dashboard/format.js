// Numbers and times as text. Null is a dash, not zero.

export const NONE = "–";

export function count(value) {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) < 10_000) return `${Math.round(value)}`;
  if (Math.abs(value) < 1_000_000) return `${trimmed(value / 1000, 1)}k`;
  return `${trimmed(value / 1_000_000, 1)}M`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.001) return `${trimmed(value * 1e6, 0)} µs`;
  if (value < 1) return `${trimmed(value * 1000, value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${trimmed(value, value < 10 ? 2 : 1)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${trimmed(value / 3600, 1)} h`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let scaled = value;
  let unit = 0;
  while (scaled >= 1024 && unit < units.length - 1) {
    scaled /= 1024;
    unit += 1;
  }
  return `${trimmed(scaled, scaled < 10 && unit ? 1 : 0)} ${units[unit]}`;
}

export function share(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const percent = value * 100;
  return `${percent > 0 && percent < 10 ? trimmed(percent, 1) : Math.round(percent)} %`;
}

export function clock(at) {
  const date = new Date(at * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map((n) => String(n).padStart(2, "0")).join(":");
}

/** "now", "12 s", "4 min": how long ago. */
export function age(elapsed) {
  if (elapsed < 1) return "now";
  if (elapsed < 120) return `${Math.floor(elapsed)} s`;
  return elapsed < 7200 ? `${Math.floor(elapsed / 60)} min` : `${Math.floor(elapsed / 3600)} h`;
}

/** Formats a number of an event or a report by the unit in its name. */
export function named(name, value) {
  if (typeof value !== "number" || /(epoch|revision)$/.test(name)) return String(value);
  if (/_per_(s|second)$/.test(name)) return `${/bytes/.test(name) ? bytes(value) : trimmed(value, 2)}/s`;
  if (/(_s|seconds)$/.test(name) || /seconds_p\d+$/.test(name)) return seconds(value);
  if (/bytes/.test(name)) return bytes(value);
  if (/(^|_)loss(_|$)/.test(name)) return `${trimmed(value * 100, 3)} %`;
  if (/(usage|usage_after|share|free)$/.test(name) && value >= 0 && value <= 1) return share(value);
  return Number.isInteger(value) ? value.toLocaleString("en") : trimmed(value, 3);
}

export const words = (name) => name.replace(/_per_s(econd)?$/, "").replaceAll("_", " ").replace(/\bkv\b/, "KV").replace(/\btp\b/, "TP");

export function trimmed(value, digits) {
  return String(Number(value.toFixed(digits)));
}
