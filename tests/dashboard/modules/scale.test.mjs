import assert from "node:assert/strict";
import test from "node:test";

import { axisEnd, bars, opening, ticks } from "../../../router/baton_router/dashboard/web/scale.js";
import { record, running } from "./records.mjs";

test("the axis ends at a round number that the longest request fits in", () => {
  const cases = [[0.2, 1], [7, 8], [10, 10], [11, 15], [999, 1000], [1001, 1500], [2000, 2000], [61_000, 80_000]];
  for (const [length, expected] of cases) {
    const one = record({ phases: [{ name: "queue", start: 5, end: 5 + length }] });
    assert.equal(axisEnd([one], 0), expected, `${length}`);
  }
  assert.equal(axisEnd([], 0), 1);
});

test("what runs lasts until now", () => {
  const one = running([{ name: "queue", start: 0, end: 10 }, { name: "prefill", start: 10, end: null }]);
  assert.equal(axisEnd([one], 380), 400);
  const [, prefill] = bars(one, 400, 380);
  assert.deepEqual(prefill, { name: "prefill", left: 2.5, width: 92.5, length: 370, open: true });
});

test("bars are to scale, and none is too narrow to be seen or leaves its row", () => {
  const drawn = bars(record(), 2000, 0);
  assert.deepEqual(drawn.map((bar) => bar.name), ["queue", "prefill", "transfer", "decode"]);
  assert.equal(drawn[1].left, 0.5);
  assert.equal(drawn[1].width, 5);
  for (const length of [0, 0.001, 1, 1999, 2000, 9000]) {
    for (const start of [0, 1000, 2000, 9000]) {
      const phases = [{ name: "queue", start: 0, end: 0 }, { name: "decode", start, end: start + length }];
      for (const { left, width } of bars(record({ phases }), 2000, 0)) {
        assert.ok(left >= 0 && width > 0.5 && left + width <= 100.000001, `${start} ${length}: ${left} ${width}`);
      }
    }
  }
});

test("ticks go from nothing to the end, which has the unit", () => {
  const texts = (end) => ticks(end).map((tick) => tick.text).join(" ");
  assert.deepEqual([1, 200, 1000, 80_000, 200_000].map(texts), ["0 0.25 0.5 0.75 1 ms", "0 50 100 150 200 ms",
    "0 0.25 0.5 0.75 1 s", "0 20 40 60 80 s", "0 0.833 1.67 2.5 3.33 min"]);
  for (let end = 1; end < 1e7; end *= 1.5) {
    for (const { text } of ticks(axisEnd([record({ phases: [{ name: "queue", start: 0, end }] })], 0)).slice(0, -1)) {
      assert.ok(text.length <= 5, `${end}: ${text}`);
    }
  }
});

test("the opening is the way to the first token", () => {
  const { end, record: part } = opening(record(), 0);
  assert.equal(end, 150);
  assert.deepEqual(part.phases.map((phase) => phase.name), ["queue", "prefill", "transfer"]);
});
