import assert from "node:assert/strict";
import test from "node:test";

import { KEPT, Requests } from "../../../router/baton_router/dashboard/web/state.js";
import { record, running } from "./records.mjs";

const asked = running([{ name: "queue", start: 0, end: 5 }, { name: "prefill", start: 5, end: null }]);
const begun = { ...record({ outcome: "running" }), phases: [
  { name: "queue", start: 0, end: 5 },
  { name: "prefill", start: 5, end: 90 },
  { name: "transfer", start: 80, end: 92 },
  { name: "decode", start: 92, end: null },
] };
const ended = { ...begun, outcome: "whole", phases: begun.phases.map((phase) => ({ ...phase, end: phase.end ?? 300 })) };
const kinds = (moves) => moves.map((move) => move.kind);

function open() {
  const requests = new Requests();
  requests.take([], 0);
  return requests;
}

test("a request is asked, its blocks move, it is done: each once", () => {
  const requests = open();
  assert.deepEqual(kinds(requests.take([asked], 10)), ["ask"]);
  assert.deepEqual(kinds(requests.take([begun], 100)), ["blocks"]);
  assert.deepEqual(kinds(requests.take([begun], 150)), []);
  assert.deepEqual(kinds(requests.take([ended], 310)), ["done"]);
  assert.equal(requests.get(7).outcome, "whole");
});

test("one that is over before it was told of shows all of it", () => {
  assert.deepEqual(kinds(open().take([ended], 310)), ["ask", "blocks", "done"]);
});

test("what was before the page was opened is history", () => {
  const requests = new Requests();
  assert.deepEqual(requests.take([ended], 310), []);
  assert.deepEqual(kinds(requests.take([{ ...ended, number: 8 }], 310)), ["ask", "blocks", "done"]);
  assert.deepEqual(requests.take([{ ...ended, number: 9 }], 60_000), []);
});

test("a prompt that its decode worker computed moves no blocks", () => {
  assert.deepEqual(kinds(open().take([{ ...ended, remote: false }], 310)), ["ask", "done"]);
});

test("a lost worker's request moves no blocks", () => {
  const lost = { ...asked, outcome: "lost" };
  assert.deepEqual(kinds(open().take([lost], 10)), ["ask", "done"]);
});

test("only the last ones are kept, the newest first", () => {
  const requests = open();
  for (let number = 1; number <= 3 * KEPT; number += 1) requests.take([{ ...ended, number }], 310);
  const numbers = requests.all.map((one) => one.number);
  assert.equal(numbers.length, KEPT);
  assert.equal(numbers[0], 3 * KEPT);
  assert.equal(numbers.at(-1), 2 * KEPT + 1);
  requests.clear();
  assert.deepEqual(requests.all, []);
});
