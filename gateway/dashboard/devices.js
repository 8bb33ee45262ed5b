// The devices, grouped by the instances that they serve.

import { $, attribute, children, h, text, variable } from "./dom.js";
import { bytes, count, seconds, share } from "./format.js";
import { LayerStrip } from "./layers.js";
import { PageMap } from "./pagemap.js";
import { groups, layersOf, morphsOf, pendingLayers, segments, stageOf } from "./shape.js";
import { fill, isPrecision, morphEntry, progressOf, tables } from "./tables.js";

// Kinds of pages other than the precisions of weights.
const KINDS = {
  rest: "other weights", "kv-used": "KV in use", "kv-free": "KV free", other: "other models", free: "free",
};

const drawn = { groups: new Map(), devices: new Map(), changes: new Map() };

/** `onChoose(instance id, layers)`: an operator chose layers in a strip. */
export function drawDevices(state, metrics, onChoose) {
  const wanted = groups(state);
  const live = { groups: new Set(), devices: new Set(), changes: new Set() };
  const elements = [];
  for (const group of wanted) {
    const element = drawGroup(group, state, metrics, onChoose, live);
    const change = group.instance && transformOf(state, group.instance);
    if (!change) elements.push(element);
    else if (live.changes.has(change.id)) drawn.changes.get(change.id).members.push(element);
    else elements.push(beginChange(change, element, live));
  }
  for (const id of live.changes) children(drawn.changes.get(id).inside, drawn.changes.get(id).members);
  children($("instances"), elements);
  forget(drawn.changes, live.changes);
  forget(drawn.groups, live.groups);
  forget(drawn.devices, live.devices);
  drawLegend(state);
}

export function repaintDevices() {
  for (const device of drawn.devices.values()) device.map.repaint();
}

export function markChosen(instanceId, layers) {
  for (const device of drawn.devices.values()) {
    if (device.strip.instance) device.strip.choose(device.strip.instance.id === instanceId ? layers : []);
  }
}

function forget(entries, live) {
  for (const [key, entry] of entries) {
    if (live.has(key)) continue;
    entry.map?.remove();
    entries.delete(key);
  }
}

// ---------------------------------------------------------------------------- an instance

function drawGroup({ instance, workers }, state, metrics, onChoose, live) {
  const key = instance?.id ?? "";
  live.groups.add(key);
  const group = entry(drawn.groups, key, makeGroup);
  const morphs = instance ? morphsOf(state, instance) : [];
  text(group.name, instance ? instance.id : "In no instance");
  group.degree.hidden = !instance;
  if (instance) {
    text(group.degree, `tp${instance.tp}${instance.pp > 1 ? ` pp${instance.pp}` : ""}`);
    drawFacts(group.facts, instance, metrics?.instances?.find((one) => one.id === instance.id));
  }
  variable(group.element, "--devices", workers.length);
  group.element.classList.toggle("is-group", workers.length > 1);
  group.element.classList.toggle("is-morphing", morphs.length > 0);
  children(group.morphs, morphs.filter(({ kind }) => kind !== "transform").map((morph) => drawMorph(group, morph)));
  children(group.devices, workers.map((worker) => drawDevice(worker, instance, morphs, onChoose, live)));
  return group.element;
}

const transformOf = (state, instance) => morphsOf(state, instance).find((morph) => morph.kind === "transform");

/** Draws one frame, with the progress, around the instances of a transform. */
function beginChange(morph, element, live) {
  live.changes.add(morph.id);
  const change = entry(drawn.changes, morph.id, () => {
    const bars = h("div.morphs");
    const inside = h("div.instances");
    return { element: h("section.becoming", {}, bars, inside), holder: bars, inside, bars: new Map() };
  });
  children(change.holder, [drawMorph(change, morph)]);
  change.members = [element];
  return change.element;
}

function makeGroup() {
  const name = h("h3");
  const degree = h("span.degree");
  const facts = h("dl.facts");
  const morphs = h("div.morphs");
  const devices = h("div.devices");
  const element = h("section.instance", {}, h("header", {}, h("div.bracket", {}, name, degree), facts, morphs), devices);
  return { element, name, degree, facts, morphs, devices, bars: new Map() };
}

function drawFacts(list, instance, measured) {
  const { blocks, used, block_tokens: size } = instance.kv;
  const below = instance.layers_below_full;
  const facts = [
    ["running", count(instance.running)],
    ["waiting", count(instance.waiting)],
    ["KV", blocks === null ? "no report" : `${share(used / blocks)} of ${count(blocks * size)} tokens`],
    ["below full", below === null ? "no report" : `${below} of ${instance.num_layers} layers`],
    ["TTFT P95", seconds(measured?.ttft_p95)],
    ["TPOT P95", seconds(measured?.tpot_p95)],
  ];
  if (list.children.length !== facts.length) {
    list.replaceChildren(...facts.map(([name]) => h("div", {}, h("dt", {}, name), h("dd"))));
  }
  facts.forEach(([, value], index) => text(list.children[index].lastElementChild, value));
}

function drawMorph(group, morph) {
  const bar = entry(group.bars, morph.id, () => {
    const words = h("span");
    const fill = h("i");
    return { element: h("div.morph", { role: "group" }, words, h("span.bar", {}, fill)), words, fill };
  });
  const progress = progressOf(morph);
  text(bar.words, inWords(morph));
  variable(bar.fill, "--done", progress === null ? "100%" : `${100 * progress}%`);
  bar.element.classList.toggle("has-no-end", progress === null);
  for (const id of group.bars.keys()) if (id !== morph.id && group.bars.size > 8) group.bars.delete(id);
  return bar.element;
}

/** The progress of a running morph as text. */
export function inWords(morph) {
  const entry = morphEntry(morph.kind);
  const words = morph.steps ? morph.reason : fill(entry?.running, morph);
  return words || `${entry?.label ?? morph.kind} is ordered`;
}

// ---------------------------------------------------------------------------- a device

function drawDevice(worker, instance, morphs, onChoose, live) {
  const key = `${instance?.id ?? ""} ${worker.id}`;
  live.devices.add(key);
  const device = entry(drawn.devices, key, () => makeDevice(onChoose));
  text(device.name, worker.id);
  text(device.place, [worker.device, worker.host].filter(Boolean).join(" · "));
  const isSilent = !worker.pages;
  text(device.state, worker.state !== "serving" ? worker.progress || worker.state : isSilent ? "no report" : "");
  device.element.classList.toggle("is-silent", isSilent);
  text(device.busy, `busy ${share(worker.busy)}`);
  variable(device.meter, "--done", `${100 * (worker.busy ?? 0)}%`);
  const stage = instance && stageOf(instance, worker);
  text(device.stage, stage && stage.number >= 0 ? stageInWords(stage, instance) : "");
  device.strip.element.hidden = !instance?.layers;
  if (instance?.layers) drawLayers(device.strip, worker, instance, stage, morphs);
  device.map.canvas.hidden = isSilent;
  text(device.gpu, gpuInWords(worker.gpu));
  if (isSilent) text(device.sums, "Its pages are unknown until it reports.");
  else drawPages(device, worker, instance);
  return device.element;
}

/** Which layers of a pipeline are here, and which shard of them. */
function stageInWords({ number, first, end, shard }, { tp }) {
  const layers = end - first > 1 ? `layers ${first} to ${end - 1}` : `layer ${first}`;
  return `stage ${number + 1}: ${layers}${tp > 1 ? `, shard ${shard + 1} of ${tp}` : ""}`;
}

function makeDevice(onChoose) {
  const name = h("h4");
  const stage = h("span.stage");
  const place = h("span.fine");
  const state = h("span.tag");
  const busy = h("span.fine.busy");
  const meter = h("i");
  const strip = new LayerStrip(onChoose);
  const map = new PageMap();
  const sums = h("p.sums.fine");
  const gpu = h("p.gpu.fine");
  const element = h(
    "article.device", {}, h("header", {}, name, stage, place, state, busy, h("span.bar", { "aria-hidden": "true" }, meter)),
    strip.element, map.canvas, sums, gpu,
  );
  return { element, name, stage, place, state, busy, meter, strip, map, sums, gpu };
}

function drawLayers(strip, worker, instance, { first, end, shard }, morphs) {
  const pending = new Set(morphs.flatMap((morph) => [...pendingLayers(morph, instance)]));
  const transform = morphs.find((morph) => morph.kind === "transform" && morph.numbers?.layers);
  const progress = transform && { done: transform.numbers.layers_done, layers: transform.numbers.layers };
  const at = transform ? transform.workers.indexOf(worker.id) : -1;
  const layers = layersOf(instance, transform).slice(first, end);
  strip.update(instance, layers, first, at >= 0 ? at : shard, pending, progress, worker);
}

function drawPages(device, worker, instance) {
  const list = segments(worker, instance);
  const by = Object.fromEntries(list.map(({ kind, pages }) => [kind, pages]));
  const size = (pages) => bytes(pages * worker.page_bytes);
  const { budget, weights, kv, free } = worker.pages;
  const words = `weights ${size(weights)} · KV ${size(kv)}, of which ${size(by["kv-used"] ?? 0)} in use · free ${size(free)}`;
  device.map.update(list, `Memory of ${worker.id}, ${size(budget)} in pages of ${bytes(worker.page_bytes)}: ${words}`);
  text(device.sums, `${size(budget)}: ${words}`);
}

/** What NVML says of the worker's GPU, "" without it; what the GPU does not tell is left out. */
export function gpuInWords(gpu) {
  if (!gpu) return "";
  const has = (value) => value !== null && value !== undefined;
  const of = (value, most, inWords) => has(value) && `${inWords(value)}${has(most) ? ` of ${inWords(most)}` : ""}`;
  const parts = [
    gpu.name || "GPU",
    has(gpu.utilization) && `busy ${share(gpu.utilization)}`,
    of(gpu.memory_used_bytes, gpu.memory_total_bytes, bytes),
    of(gpu.power_watts, gpu.power_limit_watts, (watts) => `${Math.round(watts)} W`),
    has(gpu.temperature_celsius) && `${Math.round(gpu.temperature_celsius)} °C`,
    of(gpu.sm_clock_hertz, gpu.sm_clock_max_hertz, (hertz) => `${Math.round(hertz / 1e6)} MHz`),
    ...Object.entries(gpu.throttling).map(([reason, part]) => part > 0 && `slowed by ${reason.replaceAll("_", " ")} ${share(part)}`),
    gpu.ecc_corrected_errors > 0 && `${count(gpu.ecc_corrected_errors)} memory errors corrected`,
    gpu.ecc_uncorrected_errors > 0 && `${count(gpu.ecc_uncorrected_errors)} memory errors uncorrected`,
    ...Object.entries(gpu.xid_errors).map(([xid, times]) => `XID ${xid}: ${count(times)}`),
  ];
  return parts.filter(Boolean).join(" · ");
}

function entry(entries, key, make) {
  if (!entries.has(key)) entries.set(key, make());
  return entries.get(key);
}

// ---------------------------------------------------------------------------- the legend

function drawLegend(state) {
  const has = new Set(state.instances.flatMap((one) => one.variants));
  const several = state.workers.some((worker) => new Set((worker.ranges ?? []).map((r) => r.owner.split("@")[0])).size > 1);
  const kinds = { ...Object.fromEntries(tables.precisions.map(({ name, label }) => [name, label])), ...KINDS };
  const shown = Object.keys(kinds).filter((kind) => isPrecision(kind) ? has.has(kind) : kind !== "other" || several);
  const legend = $("legend");
  if (legend.dataset.shown === shown.join()) return;
  legend.dataset.shown = shown.join();
  legend.replaceChildren(...shown.map((kind) => h("li", {}, h("i.swatch", { "data-kind": kind }), kinds[kind])));
  attribute(legend, "aria-label", "Colours of the pages");
}
