// Records as the router sends them.

export function record(fields = {}) {
  return {
    number: 7,
    tenant: "",
    class: "default",
    model: "tiny",
    decode: "10.0.0.2:8000",
    prefill: "10.0.0.1:8000",
    outcome: "whole",
    streams: true,
    phases: [
      { name: "queue", start: 1000, end: 1010 },
      { name: "prefill", start: 1010, end: 1110 },
      { name: "transfer", start: 1100, end: 1112 },
      { name: "decode", start: 1112, end: 3000 },
    ],
    prompt_tokens: 100,
    cached_tokens: 40,
    held_tokens: 0,
    remote: true,
    fallback: "",
    blocks_moved: 7,
    answer_tokens: 20,
    decision: {
      estimated_tokens: 90,
      expected_cached: 32,
      expected_restored: {},
      price: 0.1,
      price_unit: "s",
      predicted_first_token_s: 0.09,
      first_token_s: 0.1,
      others: [],
    },
    ...fields,
  };
}

export function running(phases) {
  return record({ outcome: "running", remote: null, prompt_tokens: null, answer_tokens: null, phases });
}

export function worker(role, name, fields = {}) {
  return { role, name, model: "tiny", revision: "", state: "ready", reason: "", warnings: [], computing: 0, generating: 0, load: null, ...fields };
}
