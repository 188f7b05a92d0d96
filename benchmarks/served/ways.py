"""Ways to send the same requests to servers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lora import write_adapters

BASE = "latebranch"


@dataclass(frozen=True, slots=True)
class WayOfSending:
    """A way: the flags of its server, the models of its requests by turns, and their other fields."""

    flags: Sequence[str] = ()
    models: Sequence[str] = (BASE,)
    fields: Mapping[str, Any] = field(default_factory=dict)


def ways(what: str, model: str, rank: int, folder: Path) -> dict[str, WayOfSending]:
    """Return the ways of a measurement by name; the others are compared with the first."""
    if what == "trace":
        return {"untraced": WayOfSending(), "traced": WayOfSending(fields={"speculative": {"trace": True}})}
    adapters = write_adapters(folder, model, rank)
    loaded = ("--policy", "plain", *(word for name, path in adapters for word in ("--lora", f"{name}={path}")))
    return {
        "base, no adapters loaded": WayOfSending(("--policy", "plain")),
        "base, adapters loaded": WayOfSending(loaded),
        "under the adapters": WayOfSending(loaded, [name for name, _ in adapters]),
    }
