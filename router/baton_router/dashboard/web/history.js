// The last minutes of a figure, kept while the page is open, and its line in a chart.

export const SPAN_MS = 300_000;
const SHORTEST_MS = 60_000;
const APART_MS = 900; // reports come once a second, when something has changed

export class History {
  #samples = [];

  // `values` by name; null where a value is unknown. A report soon after another one replaces it.
  add(now, values) {
    const last = this.#samples.at(-1);
    if (last && now - last.now < APART_MS) this.#samples.pop();
    this.#samples.push({ ...values, now: last && now - last.now < APART_MS ? last.now : now });
    while (this.#samples.length > 1 && this.#samples[1].now <= now - SPAN_MS) this.#samples.shift();
  }

  // Call it after a lost connection: what happened meanwhile is unknown.
  gap(now) {
    if (this.#samples.length) this.#samples.push({ now });
  }

  // Milliseconds that a chart shows: as long as there is something to show, in whole minutes.
  span(now) {
    const age = now - (this.#samples[0]?.now ?? now);
    return Math.min(SPAN_MS, Math.max(1, Math.ceil(age / SHORTEST_MS)) * SHORTEST_MS);
  }

  // [{ at, value }] of one figure, `at` from 0 (`span` ago) to 1 (now). A value holds until the next one.
  points(name, now) {
    const span = this.span(now);
    const at = (time) => Math.max(0, Math.min(1, 1 - (now - time) / span));
    const points = this.#samples.map((sample) => ({ at: at(sample.now), value: sample[name] ?? null }));
    const last = points.at(-1);
    return last ? [...points, { at: 1, value: last.value }] : [];
  }
}

// { path, area, highest }: the line of the points in a box, with steps, and gaps where a value is null.
export function chart(points, width, height) {
  const values = points.map(({ value }) => value).filter((value) => value !== null);
  const highest = Math.max(0, ...values);
  const x = ({ at }) => rounded(at * width);
  const y = (value) => rounded(height - 1 - (highest ? (value / highest) * (height - 2) : 0));
  let path = "";
  let area = "";
  let drawn = false;
  points.forEach((point, index) => {
    const next = points[index + 1];
    if (point.value === null || !next) {
      drawn = false;
      return;
    }
    path += `${drawn ? "L" : "M"}${x(point)} ${y(point.value)}H${x(next)}`;
    area += `M${x(point)} ${height}V${y(point.value)}H${x(next)}V${height}Z`;
    drawn = true;
  });
  return { path, area, highest };
}

function rounded(number) {
  return Math.round(10 * number) / 10;
}
