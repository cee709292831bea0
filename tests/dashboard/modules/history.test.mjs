import assert from "node:assert/strict";
import test from "node:test";

import { SPAN_MS, History, chart } from "../../../router/baton_router/dashboard/web/history.js";

const values = (history, now) => history.points("a", now).map(({ value }) => value);

test("a value holds until the next one", () => {
  const history = new History();
  assert.deepEqual(history.points("a", 0), []);
  history.add(1_000_000, { a: 1 });
  history.add(1_000_000 + SPAN_MS / 2, { a: 3 });
  assert.deepEqual(history.points("a", 1_000_000 + SPAN_MS), [{ at: 0, value: 1 }, { at: 0.5, value: 3 }, { at: 1, value: 3 }]);
});

test("a chart shows whole minutes, as many as there are, and at most five", () => {
  const history = new History();
  assert.equal(history.span(7), 60_000);
  history.add(1000, { a: 1 });
  assert.deepEqual([2000, 61_000, 61_001, 9e6].map((now) => history.span(now)), [60_000, 60_000, 120_000, SPAN_MS]);
});

test("what is older than the span is dropped, but not what still holds", () => {
  const history = new History();
  for (let second = 0; second <= 2000; second += 1) history.add(second * 1000, { a: second });
  const points = history.points("a", 2_000_000);
  assert.ok(points.length <= SPAN_MS / 1000 + 2);
  assert.equal(points[0].at, 0);
  history.add(9_000_000, { a: 5 });
  assert.deepEqual(values(history, 9_000_000), [2000, 5, 5]);
});

test("reports in quick succession are one sample, and a lost connection is a gap", () => {
  const history = new History();
  for (const now of [0, 100, 200]) history.add(now, { a: now });
  assert.deepEqual(values(history, 200), [200, 200]);
  history.gap(5000);
  history.add(9000, { a: 1 });
  assert.deepEqual(values(history, 9000), [200, null, 1, 1]);
});

test("the line of a chart has steps, gaps and the highest value", () => {
  const points = [{ at: 0, value: 2 }, { at: 0.5, value: null }, { at: 0.75, value: 4 }, { at: 1, value: 4 }];
  const { path, area, highest } = chart(points, 100, 10);
  assert.deepEqual([path, highest], ["M0 5H50M75 1H100", 4]);
  assert.equal(area, "M0 10V5H50V10ZM75 10V1H100V10Z");
  assert.deepEqual(chart([{ at: 0, value: 0 }, { at: 1, value: 0 }], 100, 10).path, "M0 9H100");
  assert.deepEqual(chart([], 100, 10), { path: "", area: "", highest: 0 });
});
