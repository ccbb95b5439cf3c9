// Schedules drawing: each part of the page in its own frame, once, and then only while it is visible.
import {byId} from "./words.js";

const NEVER = -1e9;
const parts = new Map(); // id of an element -> {isSeen, isDue, draw, drawn}
const queue = [];
let isWaiting = false;

const watcher = new IntersectionObserver(entries => entries.forEach(entry => {
  const part = parts.get(entry.target.id);
  part.isSeen = entry.isIntersecting;
  if (part.isSeen && part.isDue) enqueue(entry.target.id);
}), {rootMargin: "100px"});

function partOf(id) {
  if (!parts.has(id)) {
    parts.set(id, {isSeen: false, isDue: false, draw: null, drawn: NEVER});
    watcher.observe(byId(id));
  }
  return parts.get(id);
}
const isWanted = part => part.isDue && (part.isSeen || part.drawn === NEVER);

function enqueue(id) {
  if (!queue.includes(id)) queue.push(id);
  if (!isWaiting) { isWaiting = true; requestAnimationFrame(drawOne); }
}
function drawOne() {
  const part = parts.get(queue.shift());
  isWaiting = queue.length > 0;
  if (isWaiting) requestAnimationFrame(drawOne); // first: if a part cannot be drawn, the others still are
  if (!isWanted(part)) return;
  part.isDue = false;
  part.drawn = performance.now();
  part.draw();
}
/** Draws a part soon, but not twice within `gap` ms; the last request wins. `isUrgent`: now, visible or not. */
export function plan(id, draw, {gap = 1000, isUrgent = false} = {}) {
  const part = partOf(id);
  part.draw = draw;
  if (isUrgent) part.drawn = NEVER;
  else if (part.isDue) return;
  part.isDue = true;
  const wait = part.drawn + gap - performance.now();
  if (wait > 0) setTimeout(() => isWanted(part) && enqueue(id), wait);
  else if (isWanted(part)) enqueue(id);
}
