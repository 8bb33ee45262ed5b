// A device's memory as cells on a canvas, each some pages of one kind. A cell that changes its kind grows into
// the new one. Nothing is drawn while nothing changes.

import { h, isCalm } from "./dom.js";
import { cells } from "./shape.js";
import { tables } from "./tables.js";

const CELL = 9; // CSS pixels with the gap
const GAP = 2;
const ROWS = 9;
const CHANGE_MS = 500;

export class PageMap {
  constructor() {
    this.canvas = h("canvas.pages", { role: "img" });
    this.kinds = [];
    this.before = [];
    this.changedAt = 0;
    this.frame = 0;
    this.resized = new ResizeObserver(() => this.#resize());
    this.resized.observe(this.canvas);
  }

  update(list, label) {
    this.list = list;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
    if (this.columns) this.#fill();
  }

  /** Paints again, in other colours. */
  repaint() {
    this.colours = null;
    this.#paint(1);
  }

  remove() {
    this.resized.disconnect();
    cancelAnimationFrame(this.frame);
  }

  #resize() {
    const columns = Math.floor((this.canvas.clientWidth + GAP) / CELL);
    if (columns < 4 || columns === this.columns) return;
    this.columns = columns;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = this.canvas.clientWidth * scale;
    this.canvas.height = (ROWS * CELL - GAP) * scale;
    this.kinds = [];
    if (this.list) this.#fill();
  }

  #fill() {
    const now = cells(this.list, this.columns * ROWS);
    if (now.length === this.kinds.length && now.every((kind, i) => kind === this.kinds[i])) return;
    const isNew = now.length !== this.kinds.length;
    this.before = isNew ? now : this.kinds;
    this.kinds = now;
    cancelAnimationFrame(this.frame);
    if (isNew || isCalm() || document.hidden) this.#paint(1);
    else {
      this.changedAt = performance.now();
      this.frame = requestAnimationFrame((at) => this.#step(at));
    }
  }

  #step(at) {
    const part = Math.min(1, Math.max(0, (at - this.changedAt) / CHANGE_MS));
    this.#paint(part);
    if (part < 1) this.frame = requestAnimationFrame((next) => this.#step(next));
  }

  /** Fills column by column, so that a share of the memory is a share of the width. */
  #paint(part) {
    if (!this.columns || !this.kinds.length) return;
    this.colours ??= coloursOf(this.canvas);
    const scale = window.devicePixelRatio || 1;
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    const stretch = (this.canvas.clientWidth + GAP) / (this.columns * CELL);
    this.kinds.forEach((kind, i) => {
      const x = Math.floor(i / ROWS) * CELL * stretch;
      const y = (i % ROWS) * CELL;
      const width = CELL * stretch - GAP;
      if (kind === this.before[i] || part === 1) {
        this.#cell(context, x, y, width, CELL - GAP, kind);
        return;
      }
      this.#cell(context, x, y, width, CELL - GAP, this.before[i]);
      const size = 1 - (1 - part) ** 3;
      const height = (CELL - GAP) * size;
      context.clearRect(x, y, width * size, height);
      this.#cell(context, x, y, width * size, height, kind);
    });
  }

  #cell(context, x, y, width, height, kind) {
    context.fillStyle = this.colours[kind];
    context.fillRect(x, y, width, height);
    if (kind === "other") { // marked by a stroke, not by colour alone
      context.strokeStyle = this.colours.free;
      context.beginPath();
      context.moveTo(x, y + height);
      context.lineTo(x + width, y);
      context.stroke();
    }
  }
}

function coloursOf(element) {
  const style = getComputedStyle(element);
  const kinds = [...tables.precisions.map(({ name }) => name), "rest", "kv-used", "kv-free", "other", "free"];
  return Object.fromEntries(kinds.map((kind) => [kind, style.getPropertyValue(`--${kind}`).trim()]));
}
