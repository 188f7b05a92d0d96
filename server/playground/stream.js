// A generation request and its stream: yields each chunk's text and step. Knows the wire; does not know the page.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headersOf(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Returns the name of the served model.
export async function servedModel(key) {
  const answer = await checked(await fetch("v1/models", { headers: headersOf(key) }));
  return (await answer.json()).data[0].id;
}

// A stream that ended before its answer did.
export class BrokenOff extends Error {}

// Yields { text, step, usage, metrics } for each choice of each chunk, and at the end without text; what a chunk lacks is missing.
export async function* streamed(path, body, key, signal) {
  const headers = { "Content-Type": "application/json", ...headersOf(key) };
  const answer = await checked(await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal }));
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const { error, choices, usage, metrics } = JSON.parse(data);
    if (error) throw new ApiError(error.code === "engine_unavailable" ? 503 : 500, error.message);
    for (const choice of choices) {
      yield { text: choice.text ?? choice.delta?.content ?? "", step: choice.speculative_trace, usage };
    }
    if (!choices.length) yield { text: "", usage, metrics };
  }
  throw new BrokenOff();
}

async function checked(answer) {
  if (answer.ok) return answer;
  const error = await answer.json().catch(() => ({}));
  throw new ApiError(answer.status, error.error?.message ?? `the server answered ${answer.status}`);
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new BrokenOff();
    });
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice(6);
    }
  }
}
