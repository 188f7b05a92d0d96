"""Pairs of models, trees and verifiers of the table. All cells share prompts, seeds and roots."""

from dataclasses import dataclass, replace
from pathlib import Path

from engine.core.config import EngineConfig
from engine.core.tree import Expansion, TreeName
from engine.core.verifier_table import is_exact
from engine.weights import WeightsCache, default_root
from engine.weights.presets import load_presets
from engine.weights.references import find_preset
from server.settings import load_settings

MOST_NODES = 12
ROOT_BRANCHED = tuple(
    Expansion(0, branches, depth) if branches > 1 else Expansion(depth, 1, 0)
    for branches, depth in [(1, 2), (1, 4), (1, 6), (1, 8), (1, 12), (2, 2), (2, 4), (2, 6), (3, 2), (3, 4), (4, 3), (6, 2)]
)
DELAYED = tuple(
    Expansion(*shape)
    for shape in [
        *((1, 2, 2), (2, 2, 2), (1, 2, 5), (1, 3, 3), (1, 4, 2), (2, 2, 5), (2, 3, 3)),
        *((3, 2, 4), (3, 4, 2), (4, 2, 4), (4, 4, 2), (6, 2, 3), (8, 2, 2)),
    ]
)
SHAPES = (*ROOT_BRANCHED, *DELAYED)
HEAPS = tuple(Expansion(0, 4, nodes, "heap", nodes) for nodes in (4, 8, MOST_NODES))
CHAIN = SHAPES.index(Expansion(MOST_NODES, 1, 0))  # the tree along which depths are compared


@dataclass(frozen=True)
class Family:
    """How children are drawn, and the verifiers that are compared on such trees; the first is named in the rows."""

    name: str
    tree: TreeName
    verifiers: tuple[str, ...]

    @property
    def whole(self) -> Expansion:
        """An expansion that names the family and is as wide and deep as any shape."""
        return Expansion(0, 6, MOST_NODES, self.tree)

    @property
    def heap_verifiers(self) -> tuple[str, ...]:
        """The verifiers that are exact on heaps too. A heap has its own draws, so one family measures it."""
        return tuple(one for one in self.verifiers if is_exact(HEAPS[0].kind, one))


FAMILIES = (
    Family("i.i.d.", "delayed", ("nss", "naive", "spectr", "specinfer", "khisti", "block", "traversal")),
    Family("distinct", "delayed_distinct", ("traversal", "univer")),
    Family("ranked", "delayed_distinct", ("coupled",)),
)


@dataclass(frozen=True)
class Pair:
    """A target and a drafter. `lens` is the file of an early-exit drafter that does not ship."""

    name: str
    config: str
    presets: tuple[str, ...]
    dtype: str = "float32"
    lens: str = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """The models whose weights are not in the cache, and the lens if there is no such file."""
        cache, presets = WeightsCache(default_root()), load_presets()
        models = tuple(name for name in self.presets if find_preset(presets[name], cache) is None)
        return models if not self.lens or Path(self.lens).is_file() else (*models, self.lens)

    def engine_config(self) -> EngineConfig:
        """Return the configuration without cached text: its trees replace passes of the model."""
        settings = {"policy": "adaptive", "verifier": "coupled", "dtype": self.dtype, "model": self.presets[0]}
        if self.lens:
            settings["lens"] = str(Path(self.lens).resolve())
        return replace(load_settings(Path(self.config), settings).to_tool_config(), cached_text=False)


_QWEN = "qwen2.5-coder-1.5b"
PAIRS = {
    one.name: one
    for one in (
        Pair("smollm2-head", "configs/default.yaml", ("smollm2-135m",)),
        Pair("qwen-head", "configs/qwen-coder-head.yaml", (_QWEN,), "compact"),
        Pair("qwen-0.5b", "configs/qwen-coder.yaml", (_QWEN, "qwen2.5-coder-0.5b"), "compact"),
        # latebranch drafter fit-lens --target gemma3-270m --layers 9 --out gemma3-270m-lens.safetensors
        Pair("gemma3-early-exit", "configs/smollm2-early-exit.yaml", ("gemma3-270m",), lens="gemma3-270m-lens.safetensors"),
    )
}
