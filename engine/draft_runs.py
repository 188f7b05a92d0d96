"""Drafting steps in a row, after the library has run them: commits each row's tokens at once and records every step."""

from collections.abc import Sequence
from itertools import chain

from msgspec import structs

from engine.core.policy import ExpansionChoice
from engine.core.step_plan import Row, StepPlan
from engine.core.tree import TokenTree
from engine.draft.drafter import ModelPasses
from engine.draft.trees.native_growth import DraftedStep
from engine.scheduler.scheduler import Emission, RowResult, Scheduler
from engine.trace.stats import RowOutcome, StepRecord
from engine.verify.dispatch import verdict_of


def committed_outcomes(rows: Sequence[Row], drafted: Sequence[DraftedStep], scheduler: Scheduler) -> list[tuple[RowOutcome, ...]]:
    """Commit the tokens of all steps. Return the outcomes of the rows in each step."""
    num_remaining = [row.num_remaining for row in rows]
    emissions = [_emissions(row, _new_ids(drafted, index), scheduler) for index, row in enumerate(rows)]
    outcomes = []
    for step, (growth, paths, *_) in enumerate(drafted):
        trees, offsets, of_rows = growth.forest.trees, growth.forest.offsets, []
        for index, row in enumerate(rows):
            grown = growth.sources[index], growth.node_values[index], growth.rounds[index]
            verdict = verdict_of(row, paths[index].path, paths[index].extra_id)
            of_rows.append(
                RowOutcome(
                    _limited(row, num_remaining[index]), trees[index], *grown, offsets[index], verdict, emissions[index][step]
                )
            )
            num_remaining[index] -= len(verdict.path)
        outcomes.append(tuple(of_rows))
    return outcomes


def run_record(
    plan: StepPlan,
    choice: ExpansionChoice,
    drafted: Sequence[DraftedStep],
    outcomes: Sequence[tuple[RowOutcome, ...]],
    laps: dict[str, float],
) -> StepRecord:
    """Return the record of the steps. Seconds that the library did not measure are shared equally among them."""
    num_steps = len(drafted)
    shared_s = (laps["forward"] - sum(one.target_s for one in drafted)) / num_steps
    parts = []
    for one, of_rows in zip(drafted, outcomes, strict=True):
        own = {name: seconds / num_steps for name, seconds in laps.items()}
        own |= {"draft": one.draft_s, "forward": one.target_s + shared_s}
        growth = one.growth
        parts.append(StepRecord(plan, choice, growth.num_rounds, growth.passes, of_rows, own, num_calls=1.0 / num_steps))
    return StepRecord(
        plan,
        choice,
        num_draft_rounds=sum(one.num_draft_rounds for one in parts),
        draft_passes=sum((one.draft_passes for one in parts), start=ModelPasses()),
        outcomes=tuple(chain.from_iterable(outcomes)),
        laps=laps,
        num_steps=num_steps,
        parts=tuple(parts),
    )


def _limited(row: Row, num_remaining: int) -> Row:
    """Return a row with the tree that the rest of its text has room for, as the scheduler limits it."""
    tree = row.expansion
    if tree.max_depth < num_remaining:
        return row
    return structs.replace(row, expansion=tree.limited(num_remaining - 1, tree.num_draft_tokens))


def _new_ids(drafted: Sequence[DraftedStep], index: int) -> list[list[int]]:
    """Return the new tokens of a row by step: its accepted tokens and the token after them."""
    rows = ((one.growth.forest.trees[index], one.paths[index]) for one in drafted)
    return [[*(tree.token_ids[node] for node in walked.path[1:]), walked.extra_id] for tree, walked in rows]


def _emissions(row: Row, new_ids: Sequence[Sequence[int]], scheduler: Scheduler) -> list[Emission]:
    """Commit a row's tokens as an accepted chain, whose slots the library has put in order. Return the emission of each step."""
    token_ids = [*chain.from_iterable(new_ids)]
    fed = token_ids[: -len(new_ids[-1])] if row.is_drafting else []  # later steps fed them to the drafter
    result = RowResult(
        TokenTree.chain((row.certain_ids[-1], *token_ids[:-1])), tuple(range(len(token_ids))), token_ids[-1], drafted_len=0
    )
    whole = scheduler.commit(structs.replace(row, draft_ids=(*row.draft_ids, *fed)), result)
    emissions, first = [], 0
    for ids in new_ids:
        own = whole.new_ids[first : first + len(ids)]
        emissions.append(Emission(row, own, min(len(ids) - 1, len(own)) if row.is_drafting else 0, None))
        first += len(ids)
    emissions[-1] = structs.replace(emissions[-1], finish=whole.finish)
    emissions[0] = structs.replace(emissions[0], queued_s=whole.queued_s, num_cached=whole.num_cached)
    return emissions
