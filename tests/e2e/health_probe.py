"""Requests /health again and again, each time over a new connection: `python -m tests.e2e.health_probe PORT INTERVAL_S`.

It is a process of its own, so that the delays of a client with thousands of connections are not measured. It runs until its
input ends, and then writes JSON: of each request the seconds until it was connected and until it was answered, and whether
the answer was 200.
"""

import http.client
import json
import select
import sys
import time
from typing import NamedTuple

_LIMIT_S = 30.0


class Probe(NamedTuple):
    """One request."""

    connect_s: float
    total_s: float
    is_well: bool


def probe(port: int) -> Probe:
    """Request /health once."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)
    began_s = time.monotonic()
    connect_s = _LIMIT_S
    try:
        client.connect()
        connect_s = time.monotonic() - began_s
        client.request("GET", "/health")
        is_well = client.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        is_well = False
    client.close()
    return Probe(connect_s, time.monotonic() - began_s, is_well)


def main() -> None:
    """Probe until the input ends."""
    port, interval_s = int(sys.argv[1]), float(sys.argv[2])
    probes = [probe(port)]
    while not select.select([sys.stdin], [], [], interval_s)[0]:
        probes.append(probe(port))
    sys.stdout.write(json.dumps(probes))


if __name__ == "__main__":
    main()
