// The last requests as timelines, and the details of an opened one.

import { html, say } from "./dom.js";
import { route, sentences } from "./explain.js";
import { axisEnd, bars, opening, ticks } from "./scale.js";
import { seconds } from "./sizes.js";
import { duration } from "./state.js";

const SHOWN = 14;
const OUTCOMES = { running: "running", whole: "", lost: "lost", refused: "rejected", cut: "ended early" };

export class Timelines {
  #list;
  #axis;
  #rows = new Map();

  constructor(list, axis) {
    this.#list = list;
    this.#axis = axis;
  }

  show(records, named, now) {
    const shown = records.slice(0, SHOWN);
    const end = axisEnd(shown, now);
    this.#axis.replaceChildren(
      ...ticks(end).map(({ at, text }) => at100(html("span", {}, text), at)),
    );
    const kept = new Map();
    for (const record of shown) {
      const row = this.#rows.get(record.number) ?? new Row(record.number);
      row.show(record, named, end, now);
      kept.set(record.number, row);
    }
    for (const [number, row] of this.#rows) if (!kept.has(number)) row.element.remove();
    shown.forEach((record, index) => {
      const { element } = kept.get(record.number);
      if (this.#list.children[index] !== element) this.#list.insertBefore(element, this.#list.children[index] ?? null);
    });
    this.#rows = kept;
    this.#list.hidden = this.#axis.hidden = !shown.length;
  }
}

class Row {
  #way = html("span", { class: "way" });
  #total = html("span", { class: "total" });
  #track = html("span", { class: "track", "aria-hidden": "true" });
  #details;
  #button;

  constructor(number) {
    const id = `request-${number}`;
    this.#details = html("div", { id, class: "details", hidden: "" });
    this.#button = html(
      "button",
      { type: "button", class: "timeline", "aria-expanded": "false", "aria-controls": id },
      html("span", { class: "number" }, `${number}`), this.#way, this.#track, this.#total,
    );
    this.#button.addEventListener("click", () => {
      this.#details.hidden = !this.#details.hidden;
      this.#button.setAttribute("aria-expanded", String(!this.#details.hidden));
    });
    this.element = html("li", { "data-number": number }, this.#button, this.#details);
  }

  show(record, named, end, now) {
    const outcome = OUTCOMES[record.outcome] ?? record.outcome;
    say(this.#way, route(record, named));
    say(this.#total, [outcome, seconds(duration(record, now) / 1000)].filter(Boolean).join(" "));
    this.element.className = record.outcome;
    this.#track.replaceChildren(...drawn(record, end, now));
    this.#details.replaceChildren(...details(record, named, now));
  }
}

// A record as it stands in an answer of the playground: its phases up to the end, and in words.
export function timeline(record, named, now) {
  const track = html("span", { class: "track", "aria-hidden": "true" }, ...drawn(record, axisEnd([record], now), now));
  return html("div", { class: "timeline-alone" }, track, figures(record, now));
}

function drawn(record, end, now) {
  return bars(record, end, now).map((bar) => {
    const element = html("span", { class: `bar ${bar.name}${bar.open ? " open" : ""}` });
    element.style.left = `${bar.left}%`;
    element.style.width = `${bar.width}%`;
    return element;
  });
}

function details(record, named, now) {
  const zoomed = opening(record, now);
  const tenant = record.tenant ? ` · ${record.tenant}` : "";
  return [
    figures(record, now),
    html("p", { class: "note" }, "Up to the first token:"),
    html("span", { class: "track zoomed", "aria-hidden": "true" }, ...drawn(zoomed.record, zoomed.end, now)),
    ...sentences(record, named).map((sentence) => html("p", {}, sentence)),
    html("p", { class: "note" }, `${record.model} · class ${record.class}${tenant}`),
  ];
}

function figures(record, now) {
  return html(
    "dl",
    { class: "phases" },
    ...record.phases.map((phase) =>
      html(
        "div",
        { class: phase.name },
        html("dt", {}, phase.name),
        html("dd", {}, `${seconds(((phase.end ?? now) - phase.start) / 1000)}${phase.end === null ? " …" : ""}`),
      ),
    ),
    record.prompt_tokens === null
      ? null
      : html("div", {}, html("dt", {}, "cached tokens"), html("dd", {}, `${record.cached_tokens} of ${record.prompt_tokens}`)),
    record.answer_tokens === null ? null : html("div", {}, html("dt", {}, "generated tokens"), html("dd", {}, `${record.answer_tokens}`)),
  );
}

function at100(element, at) {
  element.style.left = `${at}%`;
  return element;
}
