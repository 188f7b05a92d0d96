"""The parts of a session on a GPU. Each writes figures until its time is over; a figure that is written is not taken again."""

import gc
import importlib.util
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.answers import AnswerDrafter, adaptive_over
from benchmarks.gpu.batches import batch_of
from benchmarks.gpu.figures import Figures, in_turns, synchronize
from benchmarks.gpu.growth import head_growers, level_growers, steps_of_trees
from benchmarks.gpu.kernel import TINY_LAYERS, Layer, time_pages
from benchmarks.gpu.models import LLAMA_1B, QWEN_8B, TINY, ModelShape, counting_model
from benchmarks.gpu.session import LATE
from engine.attention.paged.buffer import TableBuffer
from engine.attention.paged.graph_recorder import CudaGraphs, Recorder, Unrecorded
from engine.attention.paged.graphs import GraphResources
from engine.attention.paged.padding_shapes import PaddingShapes
from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionPolicy, PlainDecoding
from engine.core.types import Peaks, Request, SamplingParams
from engine.engine import Engine
from engine.graph_setup import table_capacity
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.model.passes import RecordedPasses
from engine.profiling.peaks import measured_peaks
from engine.sampling import choice_reference, device_choice
from engine.sampling.device_choice import NodeDraws
from engine.testing import tiny_engine
from engine.weights.layer_sizes import key_bytes

_PROMPT = 32
# A plugin that is missing leaves its settings unknown, and another version of a library warns of other things.
# conftest.py needs the extra dev, which tests of a GPU do without.
LENIENT = ("--noconftest", "-o", "addopts=", "-o", "filterwarnings=default")


class Session:
    """What all parts share: the figures, the device, sizes, and the end of the running part."""

    def __init__(self, figures: Figures, device: torch.device, is_tiny: bool) -> None:
        self.figures, self.device, self.is_tiny = figures, device, is_tiny
        self.end_s, self.was_late = 0.0, False
        self.shapes = [TINY] if is_tiny else [QWEN_8B, LLAMA_1B]
        self.rows = [1, 2] if is_tiny else [1, 8, 32, 64]
        self.nodes = [1, 4] if is_tiny else [1, 2, 4, 8, 16, 32, 64, 128]
        self.contexts = [20, 40] if is_tiny else [256, 2048, 8192]
        self.num_tokens = 12 if is_tiny else 96
        self.turns = 2 if is_tiny else 9
        self._models: dict[tuple[str, str], CausalModel] = {}
        self._peaks: Peaks | None = None

    @property
    def is_late(self) -> bool:
        """Whether the running part's time is over. What is left out for that reason can be taken in a later session."""
        self.was_late |= time.monotonic() > self.end_s
        return self.was_late

    def has(self, part: str, model: str, case: str) -> bool:
        """Return whether a figure is written already."""
        return any((one["part"], one.get("model"), one.get("case")) == (part, model, case) for one in self.figures.all)

    def model(self, shape: ModelShape, linears: str = "plain") -> CausalModel:
        """Return a model; it stays in memory, since making one takes seconds."""
        if (shape.name, linears) not in self._models:
            self._models[shape.name, linears] = counting_model(shape, self.device, linears)
        return self._models[shape.name, linears]

    def drop_models(self) -> None:
        """Have the next models made anew."""
        self._models.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def bandwidth(self, model: CausalModel) -> float:
        """Return the bytes a second that the machine reads at most, measured once."""
        if self._peaks is None:
            self._peaks = measured_peaks(model)
            assert self._peaks is not None, "no memory to measure peaks"
            for name, value in (("bytes", self._peaks.bytes_per_s), ("operations", self._peaks.operations_per_s)):
                self.figures.add("decode", case=f"peak of {name}", value=value, unit="a second")
        return self._peaks.bytes_per_s

    def recorder(self) -> Recorder:
        """Return graphs on a GPU."""
        return CudaGraphs(is_required=True) if self.device.type == "cuda" else Unrecorded()

    def limits(self) -> SchedulerConfig:
        """Return the limits of engines."""
        if self.is_tiny:
            return SchedulerConfig(max_running=4, max_step_tokens=32, num_slots=512, max_model_len=96, prefix_block_tokens=0)
        return SchedulerConfig(max_running=64, max_step_tokens=512, num_slots=64 * 256, max_model_len=256, prefix_block_tokens=0)

    def engine(self, model: CausalModel, policy: ExpansionPolicy, drafter: AnswerDrafter | None = None) -> Engine:
        """Return an engine whose passes are recorded when a shape is first used."""
        limits = self.limits()
        engine = tiny_engine(model, drafter, policy, verifier="coupled", config=limits)
        shapes = PaddingShapes(limits.max_step_tokens, is_by_row=model.has_same_bits)
        passes = engine.target.record(GraphResources(TableBuffer(table_capacity(limits), self.device), shapes, self.recorder()))
        if drafter is not None:  # before its passes are timed
            passes.prepare()
        return engine


def run_parts(path: Path, names: Sequence[str], seconds: Mapping[str, float], device: str, is_tiny: bool, left_s: float) -> None:
    """Run these parts, each as long as it may take."""
    torch.backends.cuda.matmul.allow_tf32 = False
    figures, end_s = Figures(path, left_s, is_resumed=True), time.monotonic() + left_s
    session = Session(figures, torch.device(device), is_tiny)
    name = torch.cuda.get_device_name() if session.device.type == "cuda" else "processor"
    figures.add("machine", case=f"{name}, torch {torch.__version__}")
    for part in names:
        session.end_s, session.was_late = min(time.monotonic() + seconds[part], end_s), False
        if session.is_late:
            break
        figures.add("begun", name=part)
        try:
            _PARTS[part](session)
            figures.add("ended", name=part, **({"left_out": LATE} if session.was_late else {}))
        except torch.AcceleratorError:  # the device is of no more use to this process
            raise
        except Exception as error:  # noqa: BLE001  # one part's fault is not the others'
            figures.add("ended", name=part, left_out=f"{type(error).__name__}: {error}"[:300])
            session.drop_models()  # one may be half changed, or have taken all memory
    figures.close()


def _tests(session: Session) -> None:
    if importlib.util.find_spec("pytest") is None:
        session.figures.add("tests", left_out="pytest is missing")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *LENIENT, "tests/gpu", "-x"]
    _command(session, "tests", command)


def _command(session: Session, part: str, command: Sequence[str]) -> None:
    """Run a command as long as the part may take; write its status and its last line."""
    left_s = max(1.0, session.end_s - time.monotonic())
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired as error:
        session.figures.add(part, left_out=f"{left_s:.0f} s are over after {_last_line((error.stdout or b'').decode())}")
        return
    session.figures.add(part, case=_last_line(done.stdout + done.stderr), value=done.returncode, unit="status", aim="0")


def _last_line(text: str) -> str:
    return next(iter(text.strip().splitlines()[::-1]), "no output")[:120]


def _exact(session: Session) -> None:
    """Write whether a pass by fused launches gives the answers that the model is made to give, and the module's logits."""
    for shape in session.shapes[-1:]:
        model = session.model(shape)
        batch = batch_of(2, 4, [40], session.device)
        rows = range(batch.num_tokens)
        cache = KVCache(200, session.device)
        found = _passes(session, model, cache).run(batch, rows)
        with _unfused(model):
            expected = _passes(session, model, KVCache(200, session.device)).run(batch, rows)
        error = float((found - expected).norm() / expected.norm())
        right = float((found.argmax(-1) == (batch.input_ids_1T[0] + 1) % model.vocab_size).float().mean())
        session.figures.add("exact", model=shape.name, case="fused logits", value=error, unit="relative error", aim="< 0.05")
        session.figures.add("exact", model=shape.name, case="right answers", value=right, unit="share", aim="1")


@contextmanager
def _unfused(model: CausalModel) -> Iterator[None]:
    """Have the module run passes that are recorded meanwhile."""
    fused, model.fused = model.fused, None
    try:
        yield
    finally:
        model.fused = fused


def _passes(session: Session, model: CausalModel, cache: KVCache, most: int = 128, *, chooses: bool = False) -> RecordedPasses:
    shapes = PaddingShapes(most, is_by_row=model.has_same_bits)
    resources = GraphResources(TableBuffer(1 << 20, session.device), shapes, session.recorder())
    return RecordedPasses(model, cache, resources, chooses=chooses)


def _decode(session: Session) -> None:
    """Write plain tokens a second, beside the floor of memory traffic and beside transformers."""
    for shape in session.shapes:
        model = session.model(shape)
        engine = session.engine(model, PlainDecoding())
        for num_rows in session.rows:
            case = f"plain, {num_rows} at a time"
            if session.has("decode", shape.name, case):
                continue
            if session.is_late:
                return
            tokens_s, steps_s = _served(session, engine, num_rows)
            floor = num_rows / (_bytes_of_step(model, num_rows, _PROMPT + session.num_tokens // 2) / session.bandwidth(model))
            facts = {"model": shape.name, "case": case, "value": tokens_s, "unit": "tokens/s"}
            more = {"step_ms": steps_s * 1e3}
            session.figures.add("decode", **facts, ratio=tokens_s / floor, to="floor", aim=">= 0.8 at 1 and 8", **more)
            own = _generated(session, model, num_rows)
            session.figures.add("decode", **facts, ratio=tokens_s / own, to="transformers", aim=">= 3", own=own)


def _bytes_of_step(model: CausalModel, num_rows: int, num_keys: int) -> int:
    """Return bytes of weights and of cached keys and values that a plain step reads."""
    assert model.fused is not None
    return model.fused.weight_bytes + num_rows * num_keys * key_bytes(model.module.config, model.module.dtype.itemsize)


def _served(session: Session, engine: Engine, num_rows: int, repeats: int = 2) -> tuple[float, float]:
    """Return tokens a second and seconds a step of equal requests, of the last of several runs."""
    seconds, num_steps, num_tokens = 1.0, 1, 0
    for repeat in range(repeats):
        for row in range(num_rows):
            prompt = tuple((1000 * row + place) % engine.target.model.vocab_size for place in range(_PROMPT))
            sampling = SamplingParams(temperature=0.0, max_tokens=session.num_tokens, ignore_eos=True)
            engine.add(Request(f"{repeat}-{row}", prompt, sampling))
        while engine.has_work and engine.step().stats.num_decoding_rows < num_rows:
            pass
        synchronize(session.device)
        begin_s, num_steps, num_tokens = time.perf_counter(), 0, 0
        while engine.has_work:
            stats = engine.step().stats
            num_steps, num_tokens = num_steps + 1, num_tokens + stats.num_generated_tokens
        synchronize(session.device)
        seconds = time.perf_counter() - begin_s
    return num_tokens / seconds, seconds / max(1, num_steps)


@torch.inference_mode()
def _generated(session: Session, model: CausalModel, num_rows: int) -> float:
    """Return tokens a second of transformers' own generation with the same module."""
    model.module.set_attn_implementation("sdpa")
    try:
        ids = torch.arange(num_rows * _PROMPT, device=session.device).view(num_rows, _PROMPT) % model.vocab_size
        count = session.num_tokens // 3
        generate = partial(model.module.generate, ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0)
        generate(max_new_tokens=2, min_new_tokens=2)
        synchronize(session.device)
        begin_s = time.perf_counter()
        generate(max_new_tokens=count, min_new_tokens=count)
        synchronize(session.device)
        return num_rows * count / (time.perf_counter() - begin_s)
    finally:
        model.restore_attention()


def _verify(session: Session) -> None:
    """Write T(N) of one row's tree after contexts, in turns, and its ratio to T(1)."""
    for shape in session.shapes:
        model = session.model(shape)
        cache = KVCache(max(session.contexts) + max(session.nodes) + 1, session.device)
        passes = _passes(session, model, cache, max(session.nodes))
        for context in session.contexts:
            if session.has("verify", shape.name, f"1 node after {context}") or session.is_late:
                continue
            batches = {nodes: batch_of(1, nodes, [context], session.device) for nodes in session.nodes}
            contenders = {str(nodes): partial(passes.run, batch, range(nodes)) for nodes, batch in batches.items()}
            for nodes, times in in_turns(contenders, session.turns, session.device).items():
                case = f"{nodes} node{'s' if nodes != '1' else ''} after {context}"
                facts = {"model": shape.name, "case": case, "value": times.median_ms, "unit": "ms"}
                session.figures.add("verify", **facts, ratio=times.ratio, to="one node", aim="<= 1.15 at 16")


def _where(session: Session) -> None:
    """Write what a plain step consists of: kernels a layer, seconds in them, gaps, and waits of the host."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if session.device.type == "cuda" else [])]
    for shape in session.shapes:
        model = session.model(shape)
        engine = session.engine(model, PlainDecoding())
        for num_rows in session.rows[:2]:
            if session.has("where", shape.name, f"{num_rows} at a time: kernels of a layer") or session.is_late:
                continue
            _served(session, engine, num_rows, repeats=1)
            for row in range(num_rows):
                engine.add(Request(f"where-{row}", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)))
            engine.step()
            engine.step()
            with profile(activities=activities) as profiled:
                begin_s = time.perf_counter()
                for _ in range(4):
                    engine.step()
                synchronize(session.device)
                step_ms = (time.perf_counter() - begin_s) / 4 * 1e3
            while engine.has_work:
                engine.step()
            _add_profile(session, shape, num_rows, profiled, step_ms, model.depth)


def _add_profile(session: Session, shape: ModelShape, num_rows: int, profiled: Any, step_ms: float, depth: int) -> None:
    events = profiled.events()
    kernels = [one for one in events if str(one.device_type).endswith("CUDA")] or [
        one for one in events if one.name.startswith("aten::")
    ]
    busy_ms = sum(one.time_range.elapsed_us() for one in kernels) / 4e3
    waits = sum("Synchronize" in one.name or one.name == "aten::_local_scalar_dense" for one in events) / 4
    add = partial(session.figures.add, "where", model=shape.name)
    add(
        case=f"{num_rows} at a time: kernels of a layer",
        value=len(kernels) / 4 / depth,
        unit="launches",
        aim="<= 6 and the pass's own",
    )
    add(case=f"{num_rows} at a time: step", value=step_ms, unit="ms", ratio=busy_ms / step_ms, to="kernels' share")
    add(case=f"{num_rows} at a time: waits of the host", value=waits, unit="a step", aim="1")
    longest: Counter[str] = Counter()
    for one in kernels:
        longest[one.name[:60]] += one.time_range.elapsed_us() / 4e3
    for name, milliseconds in longest.most_common(6):
        add(
            case=f"{num_rows} at a time: {name}",
            value=milliseconds,
            unit="ms a step",
            ratio=milliseconds / max(busy_ms, 1e-9),
            to="kernels",
        )


def _policy(session: Session) -> None:
    """Write the adaptive policy over plain decoding, with drafts of known answers of which 70 % are right."""
    for shape in session.shapes:
        model = session.model(shape)
        drafter = AnswerDrafter(model.vocab_size, session.device, 0.7)
        plain = session.engine(model, PlainDecoding(), drafter)
        budget_s = 0.5 if session.is_tiny else 15.0
        policy = adaptive_over(plain, drafter, session.limits(), budget_s)
        drafted = Engine(plain.info, session.limits(), plain.target, drafter, policy)  # by turns, over the same recordings
        for num_rows in session.rows:
            case = f"policy, {num_rows} at a time"
            if session.has("policy", shape.name, case) or session.is_late:
                continue
            ratios, tokens_s = [], 0.0
            for _ in range(2):
                tokens_s, plain_s = _served(session, drafted, num_rows)[0], _served(session, plain, num_rows, repeats=1)[0]
                ratios.append(tokens_s / plain_s)
            facts = {"model": shape.name, "case": case, "value": tokens_s, "unit": "tokens/s"}
            session.figures.add("policy", **facts, ratio=sum(ratios) / 2, to="plain", aim=">= 1, at 1 >= 2")


def _fused(session: Session) -> None:
    """Write passes by fused launches beside passes by the module, in turns."""
    for shape in session.shapes:
        model = session.model(shape)
        cache = KVCache(2048 if not session.is_tiny else 256, session.device)
        fused, module = _passes(session, model, cache), _passes(session, model, cache)

        def by_module(*given: Any, model: CausalModel = model, module: RecordedPasses = module) -> object:
            with _unfused(model):
                return module.run(*given)

        for nodes in session.nodes:
            case = f"{nodes} tokens"
            if session.has("fused", shape.name, case) or session.is_late:
                continue
            batch = batch_of(1, nodes, [session.contexts[0]], session.device)
            given = (batch, range(nodes))
            contenders: dict[str, Callable[[], object]] = {
                "module": partial(by_module, *given),
                "fused": partial(fused.run, *given),
            }
            times = in_turns(contenders, session.turns, session.device)["fused"]
            facts = {"model": shape.name, "case": case, "value": times.median_ms, "unit": "ms"}
            session.figures.add("fused", **facts, ratio=times.ratio, to="module", aim="< 1")


def _formats(session: Session) -> None:
    """Write passes in bfloat16, in eight-bit floats, and with the same bits at any width."""
    shape = session.shapes[0]
    base: dict[int, float] = {}
    for name in ("bfloat16", "fp8", "deterministic"):
        if name == "deterministic" and session.device.type != "cuda":
            session.figures.add("formats", left_out="deterministic passes need kernels")
            continue
        model = session.model(shape, "fp8" if name == "fp8" else "plain")
        if name == "deterministic":
            model.round_alike()
        passes = _passes(session, model, KVCache(2048, session.device))
        for nodes in (1, 16):
            if session.is_late:
                return
            batch = batch_of(1, nodes, [session.contexts[0]], session.device)
            times = in_turns({name: partial(passes.run, batch, range(nodes))}, session.turns, session.device)[name]
            base.setdefault(nodes, times.median_ms)
            facts = {"model": shape.name, "case": f"{name}, {nodes} tokens", "value": times.median_ms, "unit": "ms"}
            session.figures.add("formats", **facts, ratio=times.median_ms / base[nodes], to="bfloat16")
    session.drop_models()


def _waits(session: Session) -> None:
    """Write what the choice of tokens inside a recorded pass saves, and the growth of trees with one wait."""
    for shape in session.shapes:
        model = session.model(shape)
        with nullcontext() if session.device.type == "cuda" else _chosen_by_torch():
            for num_rows in session.rows[:2]:
                case = f"choices of {num_rows} rows in the pass"
                if session.has("waits", shape.name, case) or session.is_late:
                    continue
                times = in_turns(_choosing(session, model, num_rows), session.turns, session.device)["in the pass"]
                facts = {"model": shape.name, "case": case, "value": times.median_ms, "unit": "ms"}
                session.figures.add("waits", **facts, ratio=times.ratio, to="afterwards", aim="< 1")
    model = session.model(session.shapes[-1])
    for num_rows in session.rows[:2]:
        resources = GraphResources(TableBuffer(1 << 20, session.device), PaddingShapes(512), session.recorder())
        ways: dict[str, Callable[[], dict[str, Callable[[], object]]]] = {
            "levels": partial(level_growers, session.device, num_rows, session.is_tiny),
            "device": partial(head_growers, model, resources, num_rows, session.is_tiny),
        }
        for name, growers in ways.items():
            case = f"trees of {num_rows} rows by {name}"
            if session.has("waits", "", case) or session.is_late:
                continue
            times = in_turns(growers(), session.turns, session.device)[name]
            facts = {"model": "", "case": case, "value": times.median_ms, "unit": "ms"}
            session.figures.add("waits", **facts, ratio=times.ratio, to="rounds", aim="< 1")
        case = f"trees of {num_rows} rows read with choices"
        if not (session.has("waits", "", case) or session.is_late):
            with nullcontext() if session.device.type == "cuda" else _chosen_by_torch():
                steps = steps_of_trees(model, resources, num_rows, session.is_tiny)
                times = in_turns(steps, session.turns, session.device)["at once"]
            facts = {"model": "", "case": case, "value": times.median_ms, "unit": "ms"}
            session.figures.add("waits", **facts, ratio=times.ratio, to="trees first", aim="< 1")


@contextmanager
def _chosen_by_torch() -> Iterator[None]:
    chosen, device_choice.chosen = device_choice.chosen, choice_reference.chosen
    try:
        yield
    finally:
        device_choice.chosen = chosen


def _choosing(session: Session, model: CausalModel, num_rows: int) -> dict[str, Callable[[], object]]:
    cache, draws = KVCache(num_rows * 64 + 1, session.device), NodeDraws([0.7] * num_rows, [*range(num_rows)])
    batch, rows = batch_of(num_rows, 1, [40], session.device), range(num_rows)
    plain, choosing = (_passes(session, model, cache, chooses=chooses) for chooses in (False, True))

    def afterwards() -> object:
        return device_choice.choices(plain.run(batch, rows), *draws)

    def inside() -> object:
        return choosing.choices(choosing.run(batch, rows, draws), num_rows)

    return {"afterwards": afterwards, "in the pass": inside}


def _pages(session: Session) -> None:
    """Write what slots of one token cost beside pages of 16 tokens, slots in order, and torch's attention."""
    layer, dtype = (TINY_LAYERS[0], torch.float32) if session.is_tiny else (Layer(8, 4, 128), torch.bfloat16)
    context = session.contexts[-1]
    for num_rows, num_nodes in ((1, 1), (1, 16), (8, 1)):
        case = f"{num_rows} rows of {num_nodes} after {context}"
        if session.has("pages", str(layer), case) or session.is_late:
            continue
        times = time_pages(layer, dtype, session.device, (num_rows, num_nodes, context), session.turns)
        for name, other in times.items():
            if name != "one token":
                facts = {"model": str(layer), "case": case, "value": times["one token"].median_ms, "unit": "ms of ten"}
                session.figures.add("pages", **facts, ratio=1.0 / other.ratio, to=name, aim="<= 1.10 to pages of 16")


def _races(session: Session) -> None:
    """Run the kernels' tests under compute-sanitizer, if it is there."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None or session.device.type != "cuda":
        session.figures.add("races", left_out="compute-sanitizer is not installed")
        return
    tests = ["tests/gpu/test_fused.py::test_choices_are_the_cpus", "tests/gpu/test_paged.py::test_the_kernel_is_the_reference"]
    command = [
        tool,
        "--tool",
        "racecheck",
        "--error-exitcode",
        "9",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        *LENIENT,
        *tests,
    ]
    _command(session, "races", command)


_PARTS: dict[str, Callable[[Session], None]] = {
    "tests": _tests,
    "exact": _exact,
    "decode": _decode,
    "verify": _verify,
    "where": _where,
    "policy": _policy,
    "waits": _waits,
    "pages": _pages,
    "fused": _fused,
    "formats": _formats,
    "races": _races,
}
