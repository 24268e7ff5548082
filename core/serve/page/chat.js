// Talking: from the composer to the server and back into the transcript. One reply at a time.
import { chat } from "./api.js";
import { Conversation } from "./conversation.js";
import { copyText } from "./clipboard.js";
import { readSettings, SettingError } from "./settings.js";
import { Transcript } from "./transcript.js";

export class Chat {
  #conversation = new Conversation();
  #transcript;
  #last = null; // the view of the last turn
  #running = null; // the AbortController of the reply that is coming in
  #page;

  // page: {transcript, welcome, composer, message, send, stop, clear, status, params}, elements;
  // model(): the chosen name; refused(error): hears of a reply that failed; runs(isRunning): of its start and end;
  // showField(field, message): brings a wrong setting into sight.
  constructor(page) {
    this.#page = page;
    this.#transcript = new Transcript(page.transcript);
    page.composer.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    page.message.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    page.stop.addEventListener("click", () => this.stop());
    page.clear.addEventListener("click", () => this.#clear());
    page.transcript.addEventListener("click", (event) => this.#clicked(event.target));
    page.transcript.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#sendResults(event.target);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
  }

  // Ends the reply that is coming in; the server hears of it by the end of the connection.
  stop() {
    this.#running?.abort();
  }

  #submit() {
    const content = this.#page.message.value;
    if (this.#running) return this.#say("A reply is coming in. Escape stops it.");
    if (!content.trim()) return undefined;
    const sent = this.#ask([{ role: "user", content }]);
    if (sent) this.#page.message.value = "";
    return undefined;
  }

  #sendResults(form) {
    if (this.#running) return;
    const calls = this.#conversation.turns.at(-1).reply.calls;
    const results = calls.map(({ id, name }, i) => (
      { role: "tool", tool_call_id: id, name, content: form.elements[`result-${i}`].value }
    ));
    if (this.#ask(results)) this.#page.message.focus();
  }

  // Adds a turn and has it answered; false where the settings are not right.
  #ask(messages) {
    const settings = this.#settings();
    if (!settings) return false;
    if (this.#last) this.#last.isLast = false;
    this.#page.welcome.hidden = true;
    const turn = this.#conversation.ask(messages);
    this.#last = this.#transcript.add(turn, this.#page.model());
    this.#answer(turn, settings);
    return true;
  }

  #again() {
    const settings = this.#running ? null : this.#settings();
    if (!settings) return;
    const turn = this.#conversation.again();
    this.#last.answer(turn.reply, this.#page.model());
    this.#answer(turn, settings);
    this.#page.message.focus();
  }

  #settings() {
    try {
      return readSettings(this.#page.params);
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this.#say(error.message);
      this.#page.showField(error.field, error.message);
      return null;
    }
  }

  async #answer({ reply }, { system, fields }) {
    const running = (this.#running = new AbortController());
    const view = this.#last;
    const clock = new Clock();
    const painter = new Painter(() => {
      view.show();
      this.#transcript.follow();
    });
    this.#showRunning();
    this.#say("The reply is coming in.");
    const messages = this.#conversation.messages(system);
    const asked = { model: this.#page.model(), messages, ...fields, stream: true, stream_options: { include_usage: true } };
    try {
      for await (const chunk of chat(asked, running.signal)) {
        if (reply.take(chunk)) {
          clock.note();
          painter.ask();
        }
      }
    } catch (error) {
      if (running.signal.aborted) reply.stopped = true;
      else reply.error = error.message;
      this.#page.refused(error);
    }
    painter.stop();
    if (this.#running === running) this.#end(view, clock.figures(reply.usage)); // else it was cleared meanwhile
  }

  #end(view, figures) {
    this.#running = null;
    this.#showRunning();
    const said = view.end(figures);
    view.isLast = true;
    this.#transcript.follow();
    this.#say(said);
  }

  #showRunning() {
    const { send, stop, message } = this.#page;
    const hadFocus = [send, stop].includes(document.activeElement);
    send.hidden = this.#running !== null;
    stop.hidden = this.#running === null;
    if (hadFocus) message.focus();
    this.#page.runs(this.#running !== null);
  }

  #clear() {
    this.stop();
    this.#running = null;
    this.#showRunning();
    this.#conversation = new Conversation();
    this.#transcript.clear();
    this.#last = null;
    this.#page.welcome.hidden = false;
    this.#page.message.focus();
    this.#say("The conversation is cleared.");
  }

  async #clicked(target) {
    const button = target.closest("button");
    if (!button) return;
    if ("again" in button.dataset) this.#again();
    if (!("copies" in button.dataset)) return;
    const text = button.dataset.copies === "code"
      ? button.closest("figure").querySelector("code").textContent
      : this.#textOf(button);
    const said = (await copyText(text)) ? "Copied" : "Copying failed";
    this.#say(said);
    button.textContent = said;
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }

  #textOf(button) {
    const turns = [...this.#page.transcript.querySelectorAll(".turn")];
    return this.#conversation.turns[turns.indexOf(button.closest(".turn"))].reply.content;
  }

  #say(text) {
    this.#page.status.textContent = text;
  }
}

// At most one painting a frame, however fast chunks come.
class Painter {
  #paint;
  #frame = 0;

  constructor(paint) {
    this.#paint = paint;
  }

  ask() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#paint();
    });
  }

  stop() {
    cancelAnimationFrame(this.#frame);
  }
}

// How fast a reply came in.
class Clock {
  #began = performance.now();
  #first = 0;
  #last = 0;

  note() {
    this.#last = performance.now();
    this.#first ||= this.#last;
  }

  figures(usage) {
    if (!this.#first) return [];
    const figures = [`first word after ${((this.#first - this.#began) / 1000).toFixed(2)} s`];
    const tokens = usage?.completion_tokens;
    if (!tokens) return figures;
    figures.unshift(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    const seconds = (this.#last - this.#first) / 1000;
    if (tokens > 1 && seconds > 0) figures.splice(1, 0, `${((tokens - 1) / seconds).toFixed(1)} a second`);
    return figures;
  }
}
