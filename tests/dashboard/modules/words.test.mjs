import assert from "node:assert/strict";
import test from "node:test";

import { route, sentences } from "../../../router/baton_router/dashboard/web/explain.js";
import { addressOf, labels } from "../../../router/baton_router/dashboard/web/names.js";
import { count, counted, seconds, share, shortened } from "../../../router/baton_router/dashboard/web/sizes.js";
import { record, running, worker } from "./records.mjs";

const named = labels([worker("decode", "10.0.0.2:8000"), worker("prefill", "10.0.0.1:8000"), worker("decode", "10.0.0.3:8000")]);

test("workers are called by role and number", () => {
  assert.deepEqual([...named.values()], ["decode-0", "prefill-0", "decode-1"]);
});

test("workers are called as in their logs, if no two have the same name", () => {
  const called = (...names) => [...labels(names.map((own_name, n) => ({ ...worker("decode", `10.0.0.${n}:1`), own_name }))).values()];
  assert.deepEqual(called("smollm2-decode-7f", ""), ["smollm2-decode-7f", "decode-1"]);
  assert.deepEqual(called("a", "a", "b"), ["decode-0", "decode-1", "b"]);
  assert.deepEqual(called("decode-0", "decode-0", "decode-1"), ["decode-0", "decode-2", "decode-1"]);
  assert.deepEqual(called("decode-1", "", "", "decode-4", ""), ["decode-1", "decode-2", "decode-3", "decode-4", "decode-5"]);
  const pod = { ...worker("decode", "10.0.0.1:1"), own_name: "smollm2-6f1c2ab9-decode-7d9f5-x2x4b" };
  assert.equal(labels([pod]).get(pod.name), "decode-0");
  assert.equal(addressOf(pod, "decode-0"), "smollm2-6f1c2ab9-decode-7d9f5-x2x4b, 10.0.0.1:1");
  assert.equal(addressOf({ ...pod, own_name: "decode-0" }, "decode-0"), "10.0.0.1:1");
});

test("a route in words", () => {
  assert.equal(route(record(), named), "prefill-0 → decode-0");
  assert.equal(route(record({ prefill: null }), named), "decode-0");
  assert.equal(route(record({ remote: false }), named), "decode-0, without prefill-0");
  assert.equal(route(record({ decode: "gone:1" }), named), "prefill-0 → gone:1");
});

test("what happened and why, in sentences", () => {
  const decision = { ...record().decision, others: [{ decode: "10.0.0.2:8000", prefill: null, cached: 0, price: 0.31 }] };
  const said = sentences(record({ decision }), named);
  assert.match(said[0], /prefill-0 computed the prompt, 7 KV blocks moved, and decode-0 generated the answer/);
  assert.match(said[1], /Lowest cost: 100 ms\. Alternatives: 310 ms \(decode-0, local prefill\)/);
  assert.match(said[1], /The cost is the delay of this request/);
  assert.match(said[2], /40 of 100 prompt tokens came from the prefix cache; about 32 were expected/);
  assert.match(said[3], /at the workers: 100 ms; predicted: 90 ms/);
  const tiers = { ...decision, expected_restored: { memory: 16, disk: 8 } };
  assert.match(sentences(record({ decision: tiers }), named)[2], /about 32 \(restored: 16 from memory, 8 from disk\) were expected/);
});

test("a price that counts requests is no time", () => {
  const others = [{ decode: "10.0.0.2:8000", prefill: null, cached: 0, price: 3 }];
  const [, why] = sentences(record({ decision: { ...record().decision, price: 2, price_unit: "requests", others } }), named);
  assert.equal(why, "Lowest cost: 2. Alternatives: 3 (decode-0, local prefill). The cost is the number of requests at the workers.");
});

test("what went wrong is said", () => {
  const last = (fields) => sentences(record(fields), named).at(-1);
  assert.match(last({ outcome: "cut" }), /ended early/);
  assert.match(last({ outcome: "lost" }), /tried another worker/);
  assert.match(last({ outcome: "refused" }), /rejected the request/);
  assert.match(sentences(record({ remote: false, fallback: "busy" }), named)[0], /because prefill-0 did not deliver it \(busy\)/);
  assert.match(sentences(running(record().phases), named)[0], /is selected to compute/);
});

test("figures as people read them", () => {
  const cases = [[0, "0 ms"], [0.00002, "20 µs"], [0.0041, "4.1 ms"], [0.123, "123 ms"], [0.9999, "1.00 s"], [1.5, "1.50 s"],
    [12.34, "12.3 s"], [61, "1 min 1 s"], [119.7, "2 min 0 s"], [null, "–"], [Infinity, "–"]];
  for (const [value, expected] of cases) assert.equal(seconds(value), expected);
  assert.deepEqual([3, 3.26, 12_345, 2_500_000, null].map(count), ["3", "3.3", "12.3 k", "2.5 M", "–"]);
  assert.deepEqual([0, 1 / 60, 0.0033, 0.1, 0.96].map(count), ["0", "0.02", "0.003", "0.1", "1.0"]);
  assert.deepEqual([share(1, 3), share(0, 0)], ["33 %", "–"]);
  assert.deepEqual([counted(1, "block"), counted(2, "block")], ["1 block", "2 blocks"]);
  assert.equal(shortened("abcdef", 4), "abc…");
  assert.equal(shortened("😀😀", 2), "😀😀");
});
