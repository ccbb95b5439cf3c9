// The list of runs: one is chosen, others can be compared with it.
import {NOTHING, byId, dress, make, say} from "./words.js";

const items = new Map();
const SVG = "http://www.w3.org/2000/svg";

/** The job's name, and the part of a run's name that distinguishes runs of the same job. */
export function nameParts(name) {
  const match = /^(.+)-(\d{8}-\d{6}-[0-9a-f]{4})$/.exec(name);
  return match ? [match[1], match[2]] : [name, ""];
}
function sparkline(values) {
  const known = values.filter(value => value !== null);
  if (known.length < 2) return "";
  const low = Math.min(...known), span = Math.max(...known) - low || 1;
  return values.map((value, i) => value === null ? "" :
    `${i && values[i - 1] !== null ? "L" : "M"}${(i / (values.length - 1) * 64).toFixed(1)} ${(15 - (value - low) / span * 14).toFixed(1)}`).join("");
}
function makeItem(name, page) {
  const [job, stamp] = nameParts(name);
  const item = {
    dot: make("i", "dot"), layout: make("span", "small"), words: make("span", "small grow words"),
    fill: make("i", ""), box: make("input", ""), button: make("button", ""),
    line: document.createElementNS(SVG, "path"),
  };
  const spark = document.createElementNS(SVG, "svg");
  spark.setAttribute("class", "spark");
  spark.setAttribute("viewBox", "0 0 64 16");
  spark.setAttribute("aria-hidden", "true");
  spark.append(item.line);
  item.button.type = "button";
  item.button.title = name;
  item.button.dataset.run = name;
  item.button.append(
    make("div", "line", item.dot, make("span", "grow", make("b", "", job), " ", item.layout)),
    make("div", "line small", make("span", "grow", stamp || NOTHING), spark),
    make("div", "line", item.words), make("div", "mini", item.fill));
  item.button.addEventListener("click", () => page.choose(name));
  item.box.type = "checkbox";
  item.box.title = "compare";
  item.box.setAttribute("aria-label", `Compare ${name}`);
  item.box.addEventListener("change", () => page.compare(name, item.box.checked));
  item.element = make("li", "", item.button, item.box);
  return item;
}
function draw(item, run, page) {
  dress(item.dot, "dot " + run.state);
  say(item.layout, run.layout);
  say(item.words, run.words);
  item.words.title = run.words;
  dress(item.element, run.state);
  item.fill.style.width = run.share * 100 + "%";
  item.line.setAttribute("d", sparkline(run.spark));
  item.button.setAttribute("aria-current", String(run.run === page.chosen));
  item.box.checked = page.compared.has(run.run);
  item.box.style.accentColor = page.compared.has(run.run) ? `var(--${page.colour(run.run)})` : "";
}
export function drawRuns(state, page) {
  const list = byId("runs"), wanted = byId("filter").value.trim().toLowerCase();
  const names = state.order.filter(name => !wanted || name.toLowerCase().includes(wanted) ||
    state.runs[name].state.includes(wanted));
  for (const [name, item] of items) if (!names.includes(name)) { item.element.remove(); items.delete(name); }
  names.forEach((name, place) => {
    if (!items.has(name)) items.set(name, makeItem(name, page));
    const item = items.get(name);
    if (list.children[place] !== item.element) list.insertBefore(item.element, list.children[place] || null);
    draw(item, state.runs[name], page);
  });
  const running = state.order.filter(name => state.runs[name].state === "running").length;
  say(byId("count"), running ? `${state.order.length}, ${running} running` : String(state.order.length));
}
/** The run above (-1) or below (1) another in the list as shown. */
export function beside(chosen, by) {
  const names = [...byId("runs").querySelectorAll("button")].map(button => button.dataset.run);
  return names[Math.max(0, Math.min(names.length - 1, names.indexOf(chosen) + by))];
}
export function focusRun(name) {
  const item = items.get(name);
  if (item) { item.button.focus(); item.button.scrollIntoView({block: "nearest"}); }
}
