// Decisions along a time line, in a list, and one in detail: the numbers behind it and its outcome.

import { $, attribute, children, h, text, variable } from "./dom.js";
import { glyphOf } from "./decisions.js";
import { age, clock, named, seconds, words } from "./format.js";
import { sideBySide, weighedTable } from "./weighed.js";

const SHOWN = 60; // rows of the list
const STEPS_S = [30, 60, 180, 300]; // between times on the lane

const view = {
  decisions: [], // the oldest first
  onLane: [], // those in the time that is shown
  from: 0,
  to: 1,
  chosen: null, // ids
  pointed: null,
  isFollowing: true, // the latest is chosen until another one is
  marks: new Map(),
  rows: new Map(),
  onPoint: () => {},
};

/** `onPoint(decision or null)`: it is pointed at, by mouse or keyboard. */
export function startWhy(onPoint) {
  view.onPoint = onPoint;
  $("lane").addEventListener("keydown", (event) => step(event, view.onLane, view.marks));
  $("decisions").addEventListener("keydown", (event) => step(event, [...view.decisions].reverse(), view.rows));
  document.addEventListener("keydown", ({ key }) => key === "Escape" && pointAt(null));
}

export function drawWhy(decisions, from, to) {
  view.decisions = decisions;
  if (!decisions.some(({ id }) => id === view.chosen)) view.isFollowing = true; // it is too old
  if (view.isFollowing) view.chosen = decisions.at(-1)?.id ?? null;
  if (!decisions.some(({ id }) => id === view.pointed)) view.pointed = null;
  view.onLane = decisions.filter(({ at }) => at >= from);
  children($("lane"), view.onLane.map((decision) => drawMark(decision, from, to)));
  children($("decisions"), decisions.slice(-SHOWN).reverse().map((decision) => drawRow(decision, to)));
  for (const shown of [view.marks, view.rows]) {
    for (const id of shown.keys()) if (!decisions.some((decision) => decision.id === id)) shown.delete(id);
  }
  Object.assign(view, { from, to });
  drawTimes(from, to);
  drawSaw();
}

/** Marks the decision that is pointed at, here or in a chart; null: none. */
export function pointAt(id) {
  if (view.pointed === id) return;
  view.pointed = id;
  const decision = view.decisions.find((one) => one.id === id) ?? null;
  mark();
  drawSaw();
  drawPeek(decision);
  view.onPoint(decision);
}

function choose(id) {
  view.chosen = id;
  view.isFollowing = id === view.decisions.at(-1)?.id;
  pointAt(id);
  mark(); // it may be pointed at already
}

function step(event, list, shown) {
  const now = list.findIndex(({ id }) => shown.get(id)?.element === document.activeElement);
  const last = Math.min(list.length, shown.size) - 1;
  const next = { ArrowRight: now + 1, ArrowDown: now + 1, ArrowLeft: now - 1, ArrowUp: now - 1, Home: 0, End: last }[event.key];
  if (next === undefined || !list.length) return;
  event.preventDefault();
  shown.get(list[Math.max(0, Math.min(last, next))]?.id)?.element.focus();
}

// ---------------------------------------------------------------------------- the lane

function drawMark(decision, from, to) {
  const mark = entry(view.marks, decision.id, () => {
    const element = h("button.mark", { type: "button", role: "option" }, h("i"));
    wire(element, decision.id);
    return { element };
  });
  const glyph = glyphOf(decision);
  attribute(mark.element, "data-glyph", glyph);
  attribute(mark.element, "data-tone", decision.tone);
  attribute(mark.element, "aria-label", `${clock(decision.at)} ${titleOf(decision)}`);
  mark.element.style.left = `${(100 * (decision.at - from)) / (to - from)}%`;
  tabStop(mark.element, decision.id);
  return mark.element;
}

function drawTimes(from, to) {
  const minutes = [];
  const every = STEPS_S.find((one) => (to - from) / one <= 6) ?? STEPS_S.at(-1);
  for (let at = Math.ceil(from / every) * every; at < to; at += every) minutes.push(at);
  const times = $("lane-times");
  const wanted = minutes.map((at) => at).join();
  if (times.dataset.wanted !== wanted) {
    times.dataset.wanted = wanted;
    times.replaceChildren(...minutes.map((at) => h("span", {}, clock(at).slice(0, every < 60 ? 8 : 5))));
  }
  minutes.forEach((at, index) => { times.children[index].style.left = `${(100 * (at - from)) / (to - from)}%`; });
}

// ---------------------------------------------------------------------------- the list

function drawRow(decision, to) {
  const row = entry(view.rows, decision.id, () => {
    const parts = {
      when: h("span.when"), glyph: h("i.glyph"), title: h("b"), chip: h("span.chip"), reason: h("span.reason"),
    };
    const button = h("button.row-button", { type: "button" }, parts.when, parts.glyph, parts.title, parts.chip, parts.reason);
    wire(button, decision.id);
    return { element: button, item: h("li", {}, button), ...parts };
  });
  text(row.when, age(Math.max(0, to - decision.at)));
  attribute(row.when, "title", clock(decision.at));
  attribute(row.glyph, "data-glyph", glyphOf(decision));
  attribute(row.glyph, "data-tone", decision.tone);
  text(row.title, titleOf(decision));
  row.chip.hidden = !decision.outcome;
  if (decision.outcome) chip(row.chip, decision.outcome.state);
  text(row.reason, decision.reason);
  tabStop(row.element, decision.id);
  return row.item;
}

export function chip(element, state) {
  text(element, state);
  attribute(element, "data-state", state);
}

const titleOf = ({ kind, subject, times }) => {
  const name = kind.startsWith(`${subject}_`) ? words(kind) : `${words(kind)} ${subject}`; // policy changed
  return times > 1 ? `${name} ×${times}` : name;
};

/** Gives each list one tab stop: the chosen one, or else the latest. Arrow keys reach the others. */
function tabStop(element, id) {
  const shown = element.role === "option" ? view.onLane : view.decisions.slice(-SHOWN);
  const stop = shown.some((one) => one.id === view.chosen) ? view.chosen : shown.at(-1)?.id;
  element.tabIndex = id === stop ? 0 : -1;
  attribute(element, "aria-selected", element.role === "option" ? id === view.chosen : null);
  attribute(element, "aria-current", element.role === "option" ? null : id === view.chosen ? "true" : null);
}

function wire(element, id) {
  element.addEventListener("mouseenter", () => pointAt(id));
  element.addEventListener("mouseleave", () => pointAt(null));
  element.addEventListener("focus", () => choose(id));
  element.addEventListener("blur", () => pointAt(null));
  element.addEventListener("click", () => choose(id));
}

function mark() {
  for (const shown of [view.marks, view.rows]) {
    for (const [id, { element }] of shown) {
      tabStop(element, id);
      element.classList.toggle("is-pointed", id === (view.pointed ?? view.chosen));
    }
  }
}

// ---------------------------------------------------------------------------- one in detail

let saw = "";

function drawSaw() {
  const decision = view.decisions.find(({ id }) => id === (view.pointed ?? view.chosen));
  const facts = JSON.stringify(decision ?? null);
  if (facts === saw) return;
  saw = facts;
  mark();
  const box = $("saw");
  if (!decision) {
    box.replaceChildren(h("p.fine", {}, "No decisions in the last 15 minutes."));
    return;
  }
  box.replaceChildren(...inFull(decision));
}

/** Shows it beside its mark while it is pointed at. */
function drawPeek(decision) {
  const peek = $("peek");
  peek.hidden = !decision;
  if (!decision) return;
  variable(peek, "--at", `${Math.max(0, Math.min(100, (100 * (decision.at - view.from)) / (view.to - view.from)))}%`);
  peek.replaceChildren(...inFull(decision));
}

function inFull(decision) {
  const { outcome, at, source, reason, saw, weighed } = decision;
  const { elements, names } = sideBySide(saw);
  const isShown = (name) => names.has(name) || (weighed && name.endsWith("_cost_s"));
  const rest = Object.fromEntries(Object.entries(saw).filter(([name]) => !isShown(name)));
  const glyph = h("i.glyph", { "data-glyph": glyphOf(decision), "data-tone": decision.tone });
  const took = outcome?.took ?? null;
  const facts = [clock(at), source && `by ${source}`, took !== null && `took ${seconds(took)}`];
  return [
    h("h3", {}, glyph, titleOf(decision), outcome && chipped(outcome.state)),
    h("p.fine", {}, facts.filter(Boolean).join(" · ")),
    h("p", {}, reason || "no reason given"),
    ...(weighed ? weighedTable(weighed) : []),
    ...elements,
    ...numbers("What it saw", rest),
    ...(outcome?.reason ? [h("p.outcome", {}, outcome.reason)] : []),
    ...numbers("Outcome", outcome?.numbers ?? {}),
  ];
}

function chipped(state) {
  const element = h("span.chip");
  chip(element, state);
  return element;
}

/** A titled list of numbers; nothing if there are none. */
function numbers(title, values) {
  const pairs = Object.entries(values);
  if (!pairs.length) return [];
  const rows = pairs.map(([name, value]) => h("div", {}, h("dt", {}, words(name)), h("dd", {}, named(name, value))));
  return [h("h4", {}, title), h("dl.numbers", {}, ...rows)];
}

function entry(entries, key, make) {
  if (!entries.has(key)) entries.set(key, make());
  return entries.get(key);
}
