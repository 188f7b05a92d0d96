"""Reads a checkpoint's decoder layers, vocabulary and layer numbers: the parts that EAGLE-3 and DFlash share."""

from collections.abc import Iterable, Sequence

from engine.draft.checkpoints.files import CheckpointFiles, Keys, UnusableCheckpoint
from engine.draft.checkpoints.shapes import KnownTokens, LayersShape, Rotary
from engine.weights.facts import ModelFacts

_SCALED = ("linear", "llama3", "yarn")  # kinds of rotary embeddings that depend on the position alone
_DEFAULT_THETA, _DEFAULT_EPS = 10_000.0, 1e-6  # of LlamaConfig and Qwen3Config
_DEFAULT_POSITIONS = 2048
_NUMBER = (int, float)
_UNUSED = (  # keys of transformers' configurations that do not change a drafter's network
    *("architectures", "auto_map", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    *("initializer_range", "max_window_layers", "pretraining_tp", "tie_word_embeddings", "transformers_version", "use_cache"),
    *("_name_or_path", "id2label", "label2id", "is_encoder_decoder", "chunk_size_feed_forward", "output_attentions"),
    *("output_hidden_states", "problem_type", "return_dict", "name_or_path", "model_type", "vocab_size", "num_target_layers"),
    *("_attn_implementation", "cross_attention_hidden_size", "finetuning_task", "is_decoder", "add_cross_attention"),
)


def layers_shape(files: CheckpointFiles, keys: Keys, first_input: int) -> LayersShape:
    """Return the layers' sizes; `first_input` multiplies the width of the first layer's input.

    Raise UnusableCheckpoint if a tensor is missing or has another size.
    """
    keys.require("model_type", "llama", "qwen3")
    keys.require("hidden_act", "silu")
    keys.require("partial_rotary_factor", 1, 1.0)
    keys.require("quantization_config")
    width, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    num_kv_heads = keys.get("num_key_value_heads", int, num_heads)
    num_layers = keys.get("num_hidden_layers", int, 1)
    head_size = _head_size(files, keys, num_heads)
    if num_layers < 1 or num_kv_heads < 1 or num_heads % num_kv_heads or head_size < 2 or head_size % 2:
        raise UnusableCheckpoint(f"{num_layers} layers of {num_heads} and {num_kv_heads} heads of {head_size} are not possible")
    shape = LayersShape(
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        inner=keys.size("intermediate_size"),
        norm_eps=float(keys.get("rms_norm_eps", _NUMBER, _DEFAULT_EPS)),
        rotary=_rotary(keys, head_size),
        windows=_windows(keys, num_layers),
        has_head_norms="layers.0.self_attn.q_norm.weight" in files.shapes or keys.get("model_type", str) == "qwen3",
        has_attention_biases=keys.get("attention_bias", bool, False),
        has_mlp_biases=keys.get("mlp_bias", bool, False),
    )
    for name, size in layer_tensors(shape, first_input).items():
        files.require(name, size)
    return shape


def layer_tensors(shape: LayersShape, first_input: int) -> dict[str, tuple[int, ...]]:
    """Return the names and sizes of the tensors of all layers, without norms that only the first layer has."""
    width, queries, pairs = shape.width, shape.num_heads * shape.head_size, shape.pair_width // 2
    found: dict[str, tuple[int, ...]] = {}
    for index in range(shape.num_layers):
        prefix, read = f"layers.{index}", width * first_input if index == 0 else width
        attention = {"q_proj": (queries, read), "k_proj": (pairs, read), "v_proj": (pairs, read), "o_proj": (width, queries)}
        mlp = {"gate_proj": (shape.inner, width), "up_proj": (shape.inner, width), "down_proj": (width, shape.inner)}
        for part, linears, has_biases in (
            ("self_attn", attention, shape.has_attention_biases),
            ("mlp", mlp, shape.has_mlp_biases),
        ):
            found |= {f"{prefix}.{part}.{name}.weight": size for name, size in linears.items()}
            found |= {f"{prefix}.{part}.{name}.bias": size[:1] for name, size in linears.items()} if has_biases else {}
        found |= {f"{prefix}.{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
        if shape.has_head_norms:
            found |= {f"{prefix}.self_attn.{name}.weight": (shape.head_size,) for name in ("q_norm", "k_norm")}
    return found


def _head_size(files: CheckpointFiles, keys: Keys, num_heads: int) -> int:
    """Return the head size that the query weights have. Projects differ in the default of a missing head_dim."""
    rows = files.shapes.get("layers.0.self_attn.q_proj.weight", (0,))[0]
    given = keys.get("head_dim", int)
    if given is not None and rows and rows != given * num_heads:
        raise UnusableCheckpoint(f"{keys.name_of('head_dim')} is {given}, but {num_heads} heads have {rows} query outputs")
    return int(given or rows // num_heads)


def _rotary(keys: Keys, head_size: int) -> Rotary:
    """Return the rotary embeddings from either spelling; raise UnusableCheckpoint if two spellings disagree."""
    parameters, scaling = keys.object("rope_parameters"), keys.object("rope_scaling")
    thetas = {
        float(theta)
        for theta in (keys.get("rope_theta", _NUMBER), parameters.get("rope_theta", _NUMBER), scaling.get("rope_theta", _NUMBER))
        if theta is not None
    }
    if len(thetas) > 1:
        raise UnusableCheckpoint(f"{keys.name_of('rope_theta')} and rope_parameters give different thetas: {sorted(thetas)}")
    found = [_scaling(one) for one in (parameters, scaling) if one.values]
    if any(one != found[0] for one in found):
        raise UnusableCheckpoint(f"{keys.name_of('rope_parameters')} and rope_scaling differ")
    max_positions = keys.get("max_position_embeddings", int, _DEFAULT_POSITIONS)
    return Rotary(thetas.pop() if thetas else _DEFAULT_THETA, head_size, max_positions, found[0] if found else {})


def _scaling(keys: Keys) -> dict[str, object]:
    kind = keys.get("rope_type", str) or keys.get("type", str, "default")
    if kind == "default":
        return {}
    if kind not in _SCALED:
        only = ", ".join(("default", *_SCALED))
        raise UnusableCheckpoint(f"{keys.name_of('rope_type')} is {kind!r}; only {only} are supported")
    return {**{key: value for key, value in keys.values.items() if key not in ("type", "rope_theta")}, "rope_type": kind}


def _windows(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    kinds = keys.get("layer_types", list)
    window = keys.get("sliding_window", int)
    if keys.get("use_sliding_window", bool, False) and kinds is None:
        raise UnusableCheckpoint(f"{keys.name_of('use_sliding_window')} is true without layer_types, which names the layers")
    if kinds is None:
        return (None,) * num_layers
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise UnusableCheckpoint(f"{keys.name_of('layer_types')} is {kinds}, not full or sliding for {num_layers} layers")
    if "sliding_attention" in kinds and (window is None or window < 1):
        raise UnusableCheckpoint(f"{keys.name_of('sliding_window')} is {window}, but layer_types has sliding attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layers_after(named: Sequence[int], shift: int, depth: int, key: str) -> tuple[int, ...]:
    """Return the numbers of target layers whose outputs are read, ascending: every engine reads them in this order."""
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in named):
        raise UnusableCheckpoint(f"{key} is {list(named)}, not a list of layer numbers")
    after = tuple(sorted({one + shift for one in named}))
    if not after or after[0] < 0 or after[-1] > depth:
        raise UnusableCheckpoint(f"{key} is {list(named)}, but the target has {depth} layers")
    if after[0] == 0:
        raise UnusableCheckpoint(f"{key} is {list(named)}: layer {-shift} means the embeddings, which are not supported")
    return after


def default_layers(depth: int) -> tuple[int, int, int]:
    """Return the layers that every project reads if a checkpoint names none."""
    return 2, depth // 2, depth - 3


def num_features(files: CheckpointFiles, target_width: int, width: int) -> int:
    """Return how many states the fusing layer reads."""
    found = files.shapes.get("fc.weight")
    if found is None:
        raise UnusableCheckpoint("the tensor fc.weight is missing")
    if len(found) != 2 or found[0] != width or found[1] % target_width:
        raise UnusableCheckpoint(f"fc.weight has shape {list(found)}: its inputs are not states of the target's {target_width}")
    return found[1] // target_width


def vocabulary(files: CheckpointFiles, keys: Keys, target: ModelFacts) -> KnownTokens:
    """Return the tokens that the drafter predicts: all, or the tokens of d2t or t2d."""
    num_rows = files.shapes.get("lm_head.weight", (0,))[0]
    given = keys.get("draft_vocab_size", int)
    offsets = files.tensor("d2t").tolist() if "d2t" in files.shapes else None
    kept = files.tensor("t2d").bool().nonzero().flatten().tolist() if "t2d" in files.shapes else None
    if kept is not None and len(files.tensor("t2d")) != target.vocab_size:
        raise UnusableCheckpoint(f"t2d has {files.shapes['t2d'][0]} tokens, the target has {target.vocab_size}")
    ids = None if offsets is None else [index + offset for index, offset in enumerate(offsets)]
    if ids is not None and kept is not None and ids != kept:
        hint = ": it has target ids, not offsets" if offsets == kept else ""
        raise UnusableCheckpoint(f"d2t and t2d name different tokens{hint}")
    ids = kept if ids is None else ids
    num_known = target.vocab_size if ids is None else len(ids)
    counts = {"draft_vocab_size": given, "lm_head.weight": num_rows or None, "d2t": None if offsets is None else len(offsets)}
    for name, count in counts.items():
        if count is not None and count != num_known:
            lacking = "; d2t is missing" if ids is None else ""
            raise UnusableCheckpoint(f"{name} has {count} tokens, not {num_known}{lacking}")
    if ids is not None:
        if len(set(ids)) != len(ids) or not ids or min(ids) < 0 or max(ids) >= target.vocab_size:
            raise UnusableCheckpoint(f"d2t does not lead to different ids below {target.vocab_size}")
        if ids == list(range(target.vocab_size)):
            ids = None
    return KnownTokens(None if ids is None else tuple(ids), target.vocab_size)


def require_embeddings(files: CheckpointFiles, width: int, target: ModelFacts) -> None:
    """Raise UnusableCheckpoint unless the file's embeddings or the target's have the drafter's width and all tokens."""
    if "embed_tokens.weight" in files.shapes:
        files.require("embed_tokens.weight", (target.vocab_size, width))
    elif width != target.width:
        raise UnusableCheckpoint(f"embed_tokens.weight is missing, and the target's has width {target.width}, not {width}")


def require_output(files: CheckpointFiles, width: int, vocab: KnownTokens, target: ModelFacts) -> None:
    """Raise UnusableCheckpoint unless the file's output layer or the target's has the drafter's width."""
    if "lm_head.weight" in files.shapes:
        files.require("lm_head.weight", (vocab.num_known, width))
    elif width != target.width:
        raise UnusableCheckpoint(f"lm_head.weight is missing, and the target's has width {target.width}, not {width}")


def unused_keys(objects: Iterable[Keys]) -> list[str]:
    """Return the keys that were not read and that may matter."""
    return [name for keys in objects for name in keys.unread() if name.rpartition(".")[2] not in _UNUSED]
