// The plots. Each is drawn in a frame of its own, once, then only while it can be seen.
import {byId, make, number, say} from "./words.js";

const GAP_MS = 1000;
const FIRST = -1e9;
const seen = new Map(); // plot's id -> {isSeen, draw, drawn, isDue}
const queue = [];
let isWaiting = false;

const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
// Plotly reads a little HTML in names: none of theirs is meant as such.
const inert = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

const watcher = new IntersectionObserver(entries => entries.forEach(entry => {
  const plot = seen.get(entry.target.id);
  plot.isSeen = entry.isIntersecting;
  if (plot.isSeen && plot.isDue) enqueue(entry.target.id);
}), {rootMargin: "100px"});

for (const id of ["loss", "pace", "heat", "use"]) {
  seen.set(id, {isSeen: false, draw: null, drawn: FIRST, isDue: false});
  watcher.observe(byId(id));
}
const wanted = plot => plot.isSeen || plot.drawn === FIRST;
function enqueue(id) {
  if (!queue.includes(id)) queue.push(id);
  if (!isWaiting) { isWaiting = true; requestAnimationFrame(drawOne); }
}
function drawOne() {
  isWaiting = false;
  if (!window.Plotly) return void setTimeout(() => { isWaiting ||= queue.length && requestAnimationFrame(drawOne); }, 50);
  const id = queue.shift(), plot = seen.get(id);
  if (plot && plot.isDue && wanted(plot)) {
    plot.isDue = false;
    plot.drawn = performance.now();
    plot.draw();
  }
  if (queue.length) { isWaiting = true; requestAnimationFrame(drawOne); }
}
/** Has a plot drawn soon; of several wishes, the last. */
function plan(id, draw, isUrgent) {
  const plot = seen.get(id);
  plot.draw = draw;
  if (isUrgent) plot.drawn = FIRST; // another run's: wrong, seen or not
  else if (plot.isDue) return;
  plot.isDue = true;
  const wait = isUrgent ? 0 : Math.max(0, plot.drawn + GAP_MS - performance.now());
  if (wait) setTimeout(() => plot.isSeen && plot.isDue && enqueue(id), wait);
  else if (wanted(plot)) enqueue(id);
}

function show(id, traces, layout, why) {
  const element = byId(id);
  const note = element.querySelector(":scope > .empty");
  if (note) note.remove();
  if (!traces.length) {
    if (element.data) Plotly.purge(element);
    element.replaceChildren(make("p", "empty", why));
    element.setAttribute("aria-label", why);
    return;
  }
  Plotly.react(element, traces, dressed({height: element.clientHeight, ...layout}), {displayModeBar: false, responsive: true});
}
function dressed(layout) {
  const axis = {gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, ticks: "", fixedrange: true};
  return {
    ...layout,
    font: {family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 12, color: colour("quiet")},
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: {l: 46, r: 10, t: 8, b: 24, ...layout.margin},
    hoverlabel: {bgcolor: colour("card"), bordercolor: colour("line"), font: {color: colour("ink")}},
    showlegend: false, hovermode: "closest",
    xaxis: {...axis, showgrid: false, ...layout.xaxis}, yaxis: {...axis, nticks: 5, ...layout.yaxis},
  };
}

// ---------------------------------------------------------------- loss and throughput, of several runs

function lines(state, page, key, axis) {
  return page.shown().filter(name => state.curves[name] && state.curves[name][key].x.length).map(name => {
    const run = state.runs[name], curve = state.curves[name][key];
    const last = run.steps || run.step || 1;
    return {x: axis === "share" ? curve.x.map(x => x / last * 100) : curve.x, y: curve.y, name: inert(name), mode: "lines",
      line: {color: colour(page.colour(name)), width: name === page.chosen ? 2.2 : 1.5}, connectgaps: false,
      hovertemplate: "%{y:.5~g} at %{x:,.3~r}<extra>" + (page.shown().length > 1 ? inert(name) : "") + "</extra>"};
  }).reverse();
}
function drawCurves(state, page, isUrgent) {
  const axis = page.axis, xaxis = {rangemode: "tozero", ticksuffix: axis === "share" ? "%" : "", tickformat: axis === "share" ? "" : ",~r"};
  const run = state.runs[page.chosen], curves = state.curves[page.chosen];
  plan("loss", () => show("loss", lines(state, page, "loss", axis), {xaxis, yaxis: {tickformat: "~g"}},
    "No loss recorded: a script of your own does not tell it."), isUrgent);
  plan("pace", () => show("pace", lines(state, page, "pace", axis), {xaxis, yaxis: {rangemode: "tozero", tickformat: "~s"}},
    "No step yet."), isUrgent);
  say(byId("loss-now"), run.loss === null ? "" : number(run.loss, 4));
  say(byId("pace-now"), run.samples_per_second === null ? "" : `${number(run.samples_per_second)} samples/s`);
  byId("loss").setAttribute("aria-label", `Loss by step, now ${number(run.loss, 4)}`);
  byId("pace").setAttribute("aria-label", `Samples a second by step, now ${number(run.samples_per_second)}; ${curves ? curves.pace.x.length : 0} points`);
  drawLegend(page);
}
function drawLegend(page) {
  const names = page.shown(), legend = byId("legend");
  legend.hidden = names.length < 2;
  const text = names.map(name => page.colour(name) + name).join("\n");
  if (legend.dataset.names === text) return;
  legend.dataset.names = text;
  legend.replaceChildren(...names.map(name => {
    const swatch = make("i", "swatch");
    swatch.style.color = `var(--${page.colour(name)})`;
    return make("span", "", swatch, name);
  }));
}

// ---------------------------------------------------------------- ranks over time

const HEAT = {work: "step without waiting", seconds: "step", data: "waiting for data",
  wait: "waiting for other ranks and the network", utilization: "utilisation"};

/** Where colours begin and end: what most steps take is pale, and never so near that noise looks like news. */
export function limits(values) {
  if (!values.length) return [0, 1];
  const at = part => values[Math.min(values.length - 1, Math.floor(part * values.length))];
  values.sort();
  const low = at(0.3);
  return [low, Math.max(at(0.995), low * 1.2, low + 1e-6)];
}
function heatTrace(heat) {
  const isUse = heat.metric === "utilization", scale = isUse ? 1 : 1000;
  const columns = heat.columns, rows = heat.ranks.map(() => new Array(columns.length));
  const values = new Float64Array(columns.length * heat.ranks.length);
  let known = 0;
  columns.forEach((column, c) => column.forEach((value, r) => {
    rows[r][c] = value === null ? null : value * scale;
    if (value !== null) values[known++] = value * scale;
  }));
  const [zmin, zmax] = isUse && heat.unit === "%" ? [0, 100] : limits(values.subarray(0, known));
  const ramp = isUse ? "use" : "slow";
  return {type: "heatmap", z: rows, x0: heat.width / 2, dx: heat.width, y: heat.ranks, zmin, zmax, zsmooth: false,
    colorscale: [0, 1, 2, 3, 4].map(i => [i / 4, colour(ramp + i)]), hoverongaps: false,
    colorbar: {thickness: 8, len: 1, outlinewidth: 0, ticksuffix: isUse ? heat.unit : " ms", nticks: 5, xpad: 8, tickfont: {size: 11}},
    hovertemplate: `rank %{y}, around step %{x:,.0f}: %{z:.3~g}${isUse ? heat.unit : " ms"}<extra></extra>`};
}
function drawHeat(state, isUrgent) {
  const heat = state.heat;
  const height = heat ? Math.max(150, Math.min(380, 60 + heat.ranks.length * 14)) : 150;
  byId("heat").style.height = height + "px";
  plan("heat", () => show("heat", heat && heat.columns.length ? [heatTrace(heat)] : [],
    {margin: {l: 46, r: 4}, xaxis: {tickformat: ",~r"}, yaxis: {autorange: "reversed", showgrid: false,
      nticks: 9, tickformat: "d", title: {text: "rank", standoff: 4, font: {size: 12}}, dtick: heat && heat.ranks.length <= 8 ? 1 : undefined}},
    "Nothing of the kind was recorded."), isUrgent);
  const words = heat ? HEAT[heat.metric] : "";
  say(byId("heat-now"), heat && heat.width > 1 ? `${words}; a column is ${heat.width} steps` : words);
  byId("heat").setAttribute("aria-label", `Heat map of ${heat ? heat.ranks.length : 0} ranks by step: ${words}`);
}

// ---------------------------------------------------------------- utilisation

function useTraces(use) {
  const band = {mode: "lines", line: {width: 0}, hoverinfo: "skip", x: use.x};
  const main = {x: use.x, y: use.mean, mode: "lines", line: {color: colour("c0"), width: 2},
    customdata: use.x.map((_, i) => [use.low[i], use.high[i]]),
    hovertemplate: `%{y:.3~g}${use.unit} in the mean, %{customdata[0]:.3~g} to %{customdata[1]:.3~g}<extra></extra>`};
  return [{...band, y: use.low}, {...band, y: use.high, fill: "tonexty", fillcolor: colour("c0") + "2e"}, main];
}
function drawUse(state, isUrgent) {
  const use = state.use, isGpu = use && use.unit === "%";
  plan("use", () => show("use", use && use.x.length ? useTraces(use) : [], {xaxis: {tickformat: ",~r", rangemode: "tozero"},
    yaxis: {rangemode: "tozero", nticks: 4, ...(isGpu ? {range: [0, 104], tickvals: [0, 50, 80, 100], ticktext: ["0", "50", "80%", "100%"]} : {})}},
    "No device use recorded yet."), isUrgent);
  say(byId("use-head"), use && !isGpu ? "CPU use" : "GPU utilisation");
  const last = use && use.mean.length ? use.mean[use.mean.length - 1] : null;
  say(byId("use-now"), last === null ? "" : `${number(last)}${isGpu ? "%" : " CPUs"} a rank, in the mean; the band is from the least to the most`);
  byId("use").setAttribute("aria-label", `Use of devices by step, now ${number(last)}`);
}

/** All plots of the chosen run. `isUrgent`: somebody waits for it (a click), do not save frames. */
export function drawCharts(state, page, isUrgent) {
  drawCurves(state, page, isUrgent);
  drawHeat(state, isUrgent);
  drawUse(state, isUrgent);
}
