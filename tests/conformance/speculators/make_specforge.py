"""Makes the checkpoint of SpecForge beside this file, as make.py does those of speculators: a flat configuration, `midlayer`.

v/bin/pip install --no-deps specforge==0.2.0 && v/bin/python make_specforge.py
"""

import json

import torch
from make import HERE, KEPT, LENGTH, SIZES, STATES, VOCAB, WIDTH, save_file
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from transformers import LlamaConfig


@torch.no_grad()
def eagle3() -> None:
    torch.manual_seed(1)
    config = LlamaConfig(**SIZES, num_hidden_layers=1, draft_vocab_size=len(KEPT), tie_word_embeddings=False, pad_token_id=0)
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
    model = LlamaForCausalLMEagle3(config).eval()
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        parameter.data.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 1 + 0.3 * noise)
    model.t2d.zero_()[KEPT] = True
    model.d2t.copy_(torch.tensor(KEPT) - torch.arange(len(KEPT)))
    states, ids = torch.randn(1, LENGTH, STATES * WIDTH), torch.randint(VOCAB, (1, LENGTH))
    logits = model.lm_head(model(states, model.embed_input_ids(ids)))
    folder = HERE / "specforge-eagle3"
    model.save_pretrained(folder)
    print(json.loads((folder / "config.json").read_text()))  # noqa: T201
    expected = {"states": states[0].unflatten(-1, (STATES, WIDTH)), "ids": ids[0], "logits.0": logits[0]}
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, folder / "expected.safetensors")


if __name__ == "__main__":
    eagle3()
