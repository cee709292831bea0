// A conversation with the model. Its messages are not stored.

import { computedBy, decisionNumber, nothing, taken } from "./answer.js";
import { byId, html, say } from "./dom.js";
import { eventsOf } from "./events.js";
import { refusalOf } from "./feed.js";
import { authorization } from "./key.js";
import { labelOf } from "./names.js";
import { counted, seconds } from "./sizes.js";
import { timeline } from "./timelines.js";

const ENDS = { length: "maximum tokens reached", content_filter: "content filtered" };

export class Playground {
  #form = byId("ask");
  #question = byId("question");
  #log = byId("conversation");
  #messages = [];
  #answers = [];
  #running = null;
  #wantKey;

  // `wantKey(reason)` is called when the router rejected a request without a valid key.
  constructor(wantKey) {
    this.#wantKey = wantKey;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    this.#question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#form.requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.#running?.abort());
    byId("anew").addEventListener("click", () => this.#anew());
  }

  // The models that there are; the choice stays if it can.
  offer(models) {
    const select = byId("model");
    if ([...select.options].map((one) => one.value).join("\n") === models.join("\n")) return;
    const before = select.value;
    select.replaceChildren(...models.map((name) => html("option", { value: name }, name)));
    if (models.includes(before)) select.value = before;
  }

  // Pass the current state of the requests to the answers; each shows its own.
  follow(requests, named, now) {
    for (const answer of this.#answers) answer.follow(requests, named, now);
  }

  #anew() {
    this.#running?.abort();
    this.#messages = [];
    this.#answers = [];
    this.#log.replaceChildren(html("p", { class: "empty" }, "Send a message to see which workers answer it."));
    this.#question.focus();
  }

  async #ask() {
    const text = this.#question.value;
    if (this.#running || !text.trim()) return;
    const answer = new Answer();
    const wishes = this.#wishes([...this.#messages, { role: "user", content: text }]);
    if (!this.#messages.length) this.#log.replaceChildren();
    this.#log.append(said(text), answer.element);
    this.#answers.push(answer);
    if (wishes.problem) return answer.fail(wishes.problem);
    this.#question.value = "";
    this.#running = new AbortController();
    this.#busy(true);
    try {
      const whole = await this.#stream(wishes.body, answer);
      if (whole) this.#messages.push({ role: "user", content: text }, message(whole));
    } finally {
      this.#running = null;
      this.#busy(false);
    }
  }

  // The answer; null if it failed.
  async #stream(body, answer) {
    const signal = this.#running.signal;
    try {
      const response = await fetch("v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json", ...authorization() },
        body: JSON.stringify(body),
        signal,
      });
      if (!response.ok) {
        const refusal = await refusalOf(response);
        if (refusal.status === 401) this.#wantKey(refusal.reason);
        answer.fail(refusal.reason);
        return null;
      }
      answer.begin(response.headers);
      for await (const { data } of eventsOf(response)) {
        const end = this.#atEnd();
        answer.take(data);
        if (end) this.#log.scrollTop = this.#log.scrollHeight;
      }
      answer.done("");
    } catch (error) {
      if (signal.aborted) answer.done("stopped");
      else answer.fail(`The connection to the server was lost (${error.message}).`);
    }
    return answer.now.text || answer.now.calls.length ? answer.now : null;
  }

  #atEnd() {
    return this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < 48;
  }

  #busy(busy) {
    const focused = document.activeElement;
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    this.#log.setAttribute("aria-busy", String(busy));
    // If the focused button is hidden now, move the focus to its replacement.
    if (busy && focused === byId("send")) byId("stop").focus();
    if (!busy && focused === byId("stop")) this.#question.focus();
    say(byId("announcement"), busy ? "The model is answering." : "The answer has ended.");
    if (!busy) this.#log.scrollTop = this.#log.scrollHeight;
  }

  #wishes(messages) {
    const system = byId("system").value.trim();
    const body = {
      model: byId("model").value,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true,
      stream_options: { include_usage: true },
    };
    const temperature = byId("temperature").valueAsNumber;
    const most = byId("max-tokens").valueAsNumber;
    if (Number.isFinite(temperature)) body.temperature = temperature;
    if (Number.isFinite(most)) body.max_tokens = most;
    const tools = byId("tools").value.trim();
    if (!tools) return { body };
    try {
      return { body: { ...body, tools: JSON.parse(tools) } };
    } catch (error) {
      return { problem: `The tools are not valid JSON: ${error.message}` };
    }
  }
}

class Answer {
  #text = html("p", { class: "text" });
  #thoughts = html("pre", { class: "thoughts" });
  #thinking = html("details", { class: "thinking", open: "" }, html("summary", {}, "Thoughts"), this.#thoughts);
  #calls = html("div", { class: "calls" });
  #about = html("p", { class: "about note" });
  #way = html("div", { class: "way-of" });
  #number = null;
  #told = null;
  #how = "";
  #sent = performance.now();
  #first = null;
  now = nothing();

  constructor() {
    this.#thinking.hidden = true;
    this.element = html(
      "article",
      { class: "message answer running", "aria-label": "Answer" },
      this.#thinking, this.#text, this.#calls, this.#about, this.#way,
    );
  }

  begin(headers) {
    const decision = headers.get("x-baton-decision");
    this.#number = decisionNumber(decision);
    this.#told = {
      worker: headers.get("x-baton-worker") ?? "",
      computed: computedBy(decision),
      cached: headers.get("x-cached-tokens"),
    };
  }

  take(data) {
    this.now = taken(this.now, data);
    const { text, thoughts, calls, error } = this.now;
    if (this.#first === null && (text || thoughts || calls.length)) this.#first = performance.now();
    say(this.#text, text);
    say(this.#thoughts, thoughts);
    this.#thinking.hidden = !thoughts;
    this.#calls.replaceChildren(...calls.map((call) => html("pre", { class: "call" }, `${call.name}(${call.arguments})`)));
    if (error) this.fail(error);
  }

  done(how) {
    this.#how = how || ENDS[this.now.finish] || "";
    this.element.classList.remove("running");
  }

  fail(reason) {
    this.done("");
    this.element.classList.add("failed");
    this.element.append(html("p", { class: "problem", role: "alert" }, reason));
  }

  follow(requests, named, now) {
    if (!this.#told) return;
    const { worker, computed, cached } = this.#told;
    const label = (name) => labelOf(named, name);
    const usage = this.now.usage;
    const record = this.#number === null ? undefined : requests.get(this.#number);
    const prefill = record && record.remote !== null ? record.remote && record.prefill : computed !== worker && computed;
    const alone = worker ? `${label(worker)} computed the prompt and generated the answer` : ""; // tenants are not told of workers
    const parts = [
      prefill ? `${label(prefill)} computed the prompt, ${label(worker)} generated the answer` : alone,
      cached !== null && usage ? `${cached} of ${counted(usage.prompt_tokens, "prompt token")} cached` : "",
      this.#first ? `first token after ${seconds((this.#first - this.#sent) / 1000)}` : "",
      usage ? counted(usage.completion_tokens, "token") : "",
      this.#how,
    ];
    say(this.#about, parts.filter(Boolean).join(" · "));
    if (!record || (this.settled && record.outcome !== "running")) return;
    this.#way.replaceChildren(timeline(record, named, now));
    this.settled = record.outcome !== "running";
  }
}

function said(text) {
  return html("article", { class: "message question", "aria-label": "You" }, html("p", { class: "text" }, text));
}

function message(answer) {
  if (!answer.calls.length) return { role: "assistant", content: answer.text };
  const calls = answer.calls.map(({ id, name, arguments: given }) => ({
    id, type: "function", function: { name, arguments: given },
  }));
  return { role: "assistant", content: answer.text || null, tool_calls: calls };
}
