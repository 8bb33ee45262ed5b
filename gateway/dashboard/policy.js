// The policy, to read and to change. What the server refuses is shown at the field that it names.

import { Refused, call } from "./api.js";
import { $, attribute, h, say, text } from "./dom.js";
import { field, notice, number, select } from "./form.js";

const FIELDS = [
  ["When", [
    ["kv_usage_high", "KV use above", "share, 0 to 1: pressure"],
    ["kv_usage_low", "KV use below", "share: at ease"],
    ["queue_delay_high_s", "Queue delay above", "seconds: pressure"],
    ["queue_delay_low_s", "Queue delay below", "seconds: at ease"],
    ["windows", "Windows in a row", "that must agree"],
    ["cooldown_s", "Cool-down", "seconds between two morphs"],
  ]],
  ["How far", [
    ["step_layers", "Layers a step", "0: as the mode says"],
    ["max_layers", "Layers at most", "0: as the mode says"],
    ["precision", "Precision", "of swapped layers"],
  ]],
  ["Groups", [
    ["max_tp", "Highest degree", "0: what workers are prepared for"],
    ["long_patience_s", "Patience", "seconds for a full group before another one"],
    ["scale_down_free", "Part when free", "share of the group's KV"],
  ]],
];
const MODES = {
  default: "morphs under pressure",
  accuracy: "later, and fewer layers",
  performance: "sooner, and more of them",
  manual: "nothing by itself",
};

const view = { policy: null, fields: new Map(), modes: null, isBusy: false };

export function startPolicy() {
  view.told = notice();
  view.modes = h("fieldset.modes", {}, h("legend", {}, "Mode"), ...Object.entries(MODES).map(([name, means]) =>
    h("label", {}, h("input", { type: "radio", name: "mode", value: name }), h("b", {}, name), h("span.fine", {}, means))));
  const sets = FIELDS.map(([title, rows]) => h("fieldset", {}, h("legend", {}, title), h("div.fields", {}, ...rows.map(makeField))));
  view.save = h("button.primary", { type: "submit", disabled: true }, "Save");
  view.undo = h("button.quiet", { type: "button", disabled: true, onclick: () => fill() }, "Undo");
  view.revision = h("span.fine");
  const form = h("form.policy", { noValidate: true, "aria-label": "Policy" }, view.modes, ...sets,
    h("div.row.sticky", {}, view.save, view.undo, view.revision), view.told.element);
  form.addEventListener("submit", save);
  form.addEventListener("input", mark);
  $("panel-policy").append(form);
}

function makeField([name, label, hint]) {
  const input = name === "precision" ? select(["int8", "int4", "int3"].map((one) => [one, one])) : number({ min: 0 });
  const made = field(label, input, hint);
  view.fields.set(name, made);
  return made.element;
}

/** As the feed tells it. What somebody is typing stays. */
export function drawPolicy(policy) {
  if (view.policy?.revision === policy.revision || view.isBusy) return;
  const edited = view.policy ? changes() : {};
  view.policy = policy;
  fill(edited);
}

function fill(edited = {}) {
  const shown = { ...view.policy, ...edited };
  for (const [name, { input, clear }] of view.fields) {
    input.value = shown[name];
    clear();
  }
  for (const radio of view.modes.querySelectorAll("input")) radio.checked = radio.value === shown.mode;
  text(view.revision, `revision ${view.policy.revision}`);
  mark();
}

function changes() {
  const found = {};
  for (const [name, { input }] of view.fields) {
    const value = input.tagName === "SELECT" ? input.value : input.valueAsNumber;
    if (!Number.isNaN(value) && value !== view.policy[name]) found[name] = value;
    if (Number.isNaN(value)) found[name] = input.value === "" ? "" : input.value; // the server says what is wrong
  }
  const mode = view.modes.querySelector(":checked")?.value;
  if (mode && mode !== view.policy.mode) found.mode = mode;
  return found;
}

function mark() {
  const changed = view.policy ? changes() : {};
  for (const [name, { element }] of view.fields) element.classList.toggle("is-changed", name in changed);
  const num = Object.keys(changed).length;
  view.save.disabled = view.undo.disabled = num === 0;
  text(view.save, num ? `Save ${num} change${num > 1 ? "s" : ""}` : "Save");
}

async function save(event) {
  event.preventDefault();
  for (const { clear } of view.fields.values()) clear();
  view.isBusy = true;
  attribute(view.save, "aria-busy", "true");
  try {
    view.policy = await call("PUT", "/admin/policy", { revision: view.policy.revision, ...changes() });
    fill();
    told("good", `Saved as revision ${view.policy.revision}.`);
  } catch (error) {
    refuse(error);
  } finally {
    view.isBusy = false;
    attribute(view.save, "aria-busy", null);
  }
}

async function refuse(error) {
  if (!(error instanceof Refused)) {
    told("bad", "The gateway does not answer; nothing may have been saved.");
    return;
  }
  const at = view.fields.get(error.param);
  if (at) {
    at.fail(error.message);
    at.input.focus();
    told("", "");
    say(error.message);
  } else told("bad", error.message);
  if (error.status === 409) {
    const edited = changes();
    view.policy = await call("GET", "/admin/policy").catch(() => view.policy);
    fill(edited);
  }
}

function told(tone, message) {
  view.told.show(tone, message);
}
