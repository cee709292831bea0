import assert from "node:assert/strict";
import test from "node:test";

import { labels } from "../../../router/baton_router/dashboard/web/names.js";
import { worker } from "./records.mjs";

// As much of a browser as the picture needs while nothing moves.
class Element {
  constructor(tag) {
    this.tag = tag;
    this.attributes = new Map();
    this.children = [];
    this.clientWidth = 800;
    this.classList = { contains: () => false };
  }
  setAttribute(name, value) {
    this.attributes.set(name, String(value));
  }
  append(...children) {
    this.children.push(...children);
  }
  replaceChildren(...children) {
    this.children = children;
  }
  get texts() {
    return this.children.flatMap((child) => (child instanceof Element ? child.texts : [child]));
  }
  all(condition) {
    const within = this.children.filter((child) => child instanceof Element);
    return [...within.filter(condition), ...within.flatMap((child) => child.all(condition))];
  }
}

let resized = null;
globalThis.document = { createElementNS: (_, tag) => new Element(tag) };
globalThis.matchMedia = () => ({ matches: false });
globalThis.ResizeObserver = class {
  constructor(told) {
    resized = told;
  }
  observe() {}
};
const { Relay } = await import("../../../router/baton_router/dashboard/web/relay.js");

test("the picture calls workers as the table does, in whatever order they come", () => {
  const workers = ["b", "a", "a"].map((own_name, n) => worker("decode", `10.0.0.${n}:1`, { own_name }));
  const named = labels(workers);
  workers.reverse();
  assert.notDeepEqual(labels(workers), named);
  const place = new Element("div");
  const relay = new Relay(place);
  const shown = () =>
    new Map(place.all((one) => one.attributes.has("data-worker")).map((one) => {
      const [title] = one.all((part) => part.attributes.get("class") === "title");
      return [one.attributes.get("data-worker"), title.texts.join("")];
    }));
  relay.show({ workers, waiting: [] }, named);
  assert.deepEqual(shown(), new Map([...named].reverse()));
  resized();
  assert.deepEqual(shown(), new Map([...named].reverse()));
});
