"""Programs that others measure servers with, unchanged, against a real server process: lm-eval's scores and aiperf's load.

They have an environment of their own, which `make conformance` makes; without it these tests are skipped.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.folder import served_folder
from tests.e2e.server import RunningServer, running_server

ROOT = Path(__file__).parents[2]
TOOLS = Path(os.environ.get("CONFORMANCE_VENV", ROOT / ".venv-conformance")) / "bin"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
MODEL = "tiny"
TOLERANCE = 1e-3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def tool(name: str) -> str:
    """Return the path of a tool; skip the test where it is not installed."""
    path = TOOLS / name
    if not path.exists():
        pytest.skip(f"{name} is not installed: `make conformance` does")
    return str(path)


def run(command: list[str], folder: Path, **environment: str) -> None:
    """Run a tool at home in a folder; raise with what it printed if it failed."""
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HOME": str(folder), "HF_HOME": str(folder / "hf"), **environment}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    (folder / "printed.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    if not (TOOLS / "lm-eval").exists() and not (TOOLS / "aiperf").exists():
        pytest.skip("neither lm-eval nor aiperf is installed: `make conformance` does")
    log = tmp_path_factory.mktemp("log") / "log"
    flags = ["--model", str(weights), "--model-name", MODEL, "--policy", "fixed", "--expansion", "2.2.2", "--num-slots", "4096"]
    with running_server(log, *flags, "--drafter", "model", "--draft-model", str(weights)) as running:
        yield running


CHOICES = [
    {"query": "the quick brown", "choices": [" fox", " dog", " hello"], "gold": 0},
    {"query": "hello", "choices": [" world", " there", " café"], "gold": 1},
    {"query": "日本語", "choices": [" text", " 😀", "!"], "gold": 0},
    {"query": "stop", "choices": [" here", " over the lazy dog", "x"], "gold": 2},
    {"query": "jumps over the", "choices": [" lazy", " quick brown fox", " naïve"], "gold": 0},
    {"query": "😀 smile,", "choices": [" hello", " the", " stop here"], "gold": 1},
]
CHOICE_TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXT_TASK = """
task: tiny_text
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{query}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["!"], max_gen_toks: 12, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
"""
ROLLING_TASK = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{query}}{{choices[0]}}"
metric_list: [{metric: word_perplexity}]
"""
TASKS = {"tiny_choice": CHOICE_TASK, "tiny_text": TEXT_TASK, "tiny_rolling": ROLLING_TASK}


def tasks_in(folder: Path) -> Path:
    """Write the tasks and their data."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in CHOICES))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
    return folder


def evaluated(folder: Path, model: str, model_args: str) -> dict[str, Any]:
    """Return what lm-eval found: `results` by task, and each task's samples in order."""
    out = folder / "out"
    command = [tool("lm-eval"), "run", "--model", model, "--model_args", model_args, "--tasks", ",".join(TASKS)]
    run(
        [*command, "--include_path", str(folder), "--output_path", str(out), "--log_samples", "--device", "cpu"],
        folder,
        **OFFLINE,
    )
    (results,) = out.rglob("results_*.json")
    found: dict[str, Any] = {"results": json.loads(results.read_text())["results"]}
    for task in TASKS:
        (samples,) = out.rglob(f"samples_{task}_*.jsonl")
        found[task] = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return found


@pytest.fixture(scope="module")
def reference(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what lm-eval finds with transformers."""
    return evaluated(tasks_in(tmp_path_factory.mktemp("own")), "hf", f"pretrained={weights},dtype=float32,max_length=256")


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_lm_eval_scores_match_loaded_weights(
    server: RunningServer, weights: Path, reference: dict[str, Any], tmp_path: Path, backend: str
) -> None:
    """Log-likelihoods of choices and whole texts, arg maxes, accuracy, and greedy texts: as lm-eval's own `hf` has them."""
    tokenizer = f"tokenizer={weights},tokenizer_backend=huggingface" if backend == "huggingface" else "tokenizer_backend=remote"
    address = f"base_url={server.url}/v1/completions,model={MODEL},{tokenizer}"
    ours = evaluated(tasks_in(tmp_path), "local-completions", f"{address},num_concurrent=3,max_retries=1,max_length=256")
    for task, metrics in reference["results"].items():
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        assert numbers
        assert {name: ours["results"][task][name] for name in numbers} == pytest.approx(numbers, rel=TOLERANCE)
    for mine, own in zip(ours["tiny_choice"], reference["tiny_choice"], strict=True):
        for one, other in zip(mine["filtered_resps"], own["filtered_resps"], strict=True):
            assert float(one[0]) == pytest.approx(float(other[0]), abs=TOLERANCE)
            assert str(one[1]) == str(other[1]), "whether the choice is that of greedy decoding"
    assert [one["filtered_resps"] for one in ours["tiny_text"]] == [one["filtered_resps"] for one in reference["tiny_text"]]


@pytest.mark.parametrize("streaming", [True, False])
def test_aiperf_measures_a_chat(server: RunningServer, weights: Path, tmp_path: Path, streaming: bool) -> None:
    command = [
        *(
            tool("aiperf"),
            "profile",
            "--model",
            MODEL,
            "--url",
            server.url,
            "--endpoint-type",
            "chat",
            "--tokenizer",
            str(weights),
        ),
        *("--request-count", "12", "--concurrency", "3", "--synthetic-input-tokens-mean", "12", "--output-tokens-mean", "8"),
        *("--artifact-dir", str(tmp_path / "out"), "--ui", "none", "--extra-inputs", "ignore_eos:true"),
        *(["--streaming"] if streaming else []),
    ]
    run(command, tmp_path)
    (found,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    numbers = json.loads(found.read_text())
    assert numbers["request_count"]["avg"] == 12
    assert not numbers.get("error_request_count") or numbers["error_request_count"]["avg"] == 0
    assert numbers["output_token_count"]["avg"] > 0
    assert numbers["spec_decode_accepted_draft_tokens"]["avg"] > 0
    if streaming:
        assert numbers["time_to_first_token"]["avg"] > 0
