// What was said. No DOM here.
//
//   turn = { asked: [messages], reply: Reply }
//            the user's message, or results of tools
//
// A turn whose reply failed before its first word stays on the page and is left out of what the model hears.

export class Reply {
  content = "";
  reasoning = "";
  calls = []; // {id, name, arguments}
  finish = null; // the server's reason, or null while it goes on and where it never came
  error = "";
  stopped = false; // by the user
  usage = null;

  // Takes in a chunk; true where it brought something to read.
  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return false;
    const { content = "", reasoning, reasoning_content, tool_calls = [] } = choice.delta ?? {};
    const thought = reasoning ?? reasoning_content ?? "";
    this.content += content ?? "";
    this.reasoning += thought;
    for (const part of tool_calls) this.#takeCall(part);
    if (choice.finish_reason) this.finish = choice.finish_reason;
    return Boolean(content || thought || tool_calls.length);
  }

  get ended() {
    return this.finish !== null || this.stopped || this.error !== "";
  }

  get isUsable() {
    return this.content !== "" || this.calls.length > 0 || (this.ended && this.error === "" && !this.stopped);
  }

  get message() {
    const message = { role: "assistant", content: this.content };
    if (this.calls.length > 0) {
      message.tool_calls = this.calls.map(({ id, name, arguments: given }) => (
        { id, type: "function", function: { name, arguments: given } }
      ));
    }
    return message;
  }

  #takeCall({ index, id, function: part = {} }) {
    const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    if (id) call.id = id;
    if (part.name) call.name += part.name;
    if (part.arguments) call.arguments += part.arguments;
  }
}

export class Conversation {
  turns = [];

  ask(messages) {
    const turn = { asked: messages, reply: new Reply() };
    this.turns.push(turn);
    return turn;
  }

  // The last turn, to be answered anew.
  again() {
    const turn = this.turns.at(-1);
    turn.reply = new Reply();
    return turn;
  }

  // The messages that the last turn's reply answers.
  messages(system) {
    const before = this.turns.slice(0, -1).filter(({ reply }) => reply.isUsable);
    const said = before.flatMap(({ asked, reply }) => [...asked, reply.message]);
    const first = system.trim() ? [{ role: "system", content: system }] : [];
    return [...first, ...said, ...this.turns.at(-1).asked];
  }
}
