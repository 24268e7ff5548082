// Calls of the server that this page came from. Addresses are relative, so that a proxy may serve it under any path.
//
//   call()         one answer, or an ApiError whose message can be shown as it is
//   chat()         a streamed reply, chunk by chunk
//   apiKey         lives in this tab's sessionStorage and goes nowhere but into the header of these calls
import { dataOf } from "./events.js";

const KEY = "octavo.key";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status; // 0: there was no answer
  }
}

class ApiKey {
  #value = read();

  get value() {
    return this.#value;
  }

  set value(value) {
    this.#value = value;
    try {
      if (value) sessionStorage.setItem(KEY, value);
      else sessionStorage.removeItem(KEY);
    } catch {
      // storage is switched off: it holds until the page is left
    }
  }
}

function read() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export const apiKey = new ApiKey();

export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey.value) headers.authorization = `Bearer ${apiKey.value}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    const method = body === undefined ? "GET" : "POST";
    const text = body === undefined ? undefined : JSON.stringify(body);
    response = await fetch(path, { method, headers, body: text, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (signal?.aborted) throw error;
    if (!isLatin(apiKey.value)) throw new ApiError("The API key has characters that no header can carry.", 401);
    throw new ApiError("The server can't be reached. Is it still running?");
  }
  if (!response.ok) throw new ApiError(await inWords(response), response.status);
  return response;
}

function isLatin(text) {
  return [...text].every((each) => each >= " " && each <= "\u00ff");
}

async function inWords(response) {
  if (response.status === 401) {
    return apiKey.value ? "The server does not know this API key." : "This server wants an API key.";
  }
  const said = await response.json().then((body) => body?.error?.message, () => undefined);
  const wait = response.headers.get("retry-after");
  const retry = wait ? ` Try again in ${wait} s.` : "";
  return (typeof said === "string" && said ? sentence(said) : `The server answered with status ${response.status}.`) + retry;
}

function sentence(text) {
  const first = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?…]$/.test(first) ? first : `${first}.`;
}

// Yields the chunks of a chat reply. Throws ApiError where the server tells of an error in the middle, or breaks off.
export async function* chat(body, signal) {
  const response = await call("v1/chat/completions", { body, signal });
  try {
    for await (const data of dataOf(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(sentence(String(chunk.error.message ?? "the reply failed")), 500);
      yield chunk;
    }
  } catch (error) {
    if (signal.aborted || error instanceof ApiError) throw error;
  }
  throw new ApiError("The reply broke off: the connection to the server ended.");
}
