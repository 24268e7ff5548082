// The form of settings: what it asks for as fields of a request. An empty field is not sent; the server's default holds.

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

// A fault that the user can mend: `field` is to be shown.
export class SettingError extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

export function readSettings(form) {
  const fields = {};
  for (const name of NUMBERS) {
    const input = form.elements[name];
    input.setCustomValidity(""); // what was shown before
    if (!input.checkValidity()) throw new SettingError(`${label(input)}: ${input.validationMessage}`, input);
    if (input.value !== "") fields[name] = input.valueAsNumber;
  }
  const stop = form.elements.stop.value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (stop.length > 0) fields.stop = stop;
  const tools = readTools(form.elements.tools);
  if (tools) fields.tools = tools;
  return { system: form.elements.system.value, fields };
}

function readTools(input) {
  if (!input.value.trim()) return null;
  let tools;
  try {
    tools = JSON.parse(input.value);
  } catch (error) {
    throw new SettingError(`Tools: this is no JSON (${error.message})`, input);
  }
  if (!Array.isArray(tools)) throw new SettingError("Tools: give a list, [ … ]", input);
  return tools.length > 0 ? tools : null;
}

function label(input) {
  return input.labels[0].firstChild.textContent.trim();
}
