// What stood behind a decision: the levers that the planner weighed, as a table, and numbers of one kind as bars.

import { h, variable } from "./dom.js";
import { NONE, count, named, seconds, trimmed } from "./format.js";
import { tables } from "./tables.js";

/** A plan of the planner: each lever with its gain, its price and its cost, what was taken, and why not the others. */
export function weighedTable(plan) {
  const most = Math.max(0, ...plan.options.filter((one) => !one.refusal && !isNever(one)).map((one) => one.cost_s));
  const head = ["lever", "gain", "price", "cost"].map((name) => h("th", { scope: "col" }, name));
  return [
    h("h4", {}, "What was weighed, in request-seconds"),
    h("p.fine", {}, plan.need),
    h("table.weighed", { "aria-label": "What was weighed" },
      h("thead", {}, h("tr", {}, ...head)),
      h("tbody", {}, ...plan.options.map((one) => (one.refusal ? refused(one) : option(one, most))))),
    h("p.fine", {}, sumOf(plan)),
  ];
}

/** The numbers of an event that the gateway's table sets side by side: {elements, names: those that are shown so}. */
export function sideBySide(numbers) {
  const names = new Set();
  const elements = tables.compared.flatMap((group) => {
    const there = group.numbers.filter(([name]) => typeof numbers[name] === "number");
    if (there.length < 2) return [];
    const most = Math.max(...there.map(([name]) => numbers[name]));
    for (const [name] of there) names.add(name);
    return [
      h("h4", {}, group.title),
      h("dl.bars", {}, ...there.map(([name, label]) => h("div", {},
        h("dt", {}, label), h("dd", {}, bar(numbers[name], most), named(name, numbers[name]))))),
    ];
  });
  return { elements, names };
}

const isNever = (one) => one.duration_s >= tables.never_s;

const refused = (one) => h("tr.is-refused", {},
  h("th", { scope: "row" }, one.lever), h("td", { colSpan: 3 }, `not possible: ${one.refusal}`));

function option(one, most) {
  const name = h("th", { scope: "row" }, one.words);
  if (one.is_taken) name.append(" ", h("span.chip", { "data-state": "applied" }, "taken"));
  const cost = isNever(one) ? ["never"] : [bar(one.cost_s, most), trimmed(one.cost_s, 2)];
  return h(one.is_taken ? "tr.is-taken" : "tr", {},
    name, h("td", {}, gainOf(one)), h("td", {}, priceOf(one)), h("td", {}, ...cost));
}

function gainOf(one) {
  const gains = [
    one.blocks && `${count(one.blocks)} KV blocks`,
    one.tokens_per_s && `${one.tokens_per_s > 0 ? "+" : ""}${trimmed(one.tokens_per_s, 0)} tokens/s`,
  ].filter(Boolean);
  const when = isNever(one) ? [] : [`after ${seconds(one.duration_s)}`];
  return [...gains, ...when].join(", ") || NONE;
}

function priceOf(one) {
  const loss = one.loss ? [`loss ${named("loss", one.loss)}`] : [];
  return [trimmed(one.price_s, 2), ...loss].join(", ");
}

function sumOf({ cost_s: cost, wait_s: wait, meets }) {
  const longest = wait >= tables.never_s ? "some requests would wait without end" : `the longest wait ${seconds(wait)}`;
  const outcome = meets ? "within the objective" : "and no set of levers meets the objective";
  return `Taken in all: ${trimmed(cost, 2)}, ${longest}, ${outcome}. Of the sets that meet the objective the cheapest is `
    + "taken; a lever must gain a quarter more than its price.";
}

function bar(value, most) {
  const fill = h("i");
  variable(fill, "--done", `${most > 0 ? Math.max(0, Math.min(100, (100 * value) / most)) : 0}%`);
  return h("span.bar", { "aria-hidden": "true" }, fill);
}
