"""Which calls of a rollout train, and with how much of its credit.

Invariant: every committed call is either kept or dropped with one reason, so that kept and dropped tokens add up to
those that were captured. A call whose answer the harness carried on is no dead leaf, whether or not its tokens were
rendered anew: each sampled token trains at most once.

Source: ClawGym II (arXiv:2608.16798), filters on prefix trees; ``docs/method.md``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, get_args

from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import ModelCall

Credit = Literal["exclude", "broadcast", "split"]


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of a run; side calls (titles, checks) never train.

    Attributes:
        dead_leaves: Of each agent's each segment keep the leaf with the longest continuation, drop the others.
        max_leaves: A rollout whose kept calls end in more leaves than this trains nothing; ``None`` is no limit.
        subagent_credit: What becomes of sub-agents' calls. ``exclude``: they do not train. ``broadcast``: they train
            with the rollout's advantage. ``split``: so they do, and the agents share its credit evenly.
        compaction_credit: The same for calls that summarise a history; an agent's summaries share as one more agent.

    Raises:
        ValueError: a value is out of range.
    """

    dead_leaves: bool = True
    max_leaves: int | None = None
    subagent_credit: Credit = "exclude"
    compaction_credit: Credit = "exclude"

    def __post_init__(self) -> None:
        if self.max_leaves is not None and self.max_leaves < 1:
            raise ValueError(f"max_leaves must be at least 1, or None for no limit, got {self.max_leaves}")
        for name in ("subagent_credit", "compaction_credit"):
            if getattr(self, name) not in get_args(Credit):
                raise ValueError(f"{name} must be one of {', '.join(get_args(Credit))}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Kept:
    """What the filters left.

    Attributes:
        calls: Those that train.
        credit: Each of them -> what its tokens' advantage is multiplied by, in (0, 1].
        dropped: Reason -> sampled tokens that do not train.
    """

    calls: frozenset[int]
    credit: Mapping[int, float]
    dropped: Counter[str]


def apply(tree: PrefixTree, calls: Sequence[ModelCall], continued: AbstractSet[int], filters: Filters) -> Kept:
    """Filters one rollout.

    Args:
        tree: Where the calls' tokens are.
        calls: In order of call id, with what they are for.
        continued: Calls whose answer a later request carried on, as messages.
    """
    reasons = {c.call_id: reason for c in calls if (reason := _excluded(c, _subagents(calls), filters))}
    if filters.dead_leaves:
        left = [c for c in calls if c.call_id not in reasons]
        reasons |= dict.fromkeys(_dead(tree, left, continued | _extended(tree, calls)), "dead leaf")
    kept = [c for c in calls if c.call_id not in reasons]
    if filters.max_leaves is not None and len(leaves(tree, [c.call_id for c in kept])) > filters.max_leaves:
        reasons |= {c.call_id: "over-branching" for c in kept}
        kept = []
    dropped: Counter[str] = Counter()
    for call in calls:
        if call.call_id in reasons:
            dropped[reasons[call.call_id]] += call.sampled_tokens
    return Kept(frozenset(c.call_id for c in kept), _credit(kept, _subagents(calls), filters), dropped)


def leaves(tree: PrefixTree, kept: Collection[int]) -> set[int]:
    """Calls among ``kept`` whose tokens no other of them extends: the K of ``docs/method.md``."""
    above: set[int] = set()
    for call in kept:
        at = tree.parent_call(call)
        while at is not None and at not in above:
            above.add(at)
            at = tree.parent_call(at)
    return set(kept) - above


def _subagents(calls: Iterable[ModelCall]) -> set[str]:
    return {c.agent for c in calls if c.kind == "subagent"}


def _excluded(call: ModelCall, subagents: AbstractSet[str], filters: Filters) -> str | None:
    """Why a call does not train whatever became of it; a sub-agent's summary is excluded with the sub-agent."""
    if call.kind == "side":
        return "side call"
    if call.agent in subagents and filters.subagent_credit == "exclude":
        return "sub-agent"
    if call.kind == "compaction" and filters.compaction_credit == "exclude":
        return "compaction"
    return None


def _extended(tree: PrefixTree, calls: Iterable[ModelCall]) -> set[int]:
    """Calls that some call goes on from, in messages or in tokens."""
    return {above for c in calls for above in (c.continues, tree.parent_call(c.call_id)) if above is not None}


def _dead(tree: PrefixTree, calls: Sequence[ModelCall], continued: AbstractSet[int]) -> set[int]:
    """Leaves of a segment beside the one that is kept; summaries are no conversation and have no segments."""
    ends: dict[tuple[str, int], list[ModelCall]] = defaultdict(list)
    for call in calls:
        if call.kind != "compaction" and call.call_id not in continued:
            ends[call.agent, call.segment].append(call)
    by_id = {c.call_id: c for c in calls}
    dead: set[int] = set()
    for rivals in ends.values():
        latest = {_prompt(tree, c.call_id): c for c in rivals}  # a resample takes the place of the samples before it
        best = max(latest.values(), key=lambda c: (_continuation(tree, c, by_id), c.call_id))
        dead |= {c.call_id for c in rivals} - {best.call_id}
    return dead


def _prompt(tree: PrefixTree, call: int) -> int:
    """The node in which a call's prompt ends; calls with equal prompts share it."""
    at = tree.nodes[tree.call_end[call]].parent
    while at is not None and tree.nodes[at].call == call:  # an answer that later prompts share in part is split
        at = tree.nodes[at].parent
    assert at is not None
    return at


def _continuation(tree: PrefixTree, call: ModelCall, by_id: Mapping[int, ModelCall]) -> int:
    """Sampled tokens from the start of a call's segment to its end."""
    tokens = 0
    at: ModelCall | None = call
    while at is not None and (at.agent, at.segment) == (call.agent, call.segment):
        tokens += at.sampled_tokens
        above = at.continues if at.continues is not None else tree.parent_call(at.call_id)
        at = by_id.get(above) if above is not None else None
    return tokens


def _credit(kept: Sequence[ModelCall], subagents: AbstractSet[str], filters: Filters) -> dict[int, float]:
    """The credit of kept calls: main and whoever splits with it get equal parts of 1, the others 1 each."""
    sharers = {c.call_id: sharer for c in kept if (sharer := _sharer(c, subagents, filters)) is not None}
    parts = max(1, len(set(sharers.values())))
    return {c.call_id: 1 / parts if c.call_id in sharers else 1.0 for c in kept}


def _sharer(call: ModelCall, subagents: AbstractSet[str], filters: Filters) -> tuple[str, bool] | None:
    """Under which name a call shares the credit; ``None`` where it has all of it."""
    if call.agent in subagents and filters.subagent_credit == "broadcast":
        return None
    if call.kind == "compaction":
        return (call.agent, True) if filters.compaction_credit == "split" else None
    return call.agent, False
