#!/usr/bin/env bash
# smg 1.13.0, the model gateway: the key that it has for its workers is also the only key that it admits.
#
# Guess: `--api-key` ("the api key used for the authorization with the worker") is what smg itself presents to workers that need a key.
# A client's own key is passed on to the worker, which knows it.
# Seen: with `--api-key ADMIN` a client with another key, or with none, gets 401 from smg. Without the flag its key is passed on, but then
# smg has no key of its own: it cannot read the workers' loads.
# Harm: workers with several keys lose all but one behind smg, and each client needs the one that administers.
set -euo pipefail
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
PATH="$folder/venv/bin:$PATH"
pip install --quiet --disable-pip-version-check smg==1.13.0 2> "$folder/pip.log" || { cat "$folder/pip.log"; exit 1; }

cat > "$folder/worker.py" <<'END'
import http.server, json, sys

class Worker(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_): pass

    def do_GET(self):
        body = json.dumps({"data": [{"id": "m", "object": "model", "owned_by": "stub"}], "version": "1"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        print(self.headers["Authorization"], flush=True)
        self.do_GET()

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Worker).serve_forever()
END

statuses() { # of a client with another key and of one with the same, behind smg with these flags
  local ports gateway
  ports=($(python3 -c 'import socket; ones = [socket.socket() for _ in range(3)]; [one.bind(("127.0.0.1", 0)) for one in ones]
print(*(one.getsockname()[1] for one in ones))'))
  python3 "$folder/worker.py" "${ports[0]}" > "$folder/keys" &
  smg launch --host 127.0.0.1 --port "${ports[1]}" --prometheus-host 127.0.0.1 --prometheus-port "${ports[2]}" "$@" \
    --worker-urls "http://127.0.0.1:${ports[0]}" > "$folder/smg.log" 2>&1 &
  gateway=$!
  for _ in $(seq 300); do
    curl --silent --fail --output /dev/null "http://127.0.0.1:${ports[1]}/readiness" && break
    sleep 0.2
  done
  for key in USER ADMIN; do
    curl --silent --output /dev/null --write-out '%{http_code} ' --header "Authorization: Bearer $key" \
      --header 'Content-Type: application/json' --data '{"model": "m", "prompt": "a"}' "http://127.0.0.1:${ports[1]}/v1/completions"
  done
  kill -KILL "$gateway" %1 2> /dev/null || true
}
with_key=$(statuses --api-key ADMIN) keys=$(sort -u "$folder/keys" | paste -sd,)
echo "smg --api-key ADMIN: a client with USER, one with ADMIN: $with_key; keys that reached the worker: $keys"
[[ $with_key == "401 200 " ]]
without=$(statuses) keys=$(paste -sd, "$folder/keys")
echo "smg without a key: a client with USER, one with ADMIN: $without; keys that reached the worker: $keys"
[[ $without == "200 200 " && $keys == "Bearer USER,Bearer ADMIN" ]]
