// The burst of `make demo`, played against this service: how far it is, and TTFT over time.

import { Refused, call } from "./api.js";
import { $, attribute, h, options, say, text, variable } from "./dom.js";
import { field, notice, number, select } from "./form.js";
import { NONE, count, seconds } from "./format.js";
import { store } from "./store.js";
import { tables } from "./tables.js";

const POLL_MS = 1000;
const RUNNING = ["measuring", "sending", "waiting"];

const view = { run: null, isPolling: false };

export function startBurst() {
  view.inputs = Object.fromEntries(tables.burst.map((one) => [one.name, inputOf(one)]));
  view.go = h("button.primary", { type: "submit" }, "Play the burst");
  view.stop = h("button.quiet", { type: "button", hidden: true, onclick: stop }, "Stop");
  view.outcome = notice();
  view.bar = h("progress", { max: 1, hidden: true, "aria-label": "Progress of the burst" });
  view.words = h("p.fine");
  view.bars = h("div.ttft-bars");
  view.line = h("span.ttft-slo");
  view.plot = h("div.ttft-plot", { role: "img", "aria-label": "TTFT over time" }, view.bars, view.line);
  view.figure = h("figure.ttft", { hidden: true },
    h("figcaption", {}, "Longest TTFT of the requests that were due in each second"), view.plot);
  view.numbers = h("dl.numbers");
  view.note = h("p.fine");
  const form = h("form.burst", { noValidate: true, "aria-label": "Burst" },
    h("p.fine", {}, "Sends the burst of “make demo” to this service: more requests than it serves at full precision. First it is measured. "
      + "The policy stays as it is. Other requests wait beside the burst."),
    h("div.fields", {}, ...Object.values(view.inputs).map(({ element }) => element)),
    h("div.row", {}, view.go, view.stop), view.outcome.element);
  form.addEventListener("submit", play);
  $("panel-burst").append(form, view.bar, view.words, view.figure, view.numbers, view.note);
  followBurst();
}

function inputOf({ name, label, summary, unit, default: value, minimum, maximum }) {
  if (name === "model") return field(label, select());
  const hint = value ? `${unit}; ${minimum} to ${maximum}` : summary;
  return field(label, number({ min: minimum, max: maximum, value: value ?? "" }), hint);
}

export function drawBurst(state) {
  options(view.inputs.model.input, [...new Set(state.instances.map(({ model }) => model))].map((name) => [name, name]));
}

async function play(event) {
  event.preventDefault();
  for (const one of Object.values(view.inputs)) one.clear();
  view.outcome.show("", "");
  view.go.disabled = true;
  try {
    take(await call("POST", "/admin/burst", asked()));
    say("The burst begins.");
    followBurst();
  } catch (error) {
    refuse(error);
  } finally {
    view.go.disabled = isRunning();
  }
}

/** What the form says; of a field that is no number what was typed, so that the server says what is wrong. */
function asked() {
  const found = {};
  for (const [name, { input }] of Object.entries(view.inputs)) {
    if (name === "model") found.model = input.value || undefined;
    else if (input.value !== "" || input.validity.badInput) found[name] = Number.isNaN(input.valueAsNumber) ? "" : input.valueAsNumber;
  }
  return found;
}

async function stop() {
  try {
    take(await call("DELETE", "/admin/burst"));
  } catch (error) {
    refuse(error);
  }
}

function refuse(error) {
  const message = error instanceof Refused ? error.message : "the gateway does not answer";
  const at = error instanceof Refused && view.inputs[error.param];
  if (at) at.fail(message);
  else view.outcome.show("bad", message);
  if (error.code === "burst_running") followBurst();
}

/** Asks how the burst is until it has ended; also called when another page has begun one. */
export async function followBurst() {
  if (view.isPolling) return;
  view.isPolling = true;
  try {
    for (;;) {
      const { burst } = await call("GET", "/admin/burst");
      if (burst) take(burst);
      if (!isRunning()) return;
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  } catch (error) {
    const reason = error instanceof Refused ? error.message : "the gateway that sent it does not answer";
    if (isRunning()) take({ ...view.run, state: "failed", reason });
  } finally {
    view.isPolling = false;
  }
}

const isRunning = () => RUNNING.includes(view.run?.state);

// ---------------------------------------------------------------------------- what is shown

function take(run) {
  const before = view.run;
  view.run = run;
  view.go.disabled = isRunning();
  view.stop.hidden = !isRunning();
  view.bar.hidden = !isRunning();
  attribute(view.bar, "value", run.planned ? (run.served + run.lost) / run.planned : null);
  text(view.words, wordsOf(run));
  drawBars(run);
  drawNumbers(run);
  if (before?.id === run.id && before.state !== run.state && !isRunning()) say(wordsOf(run));
}

function wordsOf({ state, reason, model, planned, sent, served, lost, measured_s: measuredS, tokens_per_s: rate }) {
  const size = `${planned} requests, for ${count(rate)} tokens/s`;
  return {
    measuring: `${model} is measured for ${seconds(measuredS)}, with many requests at once`,
    sending: `${sent} of ${size}, are sent; ${served} answered`,
    waiting: `All ${planned} requests are sent; ${served} answered`,
    ended: `The burst has ended: ${size}; ${lost} lost`,
    stopped: `Stopped: ${sent} of ${planned} requests were sent, ${served} answered`,
    failed: `It failed: ${reason}`,
  }[state];
}

/** A bar for each second of the burst, a line at the objective. A request without a token has waited so far. */
function drawBars(run) {
  view.figure.hidden = !run.requests.length;
  if (!run.requests.length) return;
  const longest = Array.from({ length: Math.ceil(run.seconds) }, () => ({ ttft: 0, isOpen: false, isLost: false }));
  for (const [due, ttft, outcome] of run.requests) {
    const bin = longest[Math.min(longest.length - 1, Math.floor(due))];
    const isOpen = ttft === null && outcome === "";
    const waited = isOpen ? Math.max(0, (run.elapsed_s ?? due) - due) : ttft ?? 0;
    bin.isOpen ||= isOpen;
    bin.isLost ||= outcome !== "" && outcome !== "served";
    bin.ttft = Math.max(bin.ttft, waited);
  }
  const slo = store.slo.ttft_s;
  const top = 1.1 * Math.max(slo ?? 0, 0.001, ...longest.map(({ ttft }) => ttft));
  while (view.bars.children.length < longest.length) view.bars.append(h("i"));
  while (view.bars.children.length > longest.length) view.bars.lastElementChild.remove();
  longest.forEach(({ ttft, isOpen, isLost }, second) => {
    const one = view.bars.children[second];
    variable(one, "--high", `${(100 * ttft) / top}%`);
    one.className = [slo !== null && ttft > slo && "is-late", isOpen && "is-waiting", isLost && "is-lost"].filter(Boolean).join(" ");
  });
  view.line.hidden = slo === null;
  variable(view.line, "--high", `${(100 * (slo ?? 0)) / top}%`);
  text(view.line, `SLO ${seconds(slo)}`);
  const worst = longest.reduce((a, b, second) => (b.ttft > longest[a].ttft ? second : a), 0);
  const over = longest.filter(({ ttft }) => slo !== null && ttft > slo).length;
  attribute(view.plot, "aria-label", `TTFT over time: the longest is ${seconds(longest[worst].ttft)}, in second ${worst + 1} of `
    + `${longest.length}; over the objective in ${over} of them`);
}

function drawNumbers({ requests, planned, served, lost, ttft_s: ttft }) {
  const slo = store.slo.ttft_s;
  const firsts = requests.filter(([, one]) => one !== null);
  const late = firsts.filter(([, one]) => slo !== null && one > slo).length;
  const facts = [
    ["requests", count(planned || null)], ["answered", count(served)], ["lost", count(lost)],
    ["TTFT P50", ttft ? seconds(ttft.p50) : NONE], ["TTFT P95", ttft ? seconds(ttft.p95) : NONE],
    [`over ${seconds(slo)}`, count(late)],
  ];
  view.numbers.replaceChildren(...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  view.numbers.hidden = !planned;
  text(view.note, firsts.length ? `P50 and P95 are exact: of all ${firsts.length} first tokens of this burst, from when each request was due.` : "");
}
