"""`latebranch dynamo-worker` that writes to a file when requests arrive. The file is the first argument."""

import sys
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec


class Arrival(msgspec.Struct, frozen=True):
    """A request that reached a worker, by the monotonic clock of the machine, and its tokens."""

    request_id: str
    at_s: float
    num_ids: int


def main() -> int:
    """Run the command."""
    from server.cli.main import main as command
    from server.dynamo.llm_engine import DynamoEngine  # Dynamo, which the tests themselves do without

    notes = open(sys.argv.pop(1), "ab", buffering=0)  # noqa: SIM115 - as long as the process
    generate = DynamoEngine.generate

    def noting(engine: DynamoEngine, request: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        notes.write(msgspec.json.encode(Arrival(context.id(), time.monotonic(), len(request["token_ids"]))) + b"\n")
        return generate(engine, request, context)

    DynamoEngine.generate = noting  # type: ignore[method-assign, assignment]
    return command()
