// The tables that the gateway sends first: precisions, kinds of morphs, fields of the policy, charts and more. No view
// has a list of its own. The colours become a style sheet, for light and dark.

import { named } from "./format.js";

export const tables = {
  precisions: [], morphs: [], steps: [], policy: [], charts: [], compared: [], burst: [], never_s: Infinity,
};

let taken = "";

/** Returns false if the tables differ from those that the page was made with. */
export function takeTables(found) {
  const text = JSON.stringify(found);
  if (!found || taken === text) return true;
  if (taken) return false;
  taken = text;
  Object.assign(tables, found);
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, styleSheet()];
  return true;
}

export const isPrecision = (name) => tables.precisions.some((one) => one.name === name);
export const morphEntry = (kind) => tables.morphs.find(({ name }) => name === kind);

/** The precision with the fewest bits that a text such as a fingerprint names; full if it names none. */
export const lowestIn = (words) =>
  tables.precisions.findLast(({ bits, name }) => bits && words?.includes(name))?.name ?? tables.precisions[0]?.name;

/** The share of a morph that is done, 0 to 1; null if its numbers do not say so. */
export function progressOf({ kind, numbers, progress }) {
  for (const [done, all] of [tables.steps, morphEntry(kind)?.progress].filter((names) => names?.length)) {
    if (numbers?.[all]) return (numbers[done] ?? 0) / numbers[all];
  }
  return typeof progress === "number" ? progress : null;
}

/** Fills a template of the table with the numbers of a morph; "" if one is missing. */
export function fill(template, morph) {
  const facts = { ...morph.numbers, reason: morph.reason, workers: (morph.workers ?? []).join(", ") };
  const names = [...(template ?? "").matchAll(/\{(\w+)\}/g)].map(([, name]) => name);
  if (names.some((name) => facts[name] === undefined)) return "";
  return template?.replace(/\{(\w+)\}/g, (_, name) => named(name, facts[name])) ?? "";
}

function styleSheet() {
  const colours = [
    ...tables.precisions.map((one) => [one.name, one]),
    ...tables.morphs.filter(({ colour }) => colour).map((one) => [`mark-${one.name}`, one]),
  ];
  const light = colours.map(([name, one]) => `--${name}: ${one.colour};`).join(" ");
  const dark = colours.map(([name, one]) => `--${name}: ${one.dark_colour};`).join(" ");
  const kinds = tables.precisions.map(({ name }) => `[data-kind="${name}"] { --kind: var(--${name}); }`);
  const glyphs = tables.morphs.filter(({ colour }) => colour).map(({ name }) => `[data-glyph="${name}"] { --kind: var(--mark-${name}); }`);
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(`:root { ${light} }
    @media (prefers-color-scheme: dark) { :root:not([data-theme="light"]) { ${dark} } }
    :root[data-theme="dark"] { ${dark} }
    ${[...kinds, ...glyphs].join("\n")}`);
  return sheet;
}
