#!/usr/bin/env bash
# `import litellm` asks another host: litellm 1.110.2.
#
# Guess: a client whose base URL is a server of one's own talks to that server alone.
# Seen: the import of the package requests a list of prices from raw.githubusercontent.com. Where that fails it warns and tries again, then
# uses the list of the package. With LITELLM_LOCAL_MODEL_COST_MAP=True nothing is requested.
# Harm: on machines without the internet every start of a program is late and warns; elsewhere another host learns of each start.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile litellm==1.110.2

cat > "$folder/hosts.py" <<'PY'
"""Prints the hosts whose addresses the import looks up. None is reached."""

import socket

hosts: set[str] = set()


def refuse(host: object, *_: object, **__: object) -> None:
    hosts.add(str(host))
    raise socket.gaierror("no network in this test")


socket.getaddrinfo = refuse  # type: ignore[assignment]
import litellm  # noqa: E402, F401

print(sorted(hosts))
PY
asked=$("$folder/venv/bin/python" "$folder/hosts.py" 2> "$folder/log")
local=$(LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/venv/bin/python" "$folder/hosts.py" 2> /dev/null)
grep -o "retrying in" "$folder/log" | head -1
echo "import litellm looks up: $asked"
echo "with LITELLM_LOCAL_MODEL_COST_MAP=True: $local"
[[ $asked == "['raw.githubusercontent.com']" && $local == "[]" ]]
