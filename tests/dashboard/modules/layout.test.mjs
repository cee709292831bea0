import assert from "node:assert/strict";
import test from "node:test";

import { layout, linkId, shownOn } from "../../../router/baton_router/dashboard/web/layout.js";
import { record, worker } from "./records.mjs";

const cluster = (prefills, decodes) => [
  ...Array.from({ length: prefills }, (_, index) => worker("prefill", `p${index}`)),
  ...Array.from({ length: decodes }, (_, index) => worker("decode", `d${index}`)),
];

function overlap(a, b) {
  return a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
}

test("whatever the width and the workers: nothing overlaps, nothing is outside", () => {
  for (const width of [240, 320, 500, 619, 620, 760, 1200, 2400]) {
    for (const [prefills, decodes] of [[0, 0], [0, 1], [1, 1], [1, 4], [3, 2], [6, 6], [40, 40]]) {
      const placed = layout(width, cluster(prefills, decodes));
      const boxes = [placed.router, ...placed.cards];
      for (const [index, box] of boxes.entries()) {
        assert.ok(box.x >= 0 && box.x + box.width <= width + 0.01, `${width}: x`);
        assert.ok(box.y >= 0 && box.y + box.height <= placed.height, `${width}: y`);
        for (const other of boxes.slice(index + 1)) assert.ok(!overlap(box, other), `${width} ${prefills} ${decodes}`);
      }
      assert.equal(placed.cards.length + placed.left.prefill + placed.left.decode, prefills + decodes);
    }
  }
});

test("no caption runs into the next one", () => {
  const length = 72; // pixels of the longest, "KV blocks", with a space
  for (const width of [560, 640, 900]) {
    const { captions } = layout(width, cluster(1, 1));
    const starts = captions.map((one) => (one.anchor === "middle" ? one.x - (length - 8) / 2 : one.x));
    for (const [index, start] of starts.slice(1).entries()) assert.ok(start - starts[index] >= length, `${width}: ${starts}`);
  }
});

test("each pair of workers has a way for blocks, and each worker one from the router", () => {
  const { links } = layout(900, cluster(2, 3));
  const count = (kind) => links.filter((link) => link.kind === kind).length;
  assert.deepEqual([count("ask"), count("alone"), count("blocks")], [2, 3, 6]);
  assert.equal(new Set(links.map((link) => link.id)).size, links.length);
  assert.ok(links.every((link) => /^M[-\d. CQL]+$/.test(link.d)), "paths are numbers only");
});

test("a picture that is narrow runs downwards", () => {
  const { narrow, router, cards } = layout(380, cluster(1, 1));
  const [prefill, decode] = cards;
  assert.ok(narrow && router.y < prefill.y && prefill.y < decode.y);
});

test("a worker that does both stands with those that answer", () => {
  const { cards } = layout(900, [worker("both", "b"), worker("prefill", "p")]);
  assert.ok(cards.find((card) => card.worker.name === "p").x < cards.find((card) => card.worker.name === "b").x);
});

test("a move is shown on the way that the request took", () => {
  const one = record({ prefill: "p0", decode: "d0" });
  assert.deepEqual(shownOn({ kind: "ask", record: one }), { id: linkId("ask", "", "p0"), count: 1 });
  assert.deepEqual(shownOn({ kind: "ask", record: { ...one, prefill: null } }), { id: linkId("alone", "", "d0"), count: 1 });
  assert.deepEqual(shownOn({ kind: "blocks", record: one }), { id: linkId("blocks", "p0", "d0"), count: 7 });
  assert.equal(shownOn({ kind: "blocks", record: { ...one, blocks_moved: 4000 } }).count, 12);
  assert.equal(shownOn({ kind: "blocks", record: { ...one, blocks_moved: 0 } }), null);
  assert.equal(shownOn({ kind: "done", record: one }), null);
});
