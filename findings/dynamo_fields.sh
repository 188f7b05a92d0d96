#!/usr/bin/env bash
# Fields of a request that Dynamo's frontend accepts and loses: ai-dynamo 1.6.1.
#
# Guess: a frontend that answers 400 for unknown fields either refuses a field or brings it to the engine; `ignore_eos` ignores the end
# token alone; and a request that goes to another worker is marked as continued.
# Seen: `logit_bias` and `suffix` are answered with 200 and reach no engine. Beside `ignore_eos`, `stop` and `stop_token_ids` are dropped,
# so the text runs through its stop string. After a worker is lost, the next one gets the generated tokens as prompt, and the same
# frequency_penalty: no field tells the two apart.
# Harm: banned tokens are generated; texts do not end; and after a lost worker every engine that counts generated tokens samples from
# another distribution. latebranch refuses the two penalties unless max_tokens is repeated in an annotation (docs/scaling.md).
set -euo pipefail
folder=$(mktemp -d)
pids=()
trap 'kill -9 "${pids[@]}" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile "$@" 2>"$folder/pip.log" || { cat "$folder/pip.log"; return 1; }; }
pip ai-dynamo-runtime==1.6.1 pydantic==2.13.5 msgspec==0.22.0 packaging==26.3 pyyaml==6.0.3 tokenizers==0.23.3 typing-extensions==4.16.0
pip --no-deps ai-dynamo==1.6.1  # a dependency, aisimulate, is at pypi.nvidia.com alone

cat > "$folder/worker.py" <<'PY'
"""Writes each request to a file and answers with tokens 10, 11, ... 19; dies after three tokens if an annotation asks for it."""

import asyncio
import json
import os
import sys

from dynamo.common.backend import EngineConfig, LLMEngine, Worker, WorkerConfig
from dynamo.common.backend.engine import LlmRegistration

folder = sys.argv[1]


class Stub(LLMEngine):
    from_args = None

    async def start(self, worker_id):
        return EngineConfig(model=folder, served_model_name="stub", llm=LlmRegistration(context_length=512))

    async def generate(self, request, context):
        with open(f"{folder}/requests", "a") as out:
            out.write(json.dumps(request) + "\n")
        is_first = len(request["token_ids"]) == 3
        for token in range(7 + len(request["token_ids"]), 20):
            await asyncio.sleep(0.05)
            if context.is_stopped():
                return
            if token == 13 and is_first and "die" in request["annotations"]:
                os.kill(os.getpid(), 9)
            yield {"token_ids": [token], "index": 0, **({"finish_reason": "length"} if token == 19 else {})}

    async def cleanup(self):
        pass


Stub.__abstractmethods__ = frozenset()
config = WorkerConfig("dynamo", model_name=folder, served_model_name="stub", discovery_backend="file", event_plane="zmq", enable_kv_routing=False)
asyncio.run(Worker(Stub(), config).run())
PY
mkdir "$folder/model"
"$folder/venv/bin/python" - "$folder/model" <<'PY'
import json
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
tokenizer.save(f"{sys.argv[1]}/tokenizer.json")
config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "eos_token_id": 2, "max_position_embeddings": 512}
json.dump(config, open(f"{sys.argv[1]}/config.json", "w"))
json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages[0].content }}"}, open(f"{sys.argv[1]}/tokenizer_config.json", "w"))
PY

export DYN_FILE_KV="$folder/store" DYN_TCP_RPC_HOST=127.0.0.1 DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1 DYN_EVENT_PLANE_HOST=127.0.0.1 HF_HUB_OFFLINE=1
port=$("$folder/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
for name in 1 2; do
    "$folder/venv/bin/python" "$folder/worker.py" "$folder/model" > "$folder/worker$name.log" 2>&1 &
    pids+=($!)
done
"$folder/venv/bin/python" -m dynamo.frontend --http-host 127.0.0.1 --http-port "$port" --discovery-backend file --request-plane tcp --event-plane zmq \
    --migration-limit 3 > "$folder/frontend.log" 2>&1 &
pids+=($!)

"$folder/venv/bin/python" - "$folder/model" "$port" <<'PY' || { tail -n 5 "$folder"/*.log; exit 1; }
import json
import sys
import time
import urllib.error
import urllib.request

folder, url = sys.argv[1], f"http://127.0.0.1:{sys.argv[2]}/v1/"
failed = []


def get(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def sent(**fields):
    """Return the text, and the requests that reached the workers."""
    open(f"{folder}/requests", "w").close()
    body = {"model": "stub", "prompt": [3, 4, 5], "max_tokens": 50, "nvext": {"annotations": []}, **fields}
    text = get("completions", body)["choices"][0]["text"]
    return text, [json.loads(line) for line in open(f"{folder}/requests")]


def check(what, is_seen):
    print("ok  " if is_seen else "NOT ", what)
    failed.extend([] if is_seen else [what])


for _ in range(600):
    try:
        if get("models")["data"]:
            break
    except (urllib.error.URLError, ConnectionError):
        pass
    time.sleep(0.2)
time.sleep(3)  # the second worker

_, plain = sent()
_, biased = sent(logit_bias={"11": -100}, suffix="w1")
check("logit_bias and suffix: status 200, and the request is the one without them", plain == biased)
text, _ = sent(stop=["w12"])
check("stop: the text ends before it", text == "w10w11")
text, (request,) = sent(stop=["w12"], stop_token_ids=[12], ignore_eos=True)
found = request["stop_conditions"]
check("stop and stop_token_ids beside ignore_eos: the text runs through them", text == "".join(f"w{i}" for i in range(10, 20)))
check("... and no stop reaches the worker", not found["stop"] and not found["stop_token_ids"] and not found["stop_token_ids_hidden"])
text, (first, second) = sent(frequency_penalty=1.5, nvext={"annotations": ["die"]})
changed = {name for name in {*first, *second} if first.get(name) != second.get(name)}
check("a lost worker: the text is whole", text == "".join(f"w{i}" for i in range(10, 20)))
check("... the generated tokens are prompt now", second["token_ids"] == [3, 4, 5, 10, 11, 12])
check("... the frequency penalty is the same", first["sampling_options"] == second["sampling_options"])
check("... only the ids and the limit differ", changed == {"token_ids", "stop_conditions"})
sys.exit(bool(failed))
PY
