// A log as it grows, or its lines that contain a word.
import {byId, count, make, say} from "./words.js";

const LOOK_MS = 1000, TYPING_MS = 250, MAX_LINES = 1500;

export class Logs {
  constructor() {
    Object.assign(this, {run: null, file: "", place: null, found: 0, isBusy: false, isSeen: false, asking: new AbortController()});
    this.box = byId("log");
    byId("file").addEventListener("change", event => this.show(this.run, event.target.value));
    let typing = 0;
    byId("query").addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(() => this.show(this.run, this.file), TYPING_MS);
    });
    byId("follow").addEventListener("change", () => this.scroll());
    // Scrolling up stops following; going to the end starts it again.
    this.box.addEventListener("wheel", event => { if (event.deltaY < 0) byId("follow").checked = false; }, {passive: true});
    this.box.addEventListener("keydown", event => {
      if (["ArrowUp", "PageUp", "Home"].includes(event.key)) byId("follow").checked = false;
      if (event.key === "End") byId("follow").checked = true;
    });
    new IntersectionObserver(entries => { this.isSeen = entries[0].isIntersecting; }, {rootMargin: "200px"}).observe(this.box);
    setInterval(() => this.look(), LOOK_MS);
  }
  /** Lists the log files of the chosen run. The one that is shown stays if it is still there; otherwise `first` is. */
  offer(run, files, first) {
    const select = byId("file"), text = Object.keys(files).join("\n");
    if (select.dataset.files !== text || run !== this.run) {
      select.dataset.files = text;
      select.replaceChildren(...Object.entries(files).map(([file, title]) => new Option(title, file)));
      if (this.file in files) select.value = this.file;
    }
    const file = run === this.run && this.file in files ? this.file : first || "";
    if (run !== this.run || file !== this.file) this.show(run, file);
  }
  show(run, file) {
    this.asking.abort(); // the server stops searching for what nobody waits for
    Object.assign(this, {run, file, place: null, found: 0, isBusy: false, asking: new AbortController()});
    if (file) byId("file").value = file;
    this.look();
  }
  async look() {
    if (!this.run || !this.file) {
      if (this.box.children.length) this.box.replaceChildren();
      return void say(byId("log-now"), this.run ? "no log yet" : "");
    }
    if (this.isBusy || document.hidden || this.place && !this.isSeen) return;
    this.isBusy = true;
    const asking = this.asking, query = byId("query").value;
    if (query && !this.place) say(byId("log-now"), "searching …");
    try {
      const words = new URLSearchParams({run: this.run, file: this.file, query});
      if (this.place) { words.set("after", this.place.offset); words.set("line", this.place.line); }
      const answer = await fetch("api/log?" + words, {signal: asking.signal});
      const read = answer.ok ? await answer.json() : null;
      if (read && asking === this.asking) this.take(read, query);
    } catch { /* given up, or the top of the page already says that the server is gone */ }
    if (asking === this.asking) this.isBusy = false;
  }
  take(read, query) {
    if (!this.place || read.offset < this.place.offset) { this.box.replaceChildren(); this.found = 0; }
    this.place = {offset: read.offset, line: read.line};
    this.found += read.found;
    if (this.rest) this.rest.remove();
    this.rest = null;
    const lines = read.lines.map(([number, text]) => row(number, text, query));
    if (read.rest) lines.push(this.rest = row(read.line + 1, read.rest, query));
    this.box.append(...lines);
    while (this.box.children.length > MAX_LINES) this.box.firstElementChild.remove();
    const shown = this.box.children.length;
    say(byId("log-now"), query ? `${count(this.found)} found` + (this.found > shown ? `, the last ${shown} shown` : "") :
      shown ? `${count(shown > read.line ? shown : read.line)} ${read.line === 1 ? "line" : "lines"}` : "empty");
    if (lines.length) this.scroll();
  }
  scroll() {
    if (byId("follow").checked) this.box.scrollTop = this.box.scrollHeight;
  }
}
function row(number, text, query) {
  const element = make("div", ""), words = make("span", "");
  element.dataset.line = number;
  const low = text.toLowerCase(), wanted = query.toLowerCase();
  let from = 0;
  for (let at = wanted ? low.indexOf(wanted) : -1; at >= 0; at = low.indexOf(wanted, from)) {
    words.append(text.slice(from, at), make("mark", "", text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  words.append(text.slice(from));
  element.append(words);
  return element;
}
