"""A server process over a fake engine, for tests of its life: `python -m tests.api.serve_fake PORT DRAIN_S [START_ERROR]`."""

import asyncio
import sys
from unittest.mock import patch

import server.process
from server.app import create_app
from server.http.logs import configure_logging
from server.settings import Settings
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_level


def main() -> int:
    port, drain_s, *error = sys.argv[1:]
    script = emits(byte_level().encode("hello there"))
    engine = FakeEngine(script=script, gate=asyncio.Event(), start_error=error[0] if error else None)
    configure_logging("info", "json")

    def with_fakes(settings, on_fatal):
        return create_app(settings, engine, byte_level(), on_fatal)

    with patch.object(server.process, "create_app", with_fakes):
        reason = server.process.serve(Settings(model="fake", port=int(port), drain_s=float(drain_s)))
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main())
