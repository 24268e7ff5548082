// The conversation as it is seen. Text of users and models goes in as text nodes only.
//
//   article.turn
//     div.asked     what the user said, or the results of tools
//     div.reply     reasoning (folded) · words · calls · error · footer: figures and buttons
import { Rendering } from "./markup.js";

const REASONS = { length: "cut by the limit of tokens", tool_calls: "calls tools", stop: "", abort: "ended by the server" };

export class Transcript {
  #root;
  #follows = true; // the end stays in view, until the user scrolls up

  constructor(root) {
    this.#root = root;
    root.addEventListener("scroll", () => {
      this.#follows = root.scrollHeight - root.scrollTop - root.clientHeight < 48;
    });
  }

  add(turn, model) {
    const view = new TurnView(turn, model);
    this.#root.append(view.node);
    this.#follows = true;
    this.follow();
    return view;
  }

  clear() {
    for (const each of this.#root.querySelectorAll(".turn")) each.remove();
  }

  follow() {
    if (this.#follows) this.#root.scrollTop = this.#root.scrollHeight;
  }
}

export class TurnView {
  #reply;
  #parts;

  constructor(turn, model) {
    this.node = make("article", "turn");
    const asked = make("div", "asked");
    for (const message of turn.asked) asked.append(askedNode(message));
    this.node.append(asked);
    this.answer(turn.reply, model);
  }

  // Show another reply in place of the one before.
  answer(reply, model) {
    this.#reply = reply;
    this.#parts?.root.remove();
    this.#parts = replyParts(model);
    this.#parts.root.setAttribute("aria-busy", "true");
    this.node.append(this.#parts.root);
  }

  show() {
    const { thought, thinking, words, calls } = this.#parts;
    const reply = this.#reply;
    thought.hidden = reply.reasoning === "";
    thinking.show(reply.reasoning);
    words.show(reply.content);
    calls.replaceChildren(...reply.calls.map(callNode));
  }

  // The reply is over. Returns what is to be said of it aloud.
  end(figures) {
    this.show();
    const { root, error, footer } = this.#parts;
    const reply = this.#reply;
    root.setAttribute("aria-busy", "false");
    error.hidden = reply.error === "";
    error.textContent = reply.error;
    const ended = reply.stopped ? "stopped" : (REASONS[reply.finish] ?? reply.finish ?? "");
    const nothing = !reply.content && !reply.reasoning && reply.calls.length === 0;
    const empty = nothing && !reply.error && !reply.stopped ? "the model said nothing" : "";
    const notes = [...figures, ended, empty].filter(Boolean);
    footer.querySelector(".figures").textContent = notes.join(" · ");
    footer.hidden = false;
    footer.querySelector("[data-copies]").hidden = reply.content === "";
    return reply.error || ["Reply finished", ...notes].join(", ");
  }

  // Only the last turn can be answered again, or its calls be given results.
  set isLast(isLast) {
    this.#parts.footer.querySelector("[data-again]").hidden = !isLast;
    const answered = this.#reply.calls.length > 0 && this.#reply.ended && !this.#reply.error && !this.#reply.stopped;
    this.#parts.results.hidden = !isLast || !answered;
    if (isLast && answered) this.#parts.results.replaceChildren(...resultFields(this.#reply.calls));
  }

  get text() {
    return this.#reply.content;
  }
}

function replyParts(model) {
  const root = make("div", "reply");
  const thought = make("details", "reasoning");
  thought.hidden = true;
  const thinkingText = make("div", "prose");
  thought.append(make("summary", "", "Reasoning"), thinkingText);
  const text = make("div", "prose words");
  const calls = make("div", "calls");
  const error = make("p", "failure");
  error.hidden = true;
  const results = make("form", "results");
  results.hidden = true;
  const footer = make("footer", "");
  footer.hidden = true;
  footer.append(make("span", "figures"), button("Copy", "copies", "reply"), button("Regenerate", "again", ""));
  root.append(make("h3", "who", model), thought, text, calls, error, results, footer);
  return { root, thought, thinking: new Rendering(thinkingText), words: new Rendering(text), calls, error, results, footer };
}

function askedNode(message) {
  if (message.role === "user") {
    const node = make("div", "said");
    node.append(make("h3", "who", "You"), make("p", "", message.content));
    return node;
  }
  const node = make("div", "call");
  node.append(make("h3", "who", `Result of ${message.name}`), make("pre", "", message.content));
  return node;
}

function callNode({ name, arguments: given }) {
  const node = make("div", "call");
  node.append(make("h4", "", `Calls ${name || "…"}`), make("pre", "", indented(given)));
  return node;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not yet whole, or never
  }
}

// A field for what each call gave; nothing is run by this page.
function resultFields(calls) {
  const fields = calls.map(({ name }, i) => {
    const label = make("label", "", `Result of ${name}`);
    const input = make("textarea", "");
    input.name = `result-${i}`;
    input.rows = 2;
    label.append(input);
    return label;
  });
  const send = make("button", "", "Send results");
  send.type = "submit";
  return [...fields, send];
}

function button(text, key, value) {
  const made = make("button", "plain small", text);
  made.type = "button";
  made.dataset[key] = value;
  return made;
}

function make(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
