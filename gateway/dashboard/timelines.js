// The last 15 minutes of all instances together or of one, in small charts with one cursor.

import { $, options, text } from "./dom.js";
import { Chart } from "./chart.js";
import { glyphOf } from "./decisions.js";
import { count, seconds, share } from "./format.js";
import { store } from "./store.js";
import { tables } from "./tables.js";

const GAP_S = 25; // moments come at least every ten seconds: a longer pause is a gap
const ALL = "all instances";

const UNITS = {
  count,
  "count/s": (value) => `${count(value)}/s`,
  seconds,
  whole: (value) => (value === null || value === undefined || Number.isInteger(value) ? count(value) : ""),
};

/** Turns a chart of the gateway's table into the arguments of Chart. */
const specOf = ({ title, unit, floor, slo, series }) => ({
  title, floor, unit: UNITS[unit],
  slo: slo ? () => store.slo[slo] : undefined,
  series: series.map(({ label, field, of, colour, is_area: isArea, is_stepped: isStepped }) => (
    { name: label, colour, isArea, isStepped, value: of === "sum" ? sum(field) : highest(field) })),
});

let charts = [];

/** `onPoint(decision id or null)`: the pointer is near its mark. */
export function startTimelines(onPoint, onSelect) {
  charts = tables.charts.map((one) => new Chart(specOf(one), onPoint));
  $("charts").append(...charts.map(({ element }) => element));
  text($("percentiles"), percentilesOf(store.hello.percentiles));
  $("of-instance").addEventListener("change", onSelect);
  $("span").addEventListener("change", onSelect);
}

/** What the percentiles are of. */
function percentilesOf({ window_s: windowS, relative_error: error }) {
  return `TTFT P95 is of the first tokens of the last ${seconds(windowS)}, from when a worker got the request; waits at the gateway `
    + `are not in it. TPOT P95 is of the times between tokens. Both come from sketches of all values and are at most `
    + `${share(error)} off. Of several instances the highest is shown.`;
}

/** The time that is shown, [from, to], in seconds since 1970. */
export function spanNow() {
  const spanS = Math.min(store.historyS, Number($("span").value));
  text($("time-title"), `The last ${Math.round(spanS / 60)} minutes`);
  return [store.now() - spanS, store.now()];
}

export function drawTimelines(decisions, from, to) {
  const ids = [...new Set(store.moments.flatMap((moment) => Object.keys(moment.instances)))].sort();
  options($("of-instance"), [["", ALL], ...ids.map((id) => [id, id])]);
  const points = pointsOf(store.moments, $("of-instance").value);
  const marks = decisions.map((decision) => ({ id: decision.id, at: decision.at, glyph: `mark-${glyphOf(decision)}` }));
  charts.forEach((chart) => chart.update(points, from, to, marks));
}

export function repaintTimelines() {
  charts.forEach((chart) => chart.plot && chart.build());
}

export function highlight(decision) {
  charts.forEach((chart) => chart.highlight(decision));
}

function pointsOf(moments, id) {
  const points = [];
  for (const { at, instances } of moments) {
    if (points.length && at - points.at(-1).at > GAP_S) points.push({ at: points.at(-1).at + 1, instances: [] });
    points.push({ at, instances: id ? [instances[id]].filter(Boolean) : Object.values(instances) });
  }
  return points;
}

/** The values that are there: absent is not zero. */
function valuesOf(name, { instances }) {
  return instances.map((one) => one[name]).filter((value) => value !== null && value !== undefined);
}

function sum(name) {
  return (point) => {
    const values = valuesOf(name, point);
    return values.length ? values.reduce((a, b) => a + b, 0) : null;
  };
}

function highest(name) {
  return (point) => {
    const values = valuesOf(name, point);
    return values.length ? Math.max(...values) : null;
  };
}
