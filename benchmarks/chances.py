"""What noise-aware trees learn: the weights of distribution and noise, and how accurate the chances of nodes are.

python -m benchmarks.chances --config configs/default.yaml --head HEAD

A share is what was accepted over what the weights predicted, given that the parent was: 1 is an exact prediction. Of
tokens of the model, and of such as are rather cached text's. The last thousand nodes of each cell or so count.
"""

import argparse
from itertools import pairwise
from pathlib import Path

from benchmarks.drafters.contenders import Stable
from benchmarks.load import Way, mixed_prompts, requests_of
from benchmarks.markdown import table
from engine.draft.trees.calibration import Reliability
from server.cli.bench_compare import run_case
from server.settings import load_settings


def main() -> None:
    """Draft, and print two Markdown tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chances", description="what came of nodes' chances")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of settings")
    parser.add_argument("--head", type=Path, required=True, help="safetensors file of the draft head")
    parser.add_argument("--tree", default="noise_aware.8.5.4", help="grown at every step")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    parser.add_argument("--kinds", nargs="+", default=["code", "maths", "prose"])
    parser.add_argument("--num-prompts", type=int, default=6, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="requests at a time")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    config = load_settings(args.config, {}).to_tool_config()
    engine = Stable(config, {"draft_model": None, "lens": None, "head": str(args.head)}, {}).engine("head+ngram")
    way = Way.of(f"static:{args.tree}", engine, config.verifier)
    prompts = mixed_prompts(config.model, args.kinds, args.num_prompts)
    for number in range(args.rounds):
        run_case(engine, requests_of(prompts, args.batch, number, way, args), args.batch)
    edges = [f"{low:g} to {high:g}" for low, high in pairwise((0.0, *Reliability.EDGES, 1.0))]
    rows, weights = [], []
    for rule, calibration in sorted(engine.calibrations.by_rule.items()):
        agreement = calibration.agreement
        of_noise = [] if rule == "greedy" else [agreement.noise_weight, agreement.sharpness]  # greedy rows have none
        weights.append(
            [rule, *(f"{weight:.2f}" for weight in (agreement.log_prob_weight, *of_noise)), *["–"] * (2 - len(of_noise))]
        )
        for source, shares in zip(("model", "cached"), calibration.reliability.shares, strict=True):
            rows.append([rule, source, *(f"{share:.2f}" for share in shares)])
    print(table(["rows", "log prob", "noise", "sharpness"], weights), end="\n\n")
    print(table(["rows", "tokens of", *edges], rows))


if __name__ == "__main__":
    main()
