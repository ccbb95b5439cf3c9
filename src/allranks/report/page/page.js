// Draws the report from the JSON in this page, which has every word and number as it is shown. Text
// only ever goes in as text: names of jobs, runs and metrics are other people's words.
"use strict";
(() => {
const report = JSON.parse(document.getElementById("data").textContent);
const root = document.getElementById("report");

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}
const STATES = ["finished", "failed", "running", "stopped", "queued"];
function tag(text) {
  const kind = {good: "good", below: "warn", diminishing: "warn"}[text.split(/[ ,]/)[0]];
  return make("span", "tag " + (kind || (STATES.includes(text) ? text : "")), text);
}
/** One cell: a word that is judged or a state is a tag, what explains it is small. */
function cell(text, column, isText) {
  const [word, ...more] = [text].flat();
  const shown = ["verdict", "state"].includes(column) ? tag(word) : isText && !column ? make("small", "", word) : word;
  return make("td", (isText ? "text" : "") + (more.length ? " words" : ""), shown, ...more.map(one => make("small", "", one)));
}
function table({title, columns, texts, rows}) {
  const head = make("tr", "", ...columns.map((name, i) => make("th", texts[i] && i ? "text" : "", name)));
  const body = rows.map(row => make("tr", "", ...row.map((text, i) => cell(text, columns[i], texts[i] && i))));
  const block = make("section", "block " + ({Metrics: "narrow", Runs: "runs"}[title] || ""), make("h2", "", title));
  block.append(make("div", "scroll", make("table", "", make("thead", "", head), make("tbody", "", ...body))));
  return block;
}
function notes(heading, list) {
  return make("section", "block", make("h2", "", heading), make("ul", "notes", ...list.map(note => make("li", "", note))));
}

// ---------------------------------------------------------------- one job

const plots = []; // functions that draw, called again when the colours change

function section(job, index) {
  const element = make("article", "job", make("h1", "", job.job),
    make("p", "what", ...job.subtitle.map(word => make("span", "", word))));
  if (job.trains && job.trains !== job.job) element.append(make("p", "trains", job.trains));
  if (job.headline) element.append(make("p", "headline", job.headline));
  if (job.next.length) element.append(make("dl", "next", ...job.next.flatMap(([label, words, aside]) =>
    [make("dt", "", label), make("dd", "", words, make("small", "", aside))])));
  element.append(make("div", "choices", ...job.choices.map(([goal, layout, why]) => make("div", goal === "best of both" ? "choice both" : "choice",
    make("div", "goal", goal), make("div", "layout", ...layout.split(/(?<=,)/).flatMap(part => [part, make("wbr")])), make("div", "why", why)))));
  // Before the numbers, not after them: what a reader must know to read them right.
  if (job.notes.length) element.append(notes("Notes", job.notes));
  element.append(charts(index, job, job.devices.length > 1), ...job.tables.map(table));
  return element;
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
      () => scalingTraces(job, several), () => scalingLayout(job), "No speedup: no measured layout has numbers beyond doubt."),
    chart(key("parts"), "Where a step's time goes", "shares of the step, and its mean length",
      () => partTraces(job, name), () => partLayout(job), "Where the time goes was not measured in these runs."),
    chart(key("utilization"), onGpu ? "GPU utilisation" : "CPU use",
      onGpu ? "mean over ranks, percent" : "CPUs kept busy by a rank, mean over ranks",
      () => lineTraces(use, name, several, one => one.x, 0), () => ({
        xaxis: {title: {text: "seconds since steps began"}, rangemode: "tozero"},
        yaxis: {rangemode: "tozero", ...(onGpu ? {range: [0, 104]} : {})}}),
      "Device use was not recorded in these runs."),
    chart(key("loss"), "Loss", "one curve for each layout",
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
    const label = several ? device : rest.length ? `the fastest: ${best.map(row => row.layout).join(", ")}` : "measured";
    traces.push({...points(best, "c" + i % 10), name: inert(label), label, mode: "lines+markers+text",
      text: best.map(row => several ? "" : row.efficiency_words),
      line: {color: colour("c" + i % 10), width: 2.5}, marker: {size: 8, color: colour("c" + i % 10)}});
    rest.forEach((row, k) => {
      const name = "c" + (job.devices.length + k) % 10;
      traces.push({...points([row], name), name: inert(row.layout), label: several ? `${row.layout} ${device}` : row.layout,
        mode: "markers", marker: {size: 9, symbol: "diamond", color: colour(name)}});
    });
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
    customdata: rows.map(row => inert(row.point)),
    textposition: "bottom right", textfont: {color: colour("ink")}, cliponaxis: false,
    hovertemplate: "%{customdata}<extra></extra>"};
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
  const parts = Object.entries(job.parts);
  return parts.map(([part, words], i) => ({type: "bar", orientation: "h", name: words, meta: part,
    y: rows.map(name), x: rows.map(row => row.divided[part] / row.step_seconds * 100),
    marker: {color: colour(part)}, customdata: rows.map(row => row.part_words[part]),
    text: rows.map(row => i === parts.length - 1 ? row.step_words : ""),
    textposition: "outside", textfont: {color: colour("ink")}, cliponaxis: false,
    hovertemplate: `%{y}: %{customdata} ${words}<extra></extra>`}));
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

root.replaceChildren(make("p", "eyebrow", "Scaling report · ", report.date));
if (report.chosen) root.append(make("p", "what", report.chosen));
root.append(...report.sections.map(section));
if (report.notes.length) root.append(notes("About this report", report.notes));
root.append(make("footer", "", ...report.footer.map(line => make("p", "", line))));
const draw = () => plots.forEach(plot => plot());
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
