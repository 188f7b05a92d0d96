"""The HTTP client of an audit: completions or chats of an OpenAI-compatible server, several at a time, parsed into records."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import httpx2

from engine.utils.one_line import one_line
from engine.utils.progress_bar import progress_bar

Name = int | str  # a token's id where the server reports it, else its text
Body = Mapping[str, Any]
UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # in the text of a token that ends within a character
_BUSY, _REFUSED, _KEY_REFUSED = {429, 503}, {400, 404, 405, 413, 415, 422, 501}, {401, 403}
_LONGEST_PAUSE_S, _MAX_REPORTED = 10.0, 200
_FORMAT_ERRORS = (ValueError, LookupError, TypeError, AttributeError)


class AuditedServerFailed(Exception):
    """The server failed or does not answer; the message is one line."""


class AuditedServerUnsuitable(AuditedServerFailed):
    """The address, the key, the model's name or another argument does not suit the server."""


class NotOffered(Exception):
    """The server refuses a request; the message is its own."""


@dataclass(frozen=True, slots=True)
class AnswerText:
    """One choice of an answer. `names`, `logprobs` and `tops` have an entry for each token, or none at all.

    `has_ids`: the names are ids that the server lists as such, so none is left out. `usage` is the whole answer's.
    """

    text: str
    finish: str | None
    names: tuple[Name, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    tops: tuple[Mapping[Name, float], ...] = ()
    has_ids: bool = False
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int | None:
        """The number of generated tokens, if the server counts them."""
        return self.usage.get("completion_tokens")


class CompletionClient:
    """Sends completions, at most `concurrency` at a time, and counts them. `num_drafted`: None if no drafts are reported."""

    def __init__(self, url: str, model: str | None, key: str | None, timeout_s: float, concurrency: int, is_chat: bool) -> None:
        self.url = re.sub(r"(/v1)?((/chat)?/completions|/models)?/*$", "", url)
        if key is not None and not (key.isascii() and key.isprintable()):
            raise AuditedServerUnsuitable("--api-key has characters that no key may have")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx2.Limits(max_connections=concurrency)
        try:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
                raise ValueError("it must begin with http:// or https:// and a host")
            self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=timeout_s, limits=limits)
        except (httpx2.InvalidURL, ValueError) as error:
            raise AuditedServerUnsuitable(f"--url {url} is no address: {one_line(error)}") from error
        self._timeout_s, self._concurrency, self.is_chat = timeout_s, concurrency, is_chat
        self._path = "/v1/chat/completions" if is_chat else "/v1/completions"
        self.bar = progress_bar(what="", total=0, unit="request", is_shown=False)
        self.num_requests = self.num_accepted = 0
        self.num_drafted: int | None = None
        self.owner, self.model = "", model or ""
        self.models: list[str] = []

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def read_models(self) -> None:
        """Take the served model's name, unless one is given, and its owner, which names the kind of server."""
        response = self._sent("GET", "/v1/models", None)
        with suppress(*_FORMAT_ERRORS):  # an answer is needed only where no model is given
            models = response.json()["data"]
            self.models = [str(model["id"]) for model in models]
            self.owner = str(models[0].get("owned_by", ""))
        if not self.model and not self.models:
            raise AuditedServerUnsuitable(f"{self.url}/v1/models lists no model; name it with --model")
        self.model = self.model or self.models[0]

    def complete(self, body: Body) -> list[AnswerText]:
        """Return the choices of the answer, of a stream put together. Raises NotOffered, AuditedServerFailed."""
        response = self._sent("POST", self._path, {"model": self.model, **body})
        self.num_requests += 1
        self.bar.update()
        if response.status_code in _REFUSED:
            raise NotOffered(_message(response))
        try:
            raw = _joined(response.text) if body.get("stream") else response.json()
            choices = sorted(raw["choices"], key=lambda choice: choice.get("index", 0))
            answers, (num_drafted, num_accepted) = [_answer(one, raw.get("usage") or {}) for one in choices], _drafts(raw)
            if not answers:
                raise ValueError("it has no choices")
        except _FORMAT_ERRORS as error:
            raise AuditedServerFailed(f"an answer is not in the format of {self._path}: {one_line(error)}") from error
        if num_drafted is not None:
            self.num_drafted = (self.num_drafted or 0) + num_drafted
            self.num_accepted += num_accepted
        return answers

    def complete_all(self, bodies: Sequence[Body], what: str, concurrency: int | None = None) -> list[AnswerText]:
        """Return the first choices in order. The first request is sent alone: it may be refused. Raises what `complete` does."""
        self.bar.set_description(what, refresh=False)
        with ThreadPoolExecutor(concurrency or self._concurrency) as pool:
            try:
                return [found[0] for found in (*map(self.complete, bodies[:1]), *pool.map(self.complete, bodies[1:]))]
            except KeyboardInterrupt:
                self.close()  # ends the requests that run
                raise

    def _sent(self, method: str, path: str, body: Body | None) -> httpx2.Response:
        """Return the response. A busy server is tried again for as long as one request may take. Raises AuditedServerFailed."""
        left_s, is_first = self._timeout_s, True
        for number in count(1):
            try:
                response = self._http.request(method, path, json=body)
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                if is_first and isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError):
                    is_first = False  # the server may have closed an idle connection under the request
                    continue
                reason = one_line(error) or type(error).__name__
                hint = "; trust it by SSL_CERT_FILE" if "CERTIFICATE_VERIFY_FAILED" in reason else ""
                reason = "no answer in time (see --timeout)" if isinstance(error, httpx2.TimeoutException) else reason + hint
                raise AuditedServerFailed(f"{self.url} cannot be reached: {reason}") from error
            wished = response.headers.get("Retry-After", "")
            pause_s = min(_LONGEST_PAUSE_S, float(wished) if wished.isdecimal() and int(wished) else 0.4 * number)
            left_s -= pause_s
            if response.status_code not in _BUSY or left_s < 0.0:
                break
            time.sleep(pause_s)
        if response.status_code in _KEY_REFUSED:
            raise AuditedServerUnsuitable(f"{self.url} refuses the key (see --api-key): {_message(response)}")
        if response.status_code >= 300 and response.status_code not in _REFUSED:
            raise AuditedServerFailed(f"{self.url} failed with status {response.status_code}: {_message(response)}")
        return response


def _message(response: httpx2.Response) -> str:
    text = response.text or f"status {response.status_code}"
    with suppress(*_FORMAT_ERRORS):
        error = response.json()["error"]
        text = error["message"] if isinstance(error, dict) else error
    return one_line(str(text)[:_MAX_REPORTED])


def _joined(stream: str) -> dict[str, Any]:
    """Return the whole answer of a stream's chunks."""
    choice: dict[str, Any] = {"text": "", "finish_reason": None, "token_ids": [], "logprobs": {}}
    whole: dict[str, Any] = {"choices": [choice]}
    chunks = [line[5:].strip() for line in stream.split("\n") if line.startswith("data:")]
    for event in (json.loads(chunk) for chunk in chunks if chunk != "[DONE]"):
        if "error" in event:
            raise AuditedServerFailed(f"a stream ended with an error: {one_line(str(event['error'])[:_MAX_REPORTED])}")
        whole |= {key: event[key] for key in ("usage", "timings", "metrics") if event.get(key)}
        for part in event.get("choices") or ():
            choice["text"] += _text(part)
            choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
            choice["token_ids"] += part.get("token_ids") or ()
            for key, values in (part.get("logprobs") or {}).items():
                choice["logprobs"].setdefault(key, []).extend(values if isinstance(values, list) else ())
    return whole


def _text(choice: Mapping[str, Any]) -> str:
    """Return the text of a completion, a chat or a chunk; a model's reasoning comes first."""
    message = choice.get("message") or choice.get("delta") or {}
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return choice.get("text") or reasoning + (message.get("content") or "")


def _answer(choice: Mapping[str, Any], usage: Mapping[str, Any]) -> AnswerText:
    """Return a choice, its tokens from `logprobs` in OpenAI's two formats or from `token_ids`."""
    listed, ids = choice.get("logprobs") or {}, choice.get("token_ids")
    if entries := listed.get("content"):
        names, own = [_name(entry) for entry in entries], [entry.get("logprob") for entry in entries]
        tops = [{_name(top): top["logprob"] for top in entry.get("top_logprobs") or ()} for entry in entries]
    else:
        names, own = [_named(name) for name in listed.get("tokens") or ()], listed.get("token_logprobs") or []
        tops = [{_named(name): value for name, value in (top or {}).items()} for top in listed.get("top_logprobs") or ()]
    has_ids = bool(names) and not entries and all(isinstance(name, int) for name in names)
    if ids and (not names or len(ids) == len(names)):
        names, has_ids = ids, True
    own, tops = own if len(own) == len(names) else [], tops if len(tops) == len(names) else []
    return AnswerText(_text(choice), choice.get("finish_reason"), tuple(names), tuple(own), tuple(tops), has_ids, usage)


def _name(entry: Mapping[str, Any]) -> Name:
    """Return the id, but not of a token that ends a character: llama.cpp lists none of the tokens before its last one."""
    return int(entry["id"]) if "id" in entry and UNREADABLE not in entry["token"] else _named(entry["token"])


def _named(name: str) -> Name:
    return int(name[9:]) if name.startswith("token_id:") and name[9:].isdecimal() else name


def _drafts(raw: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return drafted and accepted tokens, as this server, llama.cpp's and OpenAI's report them."""
    ours, timings = (raw.get("metrics") or {}).get("speculative_decoding") or {}, raw.get("timings") or {}
    details = (raw.get("usage") or {}).get("completion_tokens_details") or {}
    accepted, rejected = (details.get(f"{kind}_prediction_tokens") or 0 for kind in ("accepted", "rejected"))
    reports = [
        (ours.get("num_draft_tokens"), ours.get("num_accepted_draft_tokens")),
        (timings.get("draft_n"), timings.get("draft_n_accepted")),
        (accepted + rejected or None, accepted),
    ]
    return next(((int(drafted), int(kept or 0)) for drafted, kept in reports if drafted is not None), (None, 0))
