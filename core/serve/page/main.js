// Puts the parts together: models, key, chat, the engine's view.
import { apiKey, ApiError, call } from "./api.js";
import { Chat } from "./chat.js";
import { EngineView } from "./engine.js";

const byId = (id) => document.getElementById(id);
const model = byId("model");
const keyForm = byId("key-form");

const engine = new EngineView();

new Chat({
  transcript: byId("transcript"),
  welcome: byId("welcome"),
  composer: byId("composer"),
  message: byId("message"),
  send: byId("send"),
  stop: byId("stop"),
  clear: byId("clear"),
  status: byId("status"),
  params: byId("params"),
  model: () => model.value,
  refused,
  runs: (isRunning) => { engine.isHasty = isRunning; },
  showField,
});

function refused(error) {
  if (error instanceof ApiError && error.status === 401) askForKey(error.message);
}

function askForKey(why) {
  keyForm.querySelector("label").textContent = why.replace(/\.$/, "");
  keyForm.hidden = false;
  byId("forget-key").hidden = byId("docs").hidden = true;
  byId("key").focus();
}

// A setting that is wrong: on a narrow screen its part of the page may be out of sight.
function showField(field, message) {
  if (!field.checkVisibility()) location.hash = "#settings";
  field.closest("details")?.setAttribute("open", "");
  field.setCustomValidity(message);
  field.reportValidity();
  field.addEventListener("input", () => field.setCustomValidity(""), { once: true });
}

async function loadModels() {
  try {
    const { data } = await (await call("v1/models")).json();
    model.replaceChildren(...data.map(({ id, max_model_len, parent }) => {
      const option = new Option(parent ? `${id} (adapter)` : id, id);
      option.title = `${max_model_len} tokens of context`;
      return option;
    }));
    byId("forget-key").hidden = !apiKey.value;
    byId("docs").hidden = apiKey.value !== ""; // a link brings no key
  } catch (error) {
    model.replaceChildren(new Option(error.status === 401 ? "key needed" : "no answer", ""));
    refused(error);
    if (error.status !== 401) setTimeout(loadModels, 4000);
  }
}

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.value = byId("key").value.trim();
  byId("key").value = "";
  keyForm.hidden = true;
  byId("message").focus();
  loadModels();
  engine.wake();
});

byId("forget-key").addEventListener("click", () => {
  apiKey.value = "";
  loadModels();
  engine.wake();
});

const links = [...document.querySelectorAll("nav a")];
function showPart() {
  const part = location.hash || "#chat";
  for (const link of links) {
    if (link.getAttribute("href") === part) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}
addEventListener("hashchange", showPart);
showPart();

byId("params").addEventListener("submit", (event) => event.preventDefault());
loadModels();
byId("message").focus();
