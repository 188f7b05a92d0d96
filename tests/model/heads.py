"""Tiny draft heads, served and by reference: the net's output over a sequence, computed densely as in training.

Shape key: B texts, T positions, F feature layers, D target width, W inner width, V vocabulary.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionPolicy
from engine.draft.models.head import DraftHead, HeadShape
from engine.draft.models.head_drafter import HeadDrafter
from engine.engine import Engine
from engine.model.causal_lm import CausalModel
from engine.testing import tiny_engine
from tests.model.tiny import model, own_module


def random_head(num_layers: int = 1, seed: int = 0, target_width: int = 32, vocab_size: int = 61) -> DraftHead:
    """Return a random head, narrower than its target, that lacks every seventh token."""
    shape = HeadShape(target_width, (1, 2, 3), 24, num_layers, 4, 2, head_size=6, intermediate=40, rope_theta=100.0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = DraftHead(shape, torch.tensor([token_id for token_id in range(vocab_size) if token_id % 7]))
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
            else:
                parameter.data.add_(torch.randn(parameter.shape) * 0.1)
    return head.requires_grad_(False).eval()


@torch.inference_mode()
def true_features(head: DraftHead, module: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """Return transformers' own states after the feature layers, fused, [B, T, W]."""
    states = module(input_ids=ids_BT, output_hidden_states=True, use_cache=False).hidden_states
    return head.features(torch.stack([states[count] for count in head.shape.feature_layers], dim=-2))


def read(features_BTW: Tensor) -> Tensor:
    """Return what each position reads: what the one before it left, and one position more."""
    return functional.pad(features_BTW, (0, 0, 1, 0))


def dense_states(head: DraftHead, module: PreTrainedModel, ids_BT: Tensor, read_BTW: Tensor) -> Tensor:
    """Return the head's last states, each position attending to those before it and itself."""
    shape, length = head.shape, ids_BT.shape[1]
    tokens, rotation = head.tokens(module.get_input_embeddings().weight[ids_BT]), head.shape.rotary(torch.arange(length))
    future = torch.ones(length, length).triu(1).bool()
    state = read_BTW
    for layer in head.decoder:
        query, key, value = layer.projected(state, tokens, *rotation)
        key, value = (x.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=2) for x in (key, value))
        scores = torch.einsum("bthk,bshk->bhts", query, key) / shape.head_size**0.5
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        state = layer.after_attention(state, torch.einsum("bhts,bshk->bthk", weights, value).flatten(2))
    assert isinstance(state, Tensor)
    return state


def cut_logits(head: DraftHead, module: PreTrainedModel, states: Tensor) -> Tensor:
    """Return logits of the head's own tokens."""
    rows_MD: Tensor = module.get_output_embeddings().weight[head.vocab_M.long()]
    return head.output_states(states) @ rows_MD.T


@torch.inference_mode()
def head_logits(head: DraftHead, module: PreTrainedModel, history: Sequence[int], path: Sequence[int]) -> Tensor:
    """Return the logits [V] after committed tokens and drafted ones: those after the root read the head's own states."""
    ids_BT = torch.tensor([[*history, *path]])
    read_BTW = read(true_features(head, module, ids_BT[:, : len(history)]))[:, :-1]
    for _ in path:
        own_BTW = dense_states(head, module, ids_BT[:, : read_BTW.shape[1]], read_BTW)
        read_BTW = torch.cat([read_BTW, own_BTW[:, -1:]], dim=1)
    logits_M = cut_logits(head, module, dense_states(head, module, ids_BT, read_BTW)[0, -1])
    return torch.full((module.config.vocab_size,), float("-inf")).index_copy_(0, head.vocab_M.long(), logits_M)


@cache
def _learnt(family: str) -> dict[str, Tensor]:
    """Return weights of a head that has seen some texts of the target's own: often right, often wrong."""
    head, module = random_head(), own_module(family)
    prompts_BT = torch.randint(3, 61, (64, 4), generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        kinds = {"do_sample": True, "top_k": 3, "temperature": 1.5, "eos_token_id": None, "pad_token_id": 0}
        ids_BT = module.generate(prompts_BT, attention_mask=torch.ones_like(prompts_BT), max_new_tokens=20, **kinds)
        out = module(input_ids=ids_BT, output_hidden_states=True, use_cache=False)
    states_BTFD = torch.stack([out.hidden_states[count] for count in head.shape.feature_layers], dim=-2)
    probs = out.logits[..., head.vocab_M.long()].softmax(-1)
    head.requires_grad_(True)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(60):
        read_BTW = read(head.features(states_BTFD))[:, :-1]
        logits = cut_logits(head, module, dense_states(head, module, ids_BT, read_BTW))
        loss = -(probs * logits.log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in head.state_dict().items()}


def learnt_head(family: str = "llama") -> DraftHead:
    """Return a head of its own with these weights; a drafter takes it over."""
    head = random_head()
    head.load_state_dict(_learnt(family))
    return head


def head_engine(
    head: DraftHead,
    target: CausalModel | None = None,
    policy: ExpansionPolicy | None = None,
    config: SchedulerConfig | None = None,
    linears: str = "plain",
) -> Engine:
    """Return an engine that drafts with the head."""
    config = config or SchedulerConfig(num_slots=2048, max_model_len=256)
    target = target or model("llama")
    drafter = HeadDrafter("head", head, target, config.num_slots, linears)
    engine = tiny_engine(target, drafter, policy, config=config)
    engine.target.report_to(drafter)
    return engine


def drafter_of(engine: Engine) -> HeadDrafter:
    """Return the engine's drafter, a head."""
    assert isinstance(engine.drafter, HeadDrafter)
    return engine.drafter
