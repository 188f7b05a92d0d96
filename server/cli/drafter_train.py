"""`latebranch drafter train` and `evaluate`: distil a draft head for a target, and measure a head on held-out texts."""

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from engine.weights import WeightsError, resolve
from engine.weights.fingerprint import RECIPE_KEY, fingerprint
from engine.weights.pretrained import load_tokenizer
from server.cli.bench_prompts import BenchError, read_prompts
from server.cli.parser import non_negative_int, positive_int
from server.text.chat_ids import chat_ids

if TYPE_CHECKING:
    from engine.draft.models.head import DraftHead, HeadShape
    from engine.model.causal_lm import CausalModel

_NOT_RECORDED = {"handler", "command", "threads", "device"}
_SIZES = {"width": 576, "intermediate": 2304, "head_layers": 1, "vocab": 8192}  # of a new head
_ROOT = Path(__file__).parents[2]
_PROMPTS = _ROOT / "configs" / "drafters" / "prompts.yaml"


def add_train_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `train`."""
    train = commands.add_parser(
        "train", help="distil a draft head: the target writes texts, a small net learns its distributions"
    )
    _add_target(train)
    train.add_argument("--work", type=Path, required=True, help="folder of texts and checkpoints; a run that was cut off goes on")
    train.add_argument(
        "--out", type=Path, required=True, help="safetensors file to write, with its curve (.jsonl, .png) beside it"
    )
    train.add_argument(
        "--prompt-grammar", type=Path, nargs="+", default=[_PROMPTS], help="YAML files of templates, drawn from in turn"
    )
    train.add_argument(
        "--weights", type=_weights, default={}, help="of kinds of prompts, where not the grammar's: code=20,prose=2"
    )
    train.add_argument("--num-prompts", type=positive_int, default=1536, help="texts to write")
    train.add_argument("--max-tokens", type=positive_int, default=192, help="tokens the target writes for each prompt")
    train.add_argument("--batch", type=positive_int, default=192, help="texts written at a time")
    train.add_argument("--begin-with", type=Path, help="a head to go on with, on more texts: its sizes and its tokens stay")
    train.add_argument(
        "--kept-share", type=float, default=0.0, help="of the head to begin with, in the weights: what it knew is forgotten less"
    )
    train.add_argument("--width", type=positive_int, help="inner width of the head; default 576")
    train.add_argument("--intermediate", type=positive_int, help="width of its feed-forward layer; default 2304")
    train.add_argument("--head-layers", type=positive_int, help="its decoder layers; default 1")
    train.add_argument("--feature-layers", type=_numbers, help="counts of target layers whose output it reads; default thirds")
    train.add_argument(
        "--vocab",
        type=positive_int,
        help="tokens it can propose: the target's likeliest; default 8192, or those of the head to begin with",
    )
    train.add_argument("--epochs", type=positive_int, default=16)
    train.add_argument("--rate", type=float, default=0.01, help="highest learning rate of matrices, by Muon")
    train.add_argument(
        "--tokens-per-update",
        type=positive_int,
        help="of learning; by default those of a pass, of more whole passes are added up",
    )
    train.add_argument(
        "--tokens-per-pass", type=positive_int, default=2000, help="of training, padding included; a GPU wants more"
    )
    train.add_argument(
        "--precision", choices=("float32", "bfloat16"), help="what training multiplies in; default bfloat16 where the device can"
    )
    train.add_argument("--refusal-weight", type=float, default=0.0, help="share of the refused mass in the loss at the end")
    train.add_argument("--seed", type=non_negative_int, default=1)
    train.set_defaults(handler=_train)


def add_evaluate_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `evaluate`."""
    measure = commands.add_parser("evaluate", help="measure a draft head on the target's answers to given prompts, by kind")
    _add_target(measure)
    measure.add_argument("--head", type=Path, required=True)
    measure.add_argument("--prompts", type=Path, required=True, help="YAML file of prompts by kind")
    measure.add_argument("--kinds", nargs="*", default=[], help="of prompts; all of the file by default")
    measure.add_argument("--max-tokens", type=positive_int, default=96)
    measure.add_argument("--steps", type=positive_int, default=6, help="depth of the chains")
    measure.add_argument("--seed", type=non_negative_int, default=99)
    measure.set_defaults(handler=_evaluate)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="reference of the target's weights")
    dtypes = ("float32", "bfloat16", "int8", "compact")
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16", help="precision of the target's pass")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=positive_int, default=2, help="threads of torch")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive_int(part) for part in text.split(","))


def _weights(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(kind and mark for kind, mark, _ in pairs):
        raise argparse.ArgumentTypeError(f"must be written like code=20,prose=2, not {text}")
    return {kind: non_negative_int(weight) for kind, _, weight in pairs}


def _train(parsed: argparse.Namespace) -> int:
    from engine.distill.corpus import Corpus, collect  # here, because torch is slow to import
    from engine.distill.make_head import distil, shape_for
    from engine.distill.prompts import PromptGrammar, draw_in_turn
    from engine.distill.rows import require_plain_output
    from engine.distill.trainer import TrainingPlan

    try:
        _complete(parsed)
        folder = resolve(parsed.target).folder
        grammars = [PromptGrammar.load(path, parsed.weights) for path in parsed.prompt_grammar]
        if unknown := set(parsed.weights).difference(*(grammar.kinds for grammar in grammars)):
            raise ValueError(f"--weights names kinds of prompts that there are not: {', '.join(sorted(unknown))}")
        prompts = _as_chats(folder, draw_in_turn(grammars, parsed.num_prompts, parsed.seed))
        model = _load(parsed, folder)
        require_plain_output(model)
        depth = len(model.module.model.layers)
        target = fingerprint(folder).as_text()
        notes: dict[str, object] = {"target": parsed.target, "command": _command(parsed), RECIPE_KEY: target}
        begin: HeadShape | DraftHead
        if parsed.begin_with:
            begin, notes["began_with"] = _trained_before(parsed.begin_with, target)
            if parsed.vocab is not None and parsed.vocab < len(begin.vocab_M):
                raise ValueError(f"a head that is gone on with keeps its {len(begin.vocab_M)} tokens: --vocab cannot be less")
            layers = begin.shape.feature_layers
        else:
            layers = parsed.feature_layers or (depth // 3, 2 * depth // 3, depth)
            begin = shape_for(model, parsed.width, parsed.head_layers, parsed.intermediate, layers)
        corpus = Corpus(parsed.work / "texts")
        made_with = _made_with(parsed, target, layers)
        notes["texts"] = {name: value for name, value in made_with.items() if name != "target"}
        corpus.bind(made_with)
        collect(corpus, model, layers, prompts, max_tokens=parsed.max_tokens, seed=parsed.seed * 1_000_000, batch=parsed.batch)
        texts = (text for text in corpus.texts() if text.index < len(prompts))
        plan = TrainingPlan(
            num_epochs=parsed.epochs,
            precision=parsed.precision,
            tokens_per_update=parsed.tokens_per_update,
            tokens_per_pass=parsed.tokens_per_pass,
            matrix_rate=parsed.rate,
            refusal_weight=parsed.refusal_weight,
            seed=parsed.seed,
        )
        distilled = distil(model, texts, begin, parsed.vocab, plan, parsed.work, notes, parsed.kept_share)
    except (WeightsError, OSError, ValueError) as error:
        sys.stderr.write(f"latebranch drafter train: {error}\n")
        return 1
    distilled.head.save(parsed.out, distilled.recipe)
    parsed.out.with_suffix(".jsonl").write_text("".join(json.dumps(point) + "\n" for point in distilled.curve))
    _plot(distilled.curve, parsed.out.with_suffix(".png"))
    sys.stdout.write(json.dumps(distilled.recipe) + "\n")
    return 0


def _complete(parsed: argparse.Namespace) -> None:
    """Fill in the defaults; raise ValueError for settings that would be ignored."""
    import torch

    from engine.distill.trainer import usual_precision

    given = [name for name in (*_SIZES, "feature_layers") if getattr(parsed, name) is not None]
    kept = [name for name in given if name != "vocab"]
    if parsed.begin_with and kept:
        raise ValueError(f"a head that is gone on with keeps its sizes: leave out --{kept[0].replace('_', '-')}")
    if parsed.tokens_per_update is None:
        parsed.tokens_per_update = parsed.tokens_per_pass
    if parsed.tokens_per_update > parsed.tokens_per_pass and parsed.tokens_per_update % parsed.tokens_per_pass:
        raise ValueError(
            f"--tokens-per-update must be up to {parsed.tokens_per_pass}, or a multiple of it, not {parsed.tokens_per_update}"
        )
    parsed.tokens_per_pass = min(parsed.tokens_per_pass, parsed.tokens_per_update)
    if len({path.resolve() for path in parsed.prompt_grammar}) < len(parsed.prompt_grammar):
        raise ValueError("--prompt-grammar names one file twice: what is learnt would be measured on")
    if parsed.out.is_dir() or not parsed.out.resolve().parent.is_dir() or parsed.out.suffix in (".jsonl", ".png"):
        raise ValueError(f"{parsed.out} cannot be written: there is no such folder, it is one, or the curve has that name")
    if parsed.begin_with and parsed.begin_with.resolve() == parsed.out.resolve():
        raise ValueError("--out would replace the head to --begin-with: it is needed to make this one again")
    if not 0.0 <= parsed.kept_share < 1.0 or (parsed.kept_share and not parsed.begin_with):
        raise ValueError(f"--kept-share is from 0 to below 1, of a head to --begin-with, not {parsed.kept_share}")
    if not parsed.rate > 0.0:
        raise ValueError(f"--rate must be above 0, not {parsed.rate}")
    if not 0.0 <= parsed.refusal_weight <= 1.0:
        raise ValueError(f"--refusal-weight is a share, from 0 to 1, not {parsed.refusal_weight}")
    if not parsed.begin_with:
        vars(parsed).update({name: value for name, value in _SIZES.items() if name not in given})
    parsed.precision = parsed.precision or usual_precision(torch.device(parsed.device))


def _trained_before(path: Path, target: str) -> "tuple[DraftHead, dict[str, object]]":
    """Load a head of the same target to continue with, and its recipe; raise ValueError if its target is another."""
    from engine.draft.models.head import DraftHead

    try:
        head, recipe = DraftHead.load(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if recipe.get(RECIPE_KEY) != target:
        raise ValueError(f"{path} was made for other weights than these; it cannot be gone on with")
    return head, recipe


def _made_with(parsed: argparse.Namespace, target: str, layers: Sequence[int]) -> dict[str, str]:
    """Return the facts that all texts of a folder must share."""
    grammars = [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in parsed.prompt_grammar]
    return {
        "target": target,
        "precision": parsed.dtype,
        "feature layers": " ".join(map(str, layers)),
        "prompt grammar": " ".join(grammars),
        "weights": json.dumps(parsed.weights, sort_keys=True),
        "seed": str(parsed.seed),
        "number of tokens": str(parsed.max_tokens),
    }


def _evaluate(parsed: argparse.Namespace) -> int:
    from engine.distill.corpus import generate_texts
    from engine.distill.evaluation import evaluate
    from engine.draft.compatibility import UnreadableDrafter
    from engine.model.linear_backends import weight_of

    try:
        folder = resolve(parsed.target).folder
        head = _head_of(folder, parsed.head)
        prompts = read_prompts(parsed.prompts, parsed.kinds, sys.maxsize)
        model = _load(parsed, folder)
        if (depth := len(model.module.model.layers)) != head.shape.feature_layers[-1]:
            raise ValueError(
                f"{parsed.head.name} does not read the target's last layer, {depth}: its distribution cannot be compared"
            )
    except (WeightsError, UnreadableDrafter, BenchError, OSError, ValueError, SafetensorError) as error:
        sys.stderr.write(f"latebranch drafter evaluate: {error}\n")
        return 1
    embeddings, output = model.module.get_input_embeddings().weight, weight_of(model.module.get_output_embeddings())
    for kind, messages in prompts.items():
        chats = dict(enumerate(_as_chats(folder, messages)))
        texts = list(generate_texts(model, head.shape.feature_layers, chats, parsed.max_tokens, parsed.seed, len(chats)))
        reports = evaluate(head.to(model.device), embeddings, output, texts, parsed.steps, share=1.0)
        sys.stdout.write(json.dumps({"kind": kind, "depths": [asdict(report) for report in reports]}) + "\n")
    return 0


def _head_of(target: Path, file: Path) -> "DraftHead":
    """Return a head, with a warning if it was made for other weights; raise ValueError if it cannot fit the target."""
    from engine.draft.compatibility import compare_fingerprint
    from engine.draft.models.head import DraftHead

    found = compare_fingerprint(target, file)
    sys.stderr.writelines(f"latebranch drafter evaluate: {warning}\n" for warning in found.warnings)
    if found.refusals:
        raise ValueError("; ".join(found.refusals))
    return DraftHead.load(file)[0]


def _load(parsed: argparse.Namespace, folder: Path) -> "CausalModel":
    import torch

    from engine.model.causal_lm import load_model
    from engine.model.linear_backends import fastest_linears

    torch.set_num_threads(parsed.threads)
    device = torch.device(parsed.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # graphs are captured on the current one
    return load_model(folder, parsed.dtype, device, fastest_linears(device))


def _as_chats(folder: Path, messages: Sequence[str]) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(folder)
    return [chat_ids(tokenizer, message) for message in messages]


def _command(parsed: argparse.Namespace) -> str:
    """Return the command line that makes this head again, with every setting."""
    settings = {
        name: value for name, value in vars(parsed).items() if name not in _NOT_RECORDED and value not in (None, {}, [_PROMPTS])
    }
    return " ".join(
        ["latebranch drafter train", *(f"--{name.replace('_', '-')} {_as_text(settings[name])}" for name in settings)]
    )


def _place(path: Path) -> str:
    """Return a file's path inside the project; the name of a file outside."""
    whole = path.absolute()
    return str(whole.relative_to(_ROOT)) if whole.is_relative_to(_ROOT) else path.name


def _as_text(value: object) -> str:
    if isinstance(value, Path):
        return _place(value)
    if isinstance(value, list):
        return " ".join(map(_as_text, value))
    if isinstance(value, dict):
        return ",".join(f"{kind}={weight}" for kind, weight in value.items())
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _plot(curve: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw loss and overlap by update, if matplotlib is installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        sys.stderr.write("matplotlib is not installed: no plot\n")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    updates = [point["update"] for point in curve]
    left.plot(updates, [point["loss"] for point in curve])
    left.set(xlabel="update", ylabel="loss, mean over the steps of a chain")
    right.plot(updates, [point["overlap"] for point in curve])
    right.set(xlabel="update", ylabel="sum of min(p, q) at step 1, training texts")
    figure.savefig(path)
    plt.close(figure)
