// Numbers as words, and elements. Text only ever goes in as text: names are other people's words.

export const NOTHING = "–";

export function fixed(value, decimals) {
  const [whole, rest] = Math.abs(value).toFixed(decimals).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ",") + (rest ? "." + rest : "");
  return (value < 0 && /[1-9]/.test(grouped) ? "-" : "") + grouped;
}
const known = value => value !== null && value !== undefined && Number.isFinite(value);
const size = value => value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value)));

/** Three significant digits. */
export function number(value, digits = 3) {
  if (!known(value)) return NOTHING;
  return value === 0 || size(value) < -6 ? "0" : fixed(value, Math.max(0, digits - 1 - size(value)));
}
export const count = value => known(value) ? fixed(value, 0) : NOTHING;
export const percent = value => known(value) ? fixed(value * 100, value < 0.995 ? 1 : 0) + "%" : NOTHING;

function twoUnits(seconds, unit, name, part, partName) {
  const parts = Math.floor(seconds / part + 0.5), per = unit / part;
  return `${Math.floor(parts / per)} ${name}` + (parts % per ? ` ${parts % per} ${partName}` : "");
}
export function duration(seconds) {
  if (!known(seconds)) return NOTHING;
  if (seconds < 59.5) return (seconds < 10 ? number(seconds, 2) : fixed(seconds, 0)) + " s";
  if (seconds >= 86400 - 1800) return twoUnits(seconds, 86400, "d", 3600, "h");
  if (seconds >= 3600 - 30) return twoUnits(seconds, 3600, "h", 60, "min");
  return twoUnits(seconds, 60, "min", 1, "s");
}
export const step = seconds => !known(seconds) ? NOTHING :
  seconds < 1e-4 && seconds > 0 ? number(seconds * 1e6) + " µs" :
    seconds < 1 ? number(seconds * 1000) + " ms" : number(seconds) + " s";
export const gigabytes = bytes => known(bytes) ? number(bytes / 1e9) : NOTHING;
/** Since when, in whole words: a clock that ticks is for the eye, not for the decimals. */
export const age = seconds => seconds < 1.5 ? "now" : seconds < 59.5 ? `${Math.round(seconds)} s ago` : duration(seconds) + " ago";

export function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}
export const byId = id => document.getElementById(id);
/** Writing what is there already would cost a layout. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
export function dress(element, className) {
  if (element.className !== className) element.className = className;
}
