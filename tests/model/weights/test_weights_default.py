"""The default model, smollm2-135m, as fetched: it loads, talks, and ends its turns."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.model.causal_lm import load_model
from engine.model.linear_backends import NATIVE
from engine.native.linear import NativeLinear
from engine.weights import gguf_tokenizer, resolve
from tests.needs import needs_library

pytestmark = [pytest.mark.weights, pytest.mark.slow]


@pytest.fixture(scope="module")
def weights():
    return resolve("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(weights):
    return AutoTokenizer.from_pretrained(weights.folder)


def test_it_answers_and_ends_its_turn(weights, tokenizer):
    model, report = AutoModelForCausalLM.from_pretrained(weights.folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_its_chat_template_is_the_models(tokenizer):
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_tied_embedding_is_stored_once(weights):
    with safe_open(weights.folder / "model.safetensors", "pt") as stored:
        names = list(stored.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@needs_library
def test_layers_are_read_as_4_bits(weights):
    """Q4_1, and an embedding in Q8_0 that is the output head too."""
    module = load_model(weights.folder, "compact", torch.device("cpu"), NATIVE).module
    linears = [linear for linear in module.model.modules() if isinstance(linear, NativeLinear)]
    assert [linear.structure.format for linear in linears] == [3] * 7 * module.config.num_hidden_layers
    assert module.lm_head.structure.format == 5


def test_digits_are_separate_tokens(weights, tokenizer, monkeypatch):
    """The model's own tokenizer splits each digit, and reads two spaces before it as one token."""
    assert tokenizer.tokenize("  42") == ["ĠĠ", "4", "2"]
    # The mutant splits by GPT-2's rule, as transformers does with this file.
    if weights.gguf is not None:
        monkeypatch.setitem(gguf_tokenizer._SPLITTINGS, "smollm", gguf_tokenizer._SPLITTINGS["gpt-2"])
        assert gguf_tokenizer.load_tokenizer(weights.gguf).tokenize("  42") == ["Ġ", "Ġ", "4", "2"]
