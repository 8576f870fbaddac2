// The last requests, and of one what was planned and when what happened.

import { $, h, keyed, text } from "./dom.js";
import { NONE, clock, count, percent, plural, seconds, share } from "./format.js";

const KINDS = { planned: "planned", sent: "sent", "first token": "first token", transferred: "KV has arrived", lost: "attempt lost", busy: "was busy", stale: "held less than believed" };

const WIDE = matchMedia("(min-width: 981px)"); // list and details side by side

export class Requests {
  constructor() {
    this.chosen = null;
    this.detail = null;
  }

  open(one) {
    this.chosen = { gateway: one.gateway, number: one.number };
    this.detail = null;
  }

  async refresh(ask) {
    this.ask = ask;
    const { requests } = await ask("requests");
    $("request-none").hidden = requests.length > 0;
    $("request-list").hidden = !requests.length;
    const body = $("request-list").tBodies[0];
    keyed(body, requests, (one) => `${one.gateway}/${one.number}`, () => this.row(), (row, one) => this.update(row, one));
    if (!this.chosen && requests.length && WIDE.matches) this.open(requests[0]);
    await this.look();
  }

  row() {
    const cells = ["when", "prompt", "workers", "tokens", "cached", "first token", "answer"].map((name) => h("td", { "data-name": name }));
    cells[1].append(h("button", { class: "line" }));
    return h("tr", {}, ...cells);
  }

  update(row, one) {
    const button = row.children[1].firstElementChild;
    const mine = this.chosen?.gateway === one.gateway && this.chosen?.number === one.number;
    row.classList.toggle("chosen", mine);
    button.setAttribute("aria-pressed", mine);
    button.onclick = () => {
      this.open(one);
      for (const other of row.parentElement.children) other.classList.toggle("chosen", other === row);
      this.look().then(() => WIDE.matches || $("request-detail").scrollIntoView({ block: "start" }), () => {}); // the loop says what is wrong
    };
    text(row.children[0], clock(one.at));
    text(button, one.label === null ? one.name || `request ${one.number}` : one.label);
    text(row.children[2], workers(one));
    text(row.children[3], count(one.prompt_tokens));
    text(row.children[4], one.first_s === null ? NONE : percent(share(one.cached_tokens, one.prompt_tokens)));
    text(row.children[5], seconds(one.first_s));
    text(row.children[6], ending(one));
    row.dataset.state = one.ended === "failed" ? "failed" : one.ended ? "over" : "running";
  }

  async look() {
    const wanted = this.chosen;
    if (!wanted || (this.detail?.ended && this.detail.number === wanted.number && this.detail.gateway === wanted.gateway)) return;
    try {
      const one = await this.ask(`requests/${encodeURIComponent(wanted.gateway)}/${wanted.number}`);
      if (wanted !== this.chosen) return;
      this.detail = one;
      $("request-detail").replaceChildren(...whole(one));
    } catch (error) {
      if (error.status !== 404) throw error;
      $("request-detail").replaceChildren(h("p", { class: "notice" }, "This request is not remembered any more."));
    }
  }
}

const workers = (one) => (one.prefill === null ? NONE : one.decode ? `${one.prefill} → ${one.decode}` : one.prefill);

function ending(one) {
  if (one.ended === "failed") return `failed: ${one.error}`;
  const tokens = plural(one.output_tokens, "token");
  return one.ended ? `${tokens}, ${one.ended}` : `${tokens} …`;
}

function* whole(one) {
  yield h("h3", {}, one.label === null ? "Request" : one.label);
  const loaded = one.from_host + one.from_disk ? `, ${count(one.from_host)} from host memory, ${count(one.from_disk)} from disk` : "";
  yield facts([
    ["id", one.name || NONE],
    ["tenant", one.tenant || NONE],
    ["gateway", one.gateway],
    ["prompt", `${plural(one.prompt_tokens, "token")}, ${count(one.cached_tokens)} cached${loaded}`],
    ["answer", ending(one)],
    ["took", one.ended_s === null ? "still running" : seconds(one.ended_s)],
  ]);
  yield h("h4", {}, "Timeline");
  yield bars(one);
  yield h("ol", { class: "events" }, ...events(one).map(([at, words]) => h("li", {}, h("span", { class: "muted" }, seconds(at)), h("span", {}, words))));
  const plans = one.events.filter((event) => event.what === "planned");
  for (const [place, event] of plans.entries()) {
    yield h("h4", {}, plans.length > 1 ? `Plan ${place + 1}` : "Plan");
    yield facts(planned(event.plan, one));
  }
  if (one.head !== null) {
    yield h("h4", {}, one.tail === null ? "Prompt" : "How the prompt begins and ends");
    yield h("pre", {}, one.tail === null ? one.head : `${one.head}\n…\n${one.tail}`);
  }
}

// What the time went to, as parts of one bar: until there was a plan, until the first token, until the end.
function bars(one) {
  const last = one.ended_s ?? one.now_s;
  const begun = one.events.find((event) => event.what === "sent")?.s ?? 0;
  const marks = [["plan", 0, begun], ["prompt", begun, one.first_s ?? last], ["answer", one.first_s ?? last, last]];
  const parts = marks.filter(([, from, to]) => to > from).map(([name, from, to]) => {
    const words = `${name} ${seconds(to - from)}`;
    const bar = h("i", { class: name, title: words }, to - from > last / 4 ? h("span", {}, words) : null);
    bar.style.width = `${(100 * (to - from)) / last}%`;
    return bar;
  });
  return h("div", { class: "bars", role: "img", "aria-label": parts.map((bar) => bar.title).join(", ") }, ...parts);
}

function events(one) {
  const rows = [[0, "came"]];
  for (const event of one.events) {
    const kind = KINDS[event.what] ?? event.what;
    const more = {
      planned: () => `: ${workers(event.plan)}`,
      sent: () => ` to ${event.worker}`,
      transferred: () => ` at ${event.worker}, from ${event.sender}`,
      "first token": () => `: ${count(event.cached_tokens)} of ${count(one.prompt_tokens)} prompt tokens were cached`,
      lost: () => `: ${event.why}`,
    }[event.what];
    rows.push([event.s, kind + (more ? more() : event.worker ? ` (${event.worker})` : "")]);
  }
  if (one.ended_s !== null) rows.push([one.ended_s, one.ended === "failed" ? `failed: ${one.error}` : `over after ${plural(one.output_tokens, "token")}: ${one.ended}`]);
  return rows;
}

function planned(plan, one) {
  const { why } = plan;
  const rows = [["computes", plan.prefill], ["answers", plan.decode ?? plan.prefill]];
  if (plan.fetch) rows.push(["copies from", `${plan.fetch.worker}: ${count(plan.fetch.tokens)} tokens, ${seconds(plan.fetch.seconds)} expected`]);
  rows.push(["believed cached", `${count(plan.cached)} of ${count(one.prompt_tokens)} tokens`]);
  if (why.home) rows.push(["home", why.home + (why.homes > 1 ? ` (one of ${why.homes})` : "")]);
  if (why.candidates) rows.push(["workers compared", count(why.candidates)]);
  if (why.wait !== undefined) rows.push(["wait, then work", `${seconds(why.wait)}, ${seconds(why.seconds)}`]);
  if (why.cost !== undefined) rows.push(["cost", why.cost.toFixed(3)]);
  for (const [name, value] of Object.entries(why.until_decode ?? {})) rows.push([`if ${name} computes`, seconds(value)]);
  for (const [name, tiers] of Object.entries(why.tiers ?? {})) rows.push([`held by ${name}`, Object.entries(tiers).map(([tier, tokens]) => `${tier} ${count(tokens)}`).join(", ")]);
  return rows;
}

const facts = (rows) => h("dl", { class: "facts" }, ...rows.flatMap(([term, value]) => [h("dt", {}, term), h("dd", {}, value)]));
