// One answer as it came: its tokens coloured by step and part, its numbers, a step to look at and that step's tree.
// Knows steps as the trace reports them. Does not know where they come from.

import { PART_NAMES, drawTree, percent, spelled } from "./tree.js";

const encoder = new TextEncoder();

export class Answer {
  // `root` has the marked places of the answer's template; without a place for a tree there is text alone.
  constructor(root) {
    this.root = root;
    this.steps = [];
    this.shown = -1;
    this.follows = true;
    this.isDue = false;
    this.decoder = new TextDecoder();
    this.text = this.place("text");
    this.stage = this.place("tree");
    if (this.stage) this.#listen();
  }

  place(name) {
    return this.root.querySelector(`[data-place="${name}"]`);
  }

  #listen() {
    this.scrubber = this.place("scrubber");
    this.scrubber.addEventListener("input", () => this.#look(Number(this.scrubber.value) - 1));
    this.place("back").addEventListener("click", () => this.#look(this.shown - 1));
    this.place("on").addEventListener("click", () => this.#look(this.shown + 1));
    this.text.addEventListener("click", (event) => {
      const at = event.target.closest(".step")?.dataset.at;
      if (at !== undefined) this.#look(Number(at));
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "ArrowLeft") this.#look(this.shown - 1);
      if (event.key === "ArrowRight") this.#look(this.shown + 1);
    });
  }

  #look(at) {
    const last = this.steps.length - 1;
    this.follows = at >= last;
    this.show(Math.max(0, Math.min(at, last)));
  }

  // Adds a new step. It is shown, unless an earlier one was selected.
  add(step) {
    this.steps.push(step);
    this.text.append(this.#spans(step, this.steps.length - 1));
    this.count({ tokens: this.numTokens, steps: this.steps.length, speed: this.speed });
    if (!this.stage) return;
    this.scrubber.max = String(this.steps.length);
    if (this.follows) this.#showSoon();
    else this.#title();
  }

  // Draws the newest step before the next frame: steps may come faster than frames.
  #showSoon() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      if (this.follows) this.show(this.steps.length - 1);
    });
  }

  #spans(step, at) {
    const span = made("span", "step");
    span.dataset.at = String(at);
    const path = step.nodes.slice(1).filter((node) => node.accepted);
    const tokens = [...path, ...(step.extra ? [{ ...step.extra, part: "extra" }] : [])].slice(0, step.num_emitted);
    for (const [index, token] of tokens.entries()) {
      const ends = step.finish === "stop" && index === tokens.length - 1;
      const text = ends ? "" : this.decoder.decode(new Uint8Array(token.bytes ?? encoder.encode(token.text)), { stream: true });
      const one = made("span", `token ${token.part}${ends ? " end" : ""}`, text);
      if (text.includes("\n")) one.classList.add("newline");
      span.append(one);
    }
    return span;
  }

  get numTokens() {
    return this.steps.reduce((sum, step) => sum + step.num_emitted, 0);
  }

  // Tokens a second by the engine's clock, without the first step: that one reads the prompt.
  get speed() {
    const later = this.steps.slice(1);
    const seconds = later.reduce((sum, step) => sum + step.step_s, 0);
    return seconds > 0 ? later.reduce((sum, step) => sum + step.num_emitted, 0) / seconds : null;
  }

  // Shows numbers of the answer; null and zero are not known yet.
  count({ tokens, steps, speed }) {
    this.place("per-step").textContent = steps ? (tokens / steps).toFixed(2) : "–";
    this.place("speed").textContent = speed ? rounded(speed) : "–";
    this.place("steps").textContent = steps || "–";
    this.place("tokens").textContent = tokens;
  }

  show(at) {
    if (at < 0) return;
    this.text.querySelector(".step.current")?.classList.remove("current");
    this.text.children[at].classList.add("current");
    this.shown = at;
    this.scrubber.value = String(at + 1);
    const step = this.steps[at];
    const detail = this.place("detail");
    this.stage.replaceChildren(drawTree(step, (node) => describe(detail, step, node)));
    this.#title();
    describe(detail, step, null);
  }

  // Shows the step with the most tokens, of those the largest tree, after the last one, unless another is selected.
  rest() {
    if (!this.stage || !this.follows || !this.steps.length) return;
    const value = (step) => 1000 * step.num_emitted + step.nodes.length;
    this.#look(this.steps.reduce((best, step, at) => (value(step) > value(this.steps[best]) ? at : best), 0));
  }

  #title() {
    this.place("title").textContent = `Step ${this.shown + 1} of ${this.steps.length}`;
    this.scrubber.setAttribute("aria-valuetext", this.place("title").textContent);
    this.place("back").disabled = this.shown <= 0;
    this.place("on").disabled = this.shown >= this.steps.length - 1;
  }
}

export function rounded(speed) {
  return speed.toFixed(speed < 100 ? 1 : 0);
}

// Describes in `place` the selected node, or the step.
export function describe(place, step, node) {
  if (node === null) {
    const parts = [made("span", "", outcome(step)), made("span", "muted", circumstances(step))];
    if (typeof step.bandwidth_share === "number") parts.push(made("span", "muted", roofline(step)));
    place.replaceChildren(...parts);
    return;
  }
  const parts = [made("strong", `token ${node.part}`, spelled(node)), made("span", "", PART_NAMES[node.part])];
  if (node.draft_prob !== undefined) parts.push(made("span", "draft", `draft ${percent(node.draft_prob)}`));
  if (node.target_prob !== undefined) parts.push(made("span", "target", `model ${percent(node.target_prob)}`));
  if (node.draft_prob !== undefined) parts.push(made("span", "", node.accepted ? "accepted" : "rejected"));
  place.replaceChildren(...parts);
}

function outcome(step) {
  const drafted = step.nodes.length - 1;
  const accepted = step.nodes.filter((node) => node.accepted).length - 1;
  if (drafted === 0) return "Nothing was drafted: the model chose one token.";
  const words = `${accepted} of ${drafted} drafted tokens accepted`;
  return `${words}, one more from the model: ${accepted + 1} ${accepted ? "tokens" : "token"} in one pass.`;
}

function circumstances(step) {
  const expected = step.expected_tokens ? `, ${step.expected_tokens.toFixed(2)} expected` : "";
  const reason = step.reason && step.reason !== "fixed" ? `, policy: ${step.reason.replaceAll("_", " ")}` : "";
  const time = step.step_s ? `, ${(1000 * step.step_s).toFixed(1)} ms` : "";
  return `${step.verifier} on ${step.expansion}${expected}${time}${reason}`;
}

// What the step's pass read and multiplied, over the whole step's time.
function roofline(step) {
  const read = `${(step.read_bytes / 1e9).toFixed(2)} GB read, ${percent(step.bandwidth_share)} of this machine’s bandwidth`;
  return `${read}; ${(step.operations / 1e9).toFixed(1)} G operations, ${percent(step.compute_share)} of its peak`;
}

function made(name, kind, text = "") {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  element.textContent = text;
  return element;
}
