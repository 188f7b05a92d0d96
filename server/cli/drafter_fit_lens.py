"""`latebranch drafter fit-lens`: trains an early-exit drafter for a target, on text that the target writes itself."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import yaml

from engine.weights import resolve
from engine.weights.fingerprint import RECIPE_KEY, fingerprint
from engine.weights.pretrained import load_tokenizer
from server.cli.parser import non_negative_int, positive_int
from server.settings import SHIPPED
from server.text.chat_ids import chat_ids

_PROMPTS = SHIPPED / "fitting_prompts.yaml"
_HELD_OUT = 10  # one text in this many is held out for measurement


def add_fit_lens_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `fit-lens`."""
    fit = commands.add_parser("fit-lens", help="fit an early-exit lens")
    fit.add_argument("--target", required=True, help="reference of the target's weights")
    fit.add_argument("--layers", type=positive_int, required=True, help="layers of the target that draft")
    fit.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    fit.add_argument("--max-tokens", type=positive_int, default=160, help="tokens the target writes for each prompt")
    fit.add_argument("--prompts", type=Path, default=_PROMPTS, help="YAML file of templates and topics")
    fit.add_argument("--seed", type=non_negative_int, default=0)
    fit.add_argument("--threads", type=positive_int, default=1, help="threads of torch")
    fit.set_defaults(handler=_fit_lens)


def _fit_lens(parsed: argparse.Namespace) -> int:
    import torch  # here, because it is slow to import

    from engine.distill.early_exit_lens import evaluate_lens, fit_lens, generated_texts
    from engine.model.causal_lm import load_model
    from engine.model.hidden_states import require_trainable

    torch.set_num_threads(parsed.threads)
    folder = resolve(parsed.target).folder
    model = load_model(folder, "float32", torch.device("cpu"), "packed")
    require_trainable(model)
    texts = generated_texts(model, _prompts(parsed.prompts, folder), parsed.max_tokens, parsed.seed)
    fitted = [text for index, text in enumerate(texts) if index % _HELD_OUT]
    recipe = {
        "target": parsed.target,
        "texts": str(len(fitted)),
        "tokens": str(sum(map(len, fitted))),
        "command": _command(parsed),
        RECIPE_KEY: fingerprint(folder).as_text(),
    }
    lens = fit_lens(model, fitted, parsed.layers, recipe)
    report = evaluate_lens(model, lens, texts[::_HELD_OUT])
    lens.save(parsed.out)
    sys.stdout.write(json.dumps({"recipe": recipe, "held_out": asdict(report)}) + "\n")
    return 0


def _command(parsed: argparse.Namespace) -> str:
    names = ("target", "layers", "max_tokens", "seed")
    flags = " ".join(f"--{name.replace('_', '-')} {getattr(parsed, name)}" for name in names)
    return f"latebranch drafter fit-lens {flags} --out {parsed.out.name}"


def _prompts(path: Path, folder: Path) -> list[tuple[int, ...]]:
    parts = yaml.safe_load(path.read_text())
    tokenizer = load_tokenizer(folder)
    texts = [template.format(topic=topic) for topic in parts["topics"] for template in parts["templates"]]
    return [chat_ids(tokenizer, text) for text in texts]
