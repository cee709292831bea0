// Layout of the relay: from the available width and the workers to boxes and links.

const CARD_HEIGHT = 106;
const GAP = 16;
const ROUTER_HEIGHT = 132;
const TOP = 30; // for the captions
const NARROW = 560; // below it the relay runs downwards
const LANE = 12; // below the cards, for requests that pass the prefill workers by
const FLOW = 76; // between two rows of a relay that runs downwards
const MOST = 6; // cards of one role; the table has all

// Returns `{ width, height, narrow, router, cards: [{ worker, x, y, width, height }], links, captions, left }`.
// A link has id, kind ("ask" to a worker that computes, "blocks" between workers), from, to and d, its path.
export function layout(width, workers) {
  const narrow = width < NARROW;
  const prefills = workers.filter((worker) => worker.role === "prefill");
  const decodes = workers.filter((worker) => worker.role !== "prefill");
  const shown = [prefills.slice(0, MOST), decodes.slice(0, MOST)];
  const placed = narrow ? downwards(width, ...shown) : sideways(width, ...shown);
  const left = { prefill: prefills.length - shown[0].length, decode: decodes.length - shown[1].length };
  return { width, narrow, left, ...placed, links: links(placed, narrow) };
}

function sideways(width, prefills, decodes) {
  const routerWidth = Math.round(0.19 * width);
  const cardWidth = Math.round(0.27 * width);
  const decodeX = width - cardWidth - 2; // for the stroke
  const prefillX = Math.round((routerWidth + decodeX - cardWidth) / 2 - 0.02 * width);
  const rows = Math.max(1, prefills.length, decodes.length);
  const inside = Math.max(ROUTER_HEIGHT, rows * (CARD_HEIGHT + GAP) - GAP);
  const column = (workers, x) => {
    const all = workers.length * (CARD_HEIGHT + GAP) - GAP;
    const y = TOP + (inside - all) / 2;
    return workers.map((worker, index) => ({
      worker, x, y: y + index * (CARD_HEIGHT + GAP), width: cardWidth, height: CARD_HEIGHT,
    }));
  };
  const routerY = TOP + (inside - ROUTER_HEIGHT) / 2;
  return {
    height: TOP + inside + LANE + 4,
    router: { x: 0, y: routerY, width: routerWidth, height: ROUTER_HEIGHT },
    cards: [...column(prefills, prefillX), ...column(decodes, decodeX)],
    captions: [
      { text: "queue", kind: "queue", x: 0, y: 14 },
      ...(prefills.length ? [{ text: "prefill", kind: "prefill", x: prefillX, y: 14 }] : []),
      ...(prefills.length ? [{ text: "KV blocks", kind: "transfer", x: (prefillX + cardWidth + decodeX) / 2, y: 14, anchor: "middle" }] : []),
      { text: "decode", kind: "decode", x: decodeX, y: 14 },
    ],
  };
}

function downwards(width, prefills, decodes) {
  const most = width < 300 ? 1 : 2;
  const captions = [{ text: "queue", kind: "queue", x: 0, y: 14 }];
  let y = TOP + ROUTER_HEIGHT;
  const rows = (workers, text, kind) => {
    if (!workers.length) return [];
    captions.push({ text, kind, x: 0, y: y + FLOW - 12 });
    y += FLOW;
    const columns = Math.min(most, workers.length);
    const cardWidth = (width - (columns - 1) * GAP) / columns - 2;
    const cards = workers.map((worker, index) => ({
      worker,
      x: (index % columns) * (cardWidth + GAP) + 1,
      y: y + Math.floor(index / columns) * (CARD_HEIGHT + GAP),
      width: cardWidth,
      height: CARD_HEIGHT,
    }));
    y += Math.ceil(workers.length / columns) * (CARD_HEIGHT + GAP) - GAP;
    return cards;
  };
  const router = { x: 0, y: TOP, width, height: ROUTER_HEIGHT };
  const cards = [...rows(prefills, "prefill", "prefill"), ...rows(decodes, "decode", "decode")];
  return { height: y + 6, router, cards, captions };
}

function links({ router, cards, height }, narrow) {
  const prefills = cards.filter((card) => card.worker.role === "prefill");
  const decodes = cards.filter((card) => card.worker.role !== "prefill");
  const link = (kind, from, to, a, b) => ({ id: linkId(kind, from, to), kind, from, to, d: curve(a, b, narrow, kind, height) });
  return [
    ...prefills.map((card) => link("ask", "", card.worker.name, router, card)),
    ...decodes.map((card) => link("alone", "", card.worker.name, router, card)),
    ...prefills.flatMap((source) =>
      decodes.map((target) => link("blocks", source.worker.name, target.worker.name, source, target)),
    ),
  ];
}

export function linkId(kind, from, to) {
  return `${kind} ${from} ${to}`;
}

// From the side of `a` that looks at `b` to the side of `b` that looks at `a`. A request that passes the
// prefill workers by goes along the edge, where none of them stands.
function curve(a, b, narrow, kind, height) {
  if (narrow) {
    const start = [a.x + a.width / 2, a.y + a.height];
    const end = [b.x + b.width / 2, b.y];
    if (kind === "alone") start[0] = end[0] < a.x + a.width / 2 ? a.x + 8 : a.x + a.width - 8;
    const middle = (start[1] + end[1]) / 2;
    return `M${point(start)} C${point([start[0], middle])} ${point([end[0], middle])} ${point(end)}`;
  }
  if (kind === "alone") {
    const start = [a.x + a.width, a.y + a.height - 12];
    const end = [b.x, b.y + b.height - 12];
    const lane = height - 4;
    const [left, right] = [start[0] + 30, end[0] - 30];
    return (
      `M${point(start)} Q${point([start[0] + 14, lane])} ${point([left, lane])} ` +
      `L${point([right, lane])} Q${point([end[0] - 14, lane])} ${point(end)}`
    );
  }
  const start = [a.x + a.width, a.y + a.height / 2];
  const end = [b.x, b.y + b.height / 2];
  const middle = (start[0] + end[0]) / 2;
  return `M${point(start)} C${point([middle, start[1]])} ${point([middle, end[1]])} ${point(end)}`;
}

function point([x, y]) {
  return `${Math.round(10 * x) / 10} ${Math.round(10 * y) / 10}`;
}

// The links on which a move of `state.js` is shown, and with how many marks.
export function shownOn(move, marks = 12) {
  const { record } = move;
  if (move.kind === "ask") {
    const kind = record.prefill ? "ask" : "alone";
    return { id: linkId(kind, "", record.prefill ?? record.decode), count: 1 };
  }
  if (move.kind === "blocks" && record.blocks_moved > 0) {
    return { id: linkId("blocks", record.prefill, record.decode), count: Math.min(marks, record.blocks_moved) };
  }
  return null;
}
