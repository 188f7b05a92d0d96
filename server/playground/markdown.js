// Renders a model's markdown as elements. Its input is hostile: nothing is parsed as HTML, and only http(s) links are links.
// Images are links too, so that nothing loads. The time is linear in the text, for any text. Does not know requests or pages.

const DEEPEST = 8;
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^(?=[^-]*-)[-:| \t]+$/;
const LONGEST_ADDRESS = 2048; // each mark looks no further, so time stays linear
const ADDRESS = /https?:\/\/[^\s<>"'`\])]{1,2048}/y;
const MARKS = { "**": "strong", "__": "strong", "~~": "s", "*": "em", _: "em" };

// Replaces the contents of `place` by the rendered text.
export function render(place, text) {
  const page = document.createDocumentFragment();
  addBlocks(page, text.replaceAll("\r\n", "\n").split("\n"), 0);
  place.replaceChildren(page);
}

export function copyButton(text) {
  const button = element("button", "Copy");
  button.type = "button";
  button.className = "quiet copy";
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

// The clipboard's interface exists only on https and on this machine: elsewhere a selection is copied.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = element("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
}

function addBlocks(parent, lines, depth) {
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let found;
    if (!line.trim()) at += 1;
    else if ((found = FENCE.exec(line))) at = addCode(parent, lines, at, found);
    else if ((found = HEADING.exec(line))) {
      parent.append(inlined(`h${Math.min(6, found[1].length + 2)}`, found[2]));
      at += 1;
    } else if (RULE.test(line)) {
      parent.append(element("hr"));
      at += 1;
    } else if (depth < DEEPEST && QUOTE.test(line)) at = addQuote(parent, lines, at, depth);
    else if (depth < DEEPEST && ITEM.test(line)) at = addList(parent, lines, at, depth);
    else if (isTable(lines, at)) at = addTable(parent, lines, at);
    else at = addParagraph(parent, lines, at, depth);
  }
}

// A fence that is still open, as in a stream, ends with the text.
function addCode(parent, lines, at, [, fence, info]) {
  const isEnd = (line) => line.trim().length >= fence.length && line.trim().replaceAll(fence[0], "") === "";
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  const figure = element("figure");
  figure.className = "code";
  const head = element("figcaption", info.trim().split(/\s/, 1)[0] || "code");
  head.append(copyButton(() => text));
  const pre = element("pre");
  pre.tabIndex = 0; // it scrolls
  pre.append(element("code", text));
  figure.append(head, pre);
  parent.append(figure);
  return end + 1;
}

function addQuote(parent, lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const quote = element("blockquote");
  addBlocks(quote, lines.slice(at, end).map((line) => line.replace(QUOTE, "")), depth + 1);
  parent.append(quote);
  return end;
}

// An item has the lines behind its mark, and those below it that are indented further than the mark.
function addList(parent, lines, at, depth) {
  const [, margin, mark] = ITEM.exec(lines[at]);
  const isOrdered = mark.length > 1;
  const list = element(isOrdered ? "ol" : "ul");
  if (isOrdered) list.start = parseInt(mark, 10);
  let found;
  while (at < lines.length && (found = ITEM.exec(lines[at])) && found[1].length <= margin.length && found[2].length > 1 === isOrdered) {
    const inner = [lines[at].slice(found[0].length)];
    const indent = found[1].length;
    for (at += 1; at < lines.length; at += 1) {
      const isBlank = !lines[at].trim();
      if (!isBlank && margined(lines[at]) <= indent && (ITEM.test(lines[at]) || !inner.at(-1).trim() || startsBlock(lines[at]))) break;
      inner.push(isBlank ? "" : lines[at].slice(Math.min(margined(lines[at]), found[0].length)));
    }
    const item = element("li");
    addBlocks(item, inner, depth + 1);
    if (item.childElementCount && item.firstElementChild.tagName === "P") item.firstElementChild.replaceWith(...item.firstElementChild.childNodes);
    list.append(item);
  }
  parent.append(list);
  return at;
}

function margined(line) {
  return line.length - line.trimStart().length;
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("|") && TABLE_RULE.test(lines[at + 1]);
}

function addTable(parent, lines, at) {
  const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|");
  const table = element("table");
  const addRow = (line, kind) => {
    const row = element("tr");
    for (const cell of cells(line)) row.append(inlined(kind, cell.trim()));
    table.append(row);
  };
  addRow(lines[at], "th");
  for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) addRow(lines[at], "td");
  const frame = element("div");
  frame.className = "table";
  frame.tabIndex = 0; // it scrolls
  frame.append(table);
  parent.append(frame);
  return at;
}

function addParagraph(parent, lines, at, depth) {
  let end = at + 1;
  const isOver = (line) => !line.trim() || startsBlock(line) || (depth < DEEPEST && ITEM.test(line));
  while (end < lines.length && !isOver(lines[end]) && !isTable(lines, end)) end += 1;
  parent.append(inlined("p", lines.slice(at, end).map((line) => line.trim()).join("\n")));
  return end;
}

function inlined(name, text) {
  const made = element(name);
  addInline(made, text, 0);
  return made;
}

function addInline(parent, text, depth) {
  const places = new Map(); // where each closing mark was found last: no part of the text is searched twice for it
  const find = (mark, from) => {
    const known = places.get(mark);
    if (known !== undefined && (known < 0 || known >= from)) return known;
    let place = text.indexOf(mark, from);
    while (place >= 0 && mark.length === 1 && mark in MARKS && text[place + 1] === mark) place = text.indexOf(mark, place + 2); // a double mark
    places.set(mark, place);
    return place;
  };
  let plain = 0; // where the text begins that is not added yet
  let at = 0;
  const add = (made, end) => {
    parent.append(text.slice(plain, at), ...(made ? [made] : []));
    plain = at = end;
  };
  while (at < text.length) {
    const found = depth < DEEPEST ? spanAt(text, at, find, depth) : null;
    if (found) add(found.made, found.end);
    else if (text[at] === "`") while (text[at] === "`") at += 1; // a run that nothing closes
    else at += text[at] === "*" && text[at + 1] === "*" ? 2 : 1;
  }
  add(null, at);
}

// Returns the element that begins at a place and where its text ends, or null.
function spanAt(text, at, find, depth) {
  const letter = text[at];
  if (letter === "\n") return { made: element("br"), end: at + 1 };
  if (letter === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) return { made: text[at + 1], end: at + 2 };
  if (letter === "`") return codeAt(text, at, find);
  if (letter === "[" || (letter === "!" && text[at + 1] === "[")) return linkAt(text, at, find);
  if (letter === "h") {
    ADDRESS.lastIndex = at;
    const address = ADDRESS.exec(text)?.[0].replace(/[.,;:!?]{1,3}$/, "");
    return address ? linked(address, address, at + address.length) : null;
  }
  const mark = text.slice(at, at + 2) in MARKS ? text.slice(at, at + 2) : letter;
  return Object.hasOwn(MARKS, mark) ? markedAt(text, at, mark, find, depth) : null;
}

function codeAt(text, at, find) {
  let begin = at;
  while (text[begin] === "`") begin += 1;
  const end = find("`".repeat(begin - at), begin);
  return end < 0 ? null : { made: element("code", text.slice(begin, end)), end: end + begin - at };
}

function markedAt(text, at, mark, find, depth) {
  const begin = at + mark.length;
  const end = find(mark, begin);
  const isInWord = mark[0] === "_" && (/\w/.test(text[at - 1] ?? "") || /\w/.test(text[end + mark.length] ?? ""));
  if (end <= begin || isInWord || /\s/.test(text[begin] + text[end - 1])) return null;
  const made = element(MARKS[mark]);
  addInline(made, text.slice(begin, end), depth + 1);
  return { made, end: end + mark.length };
}

function linkAt(text, at, find) {
  const begin = text.indexOf("[", at) + 1;
  const middle = find("](", begin);
  const end = middle < 0 ? -1 : find(")", middle);
  if (end < 0 || end - middle > LONGEST_ADDRESS) return null;
  const address = text.slice(middle + 2, end).trim().split(/\s/, 1)[0];
  const label = text.slice(begin, middle);
  return linked(address, text[at] === "!" ? `image: ${label || address}` : label || address, end + 1);
}

function linked(address, label, end) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (url === null || !["http:", "https:"].includes(url.protocol)) return null;
  const link = element("a", label);
  link.href = url.href;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return { made: link, end };
}

function element(name, text = "") {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  return made;
}
