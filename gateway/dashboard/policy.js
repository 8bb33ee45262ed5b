// The policy, to read and to change. A refusal is shown at the field that it names.

import { Refused, call } from "./api.js";
import { $, attribute, h, say, text } from "./dom.js";
import { field, notice, number, select } from "./form.js";
import { tables } from "./tables.js";

const view = { policy: null, fields: new Map(), modes: null, isBusy: false };

export function startPolicy() {
  view.outcome = notice();
  const { choices } = tables.policy.find(({ name }) => name === "mode");
  view.modes = h("fieldset.modes", {}, h("legend", {}, "Mode"), ...Object.entries(choices).map(([name, means]) =>
    h("label", {}, h("input", { type: "radio", name: "mode", value: name }), h("b", {}, name), h("span.fine", {}, means))));
  const rows = tables.policy.filter(({ name }) => name !== "mode");
  const sets = [...new Set(rows.map(({ group }) => group))].map((title) => h("fieldset", {}, h("legend", {}, title),
    h("div.fields", {}, ...rows.filter(({ group }) => group === title).map(makeField))));
  view.save = h("button.primary", { type: "submit", disabled: true }, "Save");
  view.undo = h("button.quiet", { type: "button", disabled: true, onclick: () => fill() }, "Undo");
  view.revision = h("span.fine");
  const form = h("form.policy", { noValidate: true, "aria-label": "Policy" }, view.modes, ...sets,
    h("div.row.sticky", {}, view.save, view.undo, view.revision), view.outcome.element);
  form.addEventListener("submit", save);
  form.addEventListener("input", mark);
  $("panel-policy").append(form);
}

function makeField({ name, label, unit, summary, zero, unset, choices, type }) {
  const input = type === "choice" ? select(Object.keys(choices).map((one) => [one, one])) : number({ min: 0 });
  const made = field(label, input, [unit, zero && `0: ${zero}`, unset && `empty: as the ${unset} says`].filter(Boolean).join("; ") || summary);
  input.title = summary;
  view.fields.set(name, { ...made, unset });
  return made.element;
}

/** Shows the policy of the feed; what is being typed stays. */
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
  for (const [name, { input, unset }] of view.fields) {
    if (unset && input.value === "" && !input.validity.badInput) {
      if (view.policy[name] !== null) found[name] = unset;
      continue;
    }
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
    announce("good", `Saved as revision ${view.policy.revision}.`);
  } catch (error) {
    refuse(error);
  } finally {
    view.isBusy = false;
    attribute(view.save, "aria-busy", null);
  }
}

async function refuse(error) {
  if (!(error instanceof Refused)) {
    announce("bad", "The gateway does not answer; nothing may have been saved.");
    return;
  }
  const at = view.fields.get(error.param);
  if (at) {
    at.fail(error.message);
    at.input.focus();
    announce("", "");
    say(error.message);
  } else announce("bad", error.message);
  if (error.status === 409) {
    const edited = changes();
    view.policy = await call("GET", "/admin/policy").catch(() => view.policy);
    fill(edited);
  }
}

function announce(tone, message) {
  view.outcome.show(tone, message);
}
