// The state that the server sends: everything when the page connects, then only changes.

const SILENCE_MS = 12000; // the server sends something every few seconds: after this long, the connection is dead
const RETRY_MS = 1000;

/** Applies one change: {"=": value}, {"+": [from, items]} for lists, {"~": changes, "-": removed keys}. */
export function changed(old, change) {
  if ("=" in change) return change["="];
  if ("+" in change) {
    const [from, items] = change["+"];
    old.length = from;
    for (const item of items) old.push(item);
    return old;
  }
  for (const key of change["-"] || []) delete old[key];
  for (const [key, inner] of Object.entries(change["~"])) old[key] = changed(old[key], inner);
  return old;
}

/** Keeps one connection to the server open while the page is visible. */
export class Line {
  constructor(query, onNews, onLink) {
    Object.assign(this, {query, onNews, onLink, state: null, source: null, heard: 0, skew: 0, retry: 0});
    document.addEventListener("visibilitychange", () => document.hidden ? this.close() : this.open());
    addEventListener("pagehide", () => this.close());
    addEventListener("pageshow", event => event.persisted && this.open());
    // After a laptop has slept, its connection neither works nor ends.
    setInterval(() => {
      if (this.source && Date.now() - this.heard > SILENCE_MS) this.open();
    }, 2000);
    this.open();
  }
  close() {
    clearTimeout(this.retry);
    if (this.source) this.source.close();
    this.source = null;
  }
  open() {
    this.close();
    this.heard = Date.now();
    const source = this.source = new EventSource("events?" + this.query());
    const take = (event, use) => {
      if (source !== this.source) return;
      this.heard = Date.now();
      const news = JSON.parse(event.data);
      this.skew = news.time - this.heard / 1000;
      use(news);
      this.onLink("live");
    };
    source.addEventListener("all", event => take(event, news => {
      this.state = news.state;
      this.onNews(this.state, true);
    }));
    source.addEventListener("change", event => take(event, news => {
      this.state = changed(this.state, news.change);
      this.onNews(this.state, false);
    }));
    source.addEventListener("beat", event => take(event, () => {}));
    source.addEventListener("error", () => {
      if (source !== this.source) return;
      const isRefused = source.readyState === EventSource.CLOSED;
      this.onLink(isRefused ? "lost" : "waiting");
      if (!isRefused) return;
      this.retry = setTimeout(() => this.open(), 4 * RETRY_MS);
      this.askWhy(source);
    });
  }
  /** An EventSource does not learn why it was refused, so ask. */
  async askWhy(source) {
    const asking = new AbortController();
    try {
      const {status} = await fetch("events?" + this.query(), {signal: asking.signal});
      if (status === 503 && source === this.source) this.onLink("full");
    } catch { /* there is no server */ }
    asking.abort();
  }
  /** The server's clock. */
  now() { return Date.now() / 1000 + this.skew; }
}
