// Fields with labels and errors, for all panels.

import { attribute, h, text } from "./dom.js";

let num = 0;

/** A labelled field: {element, input, fail(message), clear()}. */
export function field(label, input, hint = "") {
  num += 1;
  input.id = `field-${num}`;
  const error = h("span.error", { id: `field-${num}-error` });
  const help = h("span.fine", { id: `field-${num}-hint` }, hint);
  attribute(input, "aria-describedby", `${help.id} ${error.id}`);
  const element = h("div.field", {}, h("label", { htmlFor: input.id }, label), input, help, error);
  return {
    element, input, help,
    fail(message) {
      text(error, message);
      attribute(input, "aria-invalid", "true");
    },
    clear() {
      text(error, "");
      attribute(input, "aria-invalid", null);
    },
  };
}

export const number = (props = {}) => h("input", { type: "number", inputMode: "decimal", step: "any", ...props });
export const select = (pairs = []) => h("select", {}, ...pairs.map(([value, label]) => h("option", { value }, label)));

/** The outcome of a form, announced to screen readers. */
export function notice() {
  const element = h("p.notice", { role: "status" });
  return {
    element,
    show(tone, message) {
      attribute(element, "data-tone", tone);
      text(element, message);
    },
  };
}
