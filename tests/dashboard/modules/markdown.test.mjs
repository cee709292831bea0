import assert from "node:assert/strict";
import test from "node:test";

import { inline, parse, webAddress } from "../../../router/baton_router/dashboard/web/markdown.js";

// A short form: text as it is, other parts as [kind, ...parts].
const short = (parts) => parts.map((one) => (one.kind === "text" ? one.text : [one.kind, ...(one.parts ? short(one.parts) : [one.text])]));
const blocks = (text) => parse(text).map((block) => [block.kind, ...(block.inline ? short(block.inline) : [])]);
const items = (list) => list.items.map((item) => [...short(item.inline), ...(item.list ? [items(item.list)] : [])]);

test("paragraphs and headings", () => {
  assert.deepEqual(blocks("One\nstill one.\n\n\n# A **head** #\nTwo"), [
    ["paragraph", "One\nstill one."], ["heading", "A ", ["bold", "head"]], ["paragraph", "Two"],
  ]);
  assert.deepEqual(parse(""), []);
});

test("marks within a line", () => {
  const cases = [
    ["a **b *c*** d", ["a ", ["bold", "b ", ["italic", "c"]], " d"]],
    ["`**x**` and ``a ` b``", [["code", "**x**"], " and ", ["code", "a ` b"]]],
    ["snake_case_name, 2 * 3 * 4, a*b*c", ["snake_case_name, 2 * 3 * 4, a*b*c"]],
    ["_so_ and __so__", [["italic", "so"], " and ", ["bold", "so"]]],
    ["**open", ["**open"]],
    ["`open", ["`open"]],
    ["[Baton](https://example.org/a?b=c)!", [["link", "Baton"], "!"]],
    ["[x](javascript:alert(1))", ["[x](javascript:alert(1))"]],
    ["[x](data:text/html,1) [y](/here)", ["[x](data:text/html,1)", " ", "[y](/here)"]],
  ];
  for (const [text, expected] of cases) assert.deepEqual(short(inline(text)), expected, text);
});

test("only addresses of the web are links", () => {
  assert.equal(webAddress("HTTPS://example.org"), "https://example.org/");
  for (const bad of ["javascript:1", " https://a", "//a", "ftp://a", "https://", "http:/a", "data:,", "java\nscript:1"]) {
    assert.equal(webAddress(bad), null, bad);
  }
});

test("code is taken as it is, also while it is being written", () => {
  assert.deepEqual(parse("```python\nx = 1\n\n# no heading\n```\nend").map(({ kind, language, text }) => ({ kind, language, text })), [
    { kind: "code", language: "python", text: "x = 1\n\n# no heading" }, { kind: "paragraph", language: undefined, text: undefined },
  ]);
  assert.equal(parse("~~~\na\n```\nb")[0].text, "a\n```\nb");
  assert.equal(parse("  ```\n  a\n    b\n  ```")[0].text, "a\n  b");
});

test("lists, and lists within them", () => {
  const [list, after] = parse("1. one\n   more\n2. **two**\n   - in\n   - side\n\n3. three\n\nend");
  assert.deepEqual(items(list), [["one\nmore"], [["bold", "two"], [["in"], ["side"]]], ["three"]]);
  assert.deepEqual([list.ordered, list.start, after.kind], [true, 1, "paragraph"]);
  const [other] = parse("- a\n- b");
  assert.deepEqual([other.ordered, items(other)], [false, [["a"], ["b"]]]);
});

// However a text is cut, what was whole stays, and no character is lost.
test("a text that grows", () => {
  const text = "# Head\n\nOne *two* **three** `four`.\n\n- a\n- b `c`\n\n```js\nlet x;\n```\nEnd [l](https://e.org).";
  const final = parse(text);
  for (let length = 0; length <= text.length; length += 1) {
    const part = parse(text.slice(0, length));
    assert.equal(part.map(({ source }) => source).join("").replaceAll("\n", ""), text.slice(0, length).replaceAll("\n", ""));
    part.slice(0, -1).forEach((block, index) => assert.deepEqual(block.kind, final[index].kind));
  }
});

test("long texts without an end take no time that a reader would notice", () => {
  for (const piece of ["**a ", "[a", "`a", "_a", "*a", "- ", "```\n", "`".repeat(3) + "a "]) {
    const start = performance.now();
    parse(piece.repeat(20_000 / piece.length)); // the most of one paragraph
    assert.ok(performance.now() - start < 5000, piece);
  }
});
