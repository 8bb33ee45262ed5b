// Models that are deployed by intent: the intent, the place, what is expected and what is measured.
// Hidden while no model is registered.

import { Refused, call } from "./api.js";
import { $, children, h, options, say, text } from "./dom.js";
import { field, notice, number, select } from "./form.js";
import { bytes, seconds } from "./format.js";
import { store } from "./store.js";
import { chip } from "./why.js";

const FAILED_S = 900; // how long a failed deployment is shown
const ARMED_MS = 6000;
const WANTED = { cost: "least cost", latency: "lowest latency", memory: "least memory", gpu_hours: "fewest GPU-hours" };

const view = { rows: new Map(), form: null };

export function startDeployments() {
  const model = field("Model", select());
  const minimise = field("For", select(Object.entries(WANTED)));
  const limit = field("Latency at most", number({ min: 0 }), "seconds; then the least cost");
  const go = h("button.primary", { type: "submit" }, "Deploy");
  const outcome = notice();
  const form = h("form.deploy", { noValidate: true, "aria-label": "Deploy" },
    h("div.fields.three", {}, model.element, minimise.element, limit.element), h("div.row", {}, go), outcome.element);
  const byParam = { model, minimise, max_latency_s: limit };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    Object.values(byParam).forEach((one) => one.clear());
    outcome.show("", "");
    go.disabled = true;
    const intent = limit.input.value ? { max_latency_s: limit.input.valueAsNumber } : { minimise: minimise.input.value };
    try {
      const made = await call("POST", "/admin/deployments", { model: model.input.value, intent });
      outcome.show("good", `${made.model} is being deployed as ${made.id}.`);
    } catch (error) {
      const at = error instanceof Refused && byParam[error.param?.split(".").at(-1)];
      if (at) at.fail(error.message);
      else outcome.show("bad", inWords(error));
      say(inWords(error));
    } finally {
      go.disabled = false;
    }
  });
  view.form = { element: form, model };
  $("deploy-form").append(form);
}

export function drawDeployments(state) {
  const models = state.models ?? [];
  const shown = (state.deployments ?? []).filter(isShown);
  $("deployments").hidden = !models.length && !shown.length;
  options(view.form.model.input, models.map((one) => [one.name, one.state === "profiled" ? one.name : `${one.name} (${one.state})`]));
  for (const id of view.rows.keys()) if (!shown.some((one) => one.id === id)) view.rows.delete(id);
  children($("deployment-rows"), shown.map((one) => drawRow(one, state)));
  $("no-deployments").hidden = shown.length > 0;
}

const isShown = ({ state, since }) => state !== "retired" && (state !== "failed" || store.now() - since < FAILED_S);

function drawRow(one, state) {
  if (!view.rows.has(one.id)) view.rows.set(one.id, makeRow(one));
  const row = view.rows.get(one.id);
  chip(row.chip, one.state);
  text(row.wanted, wanted(one.intent));
  text(row.where, where(one));
  text(row.reason, one.state === "serving" ? "" : one.reason);
  children(row.facts, facts(one, state).map(([name, value], index) => fact(row, index, name, value)));
  row.retire.hidden = one.state === "retiring" || one.state === "failed";
  return row.element;
}

function makeRow({ id, model }) {
  const row = { chip: h("span.chip"), wanted: h("span.fine"), where: h("p"), reason: h("p.fine"), facts: h("dl.facts") };
  row.pairs = [];
  row.retire = h("button.quiet", { type: "button" }, "Retire");
  row.retire.addEventListener("click", () => retire(row, id, model));
  row.element = h("li.deployment", {},
    h("div.row", {}, h("h3", {}, model, h("span.fine", {}, ` ${id}`)), row.chip, row.wanted, row.retire),
    row.where, row.facts, row.reason);
  return row;
}

/** Sends the order after a second press. */
async function retire(row, id, model) {
  if (!row.isArmed) {
    row.isArmed = true;
    text(row.retire, `Yes, retire ${model}`);
    setTimeout(() => disarm(row), ARMED_MS);
    return;
  }
  disarm(row);
  try {
    await call("DELETE", `/admin/deployments/${encodeURIComponent(id)}`);
  } catch (error) {
    text(row.reason, inWords(error));
    say(inWords(error));
  }
}

function disarm(row) {
  row.isArmed = false;
  text(row.retire, "Retire");
}

const inWords = (error) => error instanceof Refused ? error.message : "the gateway does not answer; the order may not have arrived";

// ---------------------------------------------------------------------------- texts

function wanted(intent) {
  const fixed = [["tp", "tp"], ["pp", "pp"], ["precision", ""], ["kv_dtype", "KV "]]
    .filter(([name]) => intent[name]).map(([name, words]) => `${words}${intent[name]}`);
  const limits = [
    intent.max_latency_s && `at most ${seconds(intent.max_latency_s)}`,
    intent.max_cost && `cost at most ${intent.max_cost}`,
    intent.max_loss !== null && intent.max_loss !== undefined && `loss at most ${intent.max_loss * 100} %`,
  ].filter(Boolean);
  const what = intent.max_latency_s ? WANTED.cost : intent.max_cost ? WANTED.latency : WANTED[intent.minimise];
  return [what, ...limits, ...(fixed.length ? [`fixed: ${fixed.join(", ")}`] : [])].join(" · ");
}

function where({ configuration, stages }) {
  if (!configuration || !stages.length) return "";
  const { tp, pp, precision, kv_dtype: kv } = configuration;
  const shape = `tp${tp} pp${pp} ${precision}${kv && kv !== "full" ? ` kv ${kv}` : ""}`;
  const places = stages.map(({ workers, first, end }) =>
    stages.length > 1 ? `${workers.join(" + ")} (layers ${first} to ${end - 1})` : workers.join(" + "));
  return `${shape} on ${places.join(" → ")}`;
}

/** What is expected of a request of the intent, beside what recent requests got. */
function facts({ expected, instance, kv }, state) {
  if (!expected) return [];
  const now = state.metrics.instances.find(({ id }) => id === instance);
  const expectation = (name, value, seen) => [name, `${seconds(value)} expected${seen ? `, ${seconds(seen)} now (P95)` : ""}`];
  return [
    expectation("TTFT", expected.ttft_s.value, now?.ttft_p95),
    expectation("TPOT", expected.tpot_s.value, now?.tpot_p95),
    ["Request", `${seconds(expected.latency_s.value)} expected`],
    ["Memory", `${bytes(expected.memory_bytes.value)} expected`],
    ...(kv ? [["KV cache", `${bytes(kv.bytes)}, ${kv.tokens} tokens`]] : []),
  ];
}

function fact(row, index, name, value) {
  row.pairs[index] ??= h("div", {}, h("dt"), h("dd"));
  const [term, description] = row.pairs[index].children;
  text(term, name);
  text(description, value);
  return row.pairs[index];
}
