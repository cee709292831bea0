// The router's event stream while the page is open. A lost stream is requested again, with growing pauses.

import { eventsOf } from "./events.js";
import { authorization } from "./key.js";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 8000;
const SILENCE_MS = 25000; // the router says something every ten seconds

export class Feed {
  #told;
  #changed;
  #running = null;

  // `told(kind, value)` is called with each event, `changed(state, reason)` with how the connection is:
  // connecting, live, lost, or refused, when only a key helps.
  constructor(told, changed) {
    this.#told = told;
    this.#changed = changed;
  }

  // Start again with the current key.
  start() {
    this.#running?.abort();
    this.#running = new AbortController();
    this.#follow(this.#running.signal);
  }

  // End the stream. Browsers keep a page that was left for a minute, with its connections, of which one host gets six.
  stop() {
    this.#running?.abort();
    this.#running = null;
  }

  async #follow(until) {
    let pause = FIRST_PAUSE_MS;
    this.#changed("connecting", "");
    while (!until.aborted) {
      try {
        const refusal = await this.#listen(until, () => (pause = FIRST_PAUSE_MS));
        if (until.aborted) return;
        if (refusal?.final) return this.#changed("refused", refusal.reason);
        this.#changed("lost", refusal?.reason ?? "");
      } catch {
        if (until.aborted) return;
        this.#changed("lost", "");
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(LONGEST_PAUSE_MS, 2 * pause);
    }
  }

  async #listen(until, begun) {
    const silence = new AbortController();
    let timer = setTimeout(() => silence.abort(), SILENCE_MS);
    const signal = AbortSignal.any([until, silence.signal]);
    try {
      const response = await fetch("dashboard/events", { headers: authorization(), signal, cache: "no-store" });
      if (!response.ok) return await refusalOf(response);
      this.#changed("live", "");
      begun();
      const alive = new TransformStream({
        transform(piece, controller) {
          clearTimeout(timer);
          timer = setTimeout(() => silence.abort(), SILENCE_MS);
          controller.enqueue(piece);
        },
      });
      const body = response.body.pipeThrough(alive);
      for await (const { kind, data } of eventsOf({ body })) this.#told(kind, JSON.parse(data));
      return null;
    } finally {
      clearTimeout(timer);
    }
  }
}

export async function refusalOf(response) {
  const said = await response.json().catch(() => null);
  const reason = said?.error?.message ?? `The server answered ${response.status}.`;
  return { final: response.status === 401 || response.status === 403, status: response.status, reason };
}
