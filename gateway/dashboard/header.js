// The line at the top: the connection, the age of what is shown, and the numbers to look at first.

import { $, attribute, h, text } from "./dom.js";
import { age, count, seconds, share } from "./format.js";
import { store } from "./store.js";

const OLD_METRICS_S = 20; // the monitor writes every ten seconds at least

const link = { isLive: false, goneSince: null, why: "", retryAt: 0 };

export function wentLive() {
  link.isLive = true;
  link.goneSince = null;
}

export function wentGone(why, retryAt) {
  link.isLive = false;
  link.goneSince ??= Date.now();
  link.why = why;
  link.retryAt = retryAt;
}

/** Called every second: ages grow while nothing arrives. */
export function drawHeader() {
  const tone = link.isLive ? (isOld() ? "old" : "live") : "gone";
  attribute(document.body, "data-link", tone);
  attribute($("connection"), "data-tone", tone);
  text($("connection"), link.isLive ? (isOld() ? oldWords() : "live") : goneWords());
  attribute($("connection"), "title", link.isLive ? `from gateway ${store.hello?.gateway}` : link.why);
  text($("version"), store.hello ? store.hello.version : "");
  if (store.state) drawVitals(store.state);
}

function goneWords() {
  if (link.goneSince === null) return "connecting";
  const since = age((Date.now() - link.goneSince) / 1000);
  const what = store.state ? `gone since ${since === "now" ? "just now" : since}` : link.why;
  const wait = Math.ceil((link.retryAt - Date.now()) / 1000);
  return wait > 0 ? `${what} · trying again in ${wait} s` : `${what} · trying again`;
}

/** Seconds since the monitor's last metrics: of the state, which comes with changes only, or of a moment. */
function metricsAge() {
  const last = Math.max((store.state?.metrics?.at_ms ?? 0) / 1000, store.moments.at(-1)?.at ?? 0);
  return last ? store.now() - last : null;
}

const isOld = () => Boolean(store.state) && (metricsAge() === null || metricsAge() > OLD_METRICS_S);

function oldWords() {
  const old = metricsAge();
  return old === null ? "live, but nothing is measured yet" : `live, but no metrics for ${age(old)}`;
}

function drawVitals({ instances, metrics, gateway }) {
  const measured = metrics?.instances ?? [];
  const sum = (list, value) => {
    const values = list.map(value).filter((one) => one !== null && one !== undefined);
    return values.length ? values.reduce((a, b) => a + b, 0) : null;
  };
  const worst = (value) => {
    const values = measured.map(value).filter((one) => one !== null && one !== undefined);
    return values.length ? Math.max(...values) : null;
  };
  const blocks = sum(instances, (one) => one.kv.blocks);
  const used = sum(instances, (one) => one.kv.used);
  const vitals = [
    ["running", count(sum(instances, (one) => one.running))],
    ["waiting", count(sum([...instances, { waiting: gateway?.unplaced }], (one) => one.waiting))],
    ["tokens/s", count(sum(measured, (one) => one.generation_tokens_per_second))],
    ["KV in use", blocks ? share((used ?? 0) / blocks) : share(null)],
    ["TTFT P95", seconds(worst((one) => one.ttft_p95))],
    ["TPOT P95", seconds(worst((one) => one.tpot_p95))],
  ];
  const list = $("vitals");
  if (list.children.length !== vitals.length) {
    list.replaceChildren(...vitals.map(([name]) => h("div", {}, h("dt", {}, name), h("dd"))));
  }
  const over = [null, null, null, null, store.slo.ttft_s, store.slo.tpot_s];
  const raw = [null, null, null, null, worst((one) => one.ttft_p95), worst((one) => one.tpot_p95)];
  vitals.forEach(([, value], index) => {
    const cell = list.children[index].lastElementChild;
    text(cell, value);
    cell.classList.toggle("is-over", over[index] !== null && raw[index] !== null && raw[index] > over[index]);
  });
}
