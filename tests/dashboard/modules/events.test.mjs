import assert from "node:assert/strict";
import test from "node:test";

import { EventReader } from "../../../router/baton_router/dashboard/web/events.js";

const TEXT = 'event: service\ndata: {"a": 1}\n\n: nothing\n\ndata: one\ndata: two\r\n\r\ndata:[DONE]\n\n';
const EXPECTED = [
  { kind: "service", data: '{"a": 1}' },
  { kind: "message", data: "one\ntwo" },
  { kind: "message", data: "[DONE]" },
];

test("events are the same wherever they were cut", () => {
  for (let size = 1; size <= TEXT.length; size += 1) {
    const reader = new EventReader();
    const found = [];
    for (let at = 0; at < TEXT.length; at += size) found.push(...reader.push(TEXT.slice(at, at + size)));
    assert.deepEqual(found, EXPECTED, `pieces of ${size}`);
  }
});

test("an event without an end is none", () => {
  assert.deepEqual(new EventReader().push("data: half\n"), []);
});
