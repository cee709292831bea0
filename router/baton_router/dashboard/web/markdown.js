// A small part of Markdown, of a text that still grows: paragraphs, headings, lists, code, bold, italic and links.
//
// `parse` returns plain values. `Rendered` makes elements of them, with text nodes only: what a model writes is
// never markup, and what is no Markdown stays as it was written.

import { html } from "./dom.js";

const FENCE = /^(\s*)(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$/;
const ITEM = /^( {0,9})(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const INLINE_LIMIT = 20_000; // characters of a paragraph; a longer one is shown as it is
const DEEPEST = 4; // lists within lists; more are items of the deepest

// Blocks, each with the lines it came from: { kind, source } and, by kind, text, language, inline or items.
export function parse(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = code(lines, at) ?? heading(lines, at) ?? list(lines, at) ?? paragraph(lines, at);
    blocks.push({ ...block, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return blocks;
}

function code(lines, at) {
  const [, indent, fence, language] = FENCE.exec(lines[at]) ?? [];
  if (!fence) return null;
  let end = at + 1;
  const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  while (end < lines.length && !closes(lines[end])) end += 1;
  // Without its end, the code is still being written.
  const inside = lines.slice(at + 1, end).map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line));
  const block = { kind: "code", language: language.trim(), text: inside.join("\n") };
  return [block, Math.min(lines.length, end + 1)];
}

function heading(lines, at) {
  const [, text] = HEADING.exec(lines[at]) ?? [];
  return text ? [{ kind: "heading", inline: inline(text) }, at + 1] : null;
}

function list(lines, at) {
  if (!ITEM.test(lines[at])) return null;
  const items = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const [, indent, bullet, number, text] = ITEM.exec(lines[end]) ?? [];
    if (text !== undefined) {
      items.push({ indent: indent.length, ordered: !bullet, number: Number(number ?? 0), text });
    } else if (lines[end].trim() && /^\s/.test(lines[end]) && !FENCE.test(lines[end])) {
      items.at(-1).text += `\n${lines[end].trim()}`;
    } else if (lines[end].trim() || !ITEM.test(lines[end + 1] ?? "")) {
      break;
    }
  }
  return [nested(items, 1), end];
}

// One list of items; those that are further in than the first are lists of the item before them.
function nested(items, depth) {
  const [first] = items;
  const block = { kind: "list", ordered: first.ordered, start: first.number, items: [] };
  for (let at = 0; at < items.length; ) {
    let end = at + 1;
    while (depth < DEEPEST && end < items.length && items[end].indent > first.indent + 1) end += 1;
    const inner = items.slice(at + 1, end);
    block.items.push({ inline: inline(items[at].text), list: inner.length ? nested(inner, depth + 1) : null });
    at = end;
  }
  return block;
}

function paragraph(lines, at) {
  let end = at + 1;
  const ends = (line) => !line.trim() || FENCE.test(line) || HEADING.test(line) || ITEM.test(line);
  while (end < lines.length && !ends(lines[end])) end += 1;
  return [{ kind: "paragraph", inline: inline(lines.slice(at, end).join("\n")) }, end];
}

const MARKS = [
  { kind: "code", pattern: /(`+)(?!`)(.+?)(?<!`)\1(?!`)/su, text: 2 },
  { kind: "link", pattern: /\[([^[\]]+)\]\(([^()\s]+)\)/u, text: 1 },
  { kind: "bold", pattern: /\*\*(?=\S)(.+?)(?<=\S)\*\*(?!\*)/su, text: 1 },
  { kind: "bold", pattern: /(?<![\p{L}\p{N}_])__(?=\S)(.+?)(?<=\S)__(?![\p{L}\p{N}_])/su, text: 1 },
  { kind: "italic", pattern: /(?<![*\p{L}\p{N}])\*(?=[^\s*])([^*]+?)(?<=\S)\*(?!\*)/su, text: 1 },
  { kind: "italic", pattern: /(?<![\p{L}\p{N}_])_(?=[^\s_])([^_]+?)(?<=\S)_(?![\p{L}\p{N}_])/su, text: 1 },
];

// Parts of a line: { kind, text } for text and code, { kind, parts } for the others, and links with their address.
export function inline(text) {
  if (text.length > INLINE_LIMIT) return [{ kind: "text", text }];
  const parts = [];
  for (let rest = text; rest; ) {
    const found = MARKS.map((mark) => ({ ...mark, match: mark.pattern.exec(rest) })).filter(({ match }) => match);
    const next = found.sort((a, b) => a.match.index - b.match.index)[0];
    const index = next ? next.match.index : rest.length;
    if (index) parts.push({ kind: "text", text: rest.slice(0, index) });
    if (!next) break;
    const [whole] = next.match;
    parts.push(marked(next.kind, whole, next.match[next.text], next.match[2]));
    rest = rest.slice(index + whole.length);
  }
  return parts;
}

function marked(kind, whole, text, second) {
  if (kind === "code") return { kind, text };
  if (kind !== "link") return { kind, parts: inline(text) };
  const address = webAddress(second);
  return address ? { kind, address, parts: [{ kind: "text", text }] } : { kind: "text", text: whole };
}

// The address of a page on the web; null for everything else, such as javascript: and data:.
export function webAddress(text) {
  const [scheme, rest] = [text.split(":", 1)[0], text.slice(text.indexOf(":") + 1)];
  if (!/^https?$/i.test(scheme) || !rest.startsWith("//")) return null;
  try {
    return new URL(text).href;
  } catch {
    return null;
  }
}

// A text in an element. Blocks that stay the same keep their elements, and a selection in them.
export class Rendered {
  #sources = [];

  constructor(element) {
    this.element = element;
  }

  show(text) {
    const blocks = parse(text);
    const { children } = this.element;
    blocks.forEach((block, index) => {
      if (this.#sources[index] === block.source) return;
      const element = blockElement(block);
      if (children[index]) children[index].replaceWith(element);
      else this.element.append(element);
    });
    while (children.length > blocks.length) this.element.lastElementChild.remove();
    this.#sources = blocks.map(({ source }) => source);
  }
}

function blockElement(block) {
  if (block.kind === "code") {
    return html("pre", { class: "code", tabindex: "0", "aria-label": block.language || "code" }, html("code", {}, block.text));
  }
  if (block.kind === "list") {
    const items = block.items.map((item) =>
      html("li", {}, ...item.inline.map(inlineNode), item.list && blockElement(item.list)),
    );
    const start = block.ordered && block.start !== 1 ? block.start : null;
    return html(block.ordered ? "ol" : "ul", { start }, ...items);
  }
  return html("p", { class: block.kind === "heading" ? "heading-of" : null }, ...block.inline.map(inlineNode));
}

const TAGS = { bold: "strong", italic: "em", code: "code", link: "a" };

function inlineNode(part) {
  if (part.kind === "text") return part.text;
  if (part.kind === "code") return html("code", {}, part.text);
  const link = part.kind === "link" ? { href: part.address, title: part.address, target: "_blank", rel: "noopener noreferrer nofollow" } : {};
  return html(TAGS[part.kind], link, ...part.parts.map(inlineNode));
}
