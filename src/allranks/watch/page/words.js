// Formats numbers like show/numbers.py (a test compares the two), and makes elements. Text is only ever inserted as text, never as HTML.

export const NOTHING = "-";

export function fixed(value, decimals) {
  const [whole, rest] = Math.abs(value).toFixed(decimals).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ",") + (rest ? "." + rest : "");
  return (value < 0 && /[1-9]/.test(grouped) ? "-" : "") + grouped;
}
const known = value => value !== null && value !== undefined && Number.isFinite(value);

/** Three significant digits. */
export function number(value, digits = 3) {
  if (!known(value)) return NOTHING;
  const size = Number(value.toExponential(digits - 1).split("e")[1]);
  return value === 0 || size < -6 ? "0" : fixed(value, Math.max(0, digits - 1 - size));
}
export const count = value => known(value) ? fixed(value, 0) : NOTHING;
export const percent = value => known(value) ? fixed(value * 100, 1) + "%" : NOTHING;
export function duration(seconds) {
  if (!known(seconds)) return NOTHING;
  if (seconds < 59.95) {
    const found = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]].find(([unit]) => seconds >= 0.9995 * unit);
    return found ? number(seconds / found[0]) + found[1] : seconds ? number(seconds * 1e6, 1) + "µs" : "0s";
  }
  const left = Math.round(seconds);
  const [unit, name, part, partName] = left < 3600 ? [60, "m", 1, "s"] : left < 86400 ? [3600, "h", 60, "m"] : [86400, "d", 3600, "h"];
  const rest = Math.floor(left % unit / part);
  return Math.floor(left / unit) + name + (rest ? String(rest).padStart(2, "0") + partName : "");
}
export const gibibytes = bytes => known(bytes) ? number(bytes / 2 ** 30) : NOTHING;
/** How long ago, in whole seconds: decimals would only flicker. */
export const age = seconds => seconds < 1.5 ? "now" : (seconds < 59.5 ? `${Math.round(seconds)}s` : duration(seconds)) + " ago";

export function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}
export const byId = id => document.getElementById(id);
/** Sets the text only if it has changed, which saves a layout. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
export function dress(element, className) {
  if (element.className !== className) element.className = className;
}
