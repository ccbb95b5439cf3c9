// The chosen run in text: progress, speed, findings, and a table of its ranks.
import {NOTHING, age, byId, count, dress, duration, fixed, gibibytes, make, number, percent, say} from "./words.js";
import {share} from "./runs.js";

const PARTS = {compute: "compute", comm: "communication", straggler: "waiting for slower ranks", data: "data", other: "other"};

export function drawHead(run, state) {
  say(byId("name"), run.run);
  say(byId("state"), run.stalled ? "stalled" : run.state);
  dress(byId("state"), "tag " + (run.stalled ? "failed" : run.state));
  const stop = byId("stop");
  if (stop) stop.hidden = !["running", "queued"].includes(run.state);
  const words = [run.layout && `layout ${run.layout}`, run.device, run.nodes.length && run.nodes.join(", "),
    run.attempts > 1 && `attempt ${run.attempt}`, run.checkpoint !== null && `checkpoint at step ${count(run.checkpoint)}`,
    run.expected_start && `expected to start ${run.expected_start.replace("T", " ")}`]
    .filter(Boolean).map(text => make("span", "", text));
  if (run.reason) words.push(make("span", run.state === "failed" || run.stalled ? "bad" : "warn", run.reason));
  if (state.silence) words.push(make("span", "warn", `SLURM does not answer: ${state.silence}`));
  const what = byId("what"), text = words.map(one => one.textContent).join("\n");
  if (what.dataset.text !== text) { what.dataset.text = text; what.replaceChildren(...words); }
  const part = share(run), progress = byId("progress");
  dress(progress, "progress " + run.state);
  progress.hidden = !run.steps && run.state !== "finished"; // the number of steps of a user's script is not known
  progress.firstElementChild.style.width = part * 100 + "%";
  progress.setAttribute("aria-valuenow", String(Math.round(part * 100)));
  drawTiles(run);
  drawParts(state.parts);
}
/** Where the time of the last steps went, and which rank the others wait for. */
function drawParts(parts) {
  const box = byId("parts");
  box.hidden = !parts;
  if (!parts) return;
  const [bar, words] = box.children, keys = Object.keys(PARTS);
  const total = keys.reduce((sum, key) => sum + parts.seconds[key], 0) || 1;
  if (!bar.children.length) for (const key of keys) {
    bar.append(make("i", key));
    words.append(make("span", "", make("i", "swatch " + key), make("span", "")));
  }
  if (words.children.length === keys.length) words.append(make("span", "who"));
  keys.forEach((key, i) => {
    const part = parts.seconds[key] / total;
    bar.children[i].style.width = part * 100 + "%";
    say(words.children[i].lastElementChild, `${PARTS[key]} ${percent(part)}`);
    words.children[i].hidden = part < 0.0005;
  });
  say(words.lastElementChild, parts.slowest_rank === null ? "" : `rank ${parts.slowest_rank} is last in ${fixed(parts.slowest_share * 100, 0)}% of steps` +
    (parts.slowest_part ? `, slower in ${parts.slowest_part}` : ""));
}
function drawTiles(run) {
  const hours = run.device !== null && run.device !== "CPU" ? "GPU-hours" : "rank-hours";
  const tiles = [
    ["step", count(run.step), run.steps ? `of ${count(run.steps)}` : ""],
    ["epoch", count(run.epoch), run.epochs ? `of ${count(run.epochs)}` : ""],
    ["loss", number(run.loss, 4), ""],
    ["samples/s", number(run.samples_per_second), ""],
    ["efficiency", percent(run.base ? run.efficiency : null), "", run.base && `compared with ${run.base}`],
    ["step time", duration(run.step_seconds), ""],
    [run.state === "running" ? "time left" : "time", run.state === "running" ? duration(run.seconds_left)
      : duration(run.last_step !== null && run.started !== null ? run.last_step - run.started : null), ""],
    [hours, run.rank_hours < 1 ? fixed(run.rank_hours, 3) : number(run.rank_hours), ""],
    ...Object.entries(run.metrics).slice(0, 4).map(([name, value]) => [name.replaceAll("_", " "), number(value, 4), ""]),
  ];
  const list = byId("tiles");
  while (list.children.length > tiles.length) list.lastElementChild.remove();
  tiles.forEach(([name, value, more, why], i) => {
    if (!list.children[i]) list.append(make("div", "", make("dt", ""), make("dd", "", make("span", ""), make("small", ""))));
    const tile = list.children[i];
    tile.hidden = value === NOTHING && !["step", "loss", "samples/s"].includes(name);
    tile.title = why || "";
    say(tile.firstElementChild, name);
    say(tile.lastElementChild.firstElementChild, value);
    say(tile.lastElementChild.lastElementChild, more);
  });
}

// ---------------------------------------------------------------- findings of the doctor

export function drawFindings(state) {
  const known = state.findings, section = byId("findings");
  const list = known && known.list || [];
  section.hidden = !list.length && !(known && known.problem);
  const text = JSON.stringify(known);
  if (section.dataset.text === text) return;
  section.dataset.text = text;
  const problem = known && known.problem ? [make("p", "now", `The doctor could not examine this run: ${known.problem}`)] : [];
  byId("found").replaceChildren(...list.map(finding), ...problem);
}
function finding(found) {
  const who = [found.rank !== null && found.rank !== undefined && `rank ${found.rank}`, found.node && `on ${found.node}`,
    found.confidence && `${found.confidence} confidence`, found.cause].filter(Boolean).join(" · ");
  const box = make("div", "finding " + (found.confidence || ""), make("b", "", found.title || found.cause || ""), make("p", "now", who));
  for (const one of (found.evidence || []).slice(0, 4)) {
    const file = one.file && one.file.replace(/^.*\/(?=attempts\/\d+\/)/, ""); // relative to the run's folder
    const place = [file, one.line].filter(part => part !== null && part !== undefined).join(":");
    box.append(make("pre", "", make("span", "place", place + "  "), one.text || ""));
  }
  if (found.fix) {
    const copy = make("button", "", "copy");
    copy.type = "button";
    copy.addEventListener("click", async () => {
      try { await navigator.clipboard.writeText(found.fix); say(copy, "copied"); } catch { say(copy, "select it"); }
      setTimeout(() => say(copy, "copy"), 1500);
    });
    box.append(make("p", "", ""), make("div", "fix", make("pre", "", found.fix), copy));
  }
  return box;
}

// ---------------------------------------------------------------- ranks

const full = (part, whole) => part !== null && whole ? part / whole : null;
const COLUMNS = [
  ["node", "text", rank => rank.node || NOTHING],
  ["GPU", "", rank => rank.utilization === null ? NOTHING : fixed(rank.utilization, 0) + "%", rank => rank.marks.gpu_util],
  ["memory, GiB", "", rank => rank.memory === null ? NOTHING : `${gibibytes(rank.memory)} of ${gibibytes(rank.memory_total)}`,
    rank => rank.marks.memory],
  ["power, W", "", rank => rank.power === null ? NOTHING : count(rank.power) + (rank.power_limit ? ` of ${count(rank.power_limit)}` : ""),
    rank => rank.marks.power],
  ["°C", "", rank => count(rank.temperature), rank => rank.temperature !== null && rank.temperature >= 85 ? "warn" : ""],
  ["CPUs", "", rank => number(rank.cpu, 2)],
  ["workers", "", rank => rank.num_workers ? `${number(rank.workers_cpu, 2)} of ${rank.num_workers}` : NOTHING, rank => rank.marks.workers],
  ["network, MB/s", "", rank => rank.sent === null && rank.received === null ? NOTHING
    : number(Math.round(Math.max(rank.sent || 0, rank.received || 0) / 1e4) / 100), rank => rank.marks.network],
  ["host memory, GiB", "", rank => gibibytes(rank.host_memory)],
  ["step", "", rank => count(rank.step)],
  ["step time", "", rank => duration(rank.step_seconds)],
  ["data", "", rank => duration(rank.data), rank => (full(rank.data, rank.step_seconds) || 0) > 0.1 ? "warn" : ""],
  ["waiting", "", rank => duration(rank.wait)],
  ["last heard", "", (rank, now) => rank.state || (rank.heartbeat === null ? NOTHING : age(now - rank.heartbeat)),
    (rank, now) => rank.state === "failed" ? "bad" : !rank.state && rank.heartbeat !== null && now - rank.heartbeat > 30 ? "warn" : ""],
];
const order = {column: "", isDown: false}; // "": by rank
let columns = [], rows = [];

/** The field that each column is sorted by. */
const KEYS = {"rank": null, "node": "node", "GPU": "utilization", "memory, GiB": "memory", "power, W": "power", "°C": "temperature",
  "CPUs": "cpu", "workers": "workers_cpu", "network, MB/s": "sent", "host memory, GiB": "host_memory", "step": "step", "step time": "step_seconds", "data": "data", "waiting": "wait",
  "last heard": "heartbeat"};
function heading(title, kind) {
  const button = make("button", "", title), cell = make("th", kind, button);
  button.type = "button";
  cell.scope = "col";
  button.addEventListener("click", () => {
    order.isDown = order.column === title ? !order.isDown : Boolean(KEYS[title]) && title !== "node";
    order.column = title;
    for (const other of cell.parentElement.children) other.removeAttribute("aria-sort");
    cell.setAttribute("aria-sort", order.isDown ? "descending" : "ascending");
    drawRanks(...shown);
  });
  return cell;
}
let shown = [];
function sorted(ranks) {
  const names = Object.keys(ranks).sort((a, b) => a - b), key = KEYS[order.column], sign = order.isDown ? -1 : 1;
  if (!key) return order.isDown ? names.reverse() : names;
  const value = name => ranks[name][key];
  return names.sort((a, b) => value(a) === value(b) ? a - b : value(a) === null ? 1 : value(b) === null ? -1 : value(a) < value(b) ? -sign : sign);
}

/** Rebuilds the table if its shape has changed; columns without any value are left out. */
function drawTable(ranks, now) {
  const names = sorted(ranks);
  const wanted = COLUMNS.filter(([, , text]) => names.some(name => text(ranks[name], now) !== NOTHING));
  if (wanted.length === columns.length && rows.length === names.length && wanted.every((one, i) => one === columns[i])) return names;
  columns = wanted;
  const head = make("tr", "", heading("rank", ""), ...columns.map(([title, kind]) => heading(title, kind)));
  rows = names.map(() => make("tr", "", ...[["", ""], ...columns].map(([, kind]) => make("td", kind))));
  byId("ranks").replaceChildren(make("thead", "", head), make("tbody", "", ...rows));
  return names;
}
export function drawRanks(state, now) {
  shown = [state, now];
  const names = drawTable(state.ranks, now);
  names.forEach((name, i) => {
    const rank = state.ranks[name], row = rows[i];
    dress(row, rank.slowest ? "slowest" : "");
    say(row.children[0], name);
    columns.forEach(([, kind, text, mark], c) => {
      const cell = row.children[c + 1];
      say(cell, text(rank, now));
      dress(cell, [kind, mark ? mark(rank, now) : ""].filter(Boolean).join(" "));
    });
  });
}
