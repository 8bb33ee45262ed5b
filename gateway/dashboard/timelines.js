// The last 15 minutes of all instances together or of one, in small charts with one cursor.

import { $, options, text } from "./dom.js";
import { Chart } from "./chart.js";
import { glyphOf } from "./decisions.js";
import { count, seconds } from "./format.js";
import { store } from "./store.js";

const GAP_S = 25; // moments come at least every ten seconds: between two further apart nobody looked
const ALL = "all instances";

const SPECS = [
  { title: "Load", unit: count, floor: 4, series: [
    { name: "running", colour: "s1", isArea: true, value: sum("running") },
    { name: "waiting", colour: "s2", value: sum("waiting") }] },
  { title: "Throughput", unit: (v) => `${count(v)}/s`, floor: 10, series: [
    { name: "tokens", colour: "s1", isArea: true, value: sum("tokens_per_s") }] },
  { title: "Queue delay", unit: seconds, floor: 0.05, series: [
    { name: "longest", colour: "s2", value: worst("queue_delay_s") }] },
  { title: "TTFT", unit: seconds, floor: 0.05, slo: () => store.slo.ttft_s, series: [
    { name: "P95", colour: "s1", value: worst("ttft_p95_s") }] },
  { title: "TPOT", unit: seconds, floor: 0.01, slo: () => store.slo.tpot_s, series: [
    { name: "P95", colour: "s1", value: worst("tpot_p95_s") }] },
  { title: "KV blocks", unit: count, floor: 16, series: [
    { name: "all", colour: "kv-line", isStepped: true, value: sum("kv_blocks") },
    { name: "used", colour: "kv-used", isArea: true, value: sum("kv_used") }] },
  { title: "Layers below full", unit: count, floor: 4, series: [
    { name: "layers", colour: "int4", isArea: true, isStepped: true, value: sum("layers_below_full") }] },
  { title: "Degree", unit: (v) => (v === null || v === undefined || Number.isInteger(v) ? count(v) : ""), floor: 2, series: [
    { name: "highest", colour: "s1", isStepped: true, value: worst("tp") }] },
];

let charts = [];

/** `onPoint(decision id or null)`: the pointer is near its mark. */
export function startTimelines(onPoint, onSelect) {
  charts = SPECS.map((spec) => new Chart(spec, onPoint));
  $("charts").append(...charts.map(({ element }) => element));
  $("of-instance").addEventListener("change", onSelect);
  $("span").addEventListener("change", onSelect);
}

/** [from, to] in seconds since 1970: what is looked at. */
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

/** Null where nobody told a value: absent is not zero. */
function told(name, { instances }) {
  return instances.map((one) => one[name]).filter((value) => value !== null && value !== undefined);
}

function sum(name) {
  return (point) => {
    const values = told(name, point);
    return values.length ? values.reduce((a, b) => a + b, 0) : null;
  };
}

function worst(name) {
  return (point) => {
    const values = told(name, point);
    return values.length ? Math.max(...values) : null;
  };
}
