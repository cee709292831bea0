// A conversation with the model. Its messages are not stored.

import { computedBy, decisionNumber, nothing, taken } from "./answer.js";
import { byId, html, say } from "./dom.js";
import { eventsOf } from "./events.js";
import { refusalOf } from "./feed.js";
import { authorization } from "./key.js";
import { longPrompt } from "./long_prompt.js";
import { Rendered } from "./markdown.js";
import { labelOf } from "./names.js";
import { counted, seconds } from "./sizes.js";
import { timeline } from "./timelines.js";

const ENDS = { length: "maximum tokens reached", content_filter: "content filtered" };
const NEAR_END = 48; // pixels from the end of the conversation that count as its end
const LONG = 600; // characters of a question that is folded
const SAID_MS = 2000; // a button says so long what it has done

export class Playground {
  #form = byId("ask");
  #question = byId("question");
  #log = byId("conversation");
  #turns = []; // { text, question, answer, messages }: elements, and what the turn adds to the conversation
  #running = null;
  #follows = true; // the end of the conversation stays in view, until the reader scrolls up
  #top = 0;
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
    byId("long").addEventListener("click", () => this.#ask(longPrompt(1 + Math.floor(Math.random() * 1e6))));
    this.#log.addEventListener("scroll", () => {
      const { scrollTop } = this.#log;
      if (this.#atEnd()) this.#follows = true;
      else if (scrollTop < this.#top) this.#follows = false;
      this.#top = scrollTop;
    });
    new ResizeObserver(() => this.#stayAtEnd()).observe(this.#log);
  }

  // The models that there are; the choice stays if it can. A long prompt is for prefill workers.
  offer(models, workers) {
    byId("long").hidden = !workers.some((worker) => worker.role === "prefill");
    const select = byId("model");
    if ([...select.options].map((one) => one.value).join("\n") === models.join("\n")) return;
    const before = select.value;
    select.replaceChildren(...models.map((name) => html("option", { value: name }, name)));
    if (models.includes(before)) select.value = before;
  }

  // Pass the current state of the requests to the answers; each shows its own.
  follow(requests, named, now) {
    for (const { answer } of this.#turns) answer.follow(requests, named, now);
    this.#stayAtEnd();
  }

  #anew() {
    this.#running?.abort();
    this.#turns = [];
    this.#log.replaceChildren(html("p", { class: "empty" }, "Send a message to see which workers answer it."));
    this.#question.focus();
  }

  // Ask the last question again, in place of its answer.
  #retry() {
    if (this.#running) return;
    const { text, question, answer } = this.#turns.pop();
    question.remove();
    answer.element.remove();
    this.#ask(text);
  }

  async #ask(given) {
    const text = given ?? this.#question.value;
    if (this.#running || !text.trim()) return;
    const turn = { text, question: said(text), answer: new Answer(() => this.#retry()), messages: [] };
    const { answer } = turn;
    const before = this.#turns.flatMap(({ messages }) => messages);
    const wishes = this.#wishes([...before, { role: "user", content: text }]);
    if (!this.#turns.length) this.#log.replaceChildren();
    this.#log.append(turn.question, answer.element);
    this.#turns.push(turn);
    this.#follows = true;
    this.#stayAtEnd();
    if (wishes.problem) return answer.fail(wishes.problem);
    if (given === undefined) this.#question.value = "";
    this.#running = new AbortController();
    this.#busy(true);
    try {
      const whole = await this.#stream(wishes.body, answer);
      if (whole) turn.messages = [{ role: "user", content: text }, message(whole)];
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
        answer.take(data, () => this.#stayAtEnd());
      }
      answer.done("");
    } catch (error) {
      if (signal.aborted) answer.done("stopped");
      else answer.fail(`The connection to the server was lost (${error.message}).`);
    }
    return answer.now.text || answer.now.calls.length ? answer.now : null;
  }

  #atEnd() {
    return this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < NEAR_END;
  }

  #stayAtEnd() {
    if (this.#follows) this.#log.scrollTop = this.#log.scrollHeight;
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
    byId("long").disabled = busy;
    this.#stayAtEnd();
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
  #text = new Rendered(html("div", { class: "text" }));
  #thoughts = html("pre", { class: "thoughts" });
  #thinking = html("details", { class: "thinking", open: "" }, html("summary", {}, "Thoughts"), this.#thoughts);
  #calls = html("div", { class: "calls" });
  #about = html("p", { class: "about note" });
  #way = html("div", { class: "way-of" });
  #copy = html("button", { type: "button", class: "quiet copy" }, "Copy");
  #retry = html("button", { type: "button", class: "quiet retry" }, "Retry");
  #frame = 0;
  #number = null;
  #told = null;
  #how = "";
  #sent = performance.now();
  #first = null;
  now = nothing();

  // `retry` asks the question of this answer again.
  constructor(retry) {
    this.#thinking.hidden = true;
    this.#copy.addEventListener("click", () => this.#copied());
    this.#retry.addEventListener("click", retry);
    this.element = html(
      "article",
      { class: "message answer running", "aria-label": "Answer" },
      this.#thinking, this.#text.element, this.#calls, this.#about, this.#way,
      html("div", { class: "answer-actions" }, this.#copy, this.#retry),
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

  // `drawn` is called after the answer was drawn, at most once a frame however many tokens arrive.
  take(data, drawn) {
    this.now = taken(this.now, data);
    const { text, thoughts, calls, error } = this.now;
    if (this.#first === null && (text || thoughts || calls.length)) this.#first = performance.now();
    if (error) this.fail(error);
    this.#frame ||= requestAnimationFrame(() => {
      this.#draw();
      drawn();
    });
  }

  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const { text, thoughts, calls } = this.now;
    this.#text.show(text);
    say(this.#thoughts, thoughts);
    this.#thinking.hidden = !thoughts;
    this.#calls.replaceChildren(...calls.map((call) => html("pre", { class: "call" }, `${call.name}(${call.arguments})`)));
  }

  async #copied() {
    say(this.#copy, (await copy(this.now.text)) ? "Copied" : "Not copied");
    setTimeout(() => say(this.#copy, "Copy"), SAID_MS);
  }

  done(how) {
    this.#draw();
    this.#copy.hidden = !this.now.text;
    this.#how = how || ENDS[this.now.finish] || "";
    this.element.classList.remove("running");
  }

  fail(reason) {
    this.done("");
    this.element.classList.add("failed");
    this.element.lastElementChild.before(html("p", { class: "problem", role: "alert" }, reason));
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
  const whole = html("p", { class: "text" }, text);
  const words = counted(text.split(/\s+/).length, "word");
  const shown = text.length > LONG ? html("details", {}, html("summary", {}, `${text.slice(0, 80).trim()} … (${words})`), whole) : whole;
  return html("article", { class: "message question", "aria-label": "You" }, shown);
}

// Whether the text is in the clipboard. Pages that came without TLS from another machine have no clipboard of their own.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = html("textarea", { class: "unseen", readonly: "" }, text);
    const focused = document.activeElement;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}

function message(answer) {
  if (!answer.calls.length) return { role: "assistant", content: answer.text };
  const calls = answer.calls.map(({ id, name, arguments: given }) => ({
    id, type: "function", function: { name, arguments: given },
  }));
  return { role: "assistant", content: answer.text || null, tool_calls: calls };
}
