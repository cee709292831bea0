// The last requests, and the changes that the views have yet to draw.

export const KEPT = 60;
const NEWS_MS = 10000; // what began longer ago is history, not something to be shown as it happens

export class Requests {
  #records = new Map();
  #begun = false;

  // Takes records; gives what has happened since: { kind: "ask" | "blocks" | "done", record }.
  take(records, now) {
    const moves = [];
    for (const record of records) {
      const before = this.#records.get(record.number);
      if (this.#begun && now - record.phases[0].start < NEWS_MS + duration(record, now)) {
        moves.push(...changes(before, record));
      }
      this.#records.set(record.number, record);
    }
    this.#begun = true;
    for (const number of [...this.#records.keys()].sort((a, b) => a - b).slice(0, -KEPT)) {
      this.#records.delete(number);
    }
    return moves;
  }

  // Call it after a lost connection: another process may number its requests from the start.
  clear() {
    this.#records.clear();
    this.#begun = false;
  }

  get(number) {
    return this.#records.get(number);
  }

  // The newest first.
  get all() {
    return [...this.#records.values()].sort((a, b) => b.number - a.number);
  }
}

export function changes(before, after) {
  const moves = [];
  if (!before) moves.push({ kind: "ask", record: after });
  if (answered(after) && !(before && answered(before)) && after.remote) {
    moves.push({ kind: "blocks", record: after });
  }
  if (after.outcome !== "running" && (!before || before.outcome === "running")) {
    moves.push({ kind: "done", record: after });
  }
  return moves;
}

function answered(record) {
  return record.phases.some((phase) => phase.name === "decode");
}

export function duration(record, now) {
  const ends = record.phases.map((phase) => phase.end ?? now);
  return Math.max(0, Math.max(...ends) - record.phases[0].start);
}
