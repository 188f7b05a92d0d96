// The playground: a form becomes a request, its stream an answer; a second request without speculation is shown beside it.
// Only requests whose tokens are looked at are traced.

import { Answer, describe, rounded } from "./answer.js";
import { copyButton, render } from "./markdown.js";
import { ApiError, BrokenOff, servedModel, streamed } from "./stream.js";
import { drawTree } from "./tree.js";

const find = (selector) => document.querySelector(selector);
const form = find("#request");
const fields = form.elements;
const settings = find("#settings");
const answers = find("#answers");
const notice = find("#notice");
const verdict = find("#verdict");
const sides = { drafted: find("#drafted"), plain: find("#plain") };
const blank = { drafted: find("#with-tree"), plain: find("#without-tree") };

const STORED = "latebranch.conversation";
const RENDER_MS = 80;
const RETRY_MS = 1500;

let model = null;
let running = null; // what stops the request, while there is one
let latest = null; // the request whose answer is shown
let isAwaiting = false; // whether the page waits for its server
let conversation = stored();
const speeds = { drafted: null, plain: null, ceiling: null };
const CHAINS = [4, 8, 16, 32]; // lengths of drafts of the answer's own text

async function findModel() {
  try {
    model = await servedModel(fields.key.value);
    find("#model").textContent = model;
    notice.textContent = "";
  } catch (error) {
    explain(error);
  }
}

// Reports an error in words, and waits for the server if it is away.
function explain(error) {
  if (error.name === "AbortError") return;
  const status = error instanceof ApiError ? error.status : null;
  if (status === 401) {
    find("#key-field").hidden = false;
    fields.key.focus();
    notice.textContent = fields.key.value ? "The server does not accept this API key." : "This server requires an API key.";
    return;
  }
  if (status === 404) model = null; // another model may be served by now
  notice.textContent = words(error, status);
  if (error instanceof BrokenOff || error instanceof TypeError || status === 503) awaitServer();
}

function words(error, status) {
  const isWaiting = "This page waits for it.";
  if (error instanceof BrokenOff) return `The connection ended before the answer did. The server may be restarting. ${isWaiting}`;
  if (error instanceof TypeError) return `The server does not answer. It may be stopped or restarting. ${isWaiting}`;
  if (status === 503) return `The server is not ready: ${error.message}. ${isWaiting}`;
  if (status === 429) return `The limit of this API key is reached: ${error.message}`;
  return error.message;
}

async function awaitServer() {
  if (isAwaiting) return;
  isAwaiting = true;
  while (isAwaiting && !running) {
    await new Promise((done) => setTimeout(done, RETRY_MS));
    try {
      model = await servedModel(fields.key.value);
      find("#model").textContent = model;
      if (!running) notice.textContent = "The server is ready again. Send the message once more.";
      break;
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) {
        explain(error);
        break;
      }
    }
  }
  isAwaiting = false;
}

function number(name) {
  return fields[name].value === "" ? undefined : Number(fields[name].value);
}

// Returns the request, but for its speculation.
function request() {
  const sampling = { temperature: number("temperature"), top_p: number("top_p"), seed: number("seed") };
  const usage = { include_usage: true, continuous_usage_stats: true };
  const common = { model, max_tokens: number("max_tokens"), stream: true, stream_options: usage, ...sampling };
  if (fields.mode.value === "completion") return ["v1/completions", { ...common, prompt: fields.prompt.value }];
  const messages = [...conversation, { role: "user", content: fields.prompt.value }];
  return ["v1/chat/completions", { ...common, messages }];
}

function isTraced() {
  return find("#view input:checked").value === "tokens";
}

function speculation() {
  const wishes = { trace: isTraced() };
  if (!fields.enabled.checked) return { enabled: false, ...wishes };
  if (fields.verifier.value) wishes.verifier = fields.verifier.value;
  const tree = fields.tree.value;
  if (!tree) return wishes;
  wishes.tree = tree;
  const sizes = tree.startsWith("delayed") ? ["trunk", "branches", "depth"] : ["max_nodes"];
  for (const size of sizes) wishes[size] = number(size);
  return wishes;
}

// Tokens a second since the first of an answer: reading the prompt does not count.
class Pace {
  add(tokens) {
    const now = performance.now();
    this.first ??= { tokens, now };
    this.last = { tokens, now };
  }

  get speed() {
    const seconds = this.first ? (this.last.now - this.first.now) / 1000 : 0;
    return seconds > 0 ? (this.last.tokens - this.first.tokens) / seconds : null;
  }
}

// Streams one answer into its side of the page. `shown` has what came so far, also after an error.
async function generate(side, path, body, signal, shown = { text: "" }) {
  sides[side].replaceChildren(blank[side].content.cloneNode(true));
  sides[side].hidden = false;
  const answer = (shown.answer = new Answer(sides[side]));
  const pace = (shown.pace = new Pace());
  const place = answer.place("read");
  place.after(copyButton(() => shown.text));
  sides[side].setAttribute("aria-busy", "true");
  settle();
  const isPlain = body.speculative.enabled === false;
  let rendered = 0;
  try {
    for await (const { text, step, usage, metrics } of streamed(path, body, fields.key.value, signal)) {
      shown.text += text;
      if (step) answer.add(step);
      if (usage?.completion_tokens) {
        if (!metrics) pace.add(usage.completion_tokens);
        const drafted = metrics?.speculative_decoding.num_accepted_draft_tokens; // every step adds a token to these
        const steps = answer.steps.length || (metrics ? usage.completion_tokens - drafted : null);
        answer.count({ tokens: usage.completion_tokens, steps, speed: pace.speed });
      }
      if (performance.now() - rendered < RENDER_MS) continue;
      render(place, shown.text);
      showSpeed(isPlain ? "plain" : "drafted", pace.speed);
      rendered = performance.now();
    }
    answer.rest();
  } finally {
    render(place, shown.text);
    showSpeed(isPlain ? "plain" : "drafted", pace.speed);
    sides[side].setAttribute("aria-busy", "false");
    settle();
  }
  return shown;
}

function showSpeed(side, speed) {
  if (speed === null) return;
  speeds[side] = speed;
  find("#speeds").hidden = false;
  const most = Math.max(...Object.values(speeds));
  for (const [name, value] of Object.entries(speeds)) {
    const number = find(`#speed-${name}`);
    number.textContent = value === null ? "–" : `${rounded(value)} tokens/s`;
    number.nextElementSibling.firstElementChild.style.width = `${(100 * (value ?? 0)) / most}%`;
  }
  find("#ceiling").hidden = speeds.ceiling === null;
  find("#ratio").textContent = speeds.drafted && speeds.plain ? `${(speeds.drafted / speeds.plain).toFixed(2)}×` : "";
}

// Runs requests until they are done, stopped or failed. Returns whether none failed.
async function run(work) {
  running = new AbortController();
  notice.textContent = verdict.textContent = "";
  form.classList.add("running");
  settle();
  let error = null;
  try {
    await work(running.signal);
  } catch (caught) {
    error = caught;
  }
  running = null;
  form.classList.remove("running");
  settle();
  if (error) explain(error);
  return error === null || error.name === "AbortError";
}

async function send() {
  const [path, body] = request();
  const prompt = fields.prompt.value;
  const isChat = path.includes("chat");
  sides.plain.hidden = true;
  find("#hello")?.remove();
  forgetCeiling();
  showTurns(isChat ? body.messages : []);
  if (isChat) fields.prompt.value = "";
  const own = (latest = { path, body });
  const shown = { text: "" };
  const isDone = await run(async (signal) => {
    sides.drafted.scrollIntoView({ block: "nearest" });
    own.drafted = await generate("drafted", path, { ...body, speculative: speculation() }, signal, shown);
    if (fields.compare.checked) await comparePlain(signal);
  });
  if (!isChat || latest !== own) return; // a new conversation was begun
  if (shown.text) keep([...body.messages, { role: "assistant", content: shown.text }]);
  else if (!fields.prompt.value) fields.prompt.value = prompt;
  if (!isDone && !shown.text) showTurns(conversation);
}

// Generates the answer once more, with its steps.
function again() {
  const own = latest;
  forgetCeiling();
  return run(async (signal) => {
    sides.plain.hidden = true;
    own.drafted = await generate("drafted", own.path, { ...own.body, speculative: speculation() }, signal);
    if (own.body.messages && latest === own) keep([...own.body.messages, { role: "assistant", content: own.drafted.text }]);
  });
}

async function comparePlain(signal) {
  const { path, body, drafted } = latest;
  const plain = await generate("plain", path, { ...body, speculative: { enabled: false, trace: isTraced() } }, signal);
  const ratio = drafted.pace.speed / plain.pace.speed;
  const speed = Number.isFinite(ratio) ? `, ${ratio.toFixed(2)}× the speed` : "";
  const steps = [drafted, plain].map(({ answer }) => answer.place("steps").textContent);
  const isSame = drafted.text === plain.text;
  const text = isSame ? "The same text, token for token" : isFixed(body) ? "The texts differ" : "Two draws from the same distribution: set a seed to get one text";
  verdict.textContent = `${text}: ${steps[0]} steps in place of ${steps[1]}${speed}.`;
  verdict.className = isSame ? "same" : "other";
}

// Shows which share of the ceiling the answer reached: its speed if every guess were right.
async function measureCeiling(signal) {
  find("#share").textContent = "Generating the answer again, with every guess right …";
  try {
    const found = await ceilingOf(latest, signal);
    if (typeof found === "string") {
      find("#share").textContent = found;
      return;
    }
    showSpeed("ceiling", found);
    const share = document.createElement("b");
    share.textContent = `${Math.min(100, Math.round((100 * latest.drafted.pace.speed) / found))} % of the ceiling.`;
    find("#share").replaceChildren(share, ` The ceiling is this answer generated again, with every guess right: ${rounded(found)} tokens/s.`);
  } catch (error) {
    forgetCeiling();
    throw error;
  }
}

// Returns tokens a second with the answer's own text as the draft, in longer chains as long as these are faster; or why they are
// not known.
async function ceilingOf({ path, body, drafted }, signal) {
  const prediction = { type: "content", content: drafted.text };
  let best = null;
  for (const trunk of CHAINS) {
    const speculative = { tree: "delayed", trunk, branches: 1, depth: 0, verifier: "coupled" };
    const pace = new Pace();
    let text = "";
    let accepted = 0;
    for await (const part of streamed(path, { ...body, prediction, speculative }, fields.key.value, signal)) {
      text += part.text;
      if (part.usage?.completion_tokens && !part.metrics) pace.add(part.usage.completion_tokens);
      accepted = part.usage?.completion_tokens_details?.accepted_prediction_tokens ?? accepted;
    }
    if (text !== drafted.text) return "Generated again, the answer had another text, so its ceiling is not known.";
    if (!accepted) return "The server did not draft from the answer, so its ceiling is not known.";
    if (!(pace.speed > best)) break;
    best = pace.speed;
  }
  return best && drafted.pace.speed ? best : "The answer is too short to measure its ceiling.";
}

function forgetCeiling() {
  speeds.ceiling = null;
  find("#ceiling").hidden = true;
  find("#share").replaceChildren();
}

// Whether the same request generates the same text again.
function isFixed(body) {
  return body.seed !== undefined || body.temperature === 0;
}

function stored() {
  try {
    const turns = JSON.parse(localStorage.getItem(STORED)) ?? [];
    const isTurn = (turn) => ["user", "assistant"].includes(turn.role) && typeof turn.content === "string";
    return Array.isArray(turns) && turns.every(isTurn) ? turns : [];
  } catch {
    return []; // no storage, or not ours
  }
}

function keep(messages) {
  conversation = messages;
  try {
    if (messages.length) localStorage.setItem(STORED, JSON.stringify(messages));
    else localStorage.removeItem(STORED);
  } catch {
    // without storage the conversation lasts as long as the page
  }
  settle();
}

function showTurns(messages) {
  const turns = messages.map(({ role, content }) => {
    const turn = document.createElement("li");
    turn.className = role;
    if (role === "assistant") render(turn, content);
    else turn.textContent = content;
    return turn;
  });
  find("#turns").replaceChildren(...turns);
  settle();
}

function forget() {
  running?.abort();
  keep([]);
  showTurns([]);
  latest = null;
  verdict.textContent = "";
  forgetCeiling();
  for (const side of Object.values(sides)) {
    side.hidden = true;
    side.replaceChildren();
  }
  settle();
  fields.prompt.focus();
}

// Draws a recorded step before the first request.
async function drawExample() {
  const answer = await fetch("playground/example.json");
  if (!answer.ok || !find("#hello")) return;
  const step = { ...(await answer.json()), step_s: null }; // another machine's
  const detail = document.querySelector("#example-detail");
  document.querySelector("#example").replaceChildren(drawTree(step, (node) => describe(detail, step, node)));
  describe(detail, step, null);
}

// Shows what there is a choice in.
function settle() {
  const tree = fields.tree.value;
  const view = isTraced() ? "tokens" : "text";
  find("#wishes").disabled = !fields.enabled.checked;
  find("#delayed").hidden = !tree.startsWith("delayed");
  find("#sized").hidden = !tree || tree.startsWith("delayed");
  find("#conversation").hidden = !find("#turns").childElementCount;
  find("#prompt-name").textContent = fields.mode.value === "chat" ? "Message" : "Text to continue";
  answers.dataset.view = view;
  const hasSteps = Boolean(sides.drafted.querySelector(".step"));
  find("#untraced").hidden = view === "text" || running !== null || !latest || hasSteps;
  find("#measure").hidden = running !== null || !latest?.drafted || !sides.plain.hidden;
  find("#replay").hidden = running !== null || !latest?.drafted?.text || !isFixed(latest.body) || find("#share").hasChildNodes();
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return running.abort();
  isAwaiting = false;
  if (model === null) await findModel();
  if (model !== null) await send();
});
document.addEventListener("change", settle);
document.addEventListener("invalid", () => (settings.open = true), true); // a folded field cannot be shown to be wrong
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
fields.prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) form.requestSubmit();
});
find("#forget").addEventListener("click", forget);
find("#again").addEventListener("click", again);
find("#measure").addEventListener("click", () => run(comparePlain));
find("#replay").addEventListener("click", () => run(measureCeiling));
fields.key.addEventListener("change", findModel);

if (conversation.length) find("#hello").remove();
else drawExample();
showTurns(conversation);
findModel();
