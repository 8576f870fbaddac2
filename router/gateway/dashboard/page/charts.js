// Charts of the last minutes, drawn as SVG. A pointer or the arrow keys read a second of them.

import { h, keyed, s, text } from "./dom.js";
import { NONE, percent, rate, seconds as time } from "./format.js";
import { SPAN, firstToken, hitRate } from "./seconds.js";

const [WIDTH, HEIGHT] = [300, 96];
const perSecond = (name, span) => (sum) => sum[name] / span;

// `of` are lines, each with a name, what is read of how many seconds, and how it is drawn. A `base` is the line under it.
const CHARTS = [
  { name: "Hit rate", format: percent, top: () => 1, of: [["hit rate", 10, hitRate, "area"]] },
  { name: "First token", format: time, of: [["p99", 20, firstToken(0.99), "dashed"], ["p50", 20, firstToken(0.5), "line"]] },
  {
    name: "Prompt tokens/s",
    format: rate,
    joint: " ",
    of: [["of", 5, perSecond("prompt_tokens", 5), "line"], ["saved", 5, perSecond("cached_tokens", 5), "area"]],
  },
  { name: "Tokens out/s", format: rate, of: [["tokens", 5, perSecond("output_tokens", 5), "area"]] },
];

export class Charts {
  constructor(element) {
    this.element = element;
    this.charts = CHARTS.map((chart) => new Chart(chart));
    element.append(...this.charts.map((chart) => chart.element));
  }

  show(seconds) {
    for (const chart of this.charts) chart.show(seconds);
  }
}

class Chart {
  constructor({ name, format, of, top, joint = " · " }) {
    Object.assign(this, { name, format, of, top, joint, at: null, series: [] });
    this.svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: "0" });
    this.lines = s("g");
    this.cursor = s("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.svg.append(s("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2 }), this.lines, this.cursor);
    this.caption = h("figcaption", {}, h("b", {}, name), h("span", { class: "muted" }));
    this.scale = h("span");
    const ends = h("div", { class: "ends muted small" }, h("span", {}, "5 min ago"), this.scale, h("span", {}, "now"));
    this.element = h("figure", {}, this.caption, this.svg, ends);
    this.svg.addEventListener("pointermove", (event) => this.read(((event.offsetX / this.svg.clientWidth) * SPAN) | 0));
    this.svg.addEventListener("pointerleave", () => this.read(null));
    this.svg.addEventListener("blur", () => this.read(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    this.read((this.at ?? SPAN - 1) + by);
  }

  read(at) {
    this.at = at === null ? null : Math.max(0, Math.min(SPAN - 1, at));
    this.words();
  }

  show(seconds) {
    this.series = this.of.map(([, span, read]) => seconds.series(span, read));
    const most = Math.max(...this.series.flat().filter((value) => value !== null), 0);
    const top = this.top ? this.top() : nice(most);
    keyed(this.lines, this.of.map((line, place) => ({ kind: line[3], values: this.series[place], place })), (one) => one.place, (one) => s("g", { class: one.kind }, s("path", { class: "under" }), s("path", { class: "stroke" })), (group, one) => {
      const [stroke, under] = path(one.values, top);
      group.children[0].setAttribute("d", one.kind === "area" ? under : "");
      group.children[1].setAttribute("d", stroke);
    });
    text(this.scale, most || this.top ? `up to ${this.format(top)}` : "");
    this.words();
  }

  words() {
    const at = this.at ?? SPAN - 1;
    const values = this.of.map(([name], place) => [name, this.series[place]?.[at] ?? null]);
    const shown = values.map(([name, value]) => `${this.of.length > 1 ? `${name} ` : ""}${value === null ? NONE : this.format(value)}`).reverse().join(this.joint);
    const when = this.at === null ? "" : ` (${SPAN - at} s ago)`;
    text(this.caption.children[1], shown + when);
    this.svg.setAttribute("aria-label", `${this.name}: ${shown}${when}`);
    const x = ((at + 0.5) / SPAN) * WIDTH;
    this.cursor.setAttribute("visibility", this.at === null ? "hidden" : "visible");
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
  }
}

// Lines through what there is, with gaps where there is nothing, and the areas under them.
function path(values, top) {
  let stroke = "";
  let under = "";
  let from = null;
  values.forEach((value, place) => {
    const x = (((place + 0.5) / SPAN) * WIDTH).toFixed(1);
    if (value !== null) {
      const y = (HEIGHT - 2 - (Math.min(value, top) / top) * (HEIGHT - 6)).toFixed(1);
      stroke += `${from === null ? "M" : "L"}${x} ${y}`;
      under += from === null ? `M${x} ${HEIGHT}L${x} ${y}` : `L${x} ${y}`;
      from ??= x;
    }
    if (from !== null && (value === null || place === values.length - 1)) {
      under += `L${x} ${HEIGHT}Z`;
      if (value === null) from = null;
    }
  });
  return [stroke, under];
}

// The next round number.
function nice(value) {
  if (!value) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 7.5, 10].map((step) => step * power).find((step) => step >= value);
}
