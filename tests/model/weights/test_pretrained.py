"""Model folders are read without running code of theirs, and model types that cannot be served are refused by name."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.model.causal_lm import load_model
from engine.weights import UnsupportedModel, WeightsError, resolve
from engine.weights.pretrained import load_config, load_module, load_tokenizer, refuse_by_configuration
from server.cli.main import main
from tests.conformance.folder import served_folder
from tests.tokenizers_for_tests import byte_level

ROOT = Path(__file__).parents[3]
CLI = [sys.executable, "-c", "import sys; from server.cli.main import main; sys.exit(main())"]
CODE = """
from pathlib import Path
(Path(__file__).parent / "MARKER").touch()
Path({marker!r}).touch()
from transformers import {base}
class Own({base}):
    model_type = "own"
"""
AUTO = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}


def _edited(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def _folder(path: Path, marker: Path, base: str = "PretrainedConfig") -> Path:
    """Write a tiny Llama folder with a module that leaves a marker when it is imported."""
    served_folder(path)
    (path / "own.py").write_text(CODE.format(marker=str(marker), base=base))
    return path


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the folder's code would leave its mark; a question whether to run it is answered yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "marker"


@pytest.mark.parametrize("model_type", ["own", None, "llama"])
def test_code_of_a_model_folder_never_runs(model_type: str | None, tmp_path: Path, marker: Path, capsys) -> None:
    """The bug: transformers prompted on the terminal, and ran the code. A known type is served by transformers' own classes."""
    folder = _folder(tmp_path / "model", marker)
    _edited(folder / "config.json", model_type=model_type, auto_map=AUTO)
    assert main(["doctor", "--model", str(folder)]) == (0 if model_type == "llama" else 2)
    output = capsys.readouterr().out
    assert ("code of its own folder, which is never run" in output) == (model_type != "llama")
    if model_type == "llama":
        assert load_module(folder).config.model_type == "llama"
    else:
        for load in (load_config, load_module):
            with pytest.raises(UnsupportedModel, match=r"code of its own folder, which is never run$"):
                load(folder)
    assert not marker.exists()


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    weights = load_file(served_folder(tmp_path) / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    load_module(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"lacks \*\.safetensors"):
        resolve(str(tmp_path))
    with pytest.raises(OSError, match="safetensors"):
        load_module(tmp_path)


def test_code_of_a_tokenizer_never_runs(tmp_path: Path, marker: Path) -> None:
    folder = _folder(tmp_path / "model", marker, "PreTrainedTokenizerFast")
    _edited(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    with pytest.raises(UnsupportedModel, match=r"the tokenizer of .* needs code of its own folder, which is never run$"):
        load_tokenizer(folder)
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"model_type": "own", "auto_map": AUTO}, {"model_type": "rwkv"}])
def test_serve_refuses_a_model_in_one_sentence(changes: dict[str, Any], tmp_path: Path) -> None:
    """The bug: an AttributeError, or a question on the terminal; exit status 1."""
    marker, folder = tmp_path / "marker", tmp_path / "model"
    _edited(_folder(folder, marker) / "config.json", **changes)
    environment = {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT), "PATH": ""}
    command = [*CLI, "serve", "--model", str(folder), "--port", "0", "--log-level", "error"]
    done = subprocess.run(command, input="y\n" * 9, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("latebranch serve: ")]
    assert f"model type '{changes['model_type']}' is not supported: " in sentence
    assert not marker.exists()


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("rwkv", "no num_attention_heads"),
        ("xlstm", "no num_attention_heads"),
        ("mamba", "linear_attention"),
        ("blt", "its configuration has no"),
        ("gemma4_text", "per-layer"),
        ("musicgen", "text configs"),
        ("t5", "no causal language model"),
        ("vit", "no causal language model"),
    ],
)
def test_architectures_are_refused_by_name(model_type: str, why: str, tmp_path: Path, capsys) -> None:
    """The bug: an AttributeError of transformers' configuration reached the user."""
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    byte_level().save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    output = capsys.readouterr().out
    assert f"model type '{model_type}' is not supported: " in output
    assert why in output


def test_every_causal_type_passes_or_is_refused() -> None:
    """A neighbour of the types that are known to fail: whatever transformers calls a causal language model."""
    refused = set()
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # noqa: BLE001 (a configuration without defaults)
            continue
        try:
            refuse_by_configuration(config)
        except UnsupportedModel as error:
            assert f"model type '{config.model_type}' is not supported: " in str(error)  # noqa: PT017
            refused.add(model_type)
    assert {"rwkv", "xlstm", "mamba", "jamba", "falcon_mamba", "zamba2", "nemotron_h", "minimax"} <= refused
    assert not {"llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "gpt2", "phi3", "olmo2"} & refused


@pytest.mark.parametrize("model_type", ["deepseek_v2", "xmod"])
def test_a_failing_pass_refuses_the_model(model_type: str, tmp_path: Path) -> None:
    """The bug: a pass of an attention of another kind ended in transformers' RuntimeError or ValueError."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {"moe_intermediate_size": 16, "n_routed_experts": 4} if model_type == "deepseek_v2" else {"is_decoder": True}
    config = CONFIG_MAPPING[model_type](**sizes, **own, max_position_embeddings=128)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"^model type '{model_type}' is not supported: .*Error: "):
        load_model(tmp_path, "float32", torch.device("cpu"), "plain")


def test_an_unknown_type_without_code_is_refused(tmp_path: Path) -> None:
    _edited(served_folder(tmp_path) / "config.json", model_type="own")
    with pytest.raises(UnsupportedModel, match=r"^model type 'own' is not supported: transformers [\d.]+ has none$"):
        load_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama", "hidden_size": "wide"}'])
def test_broken_configuration_is_a_weights_error(text: str, tmp_path: Path) -> None:
    (served_folder(tmp_path) / "config.json").write_text(text)
    with pytest.raises((WeightsError, UnsupportedModel), match=r"cannot be read|not supported"):
        load_config(tmp_path)


def _loads(path: Path) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    ]


def test_every_load_distrusts_the_folder() -> None:
    """Each call of transformers' loaders passes `trust_remote_code=False`, or uses the flags of engine.weights.pretrained."""
    found = 0
    for path in (path for top in ("engine", "server", "selector", "benchmarks") for path in (ROOT / top).rglob("*.py")):
        for call in _loads(path):
            given = {word.arg or ast.unparse(word.value): ast.unparse(word.value) for word in call.keywords}
            if "Generation" in ast.unparse(call.func) or {"_TRUST", "_WEIGHTS"} & given.keys():
                continue
            assert given.get("trust_remote_code") == "False", f"{path}:{call.lineno}"
            if "Model" in ast.unparse(call.func) and "gguf_file" not in given:
                assert given.get("use_safetensors") == "True", f"{path}:{call.lineno}"
            found += 1
    assert found > 2
