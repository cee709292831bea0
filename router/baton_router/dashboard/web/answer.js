// An answer of the chat API as it grows: text, thoughts, tool calls, and how it ended.

export function nothing() {
  return { text: "", thoughts: "", calls: [], finish: null, usage: null, error: null };
}

// `answer` with one event's data more.
export function taken(answer, data) {
  if (data === "[DONE]") return answer;
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    return { ...answer, error: "The server sent an event that is not valid JSON." };
  }
  if (chunk.error) return { ...answer, error: String(chunk.error.message ?? "The answer ended with an error.") };
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  return {
    text: answer.text + (delta.content ?? ""),
    thoughts: answer.thoughts + (delta.reasoning_content ?? delta.reasoning ?? ""),
    calls: (delta.tool_calls ?? []).reduce(called, answer.calls),
    finish: choice?.finish_reason ?? answer.finish,
    usage: chunk.usage ?? answer.usage,
    error: answer.error,
  };
}

function called(calls, part) {
  const index = part.index ?? calls.length;
  const before = calls[index] ?? { name: "", arguments: "", id: "" };
  const after = {
    id: part.id ?? before.id,
    name: before.name + (part.function?.name ?? ""),
    arguments: before.arguments + (part.function?.arguments ?? ""),
  };
  const copy = [...calls];
  copy[index] = after;
  return copy;
}

// The number of the decision in the router's header; null without one.
export function decisionNumber(header) {
  const parts = Object.fromEntries((header ?? "").split(";").map((part) => part.split("=", 2)));
  return parts.number ? Number(parts.number) : null;
}

export function computedBy(header) {
  return /(?:^|;)computed_by=([^;]*)/.exec(header ?? "")?.[1] ?? "";
}
