// Draws the report from the JSON in this page. Text only ever goes in as text: names of jobs, runs
// and metrics are other people's words. Every number carries its place in the JSON (data-path).
"use strict";
(() => {
const report = JSON.parse(document.getElementById("data").textContent);
const root = document.getElementById("report");
const PARTS = ["compute", "comm", "straggler", "data", "other"];
const PART_NAMES = {compute: "compute", comm: "communication", straggler: "waiting for slower ranks",
  data: "data", other: "other"};
const MODES = {strong: "strong scaling: the same batch on every layout",
  weak: "weak scaling: the same batch on every rank",
  mixed: "scaling with batches that differ", "one size": "one size"};
const NOTHING = "–";

// ---------------------------------------------------------------- numbers, as words.py writes them

function fixed(value, decimals) {
  const [whole, rest] = Math.abs(value).toFixed(decimals).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ",") + (rest ? "." + rest : "");
  return (value < 0 && /[1-9]/.test(grouped) ? "-" : "") + grouped;
}
const size = value => value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value)));
function number(value) {
  return value === 0 || size(value) < -6 ? "0" : fixed(value, Math.max(0, 2 - size(value)));
}
function twoUnits(seconds, unit, name, part, partName) {
  const parts = Math.floor(seconds / part + 0.5), per = unit / part;
  return `${Math.floor(parts / per)} ${name}` + (parts % per ? ` ${parts % per} ${partName}` : "");
}
function duration(seconds) {
  if (seconds < 60) return number(seconds) + " s";
  if (seconds >= 86400 - 1800) return twoUnits(seconds, 86400, "d", 3600, "h");
  if (seconds >= 3600 - 30) return twoUnits(seconds, 3600, "h", 60, "min");
  return twoUnits(seconds, 60, "min", 1, "s");
}
function dollars(value) {
  if (Math.abs(value) > 0 && Math.abs(value) < 1) return "$" + number(value);
  return "$" + fixed(value, Math.abs(value) < 1000 ? 2 : 0);
}
const plus = (value, text) => (value > 0 ? "+" : "") + text;
const percent = value => fixed(value * 100, 1) + "%";
const FORMATS = {
  number, duration, dollars, percent, text: String,
  metric: value => fixed(value, Math.min(12, Math.max(0, 4 - size(value)))),
  count: value => fixed(value, 0),
  ratio: value => fixed(value, 2) + "×",
  signed_percent: value => plus(value, percent(value)),
  signed: value => plus(value, number(value)),
  milliseconds: value => number(value * 1000) + " ms",
};

// ---------------------------------------------------------------- elements

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}
function at(path) {
  return path.reduce((value, key) => value === null || value === undefined ? null : value[key], report);
}
/** What the JSON holds at a path, shown in a format; a dash for null. */
function shown(path, format = "text", tag = "span") {
  const value = at(path), element = document.createElement(tag);
  element.textContent = value === null || value === undefined ? NOTHING : FORMATS[format](value);
  element.dataset.path = JSON.stringify(path);
  element.dataset.format = format;
  return element;
}
function classed(className, element) {
  element.classList.add(className);
  return element;
}
function table(heading, columns, rows, kind = "") {
  const head = make("tr", "", ...columns.map(column => {
    const cell = make("th", column.text ? "text" : "");
    cell.append(...[column.name].flat());
    return cell;
  }));
  const body = rows.map(row => make("tr", "", ...columns.map(column => {
    const cell = make("td", (column.text ? "text" : "") + (column.words ? " words" : ""));
    cell.append(...[column.cell(row)].flat());
    return cell;
  })));
  const block = make("section", "block " + kind, make("h2", "", heading));
  block.append(make("div", "scroll", make("table", "", make("thead", "", head), make("tbody", "", ...body))));
  return block;
}
function tag(path) {
  const element = shown(path), value = at(path) || "";
  const first = value.split(/[ ,]/)[0];
  element.className = "tag " + ({good: "good", below: "warn", diminishing: "warn"}[first] ||
    (["finished", "failed", "running", "stopped", "queued"].includes(value) ? value : ""));
  return element;
}

// ---------------------------------------------------------------- one job

const plots = []; // functions that draw, called again when the colours change

function section(index) {
  const base = ["sections", index], job = at(base);
  const rows = job.rows.map((_, i) => [...base, "rows", i]);
  const several = job.devices.length > 1;
  const label = path => several
    ? [shown([...path, "layout"]), make("small", "", shown([...path, "device"]))]
    : [shown([...path, "layout"])];
  const what = make("p", "what", make("span", "", MODES[job.mode]));
  job.devices.forEach((_, i) => what.append(make("span", "", shown([...base, "devices", i]))));
  if (job.batch) what.append(make("span", "", "batch ", shown([...base, "batch"], "count")));
  if (job.samples) what.append(make("span", "", shown([...base, "samples"], "count"), " samples to train"));
  const element = make("article", "job", shown([...base, "job"], "text", "h1"), what);
  if (job.trains && job.trains !== job.job) element.append(classed("trains", shown([...base, "trains"], "text", "p")));
  if (job.headline) element.append(classed("headline", shown([...base, "headline"], "text", "p")));
  for (const key of Object.keys(job.differs)) {
    what.append(make("span", "", key + ": ", shown([...base, "differs", key])));
  }
  element.append(choices(base, job, several));
  // Before the numbers, not after them: what a reader must know to read them right.
  if (job.notes.length) element.append(notes("Notes", [...base, "notes"]));
  element.append(charts(index, job, several));
  if (rows.length) element.append(speedTable(rows, label), costTable(rows, label, job));
  const parted = rows.filter(path => at(path).parts);
  if (parted.length) element.append(partsTable(parted, label));
  const measured = rows.filter(path => at(path).metrics);
  if (measured.length) element.append(metricsTable(measured, label));
  element.append(runsTable(job.runs.map((_, i) => [...base, "runs", i])));
  return element;
}
function notes(heading, path) {
  const list = make("ul", "notes", ...at(path).map((_, i) => make("li", "", shown([...path, i]))));
  return make("section", "block", make("h2", "", heading), list);
}
function choices(base, job, several) {
  const goals = [["both", "Best of both"], ["time", "Fastest"], ["cost", "Cheapest"]];
  const cards = goals.filter(([key]) => job.recommended[key]).map(([key, name]) => {
    const path = [...base, "recommended", key];
    const layout = classed("layout", shown([...path, "layout"], "text", "div"));
    const why = classed("why", shown([...path, "why"], "text", "div"));
    const goal = make("div", "goal", name);
    if (several) goal.append(" · ", shown([...path, "device"]));
    return make("div", "choice " + key, goal, layout, why);
  });
  return make("div", "choices", ...cards);
}
function between(path, low, high, when) {
  return when
    ? [shown([...path, low], "number"), NOTHING, shown([...path, high], "number")] : [NOTHING];
}
function speedTable(rows, label) {
  // Where one rank is missing, say what a speedup is against.
  const relative = rows.find(path => at(path).layout === at(path).baseline && at(path).ranks > 1);
  const speedup = relative ? ["speedup vs ", shown([...relative, "baseline"])] : "speedup";
  return table("Speed", [
    {name: "layout", cell: label},
    {name: "ranks", cell: path => shown([...path, "ranks"], "count")},
    {name: speedup, cell: path => shown([...path, "speedup"], "ratio")},
    {name: "efficiency", cell: path => shown([...path, "efficiency"], "percent")},
    {name: "verdict", text: true, words: true, cell: path => [tag([...path, "verdict"]),
      make("small", "", shown([...path, "verdict_text"]))]},
    {name: "samples/s", cell: path => shown([...path, "samples_per_second", "median"], "number")},
    {name: "95% interval", cell: path => {
      const interval = [...path, "samples_per_second", "ci95"];
      return between(interval, 0, 1, at(interval));
    }},
    {name: "range", cell: path => {
      const pace = [...path, "samples_per_second"];
      return between(pace, "min", "max", at(pace) && at(pace).n > 1);
    }},
    {name: "runs", cell: path => shown([...path, "num_counted"], "count")},
  ], rows);
}
function costTable(rows, label, job) {
  const hours = job.unit === "GPU" ? "GPU-hours" : "rank-hours";
  return table("Time and cost", [
    {name: "layout", cell: label},
    {name: "time to finish", cell: path => [shown([...path, "seconds"], "duration")]},
    {name: "", text: true, cell: path => at(path).seconds_kind ? make("small", "", shown([...path, "seconds_kind"])) : ""},
    {name: hours, cell: path => shown([...path, "gpu_hours"], "number")},
    {name: hours + "/epoch", cell: path => shown([...path, "gpu_hours_per_epoch"], "number")},
    {name: "extra " + hours, cell: path => shown([...path, "extra_gpu_hours"], "signed")},
    {name: "extra", cell: path => shown([...path, "extra_share"], "signed_percent")},
    {name: "last doubling", cell: path => shown([...path, "doubling_share"], "signed_percent")},
    {name: "cost", cell: path => shown([...path, "usd"], "dollars")},
    {name: "per million samples", cell: path => shown([...path, "usd_per_million_samples"], "dollars")},
  ], rows);
}
function partsTable(rows, label) {
  return table("Where a step's time goes", [
    {name: "layout", cell: label},
    {name: "step", cell: path => shown([...path, "step_seconds"], "milliseconds")},
    ...PARTS.map(part => ({name: PART_NAMES[part],
      cell: path => shown([...path, "parts", part], "milliseconds")})),
    {name: "slowest rank", cell: path => shown([...path, "slowest_rank"], "count")},
  ], rows);
}
function metricsTable(rows, label) {
  const names = [...new Set(rows.flatMap(path => Object.keys(at(path).metrics)))];
  return table("Metrics", [
    {name: "layout", cell: label},
    ...names.map(name => ({name, cell: path => shown([...path, "metrics", name, "median"], "metric")})),
    {name: "", text: true, cell: path => make("small", "", shown([...path, "metrics_kind"]))},
  ], rows, "narrow");
}
function runsTable(rows) {
  return table("Runs", [
    {name: "run", cell: path => shown([...path, "run"])},
    {name: "layout", text: true, cell: path => shown([...path, "layout"])},
    {name: "state", text: true, cell: path => tag([...path, "state"])},
    {name: "steps", cell: path => shown([...path, "steps"], "count")},
    {name: "samples/s", cell: path => shown([...path, "samples_per_second"], "number")},
    {name: "training time", cell: path => shown([...path, "seconds"], "duration")},
  ], rows, "runs");
}

// ---------------------------------------------------------------- charts

const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
// Plotly reads a little HTML in names: none of theirs is meant as such.
const inert = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function chart(id, heading, caption, traces, layout, why) {
  const holder = make("section", "", make("h2", "", heading), make("p", "caption", caption));
  if (!traces().length) {
    holder.append(make("div", "empty", why));
    return holder;
  }
  const legend = traces().filter(trace => trace.name).map(trace => {
    const swatch = make("i", trace.line && trace.line.dash ? "swatch dash" : "swatch");
    plots.push(() => { swatch.style.color = colour(trace.meta); });
    return make("span", "", swatch, trace.label || trace.name);
  });
  const plot = make("div", "plot");
  plot.id = id;
  holder.append(make("div", "legend", ...legend), plot);
  plots.push(() => Plotly.react(plot, traces(), dressed(layout()),
    {displayModeBar: false, responsive: true}));
  return holder;
}
function dressed(layout) {
  const axis = {gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, ticks: "",
    automargin: true, fixedrange: true};
  for (const side of [layout.xaxis, layout.yaxis]) {
    if (side && side.title) side.title = {standoff: 10, font: {size: 12.5}, ...side.title};
  }
  return {
    ...layout,
    font: {family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 12.5, color: colour("quiet")},
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: {l: 8, r: 12, t: 8, b: 8, pad: 4},
    hoverlabel: {bgcolor: colour("card"), bordercolor: colour("line"), font: {color: colour("ink")}},
    showlegend: false,
    xaxis: {...axis, ...layout.xaxis}, yaxis: {...axis, ...layout.yaxis},
  };
}
function charts(index, job, several) {
  const key = name => `plot-${index}-${name}`;
  const name = one => inert(several ? `${one.layout} ${one.device}` : one.layout);
  const loss = job.curves.loss, use = job.curves.utilization;
  const onGpu = use.some(one => one.is_gpu);
  const bySamples = job.mode !== "strong" && loss.every(one => one.batch);
  return make("div", "charts",
    chart(key("scaling"), "Speedup", "measured, against the ideal line",
      () => scalingTraces(job, several), () => scalingLayout(job), "No speedup yet: it takes a measured layout."),
    chart(key("parts"), "Where a step's time goes", "shares of the step, and its mean length",
      () => partTraces(job, name), () => partLayout(job), "Where the time goes was not measured in these runs."),
    chart(key("utilization"), onGpu ? "GPU utilisation" : "CPU use",
      onGpu ? "mean over ranks, percent" : "CPUs kept busy by a rank, mean over ranks",
      () => lineTraces(use, name, several, one => one.x, 0), () => ({
        xaxis: {title: {text: "seconds since steps began"}, rangemode: "tozero"},
        yaxis: {rangemode: "tozero", ...(onGpu ? {range: [0, 104]} : {})}}),
      "Device use was not recorded in these runs."),
    chart(key("loss"), "Loss", "of each layout, on top of each other",
      () => lineTraces(loss, name, several, one => bySamples ? one.x.map(step => step * one.batch) : one.x),
      () => ({xaxis: {title: {text: bySamples ? "samples" : "step"}, rangemode: "tozero"}}),
      "These runs recorded no loss."));
}
function scalingTraces(job, several) {
  const traces = [];
  job.devices.forEach((device, i) => {
    const rows = job.rows.filter(row => row.device === device && row.speedup);
    if (!rows.length) return;
    // Layouts with the same number of ranks: the line goes through the fastest.
    const best = rows.filter(row => rows.every(other => other.ranks !== row.ranks || other.speedup <= row.speedup));
    const rest = rows.filter(row => !best.includes(row));
    if (!traces.length) traces.push(ideal(job.rows.filter(row => row.speedup).map(row => row.ranks), best[0].ranks));
    const label = several ? device : "measured";
    traces.push({...points(best, "c" + i % 10), name: inert(label), label, mode: "lines+markers+text",
      text: best.map(row => several ? "" : fixed(row.efficiency * 100, 0) + "%"),
      line: {color: colour("c" + i % 10), width: 2.5}, marker: {size: 8, color: colour("c" + i % 10)}});
    if (rest.length) traces.push({...points(rest, "c" + i % 10), name: "", mode: "markers+text",
      text: rest.map(row => inert(row.layout)),
      marker: {size: 8, color: colour("paper"), line: {color: colour("c" + i % 10), width: 2}}});
  });
  return traces;
}
function ideal(counts, first) {
  const ranks = [...new Set(counts)].sort((a, b) => a - b);
  return {x: ranks, y: ranks.map(n => n / first), name: "ideal", meta: "quiet", mode: "lines",
    line: {dash: "dot", color: colour("quiet"), width: 1.5}, hoverinfo: "skip"};
}
function points(rows, name) {
  return {
    x: rows.map(row => row.ranks), y: rows.map(row => row.speedup), meta: name,
    error_y: {type: "data", symmetric: false, thickness: 1.4, width: 5, color: colour(name),
      array: rows.map(row => row.speedup_ci95 ? row.speedup_ci95[1] - row.speedup : 0),
      arrayminus: rows.map(row => row.speedup_ci95 ? row.speedup - row.speedup_ci95[0] : 0)},
    customdata: rows.map(row => [inert(row.layout), row.efficiency]),
    textposition: "bottom right", textfont: {color: colour("ink")}, cliponaxis: false,
    hovertemplate: "%{customdata[0]}: %{y:.2f}× at %{customdata[1]:.1%} efficiency<extra></extra>"};
}
function scalingLayout(job) {
  const rows = job.rows.filter(row => row.speedup);
  const ranks = [...new Set(rows.map(row => row.ranks))].sort((a, b) => a - b);
  const most = ranks[ranks.length - 1], least = ranks[0];
  const speedups = rows.map(row => row.speedup), top = Math.max(most / least, ...speedups);
  const xaxis = {title: {text: "ranks"}, tickvals: ranks, ticktext: ranks.map(String)};
  if (most / least > 16) { // on a straight scale the small layouts would be one blot
    const powers = [...Array(24).keys()].map(n => 2 ** n);
    return {xaxis: {...xaxis, type: "log", range: [Math.log10(least / 1.2), Math.log10(most * 1.5)]},
      yaxis: {type: "log", tickvals: powers, ticktext: powers.map(String),
        range: [Math.log10(Math.min(...speedups) / 1.3), Math.log10(top * 1.3)]}};
  }
  const apart = Math.max((most - least) * 0.08, 0.3);
  return {xaxis: {...xaxis, range: [least - apart, most + apart * 1.6]}, yaxis: {range: [0, top * 1.1]}};
}
function partTraces(job, name) {
  const rows = job.rows.filter(row => row.parts);
  if (!rows.length) return [];
  return PARTS.map((part, i) => ({type: "bar", orientation: "h", name: PART_NAMES[part], meta: part,
    y: rows.map(name), x: rows.map(row => row.parts[part] / row.step_seconds * 100),
    marker: {color: colour(part)}, customdata: rows.map(row => FORMATS.milliseconds(row.parts[part])),
    text: rows.map(row => i === PARTS.length - 1 ? FORMATS.milliseconds(row.step_seconds) : ""),
    textposition: "outside", textfont: {color: colour("ink")}, cliponaxis: false,
    hovertemplate: `%{y}: %{customdata} ${PART_NAMES[part]}<extra></extra>`}));
}
function partLayout(job) {
  return {barmode: "stack", bargap: job.rows.length > 2 ? 0.4 : 0.65, xaxis: {title: {text: "percent of the step"}, range: [0, 122],
    tickvals: [0, 25, 50, 75, 100]}, yaxis: {autorange: "reversed", type: "category", gridcolor: "rgba(0,0,0,0)"}};
}
function lineTraces(curves, name, several, x, widest = 1.6) {
  // Losses go from wide and pale to thin: on top of each other, all of them stay visible.
  return curves.map((one, i) => ({x: x(one), y: one.y, name: name(one), label: several ? `${one.layout} ${one.device}` : one.layout, meta: "c" + i % 10, mode: "lines",
    line: {color: colour("c" + i % 10), width: 1.8 + Math.min(widest, 6 / curves.length) * (curves.length - 1 - i)},
    opacity: widest && i < curves.length - 1 ? 0.6 : 1,
    hovertemplate: "%{y:.5~g}<extra>" + name(one) + "</extra>"}));
}

// ---------------------------------------------------------------- the page

function footer() {
  const element = make("footer", "");
  report.prices.forEach((price, i) => {
    const path = ["prices", i];
    const line = make("p", "", "Price of ", shown([...path, "device"]), ": ",
      shown([...path, "usd_per_hour"], "dollars"), " an hour (", shown([...path, "source"]));
    if (price.date) line.append(", read ", shown([...path, "date"]));
    line.append(")");
    element.append(line);
  });
  element.append(make("p", "", "Targets: ", shown(["targets", "within_node"], "percent"),
    " efficiency within a node, ", shown(["targets", "across_nodes"], "percent"),
    " across nodes; diminishing returns where a doubling of ranks adds more than ",
    shown(["targets", "doubling"], "percent"), " hours."));
  element.append(make("p", "", "Best of both: ", shown(["targets", "both"]), "."));
  element.append(make("p", "", "Speedup and efficiency are by the samples/s of steady steps. Time to finish is ",
    "from the first step to the last, with evaluations and saves."));
  return element;
}
root.replaceChildren(make("p", "eyebrow", "Scaling report · ", shown(["date"])));
if (report.chosen) root.append(make("p", "what", shown(["chosen"])));
root.append(...report.sections.map((_, i) => section(i)));
if (report.notes.length) root.append(notes("About this report", ["notes"]));
root.append(footer());
const draw = () => plots.forEach(plot => plot());
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
