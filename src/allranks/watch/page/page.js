// Puts the page together: the chosen run, the connection to the server, keys, and stopping a run.
import {byId, say} from "./words.js";
import {Line} from "./state.js";
import {beside, drawRuns, focusRun} from "./runs.js";
import {drawFindings, drawHead, drawRanks} from "./detail.js";
import {drawCharts} from "./charts.js";
import {plan} from "./frames.js";
import {Logs} from "./logs.js";

// From here on the token is in a cookie: the address should not show it to onlookers.
const hash = decodeURIComponent(location.hash.slice(1));
history.replaceState(null, "", location.pathname + location.hash);

const logs = new Logs();
const LINK = {live: "live", waiting: "reconnecting", lost: "no answer: is allranks watch --web still running?",
  full: "too many pages are open: close some"};

const page = {
  chosen: hash || null, compared: new Set(), colours: new Map(), metric: "work", axis: "step",
  /** The chosen run, then those compared with it, in the order in which they were added. */
  shown() { return [this.chosen, ...[...this.compared].filter(name => name !== this.chosen)]; },
  /** A run keeps its colour while it is shown. */
  colour(name) {
    const shown = this.shown();
    for (const known of this.colours.keys()) if (!shown.includes(known)) this.colours.delete(known);
    if (!this.colours.has(name)) {
      const used = [...this.colours.values()];
      this.colours.set(name, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].find(i => !used.includes(i)) ?? 9);
    }
    return "c" + this.colours.get(name);
  },
  choose(name) {
    if (!name || name === this.chosen) return;
    this.chosen = name;
    history.replaceState(null, "", "#" + encodeURIComponent(name));
    if (line.state) drawRuns(line.state, this);
    line.open();
    line.state = null; // it is about the run before
  },
  compare(name, isOn) {
    if (isOn) this.compared.add(name); else this.compared.delete(name);
    line.open();
  },
};

let isDue = false, isWhole = false, numRanks = -1;
function draw() {
  isDue = false;
  const state = line.state;
  if (!state) return;
  const isUrgent = isWhole;
  isWhole = false;
  page.chosen = state.chosen;
  for (const name of page.compared) if (!state.runs[name]) page.compared.delete(name);
  drawRuns(state, page);
  byId("problem").hidden = !state.problem;
  say(byId("problem"), state.problem || "");
  const run = state.runs[page.chosen];
  byId("run").hidden = !run;
  byId("nothing").hidden = Boolean(run);
  if (!run) {
    document.title = "allranks";
    return void say(byId("nothing"), "No runs here yet. Start one with allranks run or allranks submit: it will appear here.");
  }
  document.title = `${run.steps ? Math.floor(run.share * 100) + "% " : ""}${run.job} · ${run.state}`;
  drawHead(run, state);
  drawFindings(state);
  const isTableNew = numRanks !== Object.keys(state.ranks).length;
  numRanks = Object.keys(state.ranks).length;
  plan("table", () => drawRanks(state, line.now()), {isUrgent: isUrgent || isTableNew});
  drawCharts(state, page, isUrgent);
  logs.offer(page.chosen, state.files, state.file);
}
function query() {
  const words = new URLSearchParams({metric: page.metric});
  if (page.chosen) words.set("run", page.chosen);
  for (const name of page.compared) if (name !== page.chosen) words.append("with", name);
  return words;
}
const line = new Line(query, (_, isAll) => {
  isWhole ||= isAll;
  if (!isDue) { isDue = true; requestAnimationFrame(draw); }
}, link => {
  byId("link").dataset.state = link;
  say(byId("link"), LINK[link]);
});
// Even without news, the time since each rank was last heard grows.
setInterval(() => {
  const state = line.state;
  if (state && state.head) plan("table", () => drawRanks(state, line.now()));
}, 1000);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { isWhole = true; draw(); });

for (const name of ["metric", "axis"]) {
  byId(name).addEventListener("change", event => {
    page[name] = event.target.value;
    if (name === "metric") return line.open();
    isWhole = true;
    draw();
  });
}
byId("filter").addEventListener("input", () => line.state && drawRuns(line.state, page));

// ---------------------------------------------------------------- keys

document.addEventListener("keydown", event => {
  const isTyping = event.target.matches("input[type=search], select, textarea") || byId("confirm").open;
  if (event.key === "Escape" && event.target.matches("input[type=search]")) {
    event.target.value = "";
    event.target.dispatchEvent(new Event("input"));
    return event.target.blur();
  }
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const isInList = event.target.closest("#runs li");
  const by = {j: 1, k: -1, ...(isInList ? {ArrowDown: 1, ArrowUp: -1} : {})}[event.key];
  if (by) {
    page.choose(beside(page.chosen, by));
    focusRun(page.chosen);
  } else if (event.key === "c" && page.chosen) {
    const name = isInList ? isInList.querySelector("button").dataset.run : page.chosen;
    page.compare(name, !page.compared.has(name));
  } else if (event.key === "/") {
    byId("query").focus();
    byId("query").scrollIntoView({block: "center"});
  } else if (event.key === "f") {
    byId("filter").focus();
  } else return;
  event.preventDefault();
});

// ---------------------------------------------------------------- stop

if (byId("stop")) {
  const dialog = byId("confirm"), really = byId("really");
  let asked = null;
  byId("stop").addEventListener("click", () => {
    asked = page.chosen;
    say(byId("confirm-name"), asked);
    say(byId("confirm-answer"), "");
    really.disabled = false;
    dialog.showModal();
  });
  really.addEventListener("click", async () => {
    really.disabled = true;
    say(byId("confirm-answer"), "Asking it to stop …");
    try {
      const answer = await fetch("api/stop", {method: "POST", headers: {"content-type": "application/json"},
        body: JSON.stringify({run: asked, confirm: asked})});
      const said = await answer.json();
      say(byId("confirm-answer"), answer.ok ? `Answer: ${said.said}` : said.error.what);
      if (answer.ok) setTimeout(() => dialog.close(), 1500);
    } catch {
      say(byId("confirm-answer"), "The server did not answer.");
    }
  });
}
