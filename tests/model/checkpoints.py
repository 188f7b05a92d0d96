"""Tiny checkpoints of other projects with random weights, and their networks by the book: dense, one text, no cache.

The functions here are checked against speculators' own logits (tests/model/draft/test_checkpoint_networks.py), and served
drafters against these functions.
Shape key: T tokens, D target width, W inner width, M drafter's vocabulary, V target's vocabulary, N block.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionPolicy
from engine.draft.checkpoints.load import load_drafter
from engine.draft.checkpoints.read import read_checkpoint
from engine.engine import Engine
from engine.testing import tiny_engine
from engine.weights.facts import ModelFacts
from tests.model.tiny import model, own_module

WIDTH, VOCAB, INNER, HEADS, KV_HEADS, HEAD_SIZE = 32, 61, 40, 4, 2, 8
FACTS = ModelFacts(vocab_size=VOCAB, width=WIDTH, num_layers=3, max_positions=512, eos_token_ids=(2,))  # of tiny targets
Files = tuple[Mapping[str, Any], Mapping[str, Tensor]]  # a configuration and tensors
KEPT = [token_id for token_id in range(VOCAB) if token_id % 7]  # the reduced vocabulary
LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}


def random_tensors(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """Return weights of size 1 / sqrt(inputs) and norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*shape, generator=generator) * 1.5 * shape[-1] ** -0.5
        if len(shape) == 2
        else 1 + 0.3 * torch.randn(*shape, generator=generator)
        for name, shape in shapes.items()
    }


def layer_shapes(num_layers: int = 1, first_input: int = 2, has_head_norms: bool = False) -> dict[str, tuple[int, ...]]:
    queries, pairs = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(num_layers):
        read = WIDTH * first_input if index == 0 else WIDTH
        name = f"layers.{index}"
        shapes |= {
            f"{name}.self_attn.{part}_proj.weight": (rows, read) for part, rows in (("q", queries), ("k", pairs), ("v", pairs))
        }
        shapes |= {f"{name}.self_attn.o_proj.weight": (WIDTH, queries)}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (INNER, WIDTH) for part in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj.weight": (WIDTH, INNER)}
        shapes |= {f"{name}.{part}.weight": (WIDTH,) for part in ("input_layernorm", "post_attention_layernorm")}
        if has_head_norms:
            shapes |= {f"{name}.self_attn.{part}_norm.weight": (HEAD_SIZE,) for part in ("q", "k")}
    return shapes


def vocabulary_tensors(kept: Sequence[int] = tuple(KEPT), size: int = VOCAB) -> dict[str, Tensor]:
    """Return d2t, offsets, and t2d, a mask."""
    kept_M = torch.tensor(kept)
    mask = torch.zeros(size, dtype=torch.bool)
    mask[kept_M] = True
    return {"d2t": kept_M - torch.arange(len(kept)), "t2d": mask}


def eagle3_files(
    *, num_layers: int = 1, is_reduced: bool = True, ids: Sequence[int] = (1, 2, 3), seed: int = 0, **keys: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and tensors of an EAGLE-3 head in speculators' form. `keys` are of the configuration's top."""
    transformer = {**LLAMA, "num_hidden_layers": num_layers, **keys.pop("transformer_layer_config", {})}
    num_known = len(KEPT) if is_reduced else VOCAB
    config = {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": num_known,
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": transformer,
        **keys,
    }
    count = len(set(ids))
    shapes = {
        "embed_tokens.weight": (VOCAB, WIDTH),
        "fc.weight": (WIDTH, count * WIDTH),
        "lm_head.weight": (num_known, WIDTH),
        "norm.weight": (WIDTH,),
        "layers.0.hidden_norm.weight": (WIDTH,),
        **layer_shapes(num_layers, 2, transformer["model_type"] == "qwen3"),
    }
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (count * WIDTH,)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{index}.weight": (WIDTH,) for index in range(count)}
    tensors = random_tensors(shapes, seed)
    return config, tensors | (vocabulary_tensors() if is_reduced else {})


def flat_eagle3_files(**keys: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a head as SpecForge and the authors write it: a flat configuration, `midlayer`, outputs of layers."""
    config, tensors = eagle3_files()
    flat = {**config["transformer_layer_config"], "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(KEPT)}
    flat |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}, **keys}
    return flat, {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


def dflash_files(
    *, num_layers: int = 2, is_reduced: bool = False, seed: int = 0, **keys: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and tensors of a DFlash drafter in speculators' form."""
    transformer = {**LLAMA, "model_type": "qwen3", "num_hidden_layers": num_layers, **keys.pop("transformer_layer_config", {})}
    num_known = len(KEPT) if is_reduced else VOCAB
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [1, 2, 3],
        "block_size": 5,
        "draft_vocab_size": num_known,
        "mask_token_id": 60,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "transformer_layer_config": transformer,
        **keys,
    }
    shapes = {"fc.weight": (WIDTH, 3 * WIDTH), "hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}
    shapes |= layer_shapes(num_layers, 1, has_head_norms=True)
    tensors = random_tensors(shapes, seed)
    if is_reduced:
        tensors |= random_tensors({"lm_head.weight": (num_known, WIDTH)}, seed + 1) | vocabulary_tensors()
    return config, tensors


def flat_dflash_files(**own_keys: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a DFlash drafter as its authors write it. `own_keys` are of its `dflash_config`."""
    config, tensors = dflash_files()
    own = {"mask_token_id": 60, "target_layer_ids": [0, 1, 2], **own_keys}
    flat = {**config["transformer_layer_config"], "architectures": ["DFlashDraftModel"], "block_size": 5, "num_target_layers": 3}
    return {**flat, "dflash_config": own}, tensors


def medusa_files(
    *, num_heads: int = 3, num_layers: int = 1, is_original: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return Medusa heads with the authors' names of tensors, or with vLLM's."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear" if is_original else f"blocks.{head}.layers.{layer}"
            shapes |= {f"{name}.weight": (WIDTH, WIDTH)} | ({f"{name}.bias": (WIDTH,)} if is_original else {})
        shapes[f"{head}.{num_layers}.weight" if is_original else f"lm_heads.{head}.weight"] = (VOCAB, WIDTH)
    original = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "base_model_name_or_path": "somewhere"}
    config = original if is_original else {"model_type": "medusa", "num_heads": num_heads, "num_hidden_layers": num_layers}
    return config, random_tensors(shapes, 0)


def written(folder: Path, files: Files) -> Path:
    """Write a checkpoint's folder; return it."""
    config, tensors = files
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and tensors of a folder."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@dataclass(frozen=True)
class Book:
    """A checkpoint in speculators' form as plain functions of its tensors."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def sizes(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.config["transformer_layer_config"]
        return found

    @property
    def ids_M(self) -> Tensor:
        if "d2t" not in self.tensors:
            return torch.arange(self.sizes["vocab_size"])
        return torch.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        x = x.float()
        scaled: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.sizes["rms_norm_eps"])
        return scaled * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def heads(self, x: Tensor, index: int, part: str, positions_T: Tensor | None) -> Tensor:
        """Return the rotated heads of a projection, [H, T, K]."""
        size = self.sizes["head_dim"]
        heads: Tensor = self.linear(x, f"layers.{index}.self_attn.{part}_proj").unflatten(-1, (-1, size))
        if f"layers.{index}.self_attn.{part}_norm.weight" in self.tensors:
            heads = self.norm(heads, f"layers.{index}.self_attn.{part}_norm")
        if positions_T is not None:
            theta = self.sizes["rope_parameters"]["rope_theta"]
            angles = positions_T[:, None].float() * theta ** (-torch.arange(0, size, 2).float() / size)
            cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
            first, second = heads.chunk(2, -1)
            heads = heads * cos + torch.cat([-second, first], -1) * sin
        return heads.transpose(0, 1)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(len(query) // len(key), 0) for x in (key, value))
        scores: Tensor = (query @ key.transpose(1, 2)) * self.sizes["head_dim"] ** -0.5
        return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value).transpose(0, 1).flatten(1)

    def after(self, index: int, residual: Tensor, attended: Tensor) -> Tensor:
        state, name = residual + self.linear(attended, f"layers.{index}.self_attn.o_proj"), f"layers.{index}"
        x = self.norm(state, f"{name}.post_attention_layernorm")
        gated = functional.silu(self.linear(x, f"{name}.mlp.gate_proj")) * self.linear(x, f"{name}.mlp.up_proj")
        return state + self.linear(gated, f"{name}.mlp.down_proj")

    def window(self, index: int) -> int | None:
        is_sliding = self.sizes.get("layer_types", ["full_attention"] * 8)[index] == "sliding_attention"
        return self.sizes["sliding_window"] if is_sliding else None

    def fused(self, states_TFD: Tensor) -> Tensor:
        """Return the target's states as the drafter reads them."""
        if self.config.get("fc_norm"):
            parts = [self.norm(states_TFD[..., i, :], f"fc_norm.{i}") for i in range(states_TFD.shape[-2])]
            states_TFD = torch.stack(parts, -2)
        flat = states_TFD.flatten(-2)
        if self.config.get("norm_before_fc"):
            flat = self.norm(flat, "input_norm")
        fused = self.linear(flat, "fc")
        return self.norm(fused, "hidden_norm") if "hidden_norm.weight" in self.tensors else fused

    def eagle3(self, states_TW: Tensor, embeddings_TW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [T, M] of pairs of a state and the next token's embedding, and the states for the next round."""
        positions = torch.arange(len(states_TW))
        behind = positions[:, None] - positions[None]
        state = states_TW
        for index in range(self.sizes["num_hidden_layers"]):
            residual, x = state, self.norm(state, f"layers.{index}.input_layernorm")
            if index == 0:
                hidden = self.norm(state, "layers.0.hidden_norm")
                residual = hidden if self.config["norm_before_residual"] else state
                x = torch.cat([self.norm(embeddings_TW, "layers.0.input_layernorm"), hidden], -1)
            window = self.window(index)
            visible = (behind >= 0) & (behind < window if window else True)
            query, key = (self.heads(x, index, part, positions) for part in "qk")
            state = self.after(index, residual, self.attended(query, key, self.heads(x, index, "v", None), visible))
        normed = self.norm(state, "norm")
        return self.linear(normed, "lm_head"), normed if self.config["norm_output"] else state

    def dflash(self, context_TW: Tensor, block_NW: Tensor, output_MW: Tensor) -> Tensor:
        """Return the logits [N, M] of a block's slots after a context of features."""
        length, size = len(context_TW), len(block_NW)
        places, own = torch.arange(length), torch.arange(length, length + size)
        state = block_NW
        for index in range(self.sizes["num_hidden_layers"]):
            x, window = self.norm(state, f"layers.{index}.input_layernorm"), self.window(index)
            is_causal = window is not None and not self.config["sliding_window_non_causal"]
            seen = torch.ones(size, length, dtype=torch.bool) if window is None else (places >= length - window).expand(size, -1)
            inside = own[None] <= own[:, None] if is_causal else torch.ones(size, size, dtype=torch.bool)
            key = torch.cat([self.heads(context_TW, index, "k", places), self.heads(x, index, "k", own)], 1)
            value = torch.cat([self.heads(context_TW, index, "v", None), self.heads(x, index, "v", None)], 1)
            query = self.heads(x, index, "q", own)
            state = self.after(index, state, self.attended(query, key, value, torch.cat([seen, inside], 1)))
        return self.norm(state, "norm") @ output_MW.T


@torch.no_grad()
def states_of(module: Any, ids: Sequence[int], after: Sequence[int]) -> Tensor:
    """Return the outputs of a transformers model's layers, [T, F, D]; the last one's before the final norm."""
    found: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _module, _args, output, index=index: found.__setitem__(index + 1, output[0]))
        for index, layer in enumerate(module.model.layers)
    ]
    module(input_ids=torch.tensor([list(ids)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([found[count].reshape(len(ids), -1) for count in after], dim=1)


@torch.inference_mode()
def expected_logits(files: Files, module: Any, history: Sequence[int], path: Sequence[int]) -> Tensor | None:
    """Return the logits [V] of a checkpoint in speculators' form, or Medusa's, after committed and drafted tokens.

    None: the drafter proposes nothing there.
    """
    config, tensors = files
    vocab = module.get_input_embeddings().weight.shape[0]
    if "medusa_num_heads" in config:
        return _medusa_logits(config, tensors, module, history, len(path))
    book = Book(*files)
    embeddings_VW = tensors.get("embed_tokens.weight", module.get_input_embeddings().weight)
    output_MW = tensors.get("lm_head.weight", module.get_output_embeddings().weight[book.ids_M])
    if config["speculators_model_type"] == "dflash":
        slot = len(path) + (0 if config["sample_from_anchor"] else 1)
        if slot >= config["block_size"]:
            return None
        states = states_of(module, history, sorted(config["aux_hidden_state_layer_ids"]))
        block = torch.tensor([history[-1], *[config["mask_token_id"]] * (config["block_size"] - 1)])
        logits_M = book.dflash(book.fused(states)[:-1], embeddings_VW[block], output_MW)[slot]
    else:
        if len(history) < 2:
            return None
        states = states_of(module, history, sorted(config["eagle_aux_hidden_state_layer_ids"]))
        read_TW, ids = book.fused(states)[:-1], list(history[1:])
        whole = Book(config, {**tensors, "lm_head.weight": output_MW})
        logits, own = whole.eagle3(read_TW, embeddings_VW[torch.tensor(ids)])
        for token_id in path:
            read_TW, ids = torch.cat([read_TW, own[-1:]]), [*ids, token_id]
            logits, own = whole.eagle3(read_TW, embeddings_VW[torch.tensor(ids)])
        logits_M = logits[-1]
    return torch.full((vocab,), float("-inf")).index_copy_(0, book.ids_M, logits_M)


def _medusa_logits(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], module: Any, history: Sequence[int], depth: int
) -> Tensor | None:
    if len(history) < 2 or depth >= config["medusa_num_heads"]:
        return None
    out = module(input_ids=torch.tensor([list(history)]), output_hidden_states=True, use_cache=False)
    return _medusa_head(tensors, out.hidden_states[-1][0, -2], depth, config["medusa_num_layers"])


def _medusa_head(tensors: Mapping[str, Tensor], state: Tensor, depth: int, num_layers: int) -> Tensor:
    for layer in range(num_layers):
        name = f"{depth}.{layer}.linear"
        state = state + functional.silu(functional.linear(state, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
    return functional.linear(state, tensors[f"{depth}.{num_layers}.weight"])


@cache
def learnt(kind: str, family: str = "llama") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a checkpoint that has seen some texts of the target's own: often right, often wrong."""
    module = own_module(family)
    prompts_BT = torch.randint(3, VOCAB, (64, 4), generator=torch.Generator().manual_seed(0))
    prompts_BT[::2] = torch.tensor([5, 9, 33, 4])  # of the tests of distributions
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        sampled = {"do_sample": True, "top_k": 3, "temperature": 1.5, "eos_token_id": None, "pad_token_id": 0}
        texts = module.generate(prompts_BT, attention_mask=torch.ones_like(prompts_BT), max_new_tokens=12, **sampled)
    made: Mapping[str, Callable[[], tuple[dict[str, Any], dict[str, Tensor]]]] = {
        "eagle3": eagle3_files,
        "dflash": partial(dflash_files, num_layers=1),
        "medusa": medusa_files,
    }
    files = made[kind]()
    states = [states_of(module, text.tolist(), (1, 2, 3)) for text in texts]
    with torch.no_grad():
        probs = module(input_ids=texts, use_cache=False).logits.softmax(-1)
    tensors = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in files[1].items()}
    optimizer = torch.optim.Adam([tensor for tensor in tensors.values() if tensor.requires_grad], lr=1e-2)
    for step in range(60):
        chosen = torch.randint(len(texts), (6,), generator=torch.Generator().manual_seed(step)).tolist()
        loss = torch.stack([_loss(kind, (files[0], tensors), module, texts[i], states[i], probs[i]) for i in chosen]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return files[0], {name: tensor.detach() for name, tensor in tensors.items()}


def learnt_engine(folder: Path, kind: str, policy: ExpansionPolicy, config: SchedulerConfig) -> Engine:
    """Return an engine with a checkpoint that has learnt some of the target."""
    checkpoint, target = read_checkpoint(written(folder / kind, learnt(kind)), FACTS), model("llama")
    drafter = load_drafter(checkpoint, target, config.num_slots, "plain", "float32")
    engine = tiny_engine(target, drafter, policy, config=config)
    engine.target.report_to(drafter)
    return engine


def _loss(kind: str, files: Files, module: Any, ids: Tensor, states_TFD: Tensor, probs_TV: Tensor) -> Tensor:
    """Return the cross-entropy of a text, against the target's distributions."""
    config, tensors = files
    rows_VW, embeddings_VW = (
        part.weight.detach().clone() for part in (module.get_output_embeddings(), module.get_input_embeddings())
    )
    if kind == "medusa":
        normed = module.model.norm(states_TFD[:, -1])
        parts = [(_medusa_head(tensors, normed[: -1 - depth], depth, 1), probs_TV[1 + depth :]) for depth in range(3)]
    elif kind == "dflash":
        book, size = Book(*files), config["block_size"]
        fused, parts = book.fused(states_TFD), []
        for anchor in (4, 6):
            block = embeddings_VW[torch.tensor([int(ids[anchor]), *[config["mask_token_id"]] * (size - 1)])]
            parts.append((book.dflash(fused[:anchor], block, rows_VW)[1:], probs_TV[anchor : anchor + size - 1]))
    else:
        book = Book(*files)
        logits, _ = book.eagle3(book.fused(states_TFD)[:-1], tensors["embed_tokens.weight"][ids[1:]])
        parts = [(logits, probs_TV[1:][:, book.ids_M])]
    return sum((-(probs * logits.log_softmax(-1)).sum(-1).mean() for logits, probs in parts), torch.zeros(()))
