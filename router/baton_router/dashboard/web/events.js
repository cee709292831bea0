// Server-sent events out of text that comes in pieces, wherever it was cut.

export class EventReader {
  #rest = "";
  #kind = "message";
  #data = [];

  // The events that this piece completes: { kind, data }.
  push(piece) {
    const found = [];
    const lines = (this.#rest + piece).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) found.push({ kind: this.#kind, data: this.#data.join("\n") });
        this.#kind = "message";
        this.#data = [];
      } else {
        this.#field(line);
      }
    }
    return found;
  }

  #field(line) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") this.#kind = value;
    if (name === "data") this.#data.push(value);
  }
}

// The events of an answer to `fetch`, as they come.
export async function* eventsOf(response) {
  const reader = new EventReader();
  const pieces = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    while (true) {
      const { value, done } = await pieces.read();
      if (done) return;
      yield* reader.push(value);
    }
  } finally {
    await pieces.cancel().catch(() => {});
  }
}
