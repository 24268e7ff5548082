// A model's text as nodes: paragraphs, fenced code, `code` and **strong** in a line. All of it goes in as text nodes;
// no text ever becomes HTML, and nothing in it becomes a link.

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

// [{kind: "text" | "code", text, language}] of a text that may still grow: an open fence is code to its end.
export function blocksOf(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const close = () => {
    if (fence) blocks.push({ kind: "code", text: lines.join("\n"), language: fence.language });
    else if (lines.some((line) => line.trim())) blocks.push({ kind: "text", text: lines.join("\n"), language: "" });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line);
    if (fence ? mark && endsFence(mark, fence) : mark) {
      close();
      fence = fence ? null : { mark: mark[1], language: mark[2].trim() };
    } else if (!fence && line.trim() === "") {
      close();
    } else {
      lines.push(line);
    }
  }
  if (fence || lines.length > 0) close();
  return blocks;
}

function endsFence(mark, fence) {
  return mark[1][0] === fence.mark[0] && mark[1].length >= fence.mark.length && mark[2].trim() === "";
}

// Shows a growing text in an element, and touches only the blocks that changed.
export class Rendering {
  #root;
  #shown = [];

  constructor(root) {
    this.#root = root;
  }

  show(text) {
    const blocks = blocksOf(text);
    blocks.forEach((block, i) => this.#put(block, i));
    for (const { node } of this.#shown.splice(blocks.length)) node.remove();
  }

  #put(block, i) {
    const shown = this.#shown[i];
    if (shown?.block.kind === block.kind && shown.block.text === block.text && shown.block.language === block.language) return;
    if (shown?.block.kind === block.kind) {
      fill(shown.node, block);
      shown.block = block;
      return;
    }
    const node = block.kind === "code" ? codeNode() : document.createElement("p");
    fill(node, block);
    if (shown) shown.node.replaceWith(node);
    else this.#root.append(node);
    this.#shown[i] = { block, node };
  }
}

function codeNode() {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const language = document.createElement("span");
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "plain small";
  copy.dataset.copies = "code";
  copy.textContent = "Copy";
  copy.setAttribute("aria-label", "Copy the code");
  caption.append(language, copy);
  const pre = document.createElement("pre");
  pre.tabIndex = 0; // long lines scroll, by keys too
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", "Code");
  pre.append(document.createElement("code"));
  figure.append(caption, pre);
  return figure;
}

function fill(node, block) {
  if (block.kind === "code") {
    node.querySelector("figcaption span").textContent = block.language || "code";
    node.querySelector("code").textContent = block.text;
  } else {
    node.replaceChildren(...inline(block.text));
  }
}

function inline(text) {
  return text.split(INLINE).filter(Boolean).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) return element("code", part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) return element("strong", part.slice(2, -2));
    return document.createTextNode(part);
  });
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}
