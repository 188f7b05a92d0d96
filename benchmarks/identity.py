"""Whether texts and logits are the same to the bit whatever runs beside them: plain or drafted, alone or in a batch.

    python -m benchmarks.identity --config configs/default.yaml --dtype int8 --prompts 200 --batches 1000

Every prompt is answered twice with its seed, plainly and with a tree at every step, several at a time, at temperatures 0, 0.7
and 1 in turn; texts are compared token by token. Then a text's logits, fed one token at a time, are compared with those of the
same tokens in passes beside random neighbours, in random chunks, on a random branch of a tree. The last line is JSON; the exit
status is 1 if anything differs.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.attention.packing import Segment, pack
from engine.attention.segments import chain_segment, tree_segment
from engine.core.tree import TokenTree, parse_expansion
from engine.core.types import Request, SamplingParams, Speculation
from engine.distill.prompts import PromptGrammar
from engine.engine import Engine
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.utils.progress_bar import progress_bar
from engine.weights import resolve
from engine.weights.pretrained import load_tokenizer
from server.adaptive_engine import tool_engine
from server.cli.bench_compare import run_case
from server.settings import load_settings
from server.text.chat_ids import chat_ids

_GRAMMAR = Path(__file__).parent.parent / "configs/drafters/prompts.yaml"
_TEMPERATURES = (0.0, 0.7, 1.0)
_NEEDLE, _MOST_NEIGHBOURS, _LONGEST = 24, 6, 40  # tokens compared; texts beside them, and tokens of each


def main() -> None:
    """Compare, and print what differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/default.yaml"))
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--tree", type=parse_expansion, default="noise_aware.8.5.4")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--batches", type=int, default=1000)
    args = parser.parse_args()
    engine = tool_engine(load_settings(args.config, {"dtype": args.dtype}).to_tool_config())
    prompts = _prompts(engine, args.prompts)
    plain, drafted = (
        run_case(engine, _requests(prompts, args.max_tokens, speculation), args.concurrency)
        for speculation in (Speculation(is_enabled=False), Speculation(expansion=args.tree))
    )
    different = [name for name, text in plain.texts.items() if drafted.texts[name] != text]
    num_accepted = sum(one.num_accepted_tokens for one in drafted.steps)
    rng = random.Random(0)
    model = engine.target.model
    bar = progress_bar(range(args.batches), what="batches", total=args.batches, unit="batch")
    num_other_bits = sum(not _has_same_bits(model, rng) for _ in bar)
    print(f"{len(different)} of {len(prompts)} texts differ; {num_accepted} drafted tokens were accepted")
    print(f"in {num_other_bits} of {args.batches} batches a text has other bits than alone")
    print(json.dumps({"texts": len(prompts), "different": different, "batches": args.batches, "other_bits": num_other_bits}))
    raise SystemExit(bool(different or num_other_bits))


def _prompts(engine: Engine, count: int) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(resolve(engine.info.name).folder)
    texts = PromptGrammar.load(_GRAMMAR).draw(count, seed=1)
    return [chat_ids(tokenizer, text) for text in texts]


def _requests(prompts: list[tuple[int, ...]], max_tokens: int, speculation: Speculation) -> Iterator[Request]:
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(_TEMPERATURES[index % 3], seed=index, max_tokens=max_tokens)
        yield Request(f"{index}", prompt, sampling, speculation)


def _has_same_bits(model: CausalModel, rng: random.Random) -> bool:
    """Return whether a random text's last tokens have the logits of the text alone, in a pass of a random company."""
    ids = _random_ids(model, rng, rng.randint(2, _NEEDLE))
    alone_TV = _alone(model, ids)
    done = rng.randrange(len(ids))  # fed in an earlier pass
    cache, segments, first_row, num_slots = KVCache(2048, model.device), [], 0, 0
    order: list[list[int] | None] = [*[None] * rng.randint(0, _MOST_NEIGHBOURS), ids]
    rng.shuffle(order)
    for text in order:
        slots = list(range(num_slots, num_slots + 2 * _LONGEST))
        rng.shuffle(slots)
        num_slots += len(slots)
        if text is None:
            segments.append(chain_segment(_random_ids(model, rng, rng.randint(1, _LONGEST)), 0, slots))
            continue
        if done:
            model.forward(pack([chain_segment(ids[:done], 0, slots)], model.device), cache, torch.tensor([0]))
        first_row = sum(segment.num_tokens for segment in segments)
        segments.append(_on_a_branch(model, ids, done, slots, rng))
    batch = pack(segments, model.device)
    logits_TV = model.forward(batch, cache, torch.arange(batch.num_tokens))
    rest = ids[done:]
    rows = [first_row, *(first_row + 1 + 2 * place for place in range(len(rest) - 1))]
    return torch.equal(logits_TV[rows], alone_TV[done:])


def _on_a_branch(model: CausalModel, ids: list[int], done: int, slots: list[int], rng: random.Random) -> Segment:
    """Return the segment of the text's rest as the branch 0, 1, 3, 5 .. of a tree; each node's sibling is another token.

    root - 1 - 3 - 5 ..
         - 2 - 4   - 6   (2, 4, 6 are children of 0, 1, 3)
    """
    rest, parents, tokens = ids[done:], [-1], [ids[done]]
    parent = 0
    for token_id in rest[1:]:
        parents += [parent, parent]
        tokens += [token_id, (token_id + rng.randint(1, 50)) % model.vocab_size]
        parent = len(parents) - 2
    draws = tuple(tuple(node for node, of in enumerate(parents) if of == v) for v in range(len(parents)))
    return tree_segment([rest[0]], TokenTree(tuple(parents), tuple(tokens), draws), done, slots)


def _alone(model: CausalModel, ids: list[int]) -> torch.Tensor:
    cache, first = KVCache(len(ids), model.device), torch.tensor([0])
    steps = [pack([chain_segment([token_id], place, range(len(ids)))], model.device) for place, token_id in enumerate(ids)]
    return torch.cat([model.forward(batch, cache, first) for batch in steps])


def _random_ids(model: CausalModel, rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(model.vocab_size) for _ in range(count)]


if __name__ == "__main__":
    main()
