// The live view of the engine: asks GET engine/state while the page is visible, and shows what it says.
import { ApiError, call } from "./api.js";
import { blockColours, drawBlocks, drawLegend, prepared } from "./blocks.js";
import { Rates } from "./rates.js";

const BUSY_MS = 400;
const IDLE_MS = 1500;
const TROUBLE_MS = 4000;

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fraction = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });

export class EngineView {
  #byId = (id) => document.getElementById(id);
  #legend = document.querySelector(".legend");
  #rates = new Rates();
  #state = null;
  #timer = 0;
  #isAsking = false;
  #isHasty = false;

  constructor() {
    document.addEventListener("visibilitychange", () => this.wake());
    addEventListener("octavo:theme", () => this.#draw());
    new ResizeObserver(() => this.#draw()).observe(this.#byId("engine"));
    this.wake();
  }

  // Ask now, and go on asking: a key was given, or the page came into sight.
  wake() {
    clearTimeout(this.#timer);
    if (!document.hidden && !this.#isAsking) this.#ask();
  }

  // While a reply of this page comes in, ask often, whatever the last answer was.
  set isHasty(isHasty) {
    this.#isHasty = isHasty;
    if (isHasty) this.wake();
  }

  async #ask() {
    this.#isAsking = true;
    let pause;
    try {
      this.#state = await (await call("engine/state")).json();
      this.#show();
      const isBusy = this.#isHasty || this.#state.num_running + this.#state.num_waiting > 0;
      pause = isBusy ? BUSY_MS : IDLE_MS;
    } catch (error) {
      this.#fail(error);
      pause = error instanceof ApiError && error.status === 401 ? 0 : TROUBLE_MS; // 0: until a key is given
    }
    this.#isAsking = false;
    if (pause && !document.hidden) this.#timer = setTimeout(() => this.#ask(), pause);
  }

  #fail(error) {
    const trouble = this.#byId("engine-trouble");
    trouble.hidden = false;
    trouble.textContent = error.message;
    this.#byId("pulse").hidden = true;
    document.querySelector("#engine").classList.add("stale");
  }

  #show() {
    const state = this.#state;
    this.#byId("engine-trouble").hidden = true;
    document.querySelector("#engine").classList.remove("stale");
    const rate = this.#rates.take(state);
    const tokens = rate.tokens === null ? "–" : fraction.format(rate.tokens);
    this.#put("tokens-rate", tokens);
    this.#put("steps-rate", rate.steps === null ? "–" : fraction.format(rate.steps));
    this.#put("running", number.format(state.num_running));
    this.#put("waiting", number.format(state.num_waiting));
    this.#put("preemptions", number.format(state.preemptions));
    this.#put("uptime", duration(state.uptime_seconds));
    const asked = state.prefix_query_tokens;
    this.#put("hits", asked > 0 ? `${number.format((100 * state.prefix_hit_tokens) / asked)} %` : "–");
    this.#put("pulse", `${number.format(state.num_running)} running · ${tokens} tokens/s`);
    this.#byId("pulse").hidden = false;
    this.#showCache(state.kv);
    this.#draw();
  }

  #showCache({ block_size, total, used, cached, blocks_per_cell, cells }) {
    const shared = cells.split("s").length - 1;
    const free = total - used - cached;
    this.#put("kv-free", number.format(free));
    this.#put("kv-cached", number.format(cached));
    this.#put("kv-used", number.format(used));
    this.#put("kv-shared", blocks_per_cell === 1 ? number.format(shared) : `in ${number.format(shared)} cells`);
    const cell = blocks_per_cell === 1 ? "" : ` A cell is ${blocks_per_cell} blocks and shows the busiest.`;
    const size = `${number.format(total)} blocks of ${block_size} tokens`;
    const percent = number.format(total > 0 ? (100 * used) / total : 0);
    this.#put("kv-summary", total > 0 ? `${size}, ${percent} % in use; shared ones are held by several requests.${cell}` : "This model keeps none.");
  }

  #draw() {
    drawLegend(this.#legend);
    if (!this.#state) return;
    drawBlocks(this.#byId("kv"), this.#state.kv.cells, blockColours(this.#legend));
    this.#drawHistory();
  }

  #drawHistory() {
    const canvas = this.#byId("history");
    const width = canvas.parentElement.clientWidth;
    if (width === 0) return;
    const height = 36;
    const context = prepared(canvas, width, height);
    const history = this.#rates.history;
    const most = Math.max(1, ...history.map(([, rate]) => rate));
    const place = ([ago, rate]) => [width - (ago / 60) * width, height - 1 - (rate / most) * (height - 4)];
    context.strokeStyle = getComputedStyle(canvas).color;
    context.lineWidth = 1.5;
    context.beginPath();
    for (const each of history) context.lineTo(...place(each));
    context.stroke();
    canvas.setAttribute("aria-label", `Tokens per second, last minute; at most ${fraction.format(history.length ? most : 0)}`);
  }

  #put(id, text) {
    const node = this.#byId(id);
    if (node.textContent !== text) node.textContent = text;
  }
}

function duration(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const i = units.findIndex(([, each]) => seconds >= each);
  if (i < 0) return "0 s";
  const whole = Math.floor(seconds / units[i][1]);
  if (i === 3) return `${whole} s`;
  const rest = Math.floor((seconds % units[i][1]) / units[i + 1][1]);
  return `${whole} ${units[i][0]} ${rest} ${units[i + 1][0]}`;
}
