"""OpenAI-compatible servers of a few lines over a tiny model, sound and broken, for the audit of a server by its URL."""

import contextlib
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

END = 2
_PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_PLAIN |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
FIELDS = {*_PLAIN, "model", "prompt", "max_tokens", "logprobs", "seed", "n", "stop", "stream", "logit_bias"}
FIELDS |= {"return_token_ids", "return_tokens_as_token_ids"}


class Busy(str):
    """A refusal for so many seconds."""


@cache
@torch.inference_mode()
def _logits_after(ids: tuple[int, ...], module: PreTrainedModel) -> Tensor:
    return torch.as_tensor(module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double())


class StandIn:
    """Draws from a model by formulas of its own. Tokens after the first are drafted; subclasses are broken there."""

    refused: frozenset[str] = frozenset()

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._num_unseeded = 0

    def answer(self, body: dict[str, Any]) -> dict[str, Any] | Busy | None:
        """Return the answer to a completion; None refuses it."""
        if self.refused & body.keys() or body.keys() - FIELDS:
            return None
        with self._lock:
            if body.get("seed") is None:
                self._num_unseeded += 1
            seed = body.get("seed", -self._num_unseeded)
            choices = [self._choice(body, random.Random(seed * 131 + index), index) for index in range(body.get("n", 1))]
        num_prompt, num_text = len(body["prompt"]), sum(len(choice["token_ids"]) for choice in choices)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_text, "total_tokens": num_prompt + num_text}
        return {"object": "text_completion", "choices": [self.form(choice) for choice in choices], "usage": usage}

    def form(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a choice in the format of the server; the default lists ids."""
        return choice

    def _choice(self, body: dict[str, Any], dice: random.Random, index: int) -> dict[str, Any]:
        ids: list[int] = []
        logprobs, tops, finish = [], [], "length"
        while len(ids) < body["max_tokens"]:
            row_V = self.row((*body["prompt"], *ids))
            probs_V = self.probs(row_V, _PLAIN | body, body["prompt"], ids)
            token_id = self.token(probs_V, dice, len(ids), body)
            reported_V = self.reported(row_V, probs_V)
            ids.append(token_id)
            logprobs.append(max(-9999.0, float(reported_V[token_id])))
            best = reported_V.topk(body.get("logprobs", 1))
            tops.append({f"token_id:{i}": max(-9999.0, value) for value, i in zip(best.values.tolist(), best.indices.tolist())})
            if token_id == END:
                finish = "stop"
                break
        text = " ".join(f"w{i}" for i in ids if i != END)
        for stop in body.get("stop") or ():
            if stop in text:
                text, finish = text[: text.find(stop)], "stop"
        listed = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": logprobs, "top_logprobs": tops}
        return {"index": index, "text": text, "finish_reason": finish, "token_ids": ids, "logprobs": listed}

    def row(self, ids: tuple[int, ...]) -> Tensor:
        """Return the logits after a text."""
        return _logits_after(ids, self._module)

    def probs(self, row_V: Tensor, body: dict[str, Any], prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Return the distribution of the next token."""
        row_V = row_V.clone()
        for key, bias in (body.get("logit_bias") or {}).items():
            row_V[int(key)] += bias
        for i in {*prompt, *ids}:
            row_V[i] *= body["repetition_penalty"] if row_V[i] < 0 else 1 / body["repetition_penalty"]
        for i, count in Counter(self.counted(ids)).items():
            row_V[i] -= body["presence_penalty"] + count * body["frequency_penalty"]
        if body["temperature"] == 0:
            return row_V.softmax(-1)
        probs_V = (row_V / body["temperature"]).softmax(-1)
        best = probs_V.sort(descending=True)
        kept_V = torch.ones_like(probs_V)
        if body["top_k"] > 0:
            kept_V[best.indices[body["top_k"] :]] = 0
        before_V = ((probs_V * kept_V) / (probs_V * kept_V).sum())[best.indices].cumsum(-1).roll(1)
        before_V[0] = 0.0
        if self.is_cut(body, len(ids)):
            kept_V[best.indices[before_V >= body["top_p"]]] = 0
        kept_V[probs_V < body["min_p"] * probs_V.max()] = 0
        probs_V = probs_V * kept_V
        return torch.div(probs_V, probs_V.sum())

    def counted(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens that the penalties count."""
        return ids

    def is_cut(self, body: dict[str, Any], place: int) -> bool:
        """Return whether top-p cuts a token's distribution."""
        return bool(body["top_p"] < 1.0)

    def token(self, probs_V: Tensor, dice: random.Random, place: int, body: dict[str, Any]) -> int:
        """Return the next token."""
        if body["temperature"] == 0:
            return int(probs_V.argmax())
        return dice.choices(range(len(probs_V)), probs_V.tolist())[0]

    def reported(self, row_V: Tensor, probs_V: Tensor) -> Tensor:
        """Return the log-probabilities of the answer."""
        return torch.log_softmax(row_V, -1)


class WithoutTopP(StandIn):
    def is_cut(self, body, place):
        return super().is_cut(body, place) and place == 0


class LooseAtZero(StandIn):
    """A draft, the second likeliest token, is kept at temperature 0 if it is at least half as likely as the first."""

    def token(self, probs_V, dice, place, body):
        best = probs_V.topk(2)
        is_kept = body["temperature"] == 0 and place and best.values[1] >= 0.5 * best.values[0]
        return int(best.indices[1]) if is_kept else super().token(probs_V, dice, place, body)


class SwappedTokens(StandIn):
    """One drafted token in a hundred is another one."""

    def token(self, probs_V, dice, place, body):
        token_id = super().token(probs_V, dice, place, body)
        return 3 + (token_id + 7) % 50 if place and dice.random() < 0.01 else token_id


class ForgetfulPenalties(StandIn):
    """Penalties count the first token, and of the others every third: the ones that were not drafted."""

    def counted(self, ids):
        return ids[::3]


class TruncatedLogprobs(StandIn):
    def reported(self, row_V, probs_V):
        return probs_V.log() if bool((probs_V == 0).any()) else row_V.log_softmax(-1)


class FirstTokensAlone(StandIn):
    """Tokens after the first are drawn from a flatter distribution: marginals of the first alone are right."""

    def token(self, probs_V, dice, place, body):
        flat_V = probs_V**0.7 if place else probs_V
        return super().token(flat_V / flat_V.sum(), dice, place, body)


class DraftedLogprobs(StandIn):
    """Log-probabilities of drafted tokens are 0, as llama.cpp 0.5.0 reports them."""

    def _choice(self, body, dice, index):
        choice = super()._choice(body, dice, index)
        listed, num = choice["logprobs"], len(choice["token_ids"]) - 1
        listed["token_logprobs"][1:], listed["top_logprobs"][1:] = [0.0] * num, [{}] * num
        return choice


class Generate(StandIn):
    """transformers' own `generate` behind HTTP."""

    refused = frozenset({"logit_bias", "n", "stream", "stop", "presence_penalty", "frequency_penalty"})

    def _choice(self, body, dice, index):
        body = _PLAIN | body
        is_sampled = body["temperature"] > 0
        warpers = {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p")} if is_sampled else {}
        torch.manual_seed(dice.getrandbits(60))
        out = self._module.generate(
            *(torch.tensor([body["prompt"]]),),
            attention_mask=torch.ones(1, len(body["prompt"]), dtype=torch.int64),
            **{**warpers, "repetition_penalty": body["repetition_penalty"], "max_new_tokens": body["max_tokens"]},
            **{"do_sample": is_sampled, "eos_token_id": END, "pad_token_id": 0},
            **{"output_logits": True, "return_dict_in_generate": True},
        )
        ids = out.sequences[0, len(body["prompt"]) :].tolist()
        rows = [row[0].log_softmax(-1) for row in out.logits]
        tops = [{f"token_id:{i}": float(row[i]) for i in row.topk(body.get("logprobs", 1)).indices.tolist()} for row in rows]
        listed = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": [float(row[i]) for row, i in zip(rows, ids)]}
        finish = "stop" if ids[-1] == END else "length"
        text = " ".join(f"w{i}" for i in ids if i != END)
        return {"index": 0, "text": text, "finish_reason": finish, "token_ids": ids, "logprobs": {**listed, "top_logprobs": tops}}


@contextlib.contextmanager
def served(stand_in: StandIn, encode: Callable[[str], list[int]] = lambda text: []) -> Iterator[str]:
    """Serve a stand-in on a free port; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement

        def do_GET(self):
            self._send(200, {"data": [{"id": "tiny", "owned_by": "stand-in"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if isinstance(body.get("prompt"), str):
                body["prompt"] = encode(body["prompt"])
            answer = stand_in.answer(body)
            if isinstance(answer, Busy):
                self._send(429, {"error": {"message": "too many requests"}}, {"Retry-After": answer})
            elif answer is not None and body.get("stream"):
                self._send_stream(answer)
            else:
                self._send(400 if answer is None else 200, answer or {"error": {"message": "a field is not supported"}})

        def _send_stream(self, answer):
            """Send the answer in two parts."""
            choice = answer["choices"][0]
            half = len(choice["text"]) // 2
            parts = [
                {**choice, "text": choice["text"][:half], "logprobs": None, "token_ids": None, "finish_reason": None},
                {**choice, "text": choice["text"][half:]},
            ]
            events = [f"data: {json.dumps({'choices': [part]})}\n\n" for part in parts]
            self._send_bytes(200, "".join([*events, "data: [DONE]\n\n"]).encode())

        def _send(self, status, value, headers=None):
            self._send_bytes(status, json.dumps(value).encode(), headers)

        def _send_bytes(self, status, data, headers=None):
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
