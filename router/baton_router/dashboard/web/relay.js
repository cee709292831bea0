// The relay as a picture. Each report redraws the fixed parts; moving parts have their own layer.

import { svg } from "./dom.js";
import { layout, shownOn } from "./layout.js";
import { addressOf } from "./names.js";
import { count, counted, shortened } from "./sizes.js";

const TRAVEL_MS = 900;
const BETWEEN_MS = 70; // from one mark to the next
const LIT_MS = 1600; // a link, where nothing is to move
const LETTER = 7; // pixels, about
const MOST_MOVING = 120;

const STATES = { ready: "ready", starting: "starting", not_ready: "not ready", half_open: "half open" };

export class Relay {
  #place;
  #still = svg("g");
  #moving = svg("g", { class: "moving" });
  #image = svg("svg", { role: "img" }, this.#still, this.#moving);
  #service = null;
  #named = new Map();
  #links = new Map();
  #marks = [];
  #frame = 0;
  #calm = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(place) {
    this.#place = place;
    place.append(this.#image);
    new ResizeObserver(() => this.#service && this.show(this.#service, this.#named)).observe(place);
  }

  // `named` has the workers' labels, which are those of the table.
  show(service, named) {
    this.#service = service;
    this.#named = named;
    const width = Math.floor(this.#place.clientWidth);
    if (width < 80) return;
    const placed = layout(width, service.workers);
    this.#image.setAttribute("viewBox", `0 0 ${placed.width} ${placed.height}`);
    this.#image.setAttribute("width", placed.width);
    this.#image.setAttribute("height", placed.height);
    this.#image.setAttribute("aria-label", described(service, named));
    const lit = new Set([...this.#links].filter(([, link]) => link.path.classList.contains("lit")).map(([id]) => id));
    this.#links = new Map(
      placed.links.map((link) => {
        const path = svg("path", { d: link.d, class: `link ${link.kind}${lit.has(link.id) ? " lit" : ""}` });
        return [link.id, { ...link, path }];
      }),
    );
    this.#still.replaceChildren(
      ...[...this.#links.values()].map((link) => link.path),
      ...placed.captions.map((one) => svg("text", { x: one.x, y: one.y, class: `caption ${one.kind}`, "text-anchor": one.anchor ?? "start" }, one.text)),
      router(placed.router, service),
      ...placed.cards.map((card) => worker(card, named.get(card.worker.name))),
    );
  }

  // Animate one move, if the picture has its link.
  move(move, after = 0) {
    const on = shownOn(move);
    const link = on && this.#links.get(on.id);
    if (!link) return;
    if (this.#calm.matches || document.hidden) {
      this.#light(on.id, after);
      return;
    }
    const begins = performance.now() + after;
    for (let index = 0; index < on.count && this.#marks.length < MOST_MOVING; index += 1) {
      const block = move.kind === "blocks";
      const mark = block
        ? svg("rect", { class: "mark blocks", width: 9, height: 9, rx: 2, x: -4.5, y: -4.5 })
        : svg("circle", { class: "mark ask", r: 5 });
      mark.setAttribute("visibility", "hidden");
      this.#moving.append(mark);
      this.#marks.push({ mark, id: on.id, begins: begins + index * BETWEEN_MS });
    }
    this.#light(on.id, after);
    if (!this.#frame) this.#frame = requestAnimationFrame((now) => this.#step(now));
  }

  #light(id, after) {
    setTimeout(() => this.#links.get(id)?.path.classList.add("lit"), after);
    setTimeout(() => this.#links.get(id)?.path.classList.remove("lit"), after + LIT_MS);
  }

  #step(now) {
    this.#marks = this.#marks.filter(({ mark, id, begins }) => {
      const part = (now - begins) / TRAVEL_MS;
      const path = this.#links.get(id)?.path;
      if (part >= 1 || !path) {
        mark.remove();
        return false;
      }
      if (part >= 0) {
        const eased = part < 0.5 ? 2 * part * part : 1 - 2 * (1 - part) * (1 - part);
        const { x, y } = path.getPointAtLength(eased * path.getTotalLength());
        mark.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
        mark.setAttribute("visibility", "visible");
      }
      return true;
    });
    this.#frame = this.#marks.length ? requestAnimationFrame((next) => this.#step(next)) : 0;
  }
}

// The picture in words.
export function described(service, named) {
  const waiting = service.waiting?.reduce((sum, one) => sum + one.count, 0);
  const workers = service.workers.map((one) => {
    const work = one.role === "prefill" ? `${counted(one.computing, "prompt")} in prefill` : `${counted(one.generating, "answer")} in decode`;
    return `${named.get(one.name)}, ${stateOf(one)}, ${work}`;
  });
  return [waiting === undefined ? "" : `${counted(waiting, "request")} queued`, ...workers].filter(Boolean).join("; ");
}

export function stateOf(worker) {
  return STATES[worker.state] ?? worker.state;
}

// Why a worker takes no requests, and why it serves with less than it was listed for.
export function remarksOf(worker) {
  return [worker.reason, ...worker.warnings].filter(Boolean);
}

function router({ x, y, width, height }, service) {
  const parts = [
    svg("rect", { x, y, width, height, rx: 12, class: "box queue" }),
    svg("text", { x: x + 14, y: y + 24, class: "title" }, "Router"),
  ];
  if (service.waiting) {
    for (const [index, { class: name, count: waiting }] of service.waiting.entries()) {
      const line = y + 48 + index * 21;
      parts.push(
        svg("text", { x: x + 14, y: line, class: waiting ? "small busy" : "small" }, name),
        svg("text", { x: x + width - 14, y: line, class: "small number", "text-anchor": "end" }, count(waiting)),
      );
    }
  } else {
    parts.push(svg("text", { x: x + 14, y: y + 48, class: "small" }, "your requests"));
  }
  return svg("g", {}, ...parts);
}

function worker(card, label) {
  const { x, y, width, height, worker: one } = card;
  const kind = one.role === "prefill" ? "prefill" : "decode";
  const inside = width - 28;
  const well = one.state === "ready" || one.state === "half_open";
  const busy = one.role === "prefill" ? one.computing : one.generating + one.computing;
  const state = stateOf(one);
  return svg(
    "g",
    { class: `worker ${kind} ${well ? "" : "unwell"}`, "data-worker": one.name },
    svg("title", {}, `${label}: ${[addressOf(one, label), state, ...remarksOf(one)].join(", ")}`),
    svg("rect", { x, y, width, height, rx: 12, class: `box ${kind}${busy ? " busy" : ""}` }),
    svg("text", { x: x + 14, y: y + 24, class: "title" }, label),
    svg("text", { x: x + width - 14, y: y + 24, class: "small", "text-anchor": "end" }, well ? "" : state),
    ...pips(busy, x + width - 14, y + 20, kind, well),
    svg("text", { x: x + 14, y: y + 43, class: "small mono" }, shortened(one.name, Math.floor(inside / LETTER))),
    svg("text", { x: x + 14, y: y + 62, class: "small" }, shortened(work(one), Math.floor(inside / 5.6))),
    ...memory(one, x + 14, y + height - 33, inside, kind),
  );
}

// One for each request that it works on now.
function pips(busy, right, y, kind, well) {
  if (!well) return [];
  return Array.from({ length: Math.min(6, busy) }, (_, index) =>
    svg("circle", { cx: right - 4 - index * 12, cy: y, r: 4, class: `pip ${kind}` }),
  );
}

function work(one) {
  const parts = [];
  if (one.role === "prefill" || one.computing) parts.push(`${counted(one.computing, "prompt")}`);
  if (one.role !== "prefill") parts.push(`${counted(one.generating, "answer")}`);
  if (one.load?.queued) parts.push(`${count(one.load.queued)} queued`);
  return parts.join(" · ");
}

function memory(one, x, y, width, kind) {
  if (!one.load?.total_blocks) return [];
  const { used_blocks: used, total_blocks: total } = one.load;
  const filled = (width * Math.min(used, total)) / total;
  const short = width < 130;
  return [
    svg("rect", { x, y, width, height: 4, rx: 2, class: "track" }),
    svg("rect", { x, y, width: used ? Math.max(3, filled) : 0, height: 4, rx: 2, class: `fill ${kind}` }),
    svg("text", { x, y: y + 18, class: "tiny" }, `${count(used)} of ${count(total)}${short ? "" : " KV blocks in use"}`),
  ];
}
