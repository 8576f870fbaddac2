// The radix tree of a worker as a picture: to the right the tokens of a prompt go on, from top to bottom lie those who
// share what is left of them. How tall one is says how many tokens are behind it.

import { $, h, s, text } from "./dom.js";
import { count, percent, plural, share } from "./format.js";

const EVERY_MS = 2000;
const HEIGHT = 520;
const THIN = 1.2; // of less than so many pixels nothing is drawn
const STEPS = 5;
const SHADES = {
  recent: "the stronger the later used, dotted where only a lower tier has them",
  uses: "the stronger the more often used, dotted where only a lower tier has them",
  tier: "full on the device, striped where host memory has them, dotted where only the disk has",
};

export class Tree {
  constructor() {
    this.path = [];
    this.names = [];
    this.chosen = null;
    this.asked = 0;
    this.workers = "";
    $("tree-worker").addEventListener("change", () => this.to([]));
    $("tree-shade").addEventListener("change", () => this.draw());
    $("tree").addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.found && this.draw()).observe($("tree"));
  }

  open() {}

  async refresh(ask) {
    const now = performance.now();
    if (now - this.asked < EVERY_MS - 100) return;
    this.asked = now;
    const { workers, model } = await ask("cluster", { since: Math.floor(Date.now() / 1000) + 3600 });
    text($("model"), model);
    this.offer(workers);
    const worker = $("tree-worker").value;
    const path = this.path.join(".");
    if (!worker) return this.empty("There are no workers.");
    this.again = () => this.refresh(ask);
    const found = await ask(`trees/${encodeURIComponent(worker)}`, { path });
    if (worker !== $("tree-worker").value || path !== this.path.join(".")) return; // meanwhile something else is wanted
    this.found = found;
    this.path = found.path;
    this.names.length = this.path.length;
    this.draw();
  }

  offer(workers) {
    const names = workers.map((one) => one.name).join();
    if (names === this.workers) return;
    const kept = $("tree-worker").value;
    this.workers = names;
    $("tree-worker").replaceChildren(...workers.map((one) => h("option", { value: one.name }, `${one.name} (${one.role})`)));
    if (workers.some((one) => one.name === kept)) $("tree-worker").value = kept;
  }

  to(path, names = this.names.slice(0, path.length)) {
    Object.assign(this, { path, names, chosen: null, asked: 0 });
    this.again?.().catch(() => {}); // the loop says what is wrong
  }

  empty(words) {
    this.found = null;
    $("tree").replaceChildren(h("p", { class: "notice" }, words));
    $("tree-detail").replaceChildren();
    text($("tree-note"), "");
  }

  // --- what is drawn ------------------------------------------------------------------------------------------------

  draw() {
    const runs = this.found.runs;
    this.crumbs();
    if (runs.length === 1 && !runs[0].tokens) return this.empty("Nothing is cached here yet.");
    const more = this.found.whole ? "" : " Deep parts were not looked at: open one to see them.";
    text($("tree-note"), `${plural(runs[0].below, "token")} in ${plural(this.found.seen, "run")}; ${runs.length < this.found.seen ? `the ${runs.length} largest` : "all"} are shown, ${SHADES[$("tree-shade").value]}.${more} Looking took the engine ${(1000 * this.found.seconds).toFixed(1)} ms.`);
    this.place(runs);
    const wide = Math.max(280, $("tree").clientWidth);
    const focused = document.activeElement?.closest?.("#tree g")?.dataset.key;
    const svg = s("svg", { viewBox: `0 0 ${wide} ${HEIGHT}`, role: "tree", "aria-label": "Cached prefixes", class: "tree" }, pattern());
    this.deepest = Math.max(1, ...runs.map((run) => run.x + run.tokens));
    this.items = runs.filter((run) => run.tall >= THIN && run.tokens);
    this.chosen = this.items.find((run) => run.key && run.key === this.chosen?.key) ?? this.items[0] ?? null;
    for (const run of this.items) svg.append(this.box(run, wide));
    $("tree").replaceChildren(svg);
    if (focused !== undefined) this.focus();
    this.detail();
  }

  // Where each run is: `x` in tokens, `y` and `tall` in pixels.
  place(runs) {
    for (const run of runs) run.inside = [];
    runs.forEach((run, number) => number && runs[run.parent].inside.push(run));
    Object.assign(runs[0], { x: 0, y: 0, tall: HEIGHT, depth: 0 });
    for (const run of runs) {
      const behind = Math.max(1, run.below - run.tokens);
      let y = run.y;
      for (const one of run.inside.sort((a, b) => b.below - a.below)) {
        const tall = (run.tall * one.below) / behind;
        Object.assign(one, { x: run.x + run.tokens, y, tall, up: run, depth: run.depth + 1 });
        y += tall;
      }
    }
  }

  box(run, wide) {
    const x = (run.x / this.deepest) * wide;
    const width = Math.max(2, (run.tokens / this.deepest) * wide);
    const shade = this.shade(run);
    const chosen = run === this.chosen;
    const group = s("g", { role: "treeitem", "aria-level": run.depth, "aria-label": words(run), "aria-selected": chosen, tabindex: chosen ? 0 : -1, "data-key": run.key, class: `run ${shade}` });
    group.append(s("rect", { x: x + 0.5, y: run.y + 0.5, width: Math.max(1, width - 1), height: Math.max(0.8, run.tall - 1), rx: Math.min(2, run.tall / 4) }));
    if (run.tall >= 15 && width > 46) {
      const room = Math.floor((width - 10) / 6.3);
      const label = run.text?.trim().replace(/\s+/g, " ") || `${count(run.tokens)} tokens`;
      group.append(s("text", { x: x + 6, y: run.y + Math.min(run.tall / 2 + 4, 15) }, label.length > room ? `${label.slice(0, Math.max(1, room - 1))}…` : label));
    }
    group.append(s("title", {}, words(run)));
    group.addEventListener("click", () => this.choose(run));
    group.addEventListener("dblclick", () => this.enter(run));
    run.element = group;
    return group;
  }

  shade(run) {
    const by = $("tree-shade").value;
    if (by === "tier") return run.device === run.tokens ? "on-device" : run.host ? "on-host" : "on-disk";
    if (!run.device) return "cold below-device";
    const values = this.items.filter((one) => one.device).map((one) => (by === "uses" ? one.uses : -one.ago));
    const mine = by === "uses" ? run.uses : -run.ago;
    const rank = values.filter((value) => value < mine).length / Math.max(1, values.length - 1);
    return `heat${Math.min(STEPS - 1, Math.floor(rank * STEPS))}`;
  }

  crumbs() {
    const names = ["all trees", ...this.names];
    const links = names.map((name, place) => {
      const last = place === names.length - 1;
      return h("button", { class: "line", "aria-current": last ? "location" : null, onclick: () => this.to(this.path.slice(0, place)) }, name);
    });
    $("crumbs").replaceChildren(...links);
  }

  detail() {
    const run = this.chosen;
    if (!run) return $("tree-detail").replaceChildren();
    const whose = this.tree(run);
    const facts = [
      ["tokens", count(run.tokens)],
      ["begins at", count(this.found.start + run.x)],
      ["with all behind it", count(run.below)],
      ["on the device", percent(share(run.device, run.tokens))],
      ["in host memory", percent(share(run.host, run.tokens))],
      ["on disk", percent(share(run.disk, run.tokens))],
      ["used", run.uses ? `${plural(run.uses, "time")}, last ${count(run.ago)} uses ago` : "not since it left the device"],
      ["in use now by", count(run.pins)],
      ["goes on in", `${plural(run.children, "way")}${run.hidden ? `, ${run.hidden} of them too small to be shown` : ""}`],
    ];
    if (whose) facts.unshift(["tenant", whose]);
    const enter = run.key && run.children ? h("button", { onclick: () => this.enter(run) }, "Look closer") : null;
    const words = run.text === null ? h("p", { class: "muted small" }, "What it says is for operators.") : h("pre", {}, run.text);
    $("tree-detail").replaceChildren(h("h3", {}, "Chosen prefix"), list(facts), ...(enter ? [enter] : []), words);
  }

  tree(run) {
    for (let at = run; at; at = at.up) if (at.tenant !== undefined) return name(at);
    return "";
  }

  // --- what people do -----------------------------------------------------------------------------------------------

  choose(run) {
    this.chosen?.element?.setAttribute("tabindex", -1);
    this.chosen?.element?.setAttribute("aria-selected", false);
    this.chosen = run;
    this.focus();
    this.detail();
  }

  focus() {
    const element = this.chosen?.element;
    element?.setAttribute("tabindex", 0);
    element?.setAttribute("aria-selected", true);
    element?.focus({ preventScroll: true });
  }

  enter(run) {
    if (!run.key || !run.children) return;
    const steps = [];
    for (let at = run; at && at !== this.found.runs[0]; at = at.up) steps.unshift(at);
    if (steps.some((one) => !one.key)) return;
    const names = steps.map((one) => (one.tokens ? `${count(one.tokens)} tokens` : name(one)));
    this.to([...this.path, ...steps.map((one) => one.key)], [...this.names, ...names]);
  }

  key(event) {
    const run = this.chosen;
    if (!run) return;
    const beside = (by) => {
      const column = run.up?.inside.filter((one) => this.items.includes(one)) ?? [];
      return column[column.indexOf(run) + by];
    };
    const to = {
      ArrowRight: () => run.inside.find((one) => this.items.includes(one)),
      ArrowLeft: () => (this.items.includes(run.up) ? run.up : undefined),
      ArrowDown: () => beside(1) ?? this.items[this.items.indexOf(run) + 1],
      ArrowUp: () => beside(-1) ?? this.items[this.items.indexOf(run) - 1],
    }[event.key];
    if (event.key === "Enter") this.enter(run);
    else if (event.key === "Backspace") this.to(this.path.slice(0, -1));
    else if (!to) return;
    else if (to()) this.choose(to());
    event.preventDefault();
  }
}

const list = (facts) => h("dl", { class: "facts" }, ...facts.flatMap(([term, value]) => [h("dt", {}, term), h("dd", {}, value)]));
const name = (root) => (root.tenant || "shared by all") + (root.salted ? ", with a salt" : "");

function words(run) {
  const uses = run.uses ? `, used ${plural(run.uses, "time")}` : ", not on the device";
  return `${plural(run.tokens, "token")}${uses}, ${plural(run.children, "way")} on. ${run.text?.trim().slice(0, 80) ?? ""}`;
}

function pattern() {
  const lines = s("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, s("rect", { width: 6, height: 6, class: "hatch-ground" }), s("rect", { width: 2, height: 6, class: "hatch-line" }));
  const dots = s("pattern", { id: "dots", width: 7, height: 7, patternUnits: "userSpaceOnUse" }, s("rect", { width: 7, height: 7, class: "hatch-ground" }), s("circle", { cx: 3, cy: 3, r: 1.3, class: "hatch-line" }));
  return s("defs", {}, lines, dots);
}
