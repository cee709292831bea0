// Timelines to scale: all rows by the same one, and no phase so short that it cannot be seen.

import { duration } from "./state.js";

const LEAST_SHARE = 0.6; // percent of the width

// The end of the axis, in milliseconds: a round number that the longest of the records fits in.
export function axisEnd(records, now) {
  const longest = Math.max(1, ...records.map((record) => duration(record, now)));
  const power = 10 ** Math.floor(Math.log10(longest));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((one) => one * power >= longest - 1e-9);
}

// Of an axis of so many milliseconds: { at (percent), text }. Only the last has the unit, so that all fit into a narrow row.
export function ticks(end) {
  const [unit, size] = end < 1000 ? ["ms", 1] : end < 120_000 ? ["s", 1000] : ["min", 60_000];
  const number = (part) => String(Number(((part * end) / size).toPrecision(3)));
  return [0, 0.25, 0.5, 0.75, 1].map((part) => ({ at: 100 * part, text: part < 1 ? number(part) : `${number(part)} ${unit}` }));
}

// The record's phases as { name, left, width (percent), length (milliseconds), open }.
export function bars(record, end, now) {
  const origin = record.phases[0].start;
  return record.phases.map((phase) => {
    const length = Math.max(0, (phase.end ?? now) - phase.start);
    const width = Math.min(100, Math.max(LEAST_SHARE, (100 * length) / end));
    const left = Math.min(100 - width, Math.max(0, (100 * (phase.start - origin)) / end));
    return { name: phase.name, left, width, length, open: phase.end === null };
  });
}

// The same record up to its first token, on an axis of its own: there the hand-over can be seen.
export function opening(record, now) {
  const phases = record.phases.filter((phase) => phase.name !== "decode");
  const part = { ...record, phases };
  return { end: axisEnd([part], now), record: part };
}
