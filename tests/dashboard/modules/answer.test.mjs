import assert from "node:assert/strict";
import test from "node:test";

import { computedBy, decisionNumber, nothing, taken } from "../../../router/baton_router/dashboard/web/answer.js";

const delta = (fields, more = {}) => JSON.stringify({ choices: [{ index: 0, delta: fields, ...more }] });
const all = (...events) => events.reduce(taken, nothing());

test("text, thoughts, usage and the end are put together", () => {
  const usage = { prompt_tokens: 5, completion_tokens: 3 };
  const answer = all(
    delta({ role: "assistant", content: "" }),
    delta({ reasoning_content: "Hm", reasoning: "Hm" }),
    delta({ content: "Pa" }),
    delta({ content: "ris" }),
    delta({}, { finish_reason: "stop" }),
    JSON.stringify({ choices: [], usage }),
    "[DONE]",
  );
  assert.deepEqual(answer, { text: "Paris", thoughts: "Hm", calls: [], finish: "stop", usage, error: null });
});

test("calls of tools grow side by side", () => {
  const part = (index, fields) => delta({ tool_calls: [{ index, ...fields }] });
  const { calls } = all(
    part(0, { id: "a", function: { name: "weather", arguments: '{"ci' } }),
    part(1, { id: "b", function: { name: "time", arguments: "{}" } }),
    part(0, { function: { arguments: 'ty": 1}' } }),
  );
  assert.deepEqual(calls, [
    { id: "a", name: "weather", arguments: '{"city": 1}' },
    { id: "b", name: "time", arguments: "{}" },
  ]);
});

test("an error and an event that is not JSON are reported", () => {
  assert.equal(all(delta({ content: "Pa" }), '{"error": {"message": "lost"}}').error, "lost");
  assert.equal(all(delta({ content: "Pa" }), '{"error": {"message": "lost"}}').text, "Pa");
  assert.match(all("<html>").error, /not valid JSON/);
});

test("the router's header says which decision it was", () => {
  const header = "number=12;computed_by=10.0.0.1:80;tokens=5;cached=0;first_token_s=0.1";
  assert.equal(decisionNumber(header), 12);
  assert.equal(computedBy(header), "10.0.0.1:80");
  assert.equal(decisionNumber(null), null);
  assert.equal(computedBy(null), "");
});
