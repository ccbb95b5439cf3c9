// The chosen run in text: progress, speed, findings, and a table of its ranks. Every word and number is made by the server.
import {NOTHING, age, byId, dress, make, say} from "./words.js";

export function drawHead(run, state) {
  const head = state.head, stop = byId("stop"), progress = byId("progress");
  say(byId("name"), run.run);
  say(byId("state"), run.state);
  dress(byId("state"), "tag " + run.state);
  if (stop) stop.hidden = !run.is_active;
  const kind = head.is_alarming ? "bad" : "warn", what = byId("what"), text = [...head.facts, ...head.warnings].join("\n");
  if (what.dataset.text !== text) {
    what.dataset.text = text;
    what.replaceChildren(...head.facts.map(fact => make("span", "", fact)), ...head.warnings.map(warning => make("span", kind, warning)));
  }
  dress(progress, "progress " + run.state);
  progress.hidden = !head.has_progress;
  progress.firstElementChild.style.width = run.share * 100 + "%";
  progress.setAttribute("aria-valuenow", String(Math.round(run.share * 100)));
  drawVerdict(head.verdict);
  drawTiles(head.tiles);
  drawParts(state.parts);
}
/** What limits the run, what to type next, what has changed since the last run, and warnings. */
function drawVerdict(lines) {
  const list = byId("verdict"), text = JSON.stringify(lines);
  list.hidden = !lines.length;
  if (list.dataset.text === text) return;
  list.dataset.text = text;
  list.replaceChildren(...lines.flatMap(([label, words, aside]) => {
    const shown = make("dd", label === "warning" ? "warn" : "", words, make("small", "", aside));
    return [make("dt", "", label), shown];
  }));
}
/** Where the time of the last steps went, and which rank the others wait for. */
function drawParts(parts) {
  const box = byId("parts"), [bar, words] = box.children;
  box.hidden = !parts;
  if (!parts) return;
  const shares = Object.entries(parts.shares);
  if (!bar.children.length) {
    for (const [part] of shares) {
      bar.append(make("i", part));
      words.append(make("span", "", make("i", "swatch " + part), make("span", "")));
    }
    words.append(make("span", "who"));
  }
  shares.forEach(([, [share, text]], i) => {
    bar.children[i].style.width = share * 100 + "%";
    say(words.children[i].lastElementChild, text);
    words.children[i].hidden = share < 0.0005;
  });
  say(words.lastElementChild, parts.slowest);
}
function drawTiles(tiles) {
  const list = byId("tiles");
  while (list.children.length > tiles.length) list.lastElementChild.remove();
  tiles.forEach(([name, value, more, why], i) => {
    if (!list.children[i]) list.append(make("div", "", make("dt", ""), make("dd", "", make("span", ""), make("small", ""))));
    const [title, shown] = list.children[i].children;
    list.children[i].title = why;
    say(title, name);
    say(shown.firstElementChild, value);
    say(shown.lastElementChild, more);
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
  const who = [found.rank !== null && found.rank !== undefined && `rank ${found.rank}`, found.place, found.node && `on ${found.node}`,
    found.confidence && `${found.confidence} confidence`, found.cause].filter(Boolean).join(" · ");
  const box = make("div", "finding " + (found.confidence || ""), make("b", "", found.title || found.cause || ""), make("p", "now", who));
  for (const one of (found.evidence || []).slice(0, 4)) {
    const file = one.file && one.file.replace(/^.*\/(?=attempts\/\d+\/)/, ""); // relative to the run's folder
    const place = [file, one.line].filter(Boolean).join(":");
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

const QUIET_SECONDS = 30; // a rank usually writes something every two
const order = {column: "rank", isDown: false};
let columns = [], rows = [], shown = [];

/** The cells of a rank after its number: [value to sort by, text, verdict]. What the clock changes is made here. */
function cell(rank, column, now) {
  if (column !== "last heard") return rank.cells[column];
  const passed = now - rank.heard, isQuiet = !rank.state && rank.heard !== null && passed > QUIET_SECONDS;
  return [rank.heard, rank.state || (rank.heard === null ? NOTHING : age(passed)), rank.state === "failed" ? "bad" : isQuiet ? "warn" : ""];
}
const kindOf = column => column === "node" ? "text" : "";

function heading(title) {
  const button = make("button", "", title), head = make("th", kindOf(title), button);
  button.type = "button";
  head.scope = "col";
  button.addEventListener("click", () => {
    order.isDown = order.column === title ? !order.isDown : !["rank", "node"].includes(title);
    order.column = title;
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order.isDown ? "descending" : "ascending");
    drawRanks(...shown);
  });
  return head;
}
function sorted(ranks, now) {
  const names = Object.keys(ranks).sort((a, b) => a - b), sign = order.isDown ? -1 : 1;
  if (!columns.includes(order.column)) return order.isDown ? names.reverse() : names;
  const value = name => cell(ranks[name], order.column, now)[0];
  return names.sort((a, b) => value(a) === value(b) ? a - b : value(a) === null ? 1 : value(b) === null ? -1 : value(a) < value(b) ? -sign : sign);
}
export function drawRanks(state, now) {
  shown = [state, now];
  const wanted = state.columns.length ? [...state.columns, "last heard"] : [], names = Object.keys(state.ranks);
  byId("ranks-head").parentElement.hidden = !names.length;
  if (rows.length !== names.length || wanted.join() !== columns.join()) {
    columns = wanted;
    rows = names.map(() => make("tr", "", make("td", ""), ...columns.map(() => make("td", ""))));
    byId("ranks").replaceChildren(make("thead", "", make("tr", "", ...["rank", ...columns].map(heading))), make("tbody", "", ...rows));
  }
  sorted(state.ranks, now).forEach((name, i) => {
    const rank = state.ranks[name], cells = rows[i].children;
    dress(rows[i], rank.slowest ? "slowest" : "");
    say(cells[0], name);
    columns.forEach((column, c) => {
      const [, text, verdict] = cell(rank, column, now);
      say(cells[c + 1], text);
      dress(cells[c + 1], [kindOf(column), verdict].filter(Boolean).join(" "));
    });
  });
}
