// Small charts below the figures, of the last minutes.

import { byId, say, svg } from "./dom.js";
import { chart } from "./history.js";

const WIDTH = 300;
const HEIGHT = 34;

export class Chart {
  #line = svg("path", { class: "line" });
  #area = svg("path", { class: "area" });
  #image = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.#area, this.#line);
  #highest;
  #name;
  #title;
  #shown;

  // Of the figure `name` of a History, in the element `chart-NAME`; `shown` makes text of a value.
  constructor(name, title, shown) {
    this.#name = name;
    this.#title = title;
    this.#shown = shown;
    const place = byId(`chart-${name}`);
    this.#highest = byId(`highest-${name}`);
    place.append(this.#image);
  }

  show(history, now) {
    const { path, area, highest } = chart(history.points(this.#name, now), WIDTH, HEIGHT);
    this.#line.setAttribute("d", path);
    this.#area.setAttribute("d", area);
    const minutes = `${history.span(now) / 60_000} min`;
    const text = path ? `${minutes}, up to ${this.#shown(highest)}` : minutes;
    say(this.#highest, text);
    this.#image.setAttribute("aria-label", `${this.#title}, last ${text}`);
  }
}
