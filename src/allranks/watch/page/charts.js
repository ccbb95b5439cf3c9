// The plots.
import {byId, make, number, say} from "./words.js";
import {plan} from "./frames.js";

const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
// Plotly reads a little HTML in names: none of theirs is meant as such.
const inert = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

const CURVES_MS = 1000, HEAT_MS = 2000, SAME_MS = 10000;
let onPlotly = null, hasPlotly = false;
/** Called when Plotly is there. It is large, and the words do not need it: it is loaded after them. */
export function whenReady(draw) { onPlotly = draw; }
function loadPlotly() {
  if (document.getElementById("plotly")) return;
  const script = document.createElement("script");
  script.id = "plotly";
  script.src = "static/plotly.js?" + document.body.dataset.plotly;
  script.async = true;
  script.onload = () => { hasPlotly = true; onPlotly(); };
  document.head.append(script);
}

// Of a long run a column or a point is many steps, and changes slowly: the same picture is not drawn again.
const drawn = new Map();
function isSame(id, sign, isUrgent) {
  const before = drawn.get(id), now = performance.now();
  if (!isUrgent && before && before.sign === sign && now - before.when < SAME_MS) return true;
  drawn.set(id, {sign, when: now});
  return false;
}
const signOf = list => list.map(({x, y}) => `${x.length} ${x[x.length - 1]} ${number(y[y.length - 1])}`).join();

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
    // Copies: Plotly takes a list that has grown for one that it has drawn.
    return {x: curve.x.map(x => axis === "share" ? x / last * 100 : x), y: curve.y.slice(), name: inert(name), mode: "lines",
      line: {color: colour(page.colour(name)), width: name === page.chosen ? 2.2 : 1.5}, connectgaps: false,
      hovertemplate: "%{y:.5~g} at %{x:,.3~r}<extra>" + (page.shown().length > 1 ? inert(name) : "") + "</extra>"};
  }).reverse();
}
function drawCurves(state, page, isUrgent) {
  const axis = page.axis, xaxis = {rangemode: "tozero", ticksuffix: axis === "share" ? "%" : "", tickformat: axis === "share" ? "" : ",~r"};
  const run = state.runs[page.chosen], curves = state.curves[page.chosen];
  const shown = page.shown().map(name => state.curves[name]).filter(Boolean);
  if (!isSame("loss", axis + signOf(shown.map(one => one.loss)), isUrgent)) plan("loss", () => show("loss", lines(state, page, "loss", axis), {xaxis, yaxis: {tickformat: "~g"}},
    "No loss recorded: a script of your own does not tell it."), {gap: CURVES_MS, isUrgent});
  if (!isSame("pace", axis + signOf(shown.map(one => one.pace)), isUrgent)) plan("pace", () => show("pace", lines(state, page, "pace", axis), {xaxis, yaxis: {rangemode: "tozero", tickformat: "~s"}},
    "No step yet."), {gap: CURVES_MS, isUrgent});
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

const HEAT = {work: "step without waits", seconds: "step", data: "waits for data",
  wait: "waits for ranks and network", utilization: "of its device"};

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
  const ramp = isUse ? "use" : "slow", unit = isUse ? heat.unit : " ms";
  // A colour bar of Plotly's takes a third of the time of the whole drawing.
  say(byId("heat-low"), number(zmin) + unit);
  say(byId("heat-high"), number(zmax) + unit);
  byId("heat-scale").className = "scale " + ramp;
  return {type: "heatmap", z: rows, x0: heat.width / 2, dx: heat.width, y: heat.ranks, zmin, zmax, zsmooth: false,
    colorscale: [0, 1, 2, 3, 4].map(i => [i / 4, colour(ramp + i)]), hoverongaps: false,
    showscale: false, hovertemplate: `rank %{y}, around step %{x:,.0f}: %{z:.3~g}${unit}<extra></extra>`};
}
const READING = "Reading what all ranks have written.";
const isRead = state => Object.keys(state.ranks).length > 0 || state.runs[state.chosen].step === null;
let drawnRanks = -1;
function drawHeat(state, isUrgent) {
  const heat = state.heat;
  isUrgent ||= drawnRanks !== (heat ? heat.ranks.length : 0);
  drawnRanks = heat ? heat.ranks.length : 0;
  const size = heat ? heat.ranks.length : state.runs[state.chosen].world_size || 1;
  const height = Math.max(150, Math.min(380, 60 + size * 14));
  byId("heat").style.height = height + "px";
  const known = heat ? heat.columns.reduce((sum, column) => sum + column.filter(value => value !== null).length, 0) : 0;
  const sign = heat ? [heat.metric, heat.width, heat.columns.length, known].join() : String(isRead(state));
  if (!isSame("heat", sign, isUrgent)) plan("heat", () => show("heat", heat && heat.columns.length ? [heatTrace(heat)] : [],
    {xaxis: {tickformat: ",~r"}, yaxis: {autorange: "reversed", showgrid: false,
      nticks: 9, tickformat: "d", title: {text: "rank", standoff: 4, font: {size: 12}}, dtick: heat && heat.ranks.length <= 8 ? 1 : undefined}},
    isRead(state) ? "Nothing of the kind was recorded." : READING), {gap: HEAT_MS, isUrgent});
  byId("heat-scale").hidden = !heat;
  const words = heat ? HEAT[heat.metric] : "";
  say(byId("heat-now"), heat && heat.width > 1 ? `${words} · ${heat.width} steps a column` : words);
  byId("heat").setAttribute("aria-label", `Heat map of ${heat ? heat.ranks.length : 0} ranks by step: ${words}`);
}

// ---------------------------------------------------------------- utilisation

function useTraces(use) {
  const band = {mode: "lines", line: {width: 0}, hoverinfo: "skip", x: use.x.slice()};
  const main = {x: use.x.slice(), y: use.mean.slice(), mode: "lines", line: {color: colour("c0"), width: 2},
    customdata: use.x.map((_, i) => [use.low[i], use.high[i]]),
    hovertemplate: `%{y:.3~g}${use.unit} in the mean, %{customdata[0]:.3~g} to %{customdata[1]:.3~g}<extra></extra>`};
  return [{...band, y: use.low.slice()}, {...band, y: use.high.slice(), fill: "tonexty", fillcolor: colour("c0") + "2e"}, main];
}
let hadUse = false;
function drawUse(state, isUrgent) {
  isUrgent ||= hadUse !== Boolean(state.use);
  hadUse = Boolean(state.use);
  const use = state.use, isGpu = use && use.unit === "%";
  const sign = use ? signOf([{x: use.x, y: use.mean}]) : String(isRead(state));
  if (!isSame("use", sign, isUrgent)) plan("use", () => show("use", use && use.x.length ? useTraces(use) : [], {xaxis: {tickformat: ",~r", rangemode: "tozero"},
    yaxis: {rangemode: "tozero", nticks: 4, ...(isGpu ? {range: [0, 104], tickvals: [0, 50, 80, 100], ticktext: ["0", "50", "80%", "100%"]} : {})}},
    isRead(state) ? "No use of devices was recorded." : READING), {gap: HEAT_MS, isUrgent});
  say(byId("use-head"), use && !isGpu ? "CPU use" : "GPU utilisation");
  const last = use && use.mean.length ? use.mean[use.mean.length - 1] : null;
  say(byId("use-now"), last === null ? "" : `${number(last)}${isGpu ? "%" : " CPUs"} a rank, in the mean; the band is from the least to the most`);
  byId("use").setAttribute("aria-label", `Use of devices by step, now ${number(last)}`);
}

/** All plots of the chosen run. `isUrgent`: somebody waits for it (a click), do not save frames. */
export function drawCharts(state, page, isUrgent) {
  if (!hasPlotly) return loadPlotly();
  drawCurves(state, page, isUrgent);
  drawHeat(state, isUrgent);
  drawUse(state, isUrgent);
}
