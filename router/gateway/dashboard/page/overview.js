// The overview: headline, map and charts.

import { Charts } from "./charts.js";
import { $, h, keyed, text } from "./dom.js";
import { count, percent, plural, quantile, rate, seconds as time } from "./format.js";
import { ClusterMap } from "./map.js";
import { Seconds, hitRate } from "./seconds.js";

export class Overview {
  constructor(show) {
    this.seconds = new Seconds();
    this.map = new ClusterMap($("map"), show);
    this.charts = new Charts($("charts"));
    this.ringOf = null;
  }

  async refresh(ask) {
    const picture = await ask("cluster", { since: this.seconds.since });
    this.seconds.take(picture.seconds, picture.now);
    const names = picture.workers.map((one) => `${one.name} ${one.role}`).join();
    if (names !== this.ringOf) {
      this.map.ring(await ask("ring"));
      this.ringOf = names;
    }
    text($("model"), picture.model);
    this.notice(picture);
    this.headline(picture.total);
    this.map.show(picture, this.seconds);
    this.charts.show(this.seconds);
  }

  notice(picture) {
    const dead = picture.workers.filter((one) => one.state === "dead").map((one) => one.name);
    const words = !picture.ready ? "The cluster is not ready: no worker of each role can serve." : dead.length ? `Not alive: ${dead.join(", ")}.` : "";
    $("notice").hidden = !words;
    text($("notice"), words);
  }

  headline(total) {
    const minute = this.seconds.window(60);
    const lately = this.seconds.window(10);
    const first = (part) => time(quantile(minute.first_s, part));
    const figures = [
      ["Hit rate", percent(hitRate(minute)), `of prompt tokens, last minute; ${percent(hitRate(total))} since start`],
      ["Tokens saved", count(total.cached_tokens), `of ${count(total.prompt_tokens)} prompt tokens; ${rate(lately.cached_tokens / 10)}/s now`],
      ["Requests", `${rate(lately.requests / 10)}/s`, `${plural(total.answered, "answer")} since start${total.failed ? `, ${count(total.failed)} failed` : ""}`],
      ["Tokens out", `${rate(lately.output_tokens / 10)}/s`, `${count(total.output_tokens)} since start`],
      ["First token", first(0.5), `median, last minute; p99 ${first(0.99)}`],
    ];
    const make = ([name]) => h("div", {}, h("dt", {}, name), h("dd", { class: "figure" }), h("dd", { class: "muted small" }));
    keyed($("headline"), figures, ([name]) => name, make, (element, [, value, more]) => {
      text(element.children[1], value);
      text(element.children[2], more);
    });
  }
}
