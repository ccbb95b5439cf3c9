// One uPlot plot per element, with this page's axes, colours and cursor.
import {byId, fixed, make, say} from "./words.js";

export const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const FONT = "12px system-ui, -apple-system, Segoe UI, Roboto, sans-serif";
const WHOLE = Array.from({length: 12}, (_, i) => [1, 2, 5].map(by => by * 10 ** i)).flat(); // no half steps
const plots = new Map(); // id of an element -> {plot, sign, about}

/** A short number for a tick: 0.25, 1,500, 20k, 1.5M. */
export function tick(value) {
  const size = Math.abs(value);
  const [unit, letter] = size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  const text = String(Number((value / unit).toPrecision(5)));
  return (letter || size < 1000 ? text : fixed(value, 0)) + letter;
}
function axis(more) {
  return {stroke: () => colour("quiet"), font: FONT, gap: 5, ticks: {show: false}, border: {show: false},
    values: (_, splits) => splits.map(value => value === null ? "" : tick(value)), ...more,
    grid: {show: true, width: 1, stroke: () => colour("line"), ...more.grid}};
}
/** A tip beside the cursor. `words` returns its lines, or null if there is nothing under the cursor. */
function showTip(plot, tip, words) {
  const {left, top} = plot.cursor, lines = left >= 0 && top >= 0 ? words(plot) : null;
  tip.hidden = !lines;
  if (!lines) return;
  say(tip, lines.join("\n"));
  // To the right of the cursor if there is room, else to the left, else as far right as possible.
  const room = plot.over.clientWidth - tip.offsetWidth, place = left + 14 <= room ? left + 14 : left - 14 - tip.offsetWidth;
  tip.style.left = (place >= 0 ? place : Math.max(0, room)) + "px";
  tip.style.top = Math.max(0, Math.min(plot.over.clientHeight - tip.clientHeight, top - tip.clientHeight / 2)) + "px";
}
const sizes = new ResizeObserver(entries => entries.forEach(({target}) => {
  const known = plots.get(target.id);
  if (known && target.clientWidth) known.plot.setSize({width: target.clientWidth, height: target.clientHeight});
}));

function remove(id) {
  const known = plots.get(id);
  if (known) known.plot.destroy();
  plots.delete(id);
  delete byId(id).plot;
}
/** Says why there is nothing to draw. */
export function showNote(id, why) {
  const element = byId(id);
  remove(id);
  if (element.textContent !== why) element.replaceChildren(make("p", "empty", why));
  element.setAttribute("aria-label", why);
}
/**
 * Draws `data` in uPlot's format: x, then one list for each of `series`. While `sign` stays the same, the plot is kept
 * and only its data change. `about` has the axes, scales, cursor text and hooks.
 */
export function show(id, sign, data, about) {
  const element = byId(id), known = plots.get(id), whole = sign + colour("paper");
  if (known && known.sign === whole) {
    Object.assign(known.about, about);
    known.plot.setData(data);
    return known.plot;
  }
  remove(id);
  element.replaceChildren();
  const tip = make("div", "tip"), kept = {...about};
  tip.hidden = true;
  const plot = new uPlot({
    width: element.clientWidth, height: element.clientHeight, padding: [8, 24, 0, 0],
    legend: {show: false}, cursor: {drag: {x: false, y: false}, y: false, points: {size: 7}, ...about.cursor},
    scales: {x: {time: false, range: (u, low, high) => kept.x(low, high)}, y: {range: (u, low, high) => kept.y(low, high)}},
    axes: [axis({size: 28, gap: 6, space: 70, incrs: WHOLE, grid: {show: false}, ...about.xaxis}), axis({size: 48, space: 32, ...about.yaxis})],
    series: [{}, ...about.series], bands: about.bands || [],
    hooks: {setCursor: [u => showTip(u, tip, kept.words)], draw: [u => kept.draw && kept.draw(u)]},
  }, data, element);
  plot.over.append(tip);
  plots.set(id, {plot, sign: whole, about: kept});
  element.plot = plot;
  sizes.observe(element);
  return plot;
}
