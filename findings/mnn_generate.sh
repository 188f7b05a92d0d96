#!/usr/bin/env bash
# MNN 3.6.1 in Python: `generate` of token ids returns no tokens.
#
# Guess: `generate([1, 2, 3])` returns "output token ids, list of int", as its docstring says, up to `max_new_tokens`.
# Seen: an empty list, whatever `max_new_tokens` is and with `generate_init` before it or not. The prompt is read and nothing is sampled.
# `response` of the same text samples all tokens, and `forward` has the logits.
# Harm: a program that tokenizes for itself gets empty answers, without an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
PATH="$folder/venv/bin:$PATH"
cd "$folder"
pip install --quiet --disable-pip-version-check --no-compile mnn==3.6.1 llmexport==0.0.5 torch==2.13.0 transformers==5.23.0 onnx==1.23.2 \
    2> pip.log || { cat pip.log; exit 1; }

cat > tiny.py <<'PY'
"""Writes a tiny random Llama with a tokenizer of letters."""

import string

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(["</s>", *string.ascii_lowercase])}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="</s>")
fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
fast.save_pretrained("tiny")
torch.manual_seed(1)
sizes = {"vocab_size": 27, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=0, bos_token_id=0)).save_pretrained("tiny")
PY
python tiny.py 2> /dev/null
exporter=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/llmexport/llmexport.py  # its command cannot start
python "$exporter" --path tiny --export mnn --quant_bit 8 --dst_path exported > export.log 2>&1 || { cat export.log; exit 1; }

cat > ask.py <<'PY'
import sys

import MNN.llm

model = MNN.llm.create("exported/config.json")
model.set_config({"sampler_type": "greedy", "max_new_tokens": 16})
model.load()
model.response("abc")
answered = model.context.gen_seq_len
print("response('abc'):", answered, "tokens")
found = []
for begins in (False, True):
    for most in (1, 16):
        model.reset()
        model.set_config({"max_new_tokens": most})
        if begins:
            model.generate_init()
        found.append(model.generate([1, 2, 3]))
        print(f"generate([1, 2, 3]) with max_new_tokens {most}: {found[-1]}, prompt_len {model.context.prompt_len}")
model.reset()
print("forward([1, 2, 3]):", model.forward([1, 2, 3]).shape)
sys.exit(answered == 0 or found != [[]] * 4)
PY
python ask.py
