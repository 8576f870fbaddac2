// What happened in the last minutes, second by second: what the gateways remember, and then what was seen since.

import { quantile, share } from "./format.js";

export const SPAN = 300;
const EMPTY = { requests: 0, answered: 0, failed: 0, prompts: 0, prompt_tokens: 0, cached_tokens: 0, output_tokens: 0, first_s: [], handed: {} };

export class Seconds {
  constructor() {
    this.byAt = new Map();
    this.now = 0;
  }

  // From which second on to ask: the last ones may still have grown.
  get since() {
    return this.byAt.size ? Math.max(...this.byAt.keys()) - 3 : 0;
  }

  take(seconds, now) {
    this.now = Math.floor(now);
    for (const one of seconds) this.byAt.set(one.at, one);
    for (const at of this.byAt.keys()) if (at < this.now - SPAN - 10) this.byAt.delete(at);
  }

  // The `span` seconds up to `at`, added up. The one that is now is not over and does not count.
  window(span, at = this.now - 1) {
    const sum = { ...EMPTY, first_s: [], handed: {} };
    for (let second = at - span + 1; second <= at; second += 1) {
      const one = this.byAt.get(second);
      if (!one) continue;
      for (const name of Object.keys(EMPTY)) if (typeof sum[name] === "number") sum[name] += one[name];
      sum.first_s.push(...one.first_s);
      for (const [pair, count] of Object.entries(one.handed)) sum.handed[pair] = (sum.handed[pair] ?? 0) + count;
    }
    return sum;
  }

  // A value for each of the last seconds, from what `read` makes of the `span` seconds before it.
  series(span, read) {
    const values = [];
    for (let at = this.now - SPAN; at < this.now; at += 1) values.push(read(this.window(span, at)));
    return values;
  }
}

export const hitRate = (sum) => share(sum.cached_tokens, sum.prompt_tokens);
export const firstToken = (part) => (sum) => quantile(sum.first_s, part);
