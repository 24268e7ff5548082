// Server-sent events: bytes in, the data of each event out.

export async function* dataOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const each of lines) {
        const line = each.endsWith("\r") ? each.slice(0, -1) : each;
        if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    // Whoever stops listening ends the connection, and with it the request. It may be at its end already.
    reader.cancel().catch(() => {});
  }
}
