"""The comparison with other engines, without them: contenders, what is loaded at a time, rounds and blocks, the tables."""

import csv
import io
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import __main__ as peers_main
from benchmarks.peers import contenders, measure, setup, stable
from benchmarks.peers.adapters.mnn import draw_token
from benchmarks.peers.contenders import Contender, Subject, contenders_of, those_ready
from benchmarks.peers.jobs import Answer, Answers, Job, JobFailed
from benchmarks.peers.measure import MIXED, Design, Measurement, blocks_of
from benchmarks.peers.processes import Launch, PeerDied
from benchmarks.peers.report import report, write_ratios
from benchmarks.peers.setup import PEERS
from benchmarks.peers.stable import Stable
from engine.core.tree import parse_expansion
from engine.weights.references import LocalWeights
from server.schemas.speculative import SpeculativeOptions

PROMPTS: dict[str, list[tuple[int, ...]]] = {"code": [(1, 2), (3, 4)], "prose": [(5,), (6,)]}


@dataclass
class Group:
    bytes_held: int = 100

    def cpu_s(self) -> float:
        return 0.0

    def peak_bytes(self) -> int:
        return self.bytes_held


@dataclass
class Peer:
    """A peer that answers at once, or fails at jobs of more tokens than `fails_above`."""

    launch: Launch
    fails_above: int = 1000
    group: Group = field(default_factory=Group)
    jobs: list[Job] = field(default_factory=list)
    is_stopped: bool = False

    def answer(self, job: Job) -> Answers:
        self.jobs.append(job)
        if job.num_tokens > self.fails_above:
            raise JobFailed("too long for me\nreally")
        ids = tuple(range(job.num_tokens))
        return Answers(2.0, tuple(Answer(0.5, 1.0, job.num_tokens, ids) for _ in job.prompts))

    def stop(self) -> None:
        self.is_stopped = True


@dataclass
class Cast:
    """Starts peers; remembers them in order."""

    fails_above: dict[Launch, int] = field(default_factory=dict)
    bytes_held: dict[Launch, int] = field(default_factory=dict)
    peers: list[Peer] = field(default_factory=list)

    def start(self, launch: Launch, client: Any, log: Path) -> Peer:
        peer = Peer(launch, self.fails_above.get(launch, 1000), Group(self.bytes_held.get(launch, 100)))
        self.peers.append(peer)
        return peer

    @property
    def running(self) -> list[str]:
        return [peer.launch.command[0] for peer in self.peers if not peer.is_stopped]


class Client(Peer):
    def __init__(self, log: Path) -> None:
        super().__init__(launch("client"))


@pytest.fixture
def cast(monkeypatch: pytest.MonkeyPatch) -> Cast:
    monkeypatch.setattr(stable, "start_client", Client)
    return Cast()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("LATEBRANCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def launch(name: str, expected_bytes: int = 100) -> Launch:
    return Launch((name,), "lines", expected_bytes)


def subject(tmp_path: Path, has_gguf: bool = True, has_draft: bool = True) -> Subject:
    def weights(name: str) -> LocalWeights:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"0" * 1000)
        return LocalWeights(name, folder, tmp_path / f"{name}.gguf" if has_gguf else None)

    tree = parse_expansion("noise_aware.8.5.4")
    draft = weights("small") if has_draft else None
    return Subject(weights("large"), draft, tmp_path / "config.yaml", tree, ("float32", "int8"), 2, 4, 256)


def test_missing_peer_is_named_and_left_out(tmp_path: Path):
    requested = contenders_of(subject(tmp_path))
    chosen, why = those_ready(requested)
    assert [one.name for one in chosen] == [
        f"latebranch.{dtype}.{how}" for dtype in ("float32", "int8") for how in ("plain", "fixed", "adaptive")
    ]
    assert {line.partition(" ")[0] for line in why} == set(PEERS)
    assert all("python -m benchmarks.peers setup" in line for line in why)


def test_each_capable_engine_takes_part_once(tmp_path: Path):
    both = [one.name for one in contenders_of(subject(tmp_path))]
    assert len(set(both)) == len(both)
    some = {"transformers.float32.assisted", "transformers.continuous.bfloat16", "llama.cpp.shipped", "llama.cpp.q8_0.draft"}
    assert {*some, "openvino", "vllm.bfloat16", "ik_llama.cpp.iq4_k", "onnxruntime-genai.int8", "mnn.int8"} <= set(both)
    alone = [one.name for one in contenders_of(subject(tmp_path, has_draft=False))]
    assert not [name for name in alone if name.endswith(("draft", "assisted"))]
    without = [one.peer for one in contenders_of(subject(tmp_path, has_gguf=False))]
    assert set(without) == {None, "transformers", "vllm", "onnxruntime-genai", "mnn"}


def test_fixed_tree_uses_the_adaptive_server(tmp_path: Path):
    ours = {one.name: one for one in contenders_of(subject(tmp_path)) if one.peer is None}
    fixed, adaptive, plain = (ours[f"latebranch.int8.{how}"] for how in ("fixed", "adaptive", "plain"))
    assert fixed.launch == adaptive.launch != plain.launch
    wish = SpeculativeOptions.model_validate(fixed.fields["speculative"])
    assert str(wish.expansion) == "noise_aware.8.5.4"
    delayed = SpeculativeOptions.model_validate(contenders._wish(parse_expansion("2.2.3")))
    assert str(delayed.expansion) == "2.2.3"


def test_setup_installs_each_release_once(monkeypatch: pytest.MonkeyPatch, cache: Path):
    commands: list[list[str]] = []

    def run(command: list[str]) -> None:
        commands.append(command)
        if command[1:3] == ["-m", "venv"]:
            setup.python("openvino").parent.mkdir(parents=True)
            setup.python("openvino").touch()

    monkeypatch.setattr(setup, "_run", run)
    assert not setup.is_set_up("openvino")
    setup.set_up("openvino")
    assert setup.is_set_up("openvino")
    assert setup.home("openvino") == cache / "latebranch" / "peers" / "openvino"
    assert len(commands) == 2
    assert list(setup.PINS["openvino"]) == commands[1][-len(setup.PINS["openvino"]) :]
    setup.set_up("openvino")
    assert len(commands) == 2

    monkeypatch.setitem(setup.PINS, "openvino", ("openvino-genai==9",))
    assert not setup.is_set_up("openvino")
    setup.set_up("openvino")
    assert len(commands) == 4  # nothing of the other release was kept


@pytest.mark.parametrize("peer", ["llama.cpp", "ik_llama.cpp"])
def test_peers_are_built_from_own_sources(monkeypatch: pytest.MonkeyPatch, peer: str):
    release = setup.PINS[peer][0].replace("-", "_").replace("==", "-")
    setup.home(peer).mkdir(parents=True)
    with tarfile.open(setup.home(peer) / f"{release}.tar.gz", "w:gz") as archive:
        details = b'int NUMBER = @NUMBER@;\nchar const *COMMIT = "@COMMIT@";\n'
        file = tarfile.TarInfo(f"{release}/vendor/{peer}/common/build-info.cpp.in")
        file.size = len(details)
        archive.addfile(file, io.BytesIO(details))
    commands: list[list[str]] = []
    monkeypatch.setattr(setup, "_run", commands.append)
    setup.set_up(peer)
    configure, build = commands
    assert configure[:3] == ["cmake", "-S", str(setup.home(peer) / release / "vendor" / peer)]
    assert "-DGGML_NATIVE=ON" in configure  # without the processor's own instructions a peer is several times slower
    assert build[-2:] == ["llama-server", "llama-quantize"]
    if peer == "ik_llama.cpp":
        written = (setup.home(peer) / release / "vendor" / peer / "common" / "build-info.cpp").read_text()
        assert written == 'int NUMBER = 0;\nchar const *COMMIT = "0";\n'
    assert setup.is_set_up(peer)


def test_launches_name_files_of_their_own_conversions(tmp_path: Path):
    """The file that a server loads is the one that its own peer's tool writes, never another peer's."""
    converted = [one for one in contenders_of(subject(tmp_path)) if one.conversions]
    assert {one.peer for one in converted} == {"llama.cpp", "ik_llama.cpp", "onnxruntime-genai", "mnn"}
    for one in converted:
        for conversion in one.conversions:
            assert str(conversion.target) in one.launch.command
            assert Path(conversion.command[0]).is_relative_to(setup.home(one.peer or ""))
            assert setup.PART in conversion.command


def test_conversions_run_once_without_leftovers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    conversion = setup.Conversion(tmp_path / "models" / "small.Q8_0.gguf", ("quantise", setup.PART))
    commands: list[list[str]] = []

    def run(command: list[str], folder: Path) -> None:
        assert folder == conversion.target.parent  # an exporter leaves its log where it runs
        commands.append(command)
        if len(commands) == 1:
            raise setup.SetupError("cut short")
        Path(command[1]).write_text("weights")

    monkeypatch.setattr(setup, "_run", run)
    with pytest.raises(setup.SetupError):
        setup.convert(conversion)
    for _ in range(2):
        setup.convert(conversion)
    assert len(commands) == 2
    assert [one.name for one in conversion.target.parent.iterdir()] == [conversion.target.name]


def test_failed_install_is_not_set_up(monkeypatch: pytest.MonkeyPatch):
    def run(command: list[str]) -> None:
        raise setup.SetupError("no")

    monkeypatch.setattr(setup, "_run", run)
    with pytest.raises(setup.SetupError):
        setup.set_up("transformers")
    assert not setup.is_set_up("transformers")


def test_peers_stay_loaded_while_memory_allows(cast: Cast):
    with Stable(250, cast.start) as held:
        assert held.peer(launch("a"))[1] is True
        held.peer(launch("b"))
        assert held.peer(launch("a"))[1] is False
        held.peer(launch("c"))  # b was used longest ago
        assert cast.running == ["a", "c"]
        held.peer(launch("huge", expected_bytes=1000))  # alone it may need more
        assert cast.running == ["huge"]
    assert cast.running == []


def test_measured_memory_counts_at_next_start(cast: Cast):
    cast.bytes_held[launch("a")] = 240
    with Stable(250, cast.start) as held:
        held.peer(launch("a"))
        held.peer(launch("b"))
        assert cast.running == ["b"]  # a took more than was expected
        held.peer(launch("a"))
        assert cast.running == ["a"]


def design(concurrencies: tuple[int, ...] = (1,), temperatures: tuple[float, ...] = (0.0,), **how: Any) -> Design:
    usual: dict[str, Any] = {"num_tokens": 8, "num_rounds": 1, "max_foreign_cpus": 9.0, "num_retries": 0}
    return Design(concurrencies, temperatures, **{**usual, **how})


def test_blocks_mix_kinds_only_when_concurrent():
    blocks = blocks_of(design((1, 3), (0.0, 1.0)), PROMPTS, 2)
    assert {(b.kind, b.concurrency, b.temperature) for b in blocks} == {
        (kind, concurrency, temperature)
        for kind, concurrency in (("code", 1), ("prose", 1), (MIXED, 3))
        for temperature in (0.0, 1.0)
    }
    mixed = next(block for block in blocks if block.kind == MIXED and block.temperature == 1)
    assert mixed.prompts == ((1, 2), (5,), (3, 4))
    assert mixed.job(8, {}).seeds == (2000, 2001, 2002)
    assert next(block for block in blocks if block.temperature == 0).job(8, {}).seeds[0] is None


def measured(out: Path, cast: Cast, plan: Design, contestants: list[Contender]) -> list[dict[str, Any]]:
    with Stable(10_000, cast.start) as held:
        Measurement(plan, contestants, held, out).run(PROMPTS, {"left_out": ["vllm is not set up"]})
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_contenders_receive_same_jobs_each_round(tmp_path: Path, cast: Cast):
    one, other = Contender("one", None, launch("one")), Contender("other", None, launch("other"), max_concurrency=1)
    lines = measured(tmp_path / "out", cast, design((1, 2), num_rounds=2), [one, other])
    assert lines[0]["left_out"] == ["vllm is not set up"]
    runs = [(line["contender"], line["round"], line["kind"], line["tokens_per_s"]) for line in lines[1:]]
    assert sorted(runs) == sorted(
        [("one", number, kind, 8.0) for number in range(2) for kind in ("code", "prose", MIXED)]
        + [("other", number, kind, 8.0) for number in range(2) for kind in ("code", "prose")]
    )
    warm_up, *jobs = {peer.launch.command[0]: peer for peer in cast.peers}["one"].jobs
    assert warm_up.num_tokens != 8 or warm_up.temperature == 1.0
    assert len(jobs) == 6
    # a later run goes on with the rounds
    assert [line["round"] for line in measured(tmp_path / "out", cast, design(), [one])[-2:]] == [2, 2]


def test_disturbed_measurement_is_repeated(tmp_path: Path, cast: Cast, monkeypatch: pytest.MonkeyPatch):
    readings = iter([0.5, 0.1, 0.6, 0.7, 0.8])

    class Watch:
        def __init__(self, own_s: Any) -> None:
            pass

        def cpus(self) -> float:
            return next(readings)

    monkeypatch.setattr(measure, "ForeignCpu", Watch)
    plan = design(max_foreign_cpus=0.2, num_retries=2)
    lines = measured(tmp_path / "out", cast, plan, [Contender("one", None, launch("one"))])
    assert [line["foreign_cpus"] for line in lines[1:]] == [0.5, 0.1, 0.6, 0.7, 0.8]
    assert "4 of 5 measurements left out" in report(tmp_path / "out", 0.2)


def test_failing_peer_leaves_run_with_reason(tmp_path: Path, cast: Cast):
    cast.fails_above[launch("weak")] = 10
    strong, weak = Contender("strong", None, launch("strong")), Contender("weak", None, launch("weak"))
    lines = measured(tmp_path / "out", cast, design(num_tokens=16, num_rounds=2), [strong, weak])
    assert [(line["contender"], line["reason"]) for line in lines if line["type"] == "failed"] == [
        ("weak", "too long for me\nreally")
    ]
    assert len([line for line in lines if line["type"] == "run" and line["contender"] == "strong"]) == 4
    assert "Failed: weak: really." in report(tmp_path / "out", 9.0)


def test_unstartable_peer_is_recorded_as_failed(tmp_path: Path, cast: Cast, monkeypatch: pytest.MonkeyPatch):
    def start(launch: Launch, client: Any, log: Path) -> Peer:
        raise PeerDied("it did not become ready")

    monkeypatch.setattr(cast, "start", start)
    lines = measured(tmp_path / "out", cast, design(num_tokens=16, num_rounds=2), [Contender("weak", None, launch("weak"))])
    assert [line["type"] for line in lines] == ["header", "failed"]


def line(contender: str, number: int, tokens_per_s: float, foreign_cpus: float | None = 0.0, **how: Any) -> dict[str, Any]:
    figures = {"first_s": 0.02, "token_s": 0.01, "peak_bytes": 2**30, "token_ids": None, "foreign_cpus": foreign_cpus}
    where = {"round": number, "kind": "code", "concurrency": 1, "temperature": 0.0}
    return {"type": "run", "contender": contender, "tokens_per_s": tokens_per_s, **where, **figures, **how}


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    def write(*lines: dict[str, Any]) -> dict[str, list[str]]:
        out = tmp_path / "lines"
        out.write_text("\n".join(json.dumps(one) for one in lines))
        cells = [text.strip("| ").split(" | ") for text in report(out, 0.2).splitlines() if text.startswith("| ")]
        return {row[0]: [cell.strip() for cell in row] for row in cells if not row[0].startswith("-")}

    return write


def test_ratio_divides_rates_of_same_round(rows: Any):
    found = rows(
        line("latebranch.int8.plain", 0, 30.0),
        line("latebranch.int8.plain", 1, 20.0),
        line("latebranch.int8.plain", 2, 90.0),
        line("llama.cpp", 0, 10.0),
        line("llama.cpp", 1, 20.0),
        line("llama.cpp", 2, 45.0),
        line("llama.cpp", 3, 1.0),
    )
    assert found["contender"][-1] == "int8.plain over it"
    assert found["llama.cpp"][1:] == ["15.0", "20", "10.0", "1.0", "–", "4", "2.00 (1.00–3.00)"]


def test_disturbed_measurements_and_ratios_are_excluded(rows: Any):
    found = rows(
        line("latebranch.int8.plain", 0, 30.0, foreign_cpus=0.5),
        line("latebranch.int8.plain", 1, 20.0, foreign_cpus=None),
        line("llama.cpp", 0, 10.0),
        line("llama.cpp", 1, 10.0),
    )
    assert found["llama.cpp"][-2:] == ["2", "2.00 (2.00–2.00)"]
    assert found["latebranch.int8.plain"][1] == "20.0"


def test_greedy_texts_match_reference_of_round(rows: Any):
    found = rows(
        line("transformers.float32", 0, 5.0, token_ids=[[1, 2], [3, 4]]),
        line("transformers.float32", 1, 5.0, token_ids=[[5, 6], [7, 8]]),
        line("latebranch.float32.plain", 0, 5.0, token_ids=[[1, 2], [3, 9]]),
        line("latebranch.float32.plain", 1, 5.0, token_ids=[[5, 6], [7, 8]]),
        line("llama.cpp", 0, 5.0),
    )
    assert found["latebranch.float32.plain"][5] == "3 of 4"
    assert found["llama.cpp"][5] == "–"


def test_short_report_lists_each_ratio_once(tmp_path: Path):
    names = ("latebranch.int8.adaptive", "latebranch.int8.plain", "llama.cpp")
    lines = [line(name, number, 10.0 * (3 - place)) for place, name in enumerate(names) for number in range(2)]
    path = tmp_path / "peers.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    tables = report(path, 0.2, is_short=True).split("\n\n")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in tables[1].splitlines()]
    assert rows[0][3:] == ["peer", "int8.adaptive over it", "int8.plain over it"]
    ratios = {row[3]: row[4:] for row in rows[2:]}
    assert ratios == {
        "latebranch.int8.plain": ["1.50 (1.50–1.50)", ""],
        "llama.cpp": ["3.00 (3.00–3.00)", "2.00 (2.00–2.00)"],
    }
    figures = {row.split("|")[2].strip(): row.split("|")[3].strip() for row in tables[2].splitlines()[2:]}
    assert figures == {"latebranch.int8.adaptive": "30.0", "latebranch.int8.plain": "20.0", "llama.cpp": "10.0"}
    path.write_text("\n".join(map(json.dumps, [{"type": "header", "model": "small"}, *lines])))
    text = io.StringIO()
    write_ratios(path, 0.2, (), text)
    assert list(csv.reader(text.getvalue().splitlines())) == [["model", *rows[0]], *(["small", *row] for row in rows[2:])]


def test_setup_installs_named_or_all_peers(monkeypatch):
    installed: list[str] = []
    monkeypatch.setattr(peers_main, "set_up", installed.append)
    for words in ([], ["openvino"]):
        monkeypatch.setattr("sys.argv", ["peers", "setup", *words])
        peers_main.main()
    assert installed == [*PEERS, "openvino"]
    monkeypatch.setattr("sys.argv", ["peers", "setup", "openvino", "another"])
    with pytest.raises(SystemExit):
        peers_main.main()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_sampled_tokens_have_the_models_distribution(temperature: float):
    """An adapter that draws for a library must draw as the library's peers do: by temperature alone, no token left out."""
    logits = np.array([2.0, -1.0, 0.5, 0.0, 3.0], np.float32)
    draws = np.random.default_rng(1)
    counts = np.bincount([draw_token(logits, temperature, draws) for _ in range(20_000)], minlength=5)
    weights = np.exp(logits / temperature)
    assert counts / 20_000 == pytest.approx(weights / weights.sum(), abs=0.01)
    assert counts.min() > 0
    assert draw_token(logits, 0.0, draws) == 4
