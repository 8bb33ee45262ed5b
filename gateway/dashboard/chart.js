// One small chart over time: uPlot in this page's colours, with a line for an objective and marks for decisions.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { attribute, h, text } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 118;
const NEAR_PX = 6;
const sync = uPlot.sync("time");

export class Chart {
  /** spec: {title, unit(value), series: [{name, colour, value(point), isArea, isStepped}], slo(), floor} */
  constructor(spec, onPoint) {
    this.spec = spec;
    this.onPoint = onPoint;
    this.values = spec.series.map(() => h("b"));
    this.objective = h("span.slo", { hidden: true });
    const keys = spec.series.map((one, i) =>
      h("span.key", {}, h("i.swatch", { "data-kind": one.colour }), h("span", {}, one.name), this.values[i]));
    this.box = h("div.plot", { role: "img" });
    this.element = h("figure.chart", {}, h("figcaption", {}, h("h3", {}, spec.title), ...keys, this.objective), this.box);
    this.data = [[], ...spec.series.map(() => [])];
    this.marks = [];
    this.sized = new ResizeObserver(() => this.plot?.setSize({ width: this.box.clientWidth, height: HEIGHT }));
  }

  /** Draws the chart, also after the colours changed. */
  build() {
    this.plot?.destroy();
    this.style = getComputedStyle(this.box);
    this.plot = new uPlot(this.#options(), this.data, this.box);
    this.plot.over.addEventListener("mousemove", () => this.#hover());
    this.plot.over.addEventListener("mouseleave", () => this.onPoint(null));
    this.sized.observe(this.box);
  }

  update(points, from, to, marks) {
    this.from = from;
    this.to = to;
    this.marks = marks;
    this.data = [points.map((point) => point.at), ...this.spec.series.map(({ value }) => points.map(value))];
    if (!this.plot) this.build();
    this.plot.setData(this.data);
    this.#showValues();
  }

  /** Highlights the mark of a decision; null: of none. */
  highlight(decision) {
    this.pointed = decision?.id ?? null;
    this.plot?.redraw(false, false);
  }

  #colour(name) {
    return this.style.getPropertyValue(`--${name}`).trim();
  }

  #options() {
    const [line, ink] = [this.#colour("line"), this.#colour("muted")];
    const font = `11px ${this.style.fontFamily}`;
    const common = { stroke: ink, font, grid: { stroke: line, width: 1 }, ticks: { show: false } };
    return {
      width: this.box.clientWidth,
      height: HEIGHT,
      padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: sync.key }, drag: { x: false, y: false }, y: false, points: { size: 6 } },
      scales: { x: { time: true, range: () => [this.from, this.to] }, y: { range: (_, low, high) => this.#range(high) } },
      axes: [
        { ...common, space: 70, size: 25, gap: 7, values: (_, at) => at.map((one) => clock(one).slice(0, at[1] - at[0] < 60 ? 8 : 5)) },
        { ...common, space: 28, size: 48, gap: 4, values: (_, all) => all.map((one) => this.spec.unit(one)) },
      ],
      series: [{}, ...this.spec.series.map((one) => this.#series(one))],
      hooks: { draw: [() => this.#decorate()], setCursor: [() => this.#showValues()] },
    };
  }

  #series({ colour, isArea, isStepped }) {
    const stroke = this.#colour(colour);
    return {
      stroke,
      width: 1.5,
      fill: isArea ? `${stroke}2e` : undefined,
      paths: isStepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      points: { show: false },
    };
  }

  /** The scale: from 0, and up to the objective where that is near. */
  #range(high) {
    const top = Math.max((high ?? 0) * 1.15, this.spec.floor);
    const slo = this.spec.slo?.() ?? null;
    return [0, slo !== null && slo <= top * 4 ? Math.max(top, slo * 1.15) : top];
  }

  #decorate() {
    const { ctx, bbox } = this.plot;
    const scale = devicePixelRatio || 1;
    const slo = this.spec.slo?.() ?? null;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const { id, at, glyph } of this.marks) {
      const x = Math.round(this.plot.valToPos(at, "x", true)) + 0.5;
      const isPointed = id === this.pointed;
      line(ctx, x, bbox.top, x, bbox.top + bbox.height, this.#colour(glyph), (isPointed ? 2 : 1) * scale, isPointed ? 1 : 0.4, []);
    }
    if (slo !== null) {
      const y = Math.round(this.plot.valToPos(slo, "y", true)) + 0.5;
      line(ctx, bbox.left, y, bbox.left + bbox.width, y, this.#colour("slo"), scale, 1, [5 * scale, 4 * scale]);
    }
    ctx.restore();
  }

  /** Shows the values at the cursor, or the latest. */
  #showValues() {
    const { idx } = this.plot.cursor;
    const at = idx ?? this.data[0].length - 1;
    const slo = this.spec.slo?.() ?? null;
    const values = this.spec.series.map((one, i) => {
      const value = this.data[i + 1][at];
      text(this.values[i], this.spec.unit(value));
      this.values[i].classList.toggle("is-over", slo !== null && value > slo);
      return `${one.name} ${this.spec.unit(value)}`;
    });
    this.objective.hidden = slo === null;
    if (slo !== null) text(this.objective, `SLO ${this.spec.unit(slo)}`);
    if (idx === null || idx === undefined) attribute(this.box, "aria-label", `${this.spec.title} now: ${values.join(", ")}`);
  }

  #hover() {
    const { left } = this.plot.cursor;
    const near = this.marks
      .map((one) => ({ id: one.id, away: Math.abs(this.plot.valToPos(one.at, "x") - left) }))
      .filter(({ away }) => away <= NEAR_PX)
      .sort((a, b) => a.away - b.away);
    this.onPoint(near[0]?.id ?? null);
  }
}

function line(ctx, x0, y0, x1, y1, colour, width, alpha, dash) {
  ctx.globalAlpha = alpha;
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.setLineDash(dash);
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
}
