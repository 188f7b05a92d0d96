// Draws one step's tree as SVG. Knows a step as the trace reports it; does not know streams or pages.
//
// The accepted path runs straight along the top, the extra token at its end; rejected branches hang below. Arrow keys walk the
// tree: only one node is a tab stop at a time.

const SVG = "http://www.w3.org/2000/svg";
const LETTER = 7.9;
const PAD = 11;
const HEIGHT = 34;
const GAP_X = 34;
const GAP_Y = 12;
const MARGIN = 6;
const MOST_LETTERS = 16;
const KEYS = { ArrowLeft: "parent", ArrowRight: "child", ArrowUp: "above", ArrowDown: "below" };

export const PART_NAMES = {
  root: "last token so far",
  trunk: "trunk",
  branch: "branch",
  cached: "earlier text",
  prediction: "prediction",
  extra: "the model's own token",
};

// A token's text where blanks must be seen.
export function spelled(token) {
  const text = token.text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  return text === "" ? "∅" : text;
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  const value = 100 * share;
  return `${value >= 99.95 || value < 0.005 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} %`;
}

// Returns the nodes of a step's drawing, the extra token among them, with rows and columns.
export function placed(step) {
  const nodes = step.nodes.map((node, place) => ({ ...node, place, children: [] }));
  for (const node of nodes) {
    if (node.parent !== null) nodes[node.parent].children.push(node);
  }
  if (step.extra) {
    const end = nodes.findLast((node) => node.accepted);
    const extra = { ...step.extra, parent: end.place, depth: end.depth + 1, part: "extra", accepted: true, num_draws: 1 };
    end.children.push({ ...extra, place: nodes.length, children: [] });
    nodes.push(end.children.at(-1));
  }
  let rows = 0;
  const stack = [nodes[0]];
  while (stack.length) {
    const node = stack.pop();
    const first = node.parent !== null && nodes[node.parent].children[0] === node;
    node.row = node.parent === null || first ? (node.parent === null ? rows++ : nodes[node.parent].row) : rows++;
    node.children.sort((one, other) => Number(other.accepted) - Number(one.accepted));
    stack.push(...node.children.toReversed());
  }
  const widths = [];
  for (const node of nodes) {
    node.label = shortened(spelled(node)) + (node.num_draws > 1 ? ` ×${node.num_draws}` : "");
    node.width = Math.max(38, node.label.length * LETTER + 2 * PAD);
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  for (const node of nodes) {
    node.x = MARGIN + widths.slice(0, node.depth).reduce((sum, width) => sum + width + GAP_X, 0);
    node.y = MARGIN + node.row * (HEIGHT + GAP_Y);
  }
  const width = 2 * MARGIN + widths.reduce((sum, one) => sum + one + GAP_X, -GAP_X);
  return { nodes, width, height: 2 * MARGIN + rows * (HEIGHT + GAP_Y) - GAP_Y };
}

function shortened(text) {
  return text.length > MOST_LETTERS ? `${text.slice(0, MOST_LETTERS - 1)}…` : text;
}

// One node in a sentence, for screen readers.
export function sentence(node) {
  const words = [`“${node.text}”`, PART_NAMES[node.part]];
  if (node.draft_prob !== undefined && node.draft_prob !== null) words.push(`draft ${percent(node.draft_prob)}`);
  if (node.target_prob !== undefined && node.target_prob !== null) words.push(`model ${percent(node.target_prob)}`);
  if (node.part !== "root" && node.part !== "extra") words.push(node.accepted ? "accepted" : "rejected");
  return words.join(", ");
}

// Returns the drawing; `onNode` receives the selected node, or null.
export function drawTree(step, onNode) {
  const { nodes, width, height } = placed(step);
  const svg = svgElement("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", class: "tree" });
  svg.setAttribute("aria-label", `Tree of step ${step.step}. Arrow keys walk it.`);
  const edges = svgElement("g", { class: "edges", "aria-hidden": "true" });
  svg.append(edges);
  for (const node of nodes) {
    if (node.parent !== null) edges.append(edgeOf(nodes[node.parent], node));
  }
  const shapes = nodes.map(shapeOf);
  svg.append(...shapes);
  const visit = (place) => {
    shapes.forEach((shape, at) => shape.setAttribute("tabindex", at === place ? "0" : "-1"));
    shapes[place].focus();
  };
  shapes.forEach((shape, place) => {
    shape.addEventListener("pointerenter", () => onNode(nodes[place]));
    shape.addEventListener("pointerleave", () => onNode(null));
    shape.addEventListener("click", () => visit(place));
    shape.addEventListener("focus", () => onNode(nodes[place]));
    shape.addEventListener("blur", () => onNode(null));
    shape.addEventListener("keydown", (event) => {
      const next = neighbour(nodes, nodes[place], KEYS[event.key]);
      if (next === undefined) return;
      event.preventDefault();
      visit(next.place);
    });
  });
  return svg;
}

function neighbour(nodes, node, direction) {
  if (direction === "parent") return node.parent === null ? undefined : nodes[node.parent];
  if (direction === "child") return node.children[0];
  if (direction === undefined) return undefined;
  const column = nodes.filter((other) => other.depth === node.depth).sort((one, other) => one.row - other.row);
  return column[column.indexOf(node) + (direction === "above" ? -1 : 1)];
}

function edgeOf(from, to) {
  const x = from.x + from.width;
  const y = from.y + HEIGHT / 2;
  const end = to.y + HEIGHT / 2;
  const bend = x + (to.x - x) / 2;
  const kind = `edge ${to.accepted ? "accepted" : "rejected"} ${to.part}`;
  return svgElement("path", { d: `M${x} ${y}C${bend} ${y} ${bend} ${end} ${to.x} ${end}`, class: kind });
}

function shapeOf(node) {
  const kind = `node ${node.part} ${node.accepted ? "accepted" : "rejected"}`;
  const group = svgElement("g", { class: kind, role: "img", tabindex: node.parent === null ? "0" : "-1" });
  group.setAttribute("aria-label", sentence(node));
  group.append(svgElement("rect", { x: node.x, y: node.y, width: node.width, height: HEIGHT, rx: 9, class: "box" }));
  const text = svgElement("text", { x: node.x + node.width / 2, y: node.y + (node.part === "root" ? 22 : 18.5), "text-anchor": "middle" });
  text.textContent = node.label;
  group.append(text);
  if (node.part !== "root") {
    const length = node.width - 2 * PAD;
    const bars = node.part === "extra" ? ["target"] : ["draft", "target"];
    for (const [at, kind] of bars.entries()) {
      const y = node.y + HEIGHT - 9.5 + 4 * at;
      group.append(svgElement("rect", { x: node.x + PAD, y, width: length, height: 2.5, rx: 1.25, class: "rail" }));
      const share = Math.max(0, Math.min(1, node[`${kind}_prob`] ?? 0));
      group.append(svgElement("rect", { x: node.x + PAD, y, width: length * share, height: 2.5, rx: 1.25, class: `bar ${kind}` }));
    }
  }
  return group;
}

function svgElement(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  return element;
}
