// The KV cache, a cell a block, drawn so that shapes alone tell the states apart:
//
//   free    an empty frame          cached  a half, cut from corner to corner
//   used    a full square           shared  a full square with a hole
//
// Colours are those of the legend's entries, which are drawn by the same hand.

const STATES = { f: "free", c: "cached", u: "used", s: "shared" };
const MOST_PIXELS = 264; // of height
const PITCHES = [16, 14, 12, 10, 9, 8, 7, 6, 5]; // CSS pixels from cell to cell; the last one may grow beyond the height

export function blockColours(legend) {
  return Object.fromEntries(Object.values(STATES).map((state) => (
    [state, getComputedStyle(legend.querySelector(`.${state}`)).getPropertyValue("color")]
  )));
}

export function drawLegend(legend) {
  const colours = blockColours(legend);
  for (const [state, colour] of Object.entries(colours)) {
    const context = prepared(legend.querySelector(`.${state} canvas`), 14, 14);
    drawCell(context, state, colour, 0, 0, 14);
  }
}

export function drawBlocks(canvas, cells, colours) {
  const width = canvas.parentElement.clientWidth;
  if (width === 0) return;
  const pitch = PITCHES.find((each) => Math.ceil(cells.length / Math.floor(width / each)) * each <= MOST_PIXELS) ?? PITCHES.at(-1);
  const perRow = Math.max(1, Math.floor(width / pitch));
  const context = prepared(canvas, perRow * pitch, Math.max(pitch, Math.ceil(cells.length / perRow) * pitch));
  const size = pitch - (pitch > 8 ? 2 : 1);
  for (let i = 0; i < cells.length; i++) {
    const state = STATES[cells[i]];
    if (state) drawCell(context, state, colours[state], (i % perRow) * pitch, Math.floor(i / perRow) * pitch, size);
  }
}

function drawCell(context, state, colour, x, y, size) {
  context.fillStyle = context.strokeStyle = colour;
  context.lineWidth = 1;
  if (state === "free") {
    context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
  } else if (state === "cached") {
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x, y + size);
    context.lineTo(x + size, y + size);
    context.fill();
  } else {
    context.fillRect(x, y, size, size);
    const hole = Math.max(2, Math.round(size / 3));
    const edge = Math.floor((size - hole) / 2);
    if (state === "shared") context.clearRect(x + edge, y + edge, hole, hole);
  }
}

// A cleared context whose unit is a CSS pixel, sharp on any screen.
export function prepared(canvas, width, height) {
  const scale = globalThis.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return context;
}
