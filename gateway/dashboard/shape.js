// What a device holds, as plain values to draw. Pure.

export const PARTS = ["attention", "ffn"];

/** [{instance, workers: [worker]}], instances in their order, then the workers without an instance. */
export function groups(state) {
  const byId = new Map(state.workers.map((worker) => [worker.id, worker]));
  const seen = new Set();
  const found = state.instances.map((instance) => {
    const workers = instance.workers.map((id) => byId.get(id) ?? absent(id));
    workers.forEach((worker) => seen.add(worker.id));
    return { instance, workers };
  });
  const alone = state.workers.filter((worker) => !seen.has(worker.id));
  return alone.length ? [...found, { instance: null, workers: alone }] : found;
}

const absent = (id) => ({ id, device: "?", host: "", state: "gone", pages: null, busy: null, page_bytes: 0 });

/** The layers of a worker, {number, first, end, shard}: in a pipeline its stage and rank, else all layers. */
export function stageOf(instance, worker) {
  const number = (instance.stages ?? []).findIndex(({ workers }) => workers.includes(worker.id));
  const all = { number, first: 0, end: instance.layers?.length ?? 0, shard: instance.workers.indexOf(worker.id) };
  if (number < 0) return all;
  const { workers, first, end } = instance.stages[number];
  return { number, first, end, shard: workers.indexOf(worker.id) };
}

/** The running morphs of this instance or of any of its workers. */
export function morphsOf(state, instance) {
  return state.morphs.filter(
    (morph) =>
      morph.state === "running" &&
      (morph.target === instance.id ||
        (morph.kind === "transform" && morph.workers.some((worker) => instance.workers.includes(worker)))),
  );
}

/**
 * For every layer {attention, ffn, tp, fill: {attention, ffn}}: the fill is its share of a whole half at full.
 * transform: the running one, whose last report may be newer than the instance's state.
 */
export function layersOf(instance, transform = null) {
  const sizes = instance.layer_pages ?? {};
  const ratio = (precision) => (sizes.full && sizes[precision] ? sizes[precision] / sizes.full : 1);
  return (instance.layers ?? []).map((layer, index) => {
    const { layers: all, layers_done: done, tp_before: before, tp_after: after } = transform?.numbers ?? {};
    const tp = all ? (index < all - done ? before : after) : instance.layer_tp?.[index] ?? instance.tp;
    return {
      ...layer,
      tp,
      // Each worker has all of the attention and its rows of the FFN.
      fill: { attention: ratio(layer.attention), ffn: ratio(layer.ffn) / tp },
    };
  });
}

/** The layers that a running swap has not changed yet, by its words and the instance's order. */
export function pendingLayers(morph, instance) {
  if (morph.kind !== "swap" || morph.state !== "running" || !instance.layers) return new Set();
  const words = morph.decided ?? "";
  const by = (layer) => instance.layers[layer];
  const named = /layers ([\d, ]+) to (\w+)/.exec(words);
  if (named) {
    const layers = named[1].split(",").map(Number);
    return new Set(layers.filter((layer) => by(layer) && !isAll(by(layer), named[2])));
  }
  const order = instance.order?.length ? instance.order : instance.layers.map((_, index) => index);
  const halves = Math.ceil(((morph.numbers?.halves ?? 0) - (morph.numbers?.halves_applied ?? 0)) / 2);
  const back = /back to full|more to full/.test(words);
  const down = /more to (?!full)(\w+)/.exec(words);
  const left = back
    ? [...order].reverse().filter((layer) => by(layer) && !isAll(by(layer), "full"))
    : down
      ? order.filter((layer) => by(layer) && !isAll(by(layer), down[1]))
      : [];
  return new Set(left.slice(0, halves));
}

const isAll = (layer, precision) => layer.attention === precision && layer.ffn === precision;

/**
 * The pages of a worker, as parts of this instance, in order, [{kind, pages}] that sum to the budget.
 * kind: a precision, "rest" (embeddings and the like), "kv-used", "kv-free", "other" (models), "free".
 */
export function segments(worker, instance) {
  const { budget, weights, kv, free } = worker.pages;
  const own = (range) => !instance || range.owner.split("@")[0] === instance.model;
  const ranges = worker.ranges ?? [];
  const others = total(ranges.filter((range) => !own(range)));
  const otherKv = total(ranges.filter((range) => !own(range) && range.kind === "kv"));
  const ownWeights = Math.max(0, weights - (others - otherKv));
  const ownKv = Math.max(0, kv - otherKv);
  const used = instance?.kv?.blocks ? Math.round((ownKv * (instance.kv.used ?? 0)) / instance.kv.blocks) : 0;
  const layered = ranges.length
    ? ranges.filter((range) => own(range) && range.kind === "weights" && range.layer !== null)
    : guessed(worker, instance);
  const list = [
    ...fitted(layered, ownWeights),
    { kind: "kv-used", pages: used },
    { kind: "kv-free", pages: ownKv - used },
    { kind: "other", pages: others },
    { kind: "free", pages: Math.max(free, budget - weights - kv) },
  ];
  return joined(list.filter(({ pages }) => pages > 0));
}

/** The pages of layers in their order, after the rest, which no layer has; never more than `pages`. */
function fitted(ranges, pages) {
  const sum = total(ranges);
  const scale = sum > pages ? pages / sum : 1;
  const sorted = [...ranges].sort((a, b) => a.layer - b.layer);
  return [
    { kind: "rest", pages: Math.max(0, pages - sum * scale) },
    ...sorted.map((range) => ({ kind: range.precision, pages: range.pages * scale })),
  ];
}

function guessed(worker, instance) {
  if (!instance) return [];
  const sizes = instance.layer_pages ?? {};
  const { first, end } = stageOf(instance, worker);
  return layersOf(instance).slice(first, end).flatMap((layer, index) =>
    PARTS.map((part) => ({ layer: first + index, precision: layer[part], pages: (sizes[layer[part]] ?? 0) / 2 })),
  );
}

function joined(list) {
  const whole = [];
  for (const segment of list) {
    if (whole.at(-1)?.kind === segment.kind) whole.at(-1).pages += segment.pages;
    else whole.push({ ...segment });
  }
  return whole;
}

const total = (ranges) => ranges.reduce((sum, range) => sum + range.pages, 0);

/** The kind of each of `num` cells of equally many pages. Every kind that is there has at least one cell. */
export function cells(list, num) {
  const budget = total(list);
  const found = new Array(num);
  const middles = [];
  let start = 0;
  let at = 0;
  for (const { kind, pages } of list) {
    const end = start + pages;
    while (at < num && ((at + 0.5) * budget) / num < end) found[at++] = kind;
    middles.push([kind, Math.min(num - 1, Math.floor(((start + end) / 2 / budget) * num))]);
    start = end;
  }
  while (at < num) found[at++] = list.at(-1)?.kind ?? "free";
  for (const [kind, middle] of middles) if (!found.includes(kind)) found[middle] = kind;
  return found;
}
