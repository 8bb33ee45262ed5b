// One strip per device: a column per layer, attention above the FFN. A column's colour is its precision, its
// height the share of a full half that is here; the rest was freed. Columns can be chosen for a swap.

import { attribute, h, text, variable } from "./dom.js";
import { PARTS } from "./shape.js";

export class LayerStrip {
  /** `onChoose(instance id, sorted layers)` when the choice changed. */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.chosen = new Set();
    this.columns = [];
    this.offset = 0;
    this.boundary = h("div.boundary", { hidden: true });
    this.row = h("div.layer-row", {
      role: "listbox",
      "aria-multiselectable": "true",
      "aria-orientation": "horizontal",
      onkeydown: (event) => this.#key(event),
    });
    this.first = h("span");
    this.last = h("span");
    this.element = h(
      "div.layers", {}, h("div.layer-stage", {}, this.row, this.boundary),
      h("div.layer-numbers", { "aria-hidden": "true" }, this.first, h("span.fine", {}, "layers: attention over FFN"), this.last),
    );
  }

  /**
   * layers: those that are here, the first with the number `offset`. shard: which of their FFN rows are here,
   * 0 .. tp-1. transform: {done, layers}, or null.
   */
  update(instance, layers, offset, shard, pending, transform, worker) {
    this.instance = instance;
    this.offset = offset;
    attribute(this.row, "aria-label", `Layers of ${instance.id} at ${worker.id}; space chooses layers to swap`);
    while (this.columns.length < layers.length) this.#add();
    while (this.columns.length > layers.length) this.columns.pop().element.remove();
    layers.forEach((layer, index) => this.#draw(this.columns[index], layer, offset + index, shard, pending.has(offset + index)));
    text(this.first, offset);
    text(this.last, offset + layers.length - 1);
    this.boundary.hidden = !transform;
    if (transform) variable(this.boundary, "--at", `${(100 * (transform.layers - transform.done)) / transform.layers}%`);
  }

  choose(layers) {
    this.chosen = new Set(layers);
    this.columns.forEach(({ element }, index) => attribute(element, "aria-selected", this.chosen.has(this.offset + index)));
  }

  #add() {
    const index = this.columns.length;
    const fills = PARTS.map(() => h("i"));
    const halves = PARTS.map((part, i) => h(`span.half.${part}`, {}, fills[i]));
    const element = h("div.layer", { role: "option", tabIndex: index ? -1 : 0, onclick: () => this.#toggle(index) }, ...halves);
    attribute(element, "aria-selected", "false");
    this.row.append(element);
    this.columns.push({ element, fills, halves, drawn: "", kinds: [] });
  }

  #draw(column, layer, number, shard, isPending) {
    const drawn = `${number} ${layer.attention} ${layer.ffn} ${layer.tp} ${shard} ${isPending}`;
    if (column.drawn === drawn) return;
    const isFirst = !column.drawn;
    column.drawn = drawn;
    PARTS.forEach((part, i) => {
      const precision = layer[part];
      const fill = column.fills[i];
      variable(fill, "--fill", `${Math.max(4, 100 * layer.fill[part])}%`);
      variable(fill, "--from", part === "ffn" && layer.tp > 1 ? `${(100 * (shard % layer.tp)) / layer.tp}%` : "0%");
      const kind = `${precision} ${part === "ffn" ? layer.tp : 1}`;
      if (!isFirst && column.kinds[i] !== kind) this.#flash(column.halves[i]);
      column.kinds[i] = kind;
      attribute(column.halves[i], "data-kind", precision);
    });
    column.element.classList.toggle("is-pending", isPending);
    const degree = layer.tp > 1 ? `, degree ${layer.tp}` : "";
    const words = `Layer ${number}: attention ${layer.attention}, FFN ${layer.ffn}${degree}${isPending ? ", about to change" : ""}`;
    attribute(column.element, "aria-label", words);
    attribute(column.element, "title", words);
  }

  #flash(half) {
    half.classList.remove("has-changed");
    void half.offsetWidth; // restarts the animation
    half.classList.add("has-changed");
  }

  #toggle(index) {
    const number = this.offset + index;
    if (!this.chosen.delete(number)) this.chosen.add(number);
    this.choose(this.chosen);
    this.#focus(index, false);
    this.onChoose(this.instance.id, [...this.chosen].sort((a, b) => a - b));
  }

  #focus(index, isMoved = true) {
    this.columns.forEach(({ element }, i) => { element.tabIndex = i === index ? 0 : -1; });
    if (isMoved) this.columns[index].element.focus();
  }

  #key(event) {
    const now = this.columns.findIndex(({ element }) => element === document.activeElement);
    const last = this.columns.length - 1;
    const to = { ArrowRight: Math.min(last, now + 1), ArrowLeft: Math.max(0, now - 1), Home: 0, End: last }[event.key];
    if (to !== undefined) this.#focus(to);
    else if (event.key === " " || event.key === "Enter") this.#toggle(now);
    else return;
    event.preventDefault();
  }
}
