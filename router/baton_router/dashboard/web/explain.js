// Why a request went where it went, and what came of it, in sentences.

import { labelOf } from "./names.js";
import { counted, seconds } from "./sizes.js";

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
  if (!record.prefill) return `${decode} computed the prompt and wrote the answer itself.`;
  const prefill = labelOf(named, record.prefill);
  if (record.remote === null) return `${prefill} ${record.outcome === "running" ? "is" : "was"} to compute the prompt for ${decode}.`;
  if (record.remote) {
    const moved = counted(record.blocks_moved, "KV block");
    return `${prefill} computed the prompt, ${moved} moved, and ${decode} wrote the answer.`;
  }
  const reason = record.fallback ? ` (${record.fallback})` : "";
  return `${decode} computed the prompt itself: it did not come from ${prefill}${reason}.`;
}

function why(record, named) {
  const { price_s: price, others } = record.decision;
  if (!others.length) return "";
  const shown = others.map((other) => {
    const prefill = other.prefill ? `${labelOf(named, other.prefill)} → ` : "";
    const alone = other.prefill ? "" : " alone";
    return `${seconds(other.price_s)} by ${prefill}${labelOf(named, other.decode)}${alone}`;
  });
  const close = others.some((other) => other.price_s < price);
  const words = close ? "About as cheap as any other way" : "The cheapest way";
  return `${words}: ${seconds(price)}, against ${shown.join(", ")}. A price counts the seconds for this request and for those behind it.`;
}

function cache(record) {
  const expected = record.decision.expected_cached;
  if (record.prompt_tokens === null) {
    return `About ${counted(record.decision.estimated_tokens, "prompt token")}, of which ${expected} should be in a cache.`;
  }
  return `${record.cached_tokens} of ${counted(record.prompt_tokens, "prompt token")} came from a cache; about ${expected} were expected.`;
}

function prediction(record) {
  const { predicted_first_token_s: predicted, first_token_s: actual } = record.decision;
  if (actual === null) return "";
  return `First token after ${seconds(actual)} at the workers; predicted were ${seconds(predicted)}.`;
}

function end(record) {
  if (record.outcome === "lost") return "The worker gave no answer that could be passed on; another one was asked, if there was one.";
  if (record.outcome === "refused") return "The worker refused it: what was asked for is not possible.";
  if (record.outcome === "cut") return "The answer ended early: it was stopped, or its client left.";
  return "";
}
