// Numbers for people.

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en");

const SPACE = "\u00a0"; // numbers stay with their units
export const NONE = "–";
export const count = (value) => (value < 10000 ? whole.format(Math.round(value)) : compact.format(value));
export const percent = (value) => (value === null ? NONE : `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)}${SPACE}%`);
export const rate = (value) => (value === 0 ? "0" : value < 10 ? value.toFixed(1) : value < 1000 ? count(value) : compact.format(value));

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)}${SPACE}ms`;
  return value < 60 ? `${value.toFixed(value < 10 ? 2 : 1)}${SPACE}s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)}${SPACE}s`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)}${SPACE}${units[unit]}`;
}

export const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
export const share = (part, of) => (of > 0 ? part / of : null);
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

export function quantile(values, part) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))];
}
