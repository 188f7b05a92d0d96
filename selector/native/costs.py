"""A cost model that the library corrects, where there is one: selector.cost says what it learns, and why."""

from collections.abc import Sequence

from engine.native.library import address
from engine.policy import StepWork
from selector import cost
from selector.cost import CostModel, StageSeconds
from selector.native import library


def cost_model(rest: Sequence[float] | None = None, draft: Sequence[float] | None = None) -> CostModel:
    """Return a cost model of these prices, compiled if it can be."""
    return CostModel(rest, draft) if library.library() is None else CompiledCosts(rest, draft)


class CompiledCosts(CostModel):
    """A cost model whose prices the library corrects."""

    def __init__(self, rest: Sequence[float] | None = None, draft: Sequence[float] | None = None) -> None:
        super().__init__(rest, draft)
        self._library = library.required()
        assert len(cost.KNOTS) <= library.MOST_KNOTS
        assert len(self._prior_K) == len(cost.KNOTS) + library.NUM_OTHER_PRICES
        self.compiled = library.Costs(  # over these arrays, which nothing replaces
            prior=address(self._prior_K),
            error=address(self._error_K),
            covariance=address(self._covariance_KK),
            prior_covariance=address(self._prior_KK),
            prices=address(self._prices_K),
            was_clipped=address(self._was_clipped),
            knots=address(cost.KNOTS_F),
            num_knots=len(cost.KNOTS),
            forgetting=cost.FORGETTING,
            noise=cost.NOISE,
            most_sigmas=cost.MOST_SIGMAS,
            least_factor=cost.LEAST_FACTOR,
            forgotten=cost.FORGOTTEN,
            keys=cost.KEYS,
        )

    def _learn(self, work: StepWork, seconds: StageSeconds) -> None:
        self._library.selector_learn_prices(self.compiled, library.Work(*work), seconds.draft_s, seconds.rest_s)
