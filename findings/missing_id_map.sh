#!/usr/bin/env bash
# A drafter without its map of token ids: speculators 0.9.0 loads random memory in its place, silently.
#
# Guess: a missing d2t is an error, or at least in the load report, as a missing fc.weight is.
# Seen: d2t, t2d and input_norm are in the list of tensors that may be missing. transformers creates the model without initialising
# its buffers, so d2t and t2d are whatever the memory had, and input_norm is all ones. Nothing is logged of them.
# Harm: a script that casts or prunes a checkpoint and drops integer tensors leaves a head whose drafts are other tokens: every draft
# is refused, and the server is slower than without one. Without t2d the rows of the LM head are chosen at random.
# latebranch refuses a reduced LM head without d2t or t2d, and norm_before_fc without input_norm.
source "$(dirname "$0")/engines.sh"
engines speculators

python - "$folder" <<'PY'
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch
from engines import check, done
from loguru import logger
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

folder, kept = Path(sys.argv[1]), list(range(40, 64))
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=6)).save_pretrained(folder / "target")
config = Eagle3SpeculatorConfig(
    transformer_layer_config=LlamaConfig(**sizes, num_hidden_layers=1),
    draft_vocab_size=len(kept),
    norm_before_fc=True,
    eagle_aux_hidden_state_layer_ids=[1, 3, 4],
    speculators_config=SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=str(folder / "target"), architectures=["LlamaForCausalLM"]),
    ),
)
head = Eagle3DraftModel(config)
mask = torch.zeros(64, dtype=torch.bool)
mask[kept] = True
head.load_vocab_mappings(mask, torch.tensor(kept) - torch.arange(len(kept)))
head.load_verifier_weights()
head.input_norm.weight.data.fill_(3.0)
head.save_pretrained(folder / "head")


def loaded(*dropped: str) -> tuple[Eagle3DraftModel, str]:
    """Return the head of a checkpoint without some tensors, and what loading it logged."""
    tensors = {name: tensor for name, tensor in load_file(folder / "head/model.safetensors").items() if name not in dropped}
    save_file(tensors, folder / "cut.safetensors")
    cut = folder / "-".join(["cut", *dropped])
    cut.mkdir()
    (cut / "config.json").write_text((folder / "head/config.json").read_text())
    (folder / "cut.safetensors").rename(cut / "model.safetensors")
    log = StringIO()
    logger.remove()
    logger.add(log)
    handler = logging.logging.StreamHandler(log)
    logging.add_handler(handler)
    with redirect_stderr(log):
        found = Eagle3DraftModel.from_pretrained(cut)
    logging.remove_handler(handler)
    return found, log.getvalue()


whole, _ = loaded()
check("the whole checkpoint: draft id 0 is the target's 40", whole.d2t[0] == 40, whole.d2t[0])
_, log = loaded("fc.weight")
check("without fc.weight: the load report names it", "fc.weight" in log, log)
cut, log = loaded("d2t")
check("without d2t: loaded all the same, with other numbers", not torch.equal(cut.d2t, whole.d2t), cut.d2t.tolist())
check("without d2t: nothing is logged of it", "d2t" not in log.replace(str(folder), "").replace("cut-d2t", ""), log)
cut, log = loaded("input_norm.weight")
check("without input_norm: all ones", bool((cut.input_norm.weight == 1).all()), cut.input_norm.weight)
check("without input_norm: nothing is logged of it", "input_norm" not in log.replace("cut-input_norm.weight", ""), log)
done()
PY
