// The playground: a form becomes a request, its stream an answer; a second request without speculation is shown beside it.

import { Answer, describe } from "./answer.js";
import { ApiError, servedModel, streamed } from "./stream.js";
import { drawTree } from "./tree.js";

const form = document.querySelector("#request");
const fields = form.elements;
const turns = document.querySelector("#turns");
const notice = document.querySelector("#notice");
const verdict = document.querySelector("#verdict");
const sides = { drafted: document.querySelector("#drafted"), plain: document.querySelector("#plain") };
const blank = { drafted: document.querySelector("#with-tree"), plain: document.querySelector("#without-tree") };

const isNarrow = matchMedia("(max-width: 860px)"); // the answer is below the form

let model = null;
let running = null;
let conversation = [];

async function findModel() {
  try {
    model = await servedModel(fields.key.value);
    document.querySelector("#model").textContent = model;
    notice.textContent = "";
  } catch (error) {
    explain(error);
  }
}

function explain(error) {
  if (error.name === "AbortError") return;
  if (error instanceof ApiError && error.status === 401) {
    document.querySelector("#key-field").hidden = false;
    fields.key.focus();
    notice.textContent = fields.key.value ? "This key does not open the server." : "This server requires an API key.";
    return;
  }
  notice.textContent = error.message;
}

function number(name) {
  return fields[name].value === "" ? undefined : Number(fields[name].value);
}

// Returns the request, but for its speculation.
function request() {
  const sampling = { temperature: number("temperature"), top_p: number("top_p"), seed: number("seed") };
  const common = { model, max_tokens: number("max_tokens"), stream: true, ...sampling };
  if (fields.mode.value === "completion") return ["v1/completions", { ...common, prompt: fields.prompt.value }];
  const messages = [...conversation, { role: "user", content: fields.prompt.value }];
  return ["v1/chat/completions", { ...common, messages }];
}

function speculation() {
  if (!fields.enabled.checked) return { enabled: false, trace: true };
  const wishes = { trace: true };
  if (fields.verifier.value) wishes.verifier = fields.verifier.value;
  const tree = fields.tree.value;
  if (!tree) return wishes;
  wishes.tree = tree;
  const sizes = tree.startsWith("delayed") ? ["trunk", "branches", "depth"] : ["max_nodes"];
  for (const size of sizes) wishes[size] = number(size);
  return wishes;
}

// Streams one answer into its side of the page; returns its text.
async function generate(side, path, body, signal) {
  sides[side].replaceChildren(blank[side].content.cloneNode(true));
  sides[side].hidden = false;
  if (side === "drafted" && isNarrow.matches) sides[side].firstElementChild.scrollIntoView({ block: "start" });
  const answer = new Answer(sides[side]);
  let text = "";
  sides[side].setAttribute("aria-busy", "true");
  try {
    for await (const piece of streamed(path, body, fields.key.value, signal)) {
      text += piece.text;
      if (piece.step) answer.add(piece.step);
    }
    answer.rest();
  } finally {
    sides[side].setAttribute("aria-busy", "false");
  }
  return { text, answer };
}

async function send() {
  const [path, body] = request();
  running = new AbortController();
  notice.textContent = verdict.textContent = "";
  sides.plain.hidden = true;
  document.querySelector("#hello")?.remove();
  form.classList.add("running");
  try {
    const drafted = await generate("drafted", path, { ...body, speculative: speculation() }, running.signal);
    if (fields.compare.checked) {
      const plain = await generate("plain", path, { ...body, speculative: { enabled: false, trace: true } }, running.signal);
      compare(drafted, plain, body);
    }
    if (path.includes("chat")) remember(body.messages.at(-1), { role: "assistant", content: drafted.text });
  } catch (error) {
    explain(error);
  } finally {
    running = null;
    form.classList.remove("running");
  }
}

function compare(drafted, plain, body) {
  const ratio = drafted.answer.speed / plain.answer.speed;
  const steps = `${drafted.answer.steps.length} steps in place of ${plain.answer.steps.length}`;
  const speed = Number.isFinite(ratio) ? `, ${ratio.toFixed(2)}× the speed` : "";
  const isSame = drafted.text === plain.text;
  const isFixed = body.seed !== undefined || body.temperature === 0;
  const words = isSame ? "The same text, token for token" : isFixed ? "The texts differ" : "Two draws from the same distribution: set a seed to get one text";
  verdict.textContent = `${words}: ${steps}${speed}.`;
  verdict.className = isSame ? "same" : "other";
}

function remember(...messages) {
  conversation.push(...messages);
  for (const { role, content } of messages) {
    const turn = document.createElement("li");
    turn.className = role;
    turn.textContent = content;
    turns.append(turn);
  }
  document.querySelector("#conversation").hidden = false;
  fields.prompt.value = "";
}

function forget() {
  fields.prompt.value = conversation[0].content;
  conversation = [];
  turns.replaceChildren();
  document.querySelector("#conversation").hidden = true;
}

// Draws a recorded step before the first request.
async function drawExample() {
  const answer = await fetch("playground/example.json");
  if (!answer.ok) return;
  const step = await answer.json();
  const detail = document.querySelector("#example-detail");
  document.querySelector("#example").replaceChildren(drawTree(step, (node) => describe(detail, step, node)));
  describe(detail, step, null);
}

// Shows the fields that the others leave a choice in.
function settle() {
  const isOn = fields.enabled.checked;
  const tree = fields.tree.value;
  document.querySelector("#wishes").disabled = !isOn;
  document.querySelector("#delayed").hidden = !tree.startsWith("delayed");
  document.querySelector("#sized").hidden = !tree || tree.startsWith("delayed");
  document.querySelector("#conversation").hidden = fields.mode.value !== "chat" || !conversation.length;
  document.querySelector("#prompt-name").textContent = fields.mode.value === "chat" ? "Message" : "Text to continue";
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return running.abort();
  if (model === null) await findModel();
  if (model !== null) await send();
});
form.addEventListener("change", settle);
fields.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
document.querySelector("#forget").addEventListener("click", forget);
fields.key.addEventListener("change", findModel);

settle();
findModel();
drawExample();
