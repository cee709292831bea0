// Describes in sentences which workers a request used, why the router chose them, and how it ended.

import { labelOf } from "./names.js";
import { count, counted, seconds } from "./sizes.js";

export function route(record, named) {
  const decode = labelOf(named, record.decode);
  if (!record.prefill) return decode;
  const prefill = labelOf(named, record.prefill);
  return record.remote === false ? `${decode}, without ${prefill}` : `${prefill} → ${decode}`;
}

export function sentences(record, named) {
  return [who(record, named), why(record, named), cache(record), prediction(record), end(record)].filter(Boolean);
}

function who(record, named) {
  const decode = labelOf(named, record.decode);
  if (!record.prefill) return `${decode} computed the prompt and generated the answer.`;
  const prefill = labelOf(named, record.prefill);
  if (record.remote === null) return `${prefill} ${record.outcome === "running" ? "is" : "was"} selected to compute the prompt for ${decode}.`;
  if (record.remote) {
    const moved = counted(record.blocks_moved, "KV block");
    return `${prefill} computed the prompt, ${moved} moved, and ${decode} generated the answer.`;
  }
  const reason = record.fallback ? ` (${record.fallback})` : "";
  return `${decode} computed the prompt, because ${prefill} did not deliver it${reason}.`;
}

function why(record, named) {
  const { price, price_unit: unit, others } = record.decision;
  if (!others.length) return "";
  const shown = others.map((other) => {
    const prefill = other.prefill ? `${labelOf(named, other.prefill)} → ` : "";
    const local = other.prefill ? "" : ", local prefill";
    return `${cost(other.price, unit)} (${prefill}${labelOf(named, other.decode)}${local})`;
  });
  const close = others.some((other) => other.price < price);
  const words = close ? "Cost close to the lowest" : "Lowest cost";
  const meaning = unit === "s" ? "the delay of this request and of those behind it" : `the number of ${unit} at the workers`;
  return `${words}: ${cost(price, unit)}. Alternatives: ${shown.join(", ")}. The cost is ${meaning}.`;
}

function cost(price, unit) {
  return unit === "s" ? seconds(price) : count(price);
}

function cache(record) {
  const {peer, ...tiers} = record.decision.expected_restored; // those of a peer are not among the expected
  const restored = Object.entries(tiers).map(([tier, tokens]) => `${tokens} from ${tier}`);
  const expected = `${record.decision.expected_cached}${restored.length ? ` (restored: ${restored.join(", ")})` : ""}${peer ? `, and ${peer} from the decode worker` : ""}`;
  if (record.prompt_tokens === null) {
    return `About ${counted(record.decision.estimated_tokens, "prompt token")}, ${expected} of them expected in the prefix cache.`;
  }
  return `${record.cached_tokens} of ${counted(record.prompt_tokens, "prompt token")} came from the prefix cache; about ${expected} were expected.`;
}

function prediction(record) {
  const { predicted_first_token_s: predicted, first_token_s: actual } = record.decision;
  if (actual === null) return "";
  return `Time to first token at the workers: ${seconds(actual)}; predicted: ${seconds(predicted)}.`;
}

function end(record) {
  if (record.outcome === "lost") return "The worker returned no usable answer. The router tried another worker if one was available.";
  if (record.outcome === "refused") return "The worker rejected the request as invalid.";
  if (record.outcome === "cut") return "The answer ended early: it was stopped, or its client disconnected.";
  return "";
}
