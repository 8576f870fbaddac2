// The map: gateways, the ring of homes, workers with what they serve, and the KV that flows between them.

import { $, h, keyed, s, text } from "./dom.js";
import { bytes, count, percent, plural, share } from "./format.js";

const CARDS = 24;
const LINES = 3;
const LINGER_MS = 4000; // a request is shown a little longer than it runs, or nobody could read it
const RATE_MS = 6000;
const PAIRS_S = 10;

export class ClusterMap {
  constructor(element, show) {
    this.element = element;
    this.open = (one) => show("requests", one);
    this.sent = new Map();
    this.lines = new Map();
    this.marked = null;
    this.arrows = [];
    new ResizeObserver(() => this.draw()).observe(element);
  }

  show(picture, seconds) {
    const now = performance.now();
    for (const one of picture.workers) this.measure(one, now);
    this.remember(picture.running, now);
    this.arrows = this.flows(picture.workers, seconds.window(PAIRS_S).handed);
    keyed($("gateways"), picture.gateways, (one) => one.name, () => h("li", { class: "card" }, h("b"), h("span", { class: "muted" })), (card, one) => {
      text(card.children[0], one.name + (one.name === picture.gateway && picture.gateways.length > 1 ? " (this one)" : ""));
      text(card.children[1], one.answers ? plural(one.in_flight, "prompt under way", "prompts under way") : "does not answer");
    });
    const both = picture.workers.filter((one) => one.role === "both");
    const split = picture.workers.filter((one) => one.role === "decode");
    text($("column-prefill").firstElementChild, both.length ? "Prefill and decode" : "Prefill");
    this.column($("prefill"), picture.workers.filter((one) => one.role !== "decode"));
    this.column($("decode"), split);
    $("column-decode").hidden = !split.length;
    this.draw();
  }

  column(list, workers) {
    keyed(list, workers.slice(0, CARDS), (one) => one.name, (one) => this.card(one), (card, one) => this.update(card, one));
    const more = workers.length - CARDS;
    list.dataset.more = more > 0 ? `and ${more} more` : "";
  }

  card() {
    const bar = h("div", { class: "kv", role: "img" }, h("i", { class: "used" }), h("i", { class: "kept" }));
    const blocks = h("div", { class: "blocks" }, bar, h("span", { class: "small muted" }));
    const head = h("div", { class: "head" }, h("b"), h("span", { class: "state" }));
    return h("li", { class: "card worker" }, head, blocks, h("p", { class: "small" }), h("ul", { class: "to" }), h("ul", { class: "serves" }));
  }

  update(card, one) {
    const [head, blocks, load, to, serves] = card.children;
    const [bar, full] = blocks.children;
    card.dataset.state = one.state;
    card.classList.toggle("marked", this.marked === one.name);
    text(head.children[0], one.name);
    text(head.children[1], one.state);
    if (one.blocks) {
      const { total, cached, pinned, private: own } = one.blocks;
      const used = (pinned + own) / total;
      const kept = (cached - pinned) / total;
      bar.children[0].style.width = `${100 * used}%`;
      bar.children[1].style.width = `${100 * kept}%`;
      bar.setAttribute("aria-label", `KV ${percent(used)} in use, ${percent(kept)} kept for later`);
      const hits = one.prompt_tokens ? ` · ${percent(share(one.cached_tokens, one.prompt_tokens))} hits` : "";
      const below = one.tiers ? ` · ${count(one.tiers.host_cached + one.tiers.disk_cached)} blocks in tiers` : "";
      text(load, `${one.running} running · ${one.waiting} waiting${hits}${below}`);
      text(full, `KV ${percent(used + kept)}`);
    } else {
      text(load, "has not answered yet");
    }
    const flows = this.arrows.filter((flow) => flow.from === one.name);
    keyed(to, flows, (flow) => flow.to, () => h("li"), (line, flow) => text(line, `→ ${flow.to} ${flow.words}`));
    this.serving(serves, one);
  }

  serving(list, worker) {
    const mine = [...this.lines.values()].filter(({ one }) => one.prefill === worker.name || one.decode === worker.name);
    const latest = mine.sort((a, b) => b.one.at - a.one.at).slice(0, LINES);
    const make = () => h("li", {}, h("button", { class: "line" }, h("span", { class: "what" }, h("bdi")), h("span", { class: "muted" })));
    keyed(list, latest, ({ one }) => `${one.gateway}/${one.number}`, make, (item, { one, over }) => {
      const button = item.firstElementChild;
      button.onclick = () => this.open(one);
      item.classList.toggle("over", over);
      text(button.children[0].firstElementChild, one.label ?? `request ${one.number}`);
      text(button.children[1], this.progress(one, worker, over));
    });
  }

  progress(one, worker, over) {
    const cached = one.first_s === null ? "" : `${percent(share(one.cached_tokens, one.prompt_tokens))} saved`;
    const computes = one.prefill === worker.name && one.decode !== null && one.decode !== worker.name;
    if (over) return cached || "over";
    if (one.first_s === null && one.prefill !== worker.name) return `waits for ${one.prefill}`;
    if (one.first_s === null) return `computing ${count(one.prompt_tokens)} tokens`;
    return computes ? cached : `${plural(one.output_tokens, "token")} · ${cached}`;
  }

  remember(running, now) {
    for (const line of this.lines.values()) line.over = true;
    for (const one of running) this.lines.set(`${one.gateway}/${one.number}`, { one, over: false, seen: now });
    for (const [name, line] of this.lines) if (now - line.seen > LINGER_MS) this.lines.delete(name);
  }

  measure(one, now) {
    if (one.sent_bytes === undefined) return;
    const samples = this.sent.get(one.name) ?? [];
    samples.push([now, one.sent_bytes]);
    while (samples.length > 2 && now - samples[1][0] > RATE_MS) samples.shift();
    this.sent.set(one.name, samples);
  }

  rate(name) {
    const samples = this.sent.get(name) ?? [];
    if (samples.length < 2) return 0;
    const [[from, before], [to, after]] = [samples[0], samples.at(-1)];
    return Math.max(0, (1000 * (after - before)) / (to - from));
  }

  // What a worker sends goes to the others in the shares of the prompts that it handed to them.
  flows(workers, handed) {
    const pairs = Object.entries(handed).map(([pair, number]) => [...pair.split(">"), number]);
    const sums = {};
    for (const [from, , number] of pairs) sums[from] = (sums[from] ?? 0) + number;
    const names = new Set(workers.map((one) => one.name));
    const some = pairs.filter(([from, to]) => names.has(from) && names.has(to)).sort((a, b) => b[2] - a[2]).slice(0, 48);
    return some.map(([from, to, number]) => {
      const speed = (this.rate(from) * number) / sums[from];
      return { from, to, speed, words: speed > 0 ? `${bytes(speed)}/s` : `${number} in ${PAIRS_S} s` };
    });
  }

  draw() {
    const svg = $("flows");
    const area = this.element.getBoundingClientRect();
    const place = (name) => this.element.querySelector(`.worker[data-key="${CSS.escape(name)}"]`)?.getBoundingClientRect();
    const most = Math.max(1, ...this.arrows.map((flow) => flow.speed));
    const shown = this.arrows.map((flow) => ({ ...flow, a: place(flow.from), b: place(flow.to) })).filter((flow) => flow.a && flow.b && flow.b.left > flow.a.right + 8);
    svg.setAttribute("viewBox", `0 0 ${area.width} ${area.height}`);
    keyed(svg, shown, (flow) => `${flow.from}>${flow.to}`, () => s("g", {}, s("path", { class: "flow" }), s("path", { class: "tip" })), (group, flow) => {
      const [x, y] = [flow.a.right - area.left, flow.a.top + flow.a.height / 2 - area.top];
      const [u, v] = [flow.b.left - area.left, flow.b.top + flow.b.height / 2 - area.top];
      const middle = (x + u) / 2;
      group.children[0].setAttribute("d", `M${x} ${y}C${middle} ${y} ${middle} ${v} ${u - 7} ${v}`);
      group.children[0].setAttribute("stroke-width", 1.5 + (3 * flow.speed) / most);
      group.children[0].classList.toggle("moves", flow.speed > 0);
      group.children[1].setAttribute("d", `M${u - 8} ${v - 5}L${u} ${v}L${u - 8} ${v + 5}Z`);
    });
  }

  ring({ arcs, shares }) {
    const names = Object.keys(shares).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const circle = s("svg", { viewBox: "-50 -50 100 100", class: "ring", "aria-hidden": "true" });
    const merged = [];
    for (const [end, name] of arcs) {
      if (merged.at(-1)?.name === name) merged.at(-1).end = end;
      else merged.push({ end, name });
    }
    let before = (arcs.at(-1)?.[0] ?? 1) - 1;
    for (const { end, name } of merged) {
      circle.append(s("path", { d: arc(before, end), class: `arc tint${names.indexOf(name) % 4}`, "data-name": name }));
      before = end;
    }
    const list = h("ul", { class: "shares" });
    for (const name of names.slice(0, CARDS)) {
      const button = h("button", { class: "line", "aria-pressed": "false" }, h("i", { class: `swatch tint${names.indexOf(name) % 4}` }), h("span", {}, name), h("span", { class: "muted" }, percent(shares[name])));
      button.onclick = () => this.mark(this.marked === name ? null : name);
      button.dataset.name = name;
      list.append(h("li", {}, button));
    }
    $("ring").replaceChildren(...(arcs.length ? [circle] : []), list);
  }

  // Show where a worker is on the ring.
  mark(name) {
    this.marked = name;
    for (const path of $("ring").querySelectorAll(".arc")) {
      path.classList.toggle("marked", path.dataset.name === name);
      path.classList.toggle("faint", name !== null && path.dataset.name !== name);
    }
    for (const button of $("ring").querySelectorAll("button")) button.setAttribute("aria-pressed", button.dataset.name === name);
    for (const card of this.element.querySelectorAll(".worker")) card.classList.toggle("marked", card.dataset.key === name);
  }
}

function arc(from, to) {
  const point = (turn, radius) => `${(radius * Math.sin(2 * Math.PI * turn)).toFixed(2)} ${(-radius * Math.cos(2 * Math.PI * turn)).toFixed(2)}`;
  const large = to - from > 0.5 ? 1 : 0;
  const end = Math.min(to, from + 0.9999);
  return `M${point(from, 48)}A48 48 0 ${large} 1 ${point(end, 48)}L${point(end, 36)}A36 36 0 ${large} 0 ${point(from, 36)}Z`;
}
