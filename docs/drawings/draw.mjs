// Draws the pictures of docs/how-it-works.md from the facts on stdin, into a folder: the playground's own tree, and three more.
// Knows the playground's drawing and colours; makes standalone SVG that follows the reader's light or dark.

import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

// The parts of a page that the playground's code needs, written as text.
class Element {
  constructor(name) {
    Object.assign(this, { name, attributes: {}, children: [], textContent: "" });
  }
  setAttribute(key, value) {
    this.attributes[key] = value;
  }
  append(...children) {
    this.children.push(...children);
  }
  addEventListener() {}
  toString() {
    const kept = Object.entries(this.attributes).filter(([key]) => !["tabindex", "role", "aria-label", "aria-hidden"].includes(key));
    const attributes = kept.map(([key, value]) => ` ${key}="${escaped(rounded(value))}"`).join("");
    return `<${this.name}${attributes}>${escaped(this.textContent)}${this.children.join("")}</${this.name}>`;
  }
}
globalThis.document = { createElementNS: (_, name) => new Element(name) };
const { drawTree, percent, placed, spelled } = await import("../../server/playground/tree.js");

const css = readFileSync(new URL("../../server/playground/style.css", import.meta.url), "utf-8");
const colours = css.slice(0, css.indexOf("* { box-sizing"));
const ofTrees = css.split("\n").filter((line) => /^\.(tree|rail|bar)\b/.test(line) && !/cursor|hover/.test(line)).join("\n");
const STYLE = `${colours}${ofTrees}
.paper { fill: var(--card); stroke: var(--line); }
.word { font: 13.5px var(--sans); fill: var(--muted); } .ink { fill: var(--ink); } .bold { font-weight: 600; } .code { font-family: var(--mono); font-size: 12.5px; }
text.trunk { fill: var(--trunk); } text.branch { fill: var(--branch); } text.extra { fill: var(--extra); }
.rule { fill: none; stroke: var(--line); stroke-width: 1.2; } .rule.trunk { stroke: var(--trunk); } .rule.branch { stroke: var(--branch); } .rule.extra { stroke: var(--extra); } .rule.root { stroke: var(--reject); }
.cell { fill: var(--rail); } .cell.seen { fill: var(--reject); } .cell.trunk { fill: var(--trunk); } .cell.branch { fill: var(--branch); } .cell.cached { fill: var(--cached); }
.dot { fill: var(--reject); opacity: .55; } .dot.best { fill: var(--branch); opacity: 1; } .dot.plain { fill: var(--trunk); opacity: 1; }
.ray { fill: none; stroke: var(--reject); stroke-width: 1.3; stroke-dasharray: 4 4; } .ray.best { stroke: var(--branch); stroke-dasharray: none; } .ray.plain { stroke: var(--trunk); stroke-dasharray: none; }`;

function escaped(value) {
  return String(value).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
}

function rounded(value) {
  return typeof value === "string" ? value.replace(/\d+\.\d+/g, (number) => String(Math.round(number * 10) / 10)) : value;
}

function made(name, attributes, text = "") {
  const element = new Element(name);
  Object.assign(element.attributes, Object.fromEntries(Object.entries(attributes).map(([key, value]) => [key, String(value)])));
  element.textContent = text;
  return element;
}

function word(x, y, text, kind = "", anchor = "start") {
  return made("text", { x, y, class: `word ${kind}`.trim(), "text-anchor": anchor }, text);
}

function line(x1, y1, x2, y2, kind) {
  return made("path", { d: `M${x1} ${y1}L${x2} ${y2}`, class: kind });
}

function moved(x, y, ...children) {
  const group = made("g", { transform: `translate(${x} ${y})` });
  group.append(...children);
  return group;
}

function picture(width, height, title, ...children) {
  const svg = made("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` });
  svg.append(made("title", {}, title), made("style", {}, STYLE));
  svg.append(made("rect", { x: 0.5, y: 0.5, width: width - 1, height: height - 1, rx: 14, class: "paper" }), ...children);
  return `${svg}\n`;
}

// The tree itself, with the names of its parts above it.
function delayedTree(step) {
  const { nodes, width, height } = placed(step);
  const spans = [["root", "last token"], ["trunk", "trunk"], ["branch", "branches"], ["extra", "the model’s"]];
  const above = spans.flatMap(([part, name]) => {
    const own = nodes.filter((node) => node.part === part && (part !== "extra" || node.accepted));
    const from = Math.min(...own.map((node) => node.x));
    const to = Math.max(...own.map((node) => node.x + node.width));
    const drawn = part === "root" ? "" : part;
    return [line(from, 26, to, 26, `rule ${part}`), word((from + to) / 2, 17, name, `${drawn} bold`, "middle")];
  });
  const lines = ["Solid: accepted. Broken: rejected.", "Bars: how likely the drafter (above) and the model (below) found a token."];
  const below = lines.map((text, at) => word(6, height + 62 + 22 * at, text));
  const tree = moved(0, 36, drawTree(step, () => {}));
  return picture(Math.max(width, 560) + 80, height + 124, "A delayed token tree", moved(40, 20, ...above, tree, ...below));
}

// Which keys each token of the pass sees: the text before, its ancestors and itself.
function mask(step) {
  const CELL = 27, LEFT = 92, CONTEXT = 118, TOP = 66;
  const { nodes } = step;
  const sees = nodes.map((node, at) => new Set([at]));
  nodes.forEach((node, at) => node.parent !== null && sees[node.parent].forEach((one) => sees[at].add(one)));
  const parts = [word(LEFT, 26, "keys", "bold"), word(LEFT + CONTEXT / 2, 52, `${step.position} before`, "", "middle"), word(20, 52, "queries", "bold")];
  const columns = LEFT + CONTEXT + 10;
  nodes.forEach((node, at) => {
    parts.push(word(columns + at * CELL + CELL / 2, 52, spelled(node), "code ink", "middle"));
    parts.push(word(LEFT - 12, TOP + at * CELL + 18, spelled(node), "code ink", "end"));
    parts.push(made("rect", { x: LEFT, y: TOP + at * CELL + 2, width: CONTEXT, height: CELL - 4, rx: 4, class: "cell seen" }));
    nodes.forEach((key, column) => {
      const kind = !sees[at].has(column) ? "" : key.part === "root" ? "seen" : key.part;
      parts.push(made("rect", { x: columns + column * CELL + 2, y: TOP + at * CELL + 2, width: CELL - 4, height: CELL - 4, rx: 4, class: `cell ${kind}`.trim() }));
    });
  });
  const end = TOP + nodes.length * CELL;
  parts.push(word(20, end + 28, `One forward of ${nodes.length} tokens: the root and ${nodes.length - 1} drafted ones.`));
  parts.push(word(20, end + 50, "Each sees the text before, its ancestors and itself."));
  return picture(columns + nodes.length * CELL + 40, end + 70, "The mask of one pass", ...parts);
}

// How the coupled rule walks down: the model draws at each node, and the walk continues while a child has the drawn token.
function acceptedPath(step) {
  const ROW = 46;
  const columns = { after: 24, offered: 150, drawn: 480, verdict: 620 };
  const heads = { after: "after", offered: "the tree offers", drawn: "the model draws", verdict: "so" };
  const parts = Object.entries(columns).map(([name, x]) => word(x, 32, heads[name], "bold"));
  const path = step.nodes.map((node, at) => ({ ...node, at })).filter((node) => node.accepted);
  path.forEach((node, at) => {
    const y = 48 + at * ROW;
    const children = step.nodes.filter((one) => one.parent === node.at);
    const drawn = path[at + 1] ?? { ...step.extra, part: "extra" };
    parts.push(line(20, y, 840, y, "rule"), chip(columns.after, y + 8, spelled(node), node.part, true));
    if (!children.length) parts.push(word(columns.offered, y + 28, "nothing: a leaf"));
    children.forEach((child, place) => {
      const x = columns.offered + place * 108;
      const taken = child.accepted;
      parts.push(chip(x, y + 8, spelled(child), child.part, taken), word(x + 46, y + 28, percent(child.draft_prob)));
    });
    parts.push(chip(columns.drawn, y + 8, spelled(drawn), drawn.part, true));
    parts.push(word(columns.verdict, y + 28, drawn.part === "extra" ? "the end: a token of its own" : "accepted, go on there"));
  });
  const end = 48 + path.length * ROW;
  parts.push(line(20, end, 840, end, "rule"), word(24, end + 28, `Percentages are the drafter’s. ${path.length - 1} drafted tokens and one of the model’s own: ${path.length} from one pass.`));
  return picture(860, end + 48, "A path is accepted", ...parts);
}

function chip(x, y, text, part, isTaken) {
  const tree = made("g", { class: "tree" });
  const node = made("g", { class: `node ${part} ${isTaken ? "accepted" : "rejected"}` });
  node.append(made("rect", { x, y, width: 38, height: 30, rx: 9, class: "box" }), made("text", { x: x + 19, y: y + 20, "text-anchor": "middle" }, text));
  tree.append(node);
  return tree;
}

// Every tree of the menu by its cost and expected tokens; tokens a second are the slope of a line from the corner.
function weighed(menu) {
  const WIDTH = 780, LEFT = 62, TOP = 30, RIGHT = 740, BOTTOM = 350;
  const mostMs = 300, mostTokens = 4.5;
  const x = (ms) => LEFT + ((RIGHT - LEFT) * ms) / mostMs;
  const y = (tokens) => BOTTOM - ((BOTTOM - TOP) * tokens) / mostTokens;
  const rate = (one) => (1000 * one.tokens) / one.ms;
  const plain = menu.find((one) => one.nodes === 0);
  const best = menu.reduce((one, other) => (rate(other) > rate(one) ? other : one));
  const largest = menu.reduce((one, other) => (other.nodes > one.nodes ? other : one));
  const parts = [line(LEFT, TOP, LEFT, BOTTOM, "rule"), line(LEFT, BOTTOM, RIGHT, BOTTOM, "rule")];
  for (const tokens of [1, 2, 3, 4]) parts.push(line(LEFT - 5, y(tokens), LEFT, y(tokens), "rule"), word(LEFT - 10, y(tokens) + 4, tokens, "", "end"));
  for (const ms of [100, 200, 300]) parts.push(line(x(ms), BOTTOM, x(ms), BOTTOM + 5, "rule"), word(x(ms), BOTTOM + 22, ms, "", "middle"));
  parts.push(word(LEFT - 42, TOP - 8, "expected tokens"), word(RIGHT, BOTTOM + 44, "milliseconds of the step", "", "end"));
  for (const [one, kind] of [[best, "best"], [plain, "plain"]]) {
    const far = Math.min(mostMs, (mostTokens / one.tokens) * one.ms);
    parts.push(line(LEFT, BOTTOM, x(far), y((one.tokens * far) / one.ms), `ray ${kind}`));
  }
  for (const one of menu) parts.push(made("circle", { cx: x(one.ms), cy: y(one.tokens), r: 3.4, class: "dot" }));
  const named = [[best, "best", "branch bold", -12, "end"], [plain, "plain", "trunk bold", 26, "start"], [largest, "", "ink", 26, "end"]];
  for (const [one, kind, colour, down, anchor] of named) {
    const name = one.nodes ? one.tree : "plain decoding";
    parts.push(made("circle", { cx: x(one.ms), cy: y(one.tokens), r: 5.5, class: `dot ${kind}`.trim() }));
    parts.push(word(x(one.ms) + (anchor === "start" ? 8 : 0), y(one.tokens) + down, `${name}: ${rate(one).toFixed(1)} tokens/s`, colour, anchor));
  }
  return picture(WIDTH, BOTTOM + 62, "Tokens weighed against time", ...parts);
}

const { step, weighed: menu } = JSON.parse(readFileSync(0, "utf-8"));
const drawings = { "tree.svg": delayedTree(step), "mask.svg": mask(step), "path.svg": acceptedPath(step), "weighed.svg": weighed(menu) };
for (const [name, svg] of Object.entries(drawings)) writeFileSync(join(process.argv[2], name), svg);
