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
/** How long ago, in one unit: more would only flicker. */
export function age(seconds) {
  const [unit, name] = seconds < 90 ? [1, "s"] : seconds < 5400 ? [60, "m"] : [3600, "h"];
  return seconds < 1.5 ? "now" : `${Math.round(seconds / unit)}${name} ago`;
}

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
