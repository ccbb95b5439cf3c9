// The plots of the chosen run.
import {byId, count, make, number, say} from "./words.js";
import {colour, show, showNote, tick} from "./plot.js";
import {plan} from "./frames.js";
import {nameParts} from "./runs.js";

const CURVES_MS = 1000, HEAT_MS = 2000, SAME_MS = 10000;

// In a long run a point stands for many steps and changes slowly: the same picture is not drawn again.
const drawn = new Map();
function isSame(id, sign, isUrgent) {
  const before = drawn.get(id), now = performance.now();
  if (!isUrgent && before && before.sign === sign && now - before.when < SAME_MS) return true;
  drawn.set(id, {sign, when: now});
  return false;
}
const signOf = list => list.map(({x, y}) => `${x.length} ${x[x.length - 1]} ${number(y[y.length - 1])}`).join();

// ---------------------------------------------------------------- loss and throughput of several runs

/** A little more than the range of values, so that no curve touches the frame. */
function around(low, high) {
  if (low === null || high === null) return [0, 1];
  const more = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - more, high + more];
}
const short = name => { const [job, stamp] = nameParts(name); return stamp ? `${job} …${stamp.slice(-4)}` : name; };
const fromZero = (_, high) => [0, high === null || high <= 0 ? 1 : high * 1.06];

/** The value of a curve at an index, or at the nearest index that has one. */
function nearest(values, place) {
  for (let by = 0; by < values.length; by++) {
    for (const i of [place - by, place + by]) if (values[i] !== undefined && values[i] !== null) return values[i];
  }
  return null;
}
function drawLines(id, state, page, key, range, why) {
  const names = page.shown().filter(name => state.curves[name] && state.curves[name][key].x.length).reverse();
  if (!names.length) return showNote(id, why);
  const isShare = page.axis === "share";
  const tables = names.map(name => {
    const {x, y} = state.curves[name][key], last = state.runs[name].steps || state.runs[name].step || 1;
    return [isShare ? x.map(step => step / last * 100) : x, y];
  });
  // A line continues where only another run has a value; it breaks where a loss is not a number.
  const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
  const series = names.map(name => ({
    stroke: colour(page.colour(name)), width: name === page.chosen ? 2.2 : 1.5, points: {size: 4}}));
  show(id, [page.axis, page.chosen, ...names.map(name => page.colour(name) + name)].join("\n"), data, {
    series, x: (_, high) => [0, isShare ? 100 : high || 1], y: range, xaxis: {values: (_, splits) => splits.map(at => tick(at) + (isShare ? "%" : ""))},
    words: u => {
      const at = u.cursor.idx;
      if (at === null || at === undefined) return null;
      const where = isShare ? `${number(u.data[0][at])}%` : `step ${count(u.data[0][at])}`;
      return [where, ...names.map((name, i) => number(nearest(u.data[i + 1], at), 5) + (names.length > 1 ? `  ${short(name)}` : "")).reverse()];
    },
  });
}
/** Why a plot is empty. */
const why = (state, reason) => state.runs[state.chosen].step === null ? "No step yet." : reason;

function drawCurves(state, page, isUrgent) {
  const axis = page.axis;
  const shown = page.shown().map(name => state.curves[name]).filter(Boolean);
  if (!isSame("loss", axis + signOf(shown.map(one => one.loss)), isUrgent)) plan("loss", () =>
    drawLines("loss", state, page, "loss", around, why(state, "No loss was recorded: a script of your own does not report it.")), {gap: CURVES_MS, isUrgent});
  if (!isSame("pace", axis + signOf(shown.map(one => one.pace)), isUrgent)) plan("pace", () =>
    drawLines("pace", state, page, "pace", fromZero, why(state, "No throughput is known yet.")), {gap: CURVES_MS, isUrgent});
  const {loss, pace} = state.head;
  say(byId("loss-now"), loss);
  say(byId("pace-now"), pace);
  byId("loss").setAttribute("aria-label", `Loss by step, now ${loss || "not known"}`);
  byId("pace").setAttribute("aria-label", `Samples per second by step, now ${pace || "not known"}`);
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

// ---------------------------------------------------------------- utilisation

const READING = "Reading the events of all ranks …";
const isRead = state => Object.keys(state.ranks).length > 0 || state.runs[state.chosen].step === null;

function drawBand(use) {
  const isGpu = use.unit === "%", line = colour("c0");
  show("use", "use" + use.unit, [use.x, use.low, use.high, use.mean], {
    series: [{width: 0, points: {show: false}}, {width: 0, points: {show: false}}, {stroke: line, width: 2, points: {size: 4}}],
    bands: [{series: [2, 1], fill: line + "2e"}],
    x: (_, high) => [0, high || 1], y: isGpu ? () => [0, 104] : fromZero,
    yaxis: isGpu ? {splits: () => [0, 50, 80, 100], values: (_, splits) => splits.map(at => at + "%")} : {},
    words: u => {
      const at = u.cursor.idx;
      if (at === null || at === undefined) return null;
      const [x, low, high, mean] = u.data.map(values => values[at]);
      return [`step ${count(x)}`, `${number(mean)}${use.unit} on average`, `${number(low)} to ${number(high)}${use.unit}`];
    },
  });
}
let hadUse = false;
function drawUse(state, isUrgent) {
  isUrgent ||= hadUse !== Boolean(state.use);
  hadUse = Boolean(state.use);
  const use = state.use, isGpu = use && use.unit === "%";
  const sign = use ? use.unit + signOf([{x: use.x, y: use.mean}]) : String(isRead(state));
  if (!isSame("use", sign, isUrgent)) plan("use", () => use && use.x.length ? drawBand(use)
    : showNote("use", isRead(state) ? why(state, "No utilisation was recorded.") : READING), {gap: HEAT_MS, isUrgent});
  say(byId("use-head"), !use ? "Utilisation" : isGpu ? "GPU utilisation" : "CPU use");
  const last = use && use.mean.length ? use.mean[use.mean.length - 1] : null;
  say(byId("use-now"), last === null ? "" : `${number(last)}${isGpu ? "%" : " CPUs"} per rank on average; the band spans all ranks`);
  byId("use").setAttribute("aria-label", `Utilisation by step, now ${number(last)}`);
}

// ---------------------------------------------------------------- ranks over time

const HEAT = {work: "step time without waiting", seconds: "step time", data: "waiting for data",
  wait: "waiting for ranks and network", utilization: "of the device"};

/** Where colours begin and end: usual step times are pale, and the range is wide enough to hide noise. */
export function limits(values) {
  if (!values.length) return [0, 1];
  const at = part => values[Math.min(values.length - 1, Math.floor(part * values.length))];
  values.sort();
  const low = at(0.3);
  return [low, Math.max(at(0.995), low * 1.2, low + 1e-6)];
}
function limitsOf(heat) {
  if (heat.unit === "%") return [0, 100];
  const values = new Float64Array(heat.columns.length * heat.ranks.length);
  let known = 0;
  for (const column of heat.columns) for (const value of column) if (value !== null) values[known++] = value;
  return limits(values.subarray(0, known));
}
/** 256 colours through the five stops of a ramp, as [red, green, blue]. */
function ramp(name) {
  const stops = [0, 1, 2, 3, 4].map(i => colour(name + i)).map(hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16)));
  return Array.from({length: 256}, (_, i) => {
    const at = i / 255 * 4, from = Math.min(3, Math.floor(at));
    return stops[from].map((value, c) => Math.round(value + (stops[from + 1][c] - value) * (at - from)));
  });
}
/** One pixel per column and rank; unknown values are left out. */
function image(heat, low, high, colours) {
  const canvas = make("canvas", ""), width = heat.columns.length, height = heat.ranks.length;
  Object.assign(canvas, {width, height});
  const context = canvas.getContext("2d"), pixels = context.createImageData(width, height);
  heat.columns.forEach((column, x) => column.forEach((value, y) => {
    if (value === null) return;
    const part = Math.max(0, Math.min(255, Math.round((value - low) / (high - low || 1) * 255)));
    pixels.data.set([...colours[part], 255], (y * width + x) * 4);
  }));
  context.putImageData(pixels, 0, 0);
  return canvas;
}
function drawCells(heat) {
  const isUse = heat.metric === "utilization", scale = isUse ? 1 : 1000, unit = isUse ? heat.unit : " ms";
  const [low, high] = limitsOf(heat), kind = isUse ? "use" : "slow", size = heat.ranks.length;
  const cells = image(heat, low, high, ramp(kind)), end = heat.columns.length * heat.width;
  say(byId("heat-low"), number(low * scale) + unit);
  say(byId("heat-high"), number(high * scale) + unit);
  byId("heat-scale").className = "scale " + kind;
  const every = Math.ceil(size / 9);
  const plot = show("heat", `heat ${size}`, [[0, end], [null, null]], {
    series: [{points: {show: false}}], cursor: {y: true, points: {show: false}},
    // Ranks are listed downwards: rank i is at -i.
    x: () => [0, end], y: () => [0.5 - size, 0.5],
    yaxis: {grid: {show: false}, label: "rank", labelSize: 18, labelFont: "12px system-ui, sans-serif", labelGap: 0, size: 36,
      splits: () => heat.ranks.map((_, i) => -i).filter(i => i % every === 0), values: (_, splits) => splits.map(at => String(heat.ranks[-at]))},
    draw: u => {
      const {left, top, width, height} = u.bbox;
      u.ctx.imageSmoothingEnabled = false;
      u.ctx.drawImage(cells, left, top, width, height);
    },
    words: u => {
      const c = Math.floor(u.posToVal(u.cursor.left, "x") / heat.width), r = Math.round(-u.posToVal(u.cursor.top, "y"));
      const value = heat.columns[c] ? heat.columns[c][r] : undefined;
      if (value === undefined || value === null) return null;
      const [first, last] = [c * heat.width + 1, (c + 1) * heat.width];
      return [`rank ${heat.ranks[r]}`, first === last ? `step ${count(first)}` : `steps ${count(first)} to ${count(last)}`, number(value * scale) + unit];
    },
  });
  plot.heat = {...heat, low, high};
}
let drawnRanks = -1;
function drawHeat(state, isUrgent) {
  const heat = state.heat;
  isUrgent ||= drawnRanks !== (heat ? heat.ranks.length : 0);
  drawnRanks = heat ? heat.ranks.length : 0;
  const size = heat ? heat.ranks.length : Object.keys(state.ranks).length || 1;
  byId("heat").style.height = Math.max(110, Math.min(380, 44 + size * 20)) + "px";
  const known = heat ? heat.columns.reduce((sum, column) => sum + column.filter(value => value !== null).length, 0) : 0;
  const sign = heat ? [heat.metric, heat.width, heat.columns.length, known].join() : String(isRead(state));
  if (!isSame("heat", sign, isUrgent)) plan("heat", () => heat && heat.columns.length ? drawCells(heat)
    : showNote("heat", isRead(state) ? why(state, "This was not recorded.") : READING), {gap: HEAT_MS, isUrgent});
  byId("heat-scale").hidden = !heat;
  const words = heat ? HEAT[heat.metric] : "";
  say(byId("heat-now"), heat && heat.width > 1 ? `${words} · ${heat.width} steps per column` : words);
  byId("heat").setAttribute("aria-label", `Heat map of ${heat ? heat.ranks.length : 0} ranks by step: ${words}`);
}

/** Draws all plots of the chosen run. `isUrgent`: the user is waiting (a click), draw at once. */
export function drawCharts(state, page, isUrgent) {
  drawCurves(state, page, isUrgent);
  drawHeat(state, isUrgent);
  drawUse(state, isUrgent);
}
