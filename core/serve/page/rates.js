// Rates out of totals that are read now and then. No DOM here.

const KEPT_SECONDS = 60;
const OVER_SECONDS = 1.5; // a rate is a mean over about this long, so that it can be read

export class Rates {
  #samples = []; // {at, tokens, steps}; at is the server's uptime in seconds

  // Takes in a state; returns {tokens, steps} per second, each null until it is known.
  take({ uptime_seconds: at, generated_tokens: tokens, steps }) {
    const last = this.#samples.at(-1);
    if (last && (at < last.at || tokens < last.tokens)) this.#samples = []; // another server
    if (last?.at === at) return this.#rate(this.#samples.length - 1);
    this.#samples.push({ at, tokens, steps });
    while (this.#samples[0].at < at - KEPT_SECONDS - OVER_SECONDS) this.#samples.shift();
    return this.#rate(this.#samples.length - 1);
  }

  // [[seconds ago, tokens per second]], oldest first.
  get history() {
    const now = this.#samples.at(-1)?.at ?? 0;
    return this.#samples.map(({ at }, i) => [now - at, this.#rate(i).tokens]).filter(([, rate]) => rate !== null);
  }

  #rate(i) {
    const now = this.#samples[i];
    let j = i;
    while (j > 0 && now.at - this.#samples[j].at < OVER_SECONDS) j--;
    const before = this.#samples[j];
    if (i === j) return { tokens: null, steps: null };
    const seconds = now.at - before.at;
    return { tokens: (now.tokens - before.tokens) / seconds, steps: (now.steps - before.steps) / seconds };
  }
}
