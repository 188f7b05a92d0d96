"""The rounds of growing trees on the drafter's device: the nodes that a round feeds are chosen without the host.

These are the steps of engine.draft.trees.best_first, and of trees of fixed shapes, for all trees together. All sizes are fixed by
RoundShape, so that a round can be recorded as a graph. A tree has W lanes, and a live lane has one node. In each round the
candidates of the lanes' nodes are ranked (device_ranking) and scored, and the best new nodes become the lanes of the next pass.
Shape key: B trees, W lanes of a tree, P = B W lanes, N drafted nodes of a tree, E scored children of a node, K candidates of a
node, S scored nodes and one for lanes without a node, R rounds, Q numbers of a lane in the results.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from engine.attention.paged.completion import GrownNodes
from engine.attention.paged.graphs import TablePass
from engine.attention.paged.levels import Lanes, feed_lanes
from engine.draft.trees.best_first import PRIOR_CONTINUED, PRIOR_EXPANDED
from engine.draft.trees.calibration import Reliability
from engine.draft.trees.device_ranking import Ranked, RoundShape, agreements, lanes_of, ranked, split_numbers
from engine.native.library import NUM_SCORES

NUM_FACTS = 5  # of a lane in the results before its candidates: validity, node, parent, token, sum of squares


class _Lanes(NamedTuple):
    """The node of each lane. Lanes that are not live have node N + 1, and the root as their parent."""

    is_live: Bool[Tensor, "B W"]
    node: Int[Tensor, "B W"]
    parent: Int[Tensor, "B W"]
    token: Int[Tensor, "B W"]
    depth: Int[Tensor, "B W"]
    place: Int[Tensor, "B W"]
    value: Float[Tensor, "B W"]


class _Scored(NamedTuple):
    """Tokens that can become nodes, the oldest first. `node` is 0 until the token is fed."""

    value: Float[Tensor, "B S"]
    token: Int[Tensor, "B S"]
    parent: Int[Tensor, "B S"]
    depth: Int[Tensor, "B S"]
    place: Int[Tensor, "B S"]
    node: Int[Tensor, "B S"]


class DeviceRounds(ABC):
    """Owns the state of growing trees. `begin`, then `advance` for each round, then `finish`. None waits.

    `nodes` are the finished trees, and `is_node_BN` are the places of their nodes.
    """

    def __init__(self, shape: RoundShape, ids_M: Int[Tensor, " M"] | None, num_known: int, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._num_scored = shape.num_rounds * shape.width * shape.num_scored
        self._ids_M = torch.arange(num_known, device=device) if ids_M is None else ids_M
        self._edges = torch.tensor(Reliability.EDGES, dtype=torch.float64, device=device)
        self.numbers_BF, self._given = split_numbers(shape, device)
        width, count, integers, floats = shape.width, self._num_scored + 1, self._integers, self._floats
        self._lanes = _Lanes._make([integers(width).bool(), *(integers(width) for _ in range(5)), floats(width)])
        self._scored = _Scored(floats(count), *(integers(count) for _ in range(5)))
        self._min_value_B1, self._continued_B1 = floats(1), floats(1)
        self._num_offered_B1, self._num_fed_B1 = integers(1), integers(1)
        self._round_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.found_BRWQ = floats(shape.num_rounds, width, NUM_FACTS + 3 * shape.num_kept)
        self.is_node_BN = integers(shape.num_nodes).bool()
        self.nodes = GrownNodes._make([*(integers(shape.num_nodes) for _ in range(4)), shape.num_rounds])

    def _integers(self, *sizes: int) -> Tensor:
        return torch.zeros(self._shape.num_trees, *sizes, dtype=torch.int64, device=self._device)

    def _floats(self, *sizes: int) -> Tensor:
        return torch.zeros(self._shape.num_trees, *sizes, dtype=torch.float64, device=self._device)

    @abstractmethod
    def _ranked(self) -> Ranked:
        """Return the candidates of the lanes' nodes."""

    @abstractmethod
    def _feed(self) -> None:
        """Prepare the candidates of the lanes' next nodes."""

    def begin(self) -> None:
        """Start the trees of `numbers_BF`: the first lane of each has its root."""
        for tensor in (*self._lanes, *self._scored, self._num_offered_B1, self._num_fed_B1, self._round_1, self.found_BRWQ):
            tensor.zero_()
        self._lanes.is_live[:, :1] = self._given.has_root > 0
        self._lanes.value.fill_(1.0)
        self._scored.value.fill_(-torch.inf)
        self._min_value_B1.copy_(1.0 / (self._given.max_nodes + 1))
        self._continued_B1.fill_(PRIOR_CONTINUED)

    def advance(self) -> None:
        """Score the candidates of the lanes' nodes, choose the nodes of the next lanes, and feed them."""
        found = self._ranked()
        self._keep(found)
        self._score(found)
        self._choose()
        self._feed()
        self._round_1 += 1

    def _keep(self, found: Ranked) -> None:
        """Write the candidates to the results. Those that a node does not have are impossible there."""
        lanes, is_valid_P1 = self._lanes, self._is_valid(found)
        facts = [is_valid_P1, *(one.flatten()[:, None] for one in (lanes.node, lanes.parent, lanes.token)), found.squares_P1]
        probs_PK = torch.where(self._is_offered(found), found.probs_PK, 0.0)
        numbers_PQ = torch.cat([one.double() for one in (*facts, found.ids_PK, probs_PK, found.noise_PK)], dim=1)
        self.found_BRWQ.index_copy_(1, self._round_1, numbers_PQ.view(self._shape.num_trees, 1, self._shape.width, -1))

    def _is_valid(self, found: Ranked) -> Bool[Tensor, "P 1"]:
        return found.squares_P1.isfinite() & self._lanes.is_live.flatten()[:, None]

    def _is_offered(self, found: Ranked) -> Bool[Tensor, "P K"]:
        """Return which of the kept tokens are candidates of a lane's node: possible, and as many as it needs."""
        given = self._given
        num_ranked_B1 = torch.where(given.is_valued > 0, NUM_SCORES, given.branches)
        fixed_BW = given.num_children.gather(1, self._lanes.place)
        most_P1 = torch.where(given.is_fixed > 0, fixed_BW, num_ranked_B1).flatten()[:, None]
        place_K = torch.arange(self._shape.num_kept, device=self._device)
        return self._is_valid(found) & (place_K < most_P1) & (found.probs_PK > 0.0)

    def _score(self, found: Ranked) -> None:
        """Append the values of the lanes' children, in the order of lanes and ranks. A child of a fixed shape has value 1."""
        given, lanes, count, width = self._given, self._lanes, self._shape.num_scored, self._shape.width
        is_offered_PK = self._is_offered(found)
        agreed_PK = agreements(given, found, is_offered_PK, width)
        shares_PK = lanes_of(given.shares, width).gather(1, torch.bucketize(agreed_PK, self._edges, right=True))
        chances_PK = torch.where(lanes_of(given.is_valued, width) > 0, agreed_PK * shares_PK, found.probs_PK).clamp(max=1.0)
        is_scored_PE = is_offered_PK[:, :count] & (torch.arange(count, device=self._device) < lanes_of(given.branches, width))
        chances_PE = torch.where(is_scored_PE, chances_PK[:, :count], 0.0)
        values_PE = torch.where(lanes_of(given.is_fixed, width) > 0, 1.0, lanes.value.flatten()[:, None] * chances_PE)
        gains_BW = chances_PE.cumsum(1)[:, -1].clamp(max=1.0).view(-1, width)
        self._continued_B1.copy_(torch.cat([self._continued_B1, gains_BW], dim=1).cumsum(1)[:, -1:])
        self._num_offered_B1 += self._is_valid(found).view(-1, width).sum(1, keepdim=True)
        places_BWE = torch.unflatten(given.places, 1, (-1, count)).gather(1, lanes.place[:, :, None].expand(-1, -1, count))
        parent_BWE, depth_BWE = (one[:, :, None].expand(-1, -1, count) for one in (lanes.node, lanes.depth + 1))
        made = (torch.where(is_scored_PE, values_PE, -torch.inf), found.ids_PK[:, :count], parent_BWE, depth_BWE, places_BWE)
        columns = self._round_1 * (width * count) + torch.arange(width * count, device=self._device)
        for kept, new in zip(self._scored, made, strict=False):
            kept.index_copy_(1, columns, new.reshape(-1, width * count))

    def _best(self) -> tuple[Int[Tensor, "B N"], Float[Tensor, "B N"], Bool[Tensor, "B N"]]:
        """Return the best scored nodes, their values, and whether they would be kept if growth ended now."""
        sorted_values, order_BN = self._scored.value.sort(dim=1, descending=True, stable=True)
        count = min(self._shape.num_nodes, order_BN.shape[1])
        order_BN, value_BN = order_BN[:, :count], sorted_values[:, :count]
        return order_BN, value_BN, (value_BN >= self._given.thresholds[:, :count]).cumprod(1) > 0

    def finish(self) -> None:
        """Number the kept nodes as best_first does: fed nodes first, in this order. Nodes of a fixed shape are sorted by age."""
        given, scored, num_nodes = self._given, self._scored, self._shape.num_nodes
        order_BN, _, is_kept_BN = self._best()
        count = order_BN.shape[1]
        place_N = torch.arange(1, count + 1, device=self._device)
        fed_BN = scored.node.gather(1, order_BN)  # 0 of a node that is not fed
        is_by_place_BN = (given.is_fixed > 0) | (fed_BN == 0)
        rank_BN = torch.where(is_by_place_BN, num_nodes + place_N, fed_BN)
        sorted_BN = torch.where(is_kept_BN, rank_BN, 3 * num_nodes).argsort(1)
        order_BN, fed_BN, is_kept_BN = (one.gather(1, sorted_BN) for one in (order_BN, fed_BN, is_kept_BN))
        new_BN = self._integers(num_nodes + 2)  # by the number as a fed node
        new_BN.scatter_(1, torch.where(is_kept_BN & (fed_BN > 0), fed_BN, num_nodes + 1), place_N.expand_as(fed_BN))
        token_BN, depth_BN, parent_BN = (one.gather(1, order_BN) for one in (scored.token, scored.depth, scored.parent))
        depth_BN = torch.where(is_kept_BN, depth_BN, 1)
        made = (token_BN, new_BN.gather(1, parent_BN), depth_BN, given.keys.gather(1, depth_BN))
        nothing = (0, 0, 1, 0)
        self.is_node_BN.zero_()
        self.is_node_BN[:, :count] = is_kept_BN
        for kept_BN, new, padding in zip(self.nodes[:4], made, nothing, strict=True):
            kept_BN.fill_(padding)
            kept_BN[:, :count] = torch.where(is_kept_BN, new, padding)

    def _choose(self) -> None:
        """Choose the best new nodes that would be kept if growth ended now."""
        given, scored, width = self._given, self._scored, self._shape.width
        order_BN, value_BN, is_kept_BN = self._best()
        has_children_BN = given.num_children.gather(1, scored.place.gather(1, order_BN)) > 0
        is_inner_BN = torch.where(given.is_fixed > 0, has_children_BN, scored.depth.gather(1, order_BN) < given.depth)
        is_new_BN = is_kept_BN & is_inner_BN & (scored.node.gather(1, order_BN) == 0)
        best_B1 = torch.where(is_new_BN, value_BN, -torch.inf).amax(1, keepdim=True)
        lowered_B1 = torch.minimum(self._min_value_B1, best_B1 / 2)
        self._min_value_B1.copy_(torch.where(best_B1.isfinite(), lowered_B1, self._min_value_B1))
        is_chosen_BN = is_new_BN & (value_BN > self._min_value_B1)
        rank_BN = is_chosen_BN.cumsum(1) - 1
        is_chosen_BN &= (rank_BN < torch.minimum(given.lanes, given.max_nodes - self._num_fed_B1)) & (
            self._round_1 + 1 < given.rounds
        )
        gain_B1 = torch.where(is_chosen_BN, value_BN, 0.0).cumsum(1)[:, -1:]
        share_B1 = self._continued_B1 / (PRIOR_EXPANDED + self._num_offered_B1)
        is_chosen_BN &= gain_B1 * share_B1 >= given.level_cost
        chosen_BW = torch.full_like(order_BN[:, :1], self._num_scored).repeat(1, width + 1)
        chosen_BW = chosen_BW.scatter(
            1, torch.where(is_chosen_BN, rank_BN, width), torch.where(is_chosen_BN, order_BN, self._num_scored)
        )
        self._take(chosen_BW[:, :width], is_chosen_BN.sum(1, keepdim=True))

    def _take(self, chosen_BW: Int[Tensor, "B W"], count_B1: Int[Tensor, "B 1"]) -> None:
        """Make scored nodes the next lanes. They are numbered in this order, nodes of a fixed shape by age."""
        scored, num_nodes = self._scored, self._shape.num_nodes
        lane_W = torch.arange(self._shape.width, device=self._device)
        is_live_BW = lane_W < count_B1
        ages_BW = (scored.value > -torch.inf).cumsum(1).gather(1, chosen_BW)
        number_BW = torch.where(self._given.is_fixed > 0, ages_BW, self._num_fed_B1 + 1 + lane_W)
        node_BW = torch.where(is_live_BW, number_BW, num_nodes + 1)
        scored.node.scatter_(1, chosen_BW, node_BW)
        self._num_fed_B1 += count_B1
        taken = (one.gather(1, chosen_BW) for one in (scored.parent, scored.token, scored.depth, scored.place, scored.value))
        for kept, new in zip(self._lanes, (is_live_BW, node_BW, *taken), strict=True):
            kept.copy_(new)


class PassRounds(DeviceRounds):
    """Rounds whose lanes feed a recorded pass of the drafter, which is to run between two rounds."""

    def __init__(
        self, shape: RoundShape, table_pass: TablePass, ids_M: Int[Tensor, " M"] | None, num_known: int, dummy_slot: int
    ) -> None:
        super().__init__(shape, ids_M, num_known, table_pass.table.device)
        self._pass, self._dummy_slot = table_pass, dummy_slot
        end = shape.num_nodes + 2
        self._sees_BNN = self._integers(end, end - 1).bool()
        self._depth_BN, self._is_fed_BN = self._integers(end), self._integers(end).bool()

    def begin(self) -> None:
        """Start the trees. The root is fed."""
        super().begin()
        for tensor in (self._sees_BNN, self._depth_BN, self._is_fed_BN):
            tensor.zero_()
        self._sees_BNN[:, 0, 0].fill_(True)
        self._is_fed_BN[:, 0].fill_(True)

    def _ranked(self) -> Ranked:
        num_lanes = self._shape.num_trees * self._shape.width
        return ranked(self._shape, self._given, self._pass.rows_NM[:num_lanes], self._lanes.depth, self._ids_M)

    def _feed(self) -> None:
        """Write the lanes to the table. Nodes without keys have the root's slot there, and no lane sees them."""
        given, lanes, end = self._given, self._lanes, self._shape.num_nodes + 1
        rows_BWN = lanes.parent[:, :, None].expand(-1, -1, end)
        sees_BWN = self._sees_BNN.gather(1, rows_BWN) | (lanes.node[:, :, None] == torch.arange(end, device=self._device))
        self._sees_BNN.scatter_(1, lanes.node[:, :, None].expand(-1, -1, end), sees_BWN)
        self._depth_BN.scatter_(1, lanes.node, lanes.depth)
        self._is_fed_BN.scatter_(1, lanes.node, True)
        fed = Lanes(
            ids_BW=lanes.token,
            positions_BW=given.position + lanes.depth,
            slots_BW=torch.where(lanes.is_live, given.slots.gather(1, lanes.node.clamp(max=end - 1)), self._dummy_slot),
            previous_BW=given.slots.gather(1, lanes.parent),
            seen_BWN=sees_BWN,
            node_slots_BN=torch.where(self._is_fed_BN[:, :end], given.slots, given.slots[:, :1]),
            node_positions_BN=given.position + self._depth_BN[:, :end],
        )
        feed_lanes(self._pass, fed, given.tails)


class LevelRounds(DeviceRounds):
    """Rounds over logits of L levels after each root, `levels_BLM`: a node's candidates are its level's, ranked in `begin`."""

    def __init__(self, shape: RoundShape, levels_BLM: Float[Tensor, "B L M"], ids_M: Int[Tensor, " M"] | None) -> None:
        super().__init__(shape, ids_M, levels_BLM.shape[2], levels_BLM.device)
        self._num_levels, self.levels_BLM = levels_BLM.shape[1], levels_BLM
        num_levels, count = self._num_levels, shape.num_trees * self._num_levels
        wide = self._floats(num_levels, shape.num_kept).view(count, -1)
        self._by_level = Ranked(wide.long(), wide.clone(), wide.clone(), wide[:, :1].clone())

    def begin(self) -> None:
        """Start the trees, and rank the tokens of all levels."""
        super().begin()
        depth_BL = torch.arange(self._num_levels, device=self._device).expand(self._shape.num_trees, -1)
        of_levels = self._shape._replace(width=self._num_levels)
        found = ranked(of_levels, self._given, self.levels_BLM.flatten(0, 1), depth_BL, self._ids_M)
        for kept, new in zip(self._by_level, found, strict=True):
            kept.copy_(new)

    def _ranked(self) -> Ranked:
        """Return the candidates of the lanes' levels; there are none below the last."""
        depth_BW = self._lanes.depth
        first_B1 = self._num_levels * torch.arange(self._shape.num_trees, device=self._device)[:, None]
        places_P = (first_B1 + depth_BW.clamp(max=self._num_levels - 1)).flatten()
        found = Ranked._make(one.index_select(0, places_P) for one in self._by_level)
        is_level_P1 = (depth_BW < self._num_levels).flatten()[:, None]
        return found._replace(squares_P1=torch.where(is_level_P1, found.squares_P1, torch.inf))

    def _feed(self) -> None:
        """Do nothing: all levels are known."""

    def run(self) -> None:
        """Grow the trees of `numbers_BF`."""
        self.begin()
        for _ in range(self._shape.num_rounds):
            self.advance()
        self.finish()
