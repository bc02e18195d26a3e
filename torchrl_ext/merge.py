"""Many rollouts' trees as one packed forest in which common prompts lie once.

Rollouts of a batch begin alike: system prompt and tools are common to a harness, the task's text to a group. A forward
over the merged forest computes them once.

Invariants: the result is depth first with the interval property of ``PackedTree`` (query i sees key j iff
``j <= i < subtree_end[j]``); every position keeps its path, token for token; only tokens with no sampled token on their
path (themselves included) are shared, so nothing that trains is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from clawgym_env.tree.pack import BoolArray, PackedTree
from clawgym_env.types import FloatArray, TokenArray

SHARED = -1


@dataclass(frozen=True, slots=True, eq=False)
class MergedTree:
    """N unique tokens of a batch of rollouts in depth-first order.

    Attributes:
        tokens: [N] int64.
        parent: [N] int64; -1 at a root.
        depth: [N] int64, position id.
        subtree_end: [N] int64, one past the last descendant.
        rollout: [N] int64, index of the tree that holds the token; -1 where several do.
        sampled: [N] bool.
        trainable: [N] bool.
        log_probs: [N] float32, of the sampled distribution; NaN where not sampled.
        versions: [N] int64; -1 where not sampled.
        call: [N] int64, call id within its rollout; -1 where not sampled.
        n_leaves: [N] int64, retained leaves at or below the token, over all rollouts that hold it.
        credit: [N] float32, multiplies the token's advantage.
        index_of: For each tree [N_i] int64: where its tokens lie in this forest.
    """

    tokens: TokenArray
    parent: TokenArray
    depth: TokenArray
    subtree_end: TokenArray
    rollout: TokenArray
    sampled: BoolArray
    trainable: BoolArray
    log_probs: FloatArray
    versions: TokenArray
    call: TokenArray
    n_leaves: TokenArray
    credit: FloatArray
    index_of: list[TokenArray]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True, eq=False)
class _Run:
    """A run of prompt tokens without a fork, in the trie of all rollouts' prompts.

    Attributes:
        placed: (tree, first position in that tree) of every copy of the run.
        blocks: (tree, start, end) of the subtrees that begin with a sampled token right after the run.
    """

    tokens: TokenArray
    parent: _Run | None
    children: dict[int, _Run] = field(default_factory=dict)
    placed: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[tuple[int, int, int]] = field(default_factory=list)


def prune(packed: PackedTree) -> tuple[PackedTree, TokenArray]:
    """Leaves out tokens on no path to a trainable token: they cost a forward and change nothing.

    Returns:
        The smaller tree and [n] int64, the positions that were kept.
    """
    count = np.concatenate([[0], np.cumsum(packed.trainable)])
    keep = count[packed.subtree_end] > count[:-1]
    kept = np.flatnonzero(keep)
    new = np.concatenate([[0], np.cumsum(keep)])  # new[i]: kept tokens before i; kept tokens have kept parents
    parent = packed.parent[kept]
    return (
        PackedTree(
            tokens=packed.tokens[kept],
            parent=np.where(parent >= 0, new[parent], -1),
            depth=packed.depth[kept],
            subtree_end=new[packed.subtree_end[kept]],
            sampled=packed.sampled[kept],
            trainable=packed.trainable[kept],
            log_probs=packed.log_probs[kept],
            versions=packed.versions[kept],
            call=packed.call[kept],
            n_leaves=packed.n_leaves[kept],
            credit=packed.credit[kept],
        ),
        kept,
    )


def merge_trees(trees: Sequence[PackedTree]) -> MergedTree:
    """Lays the trees of a batch out as one forest; see the module's invariants.

    Linear in the number of tokens; Python runs once per run of prompt tokens and per sampled subtree, not per token.

    Args:
        trees: One per rollout; trees of several roots, and empty ones, are fine.
    """
    root = _Run(np.empty(0, dtype=np.int64), None)
    for k, tree in enumerate(trees):
        _insert(root, k, tree)
    return _lay_out(root, trees)


def _insert(root: _Run, k: int, tree: PackedTree) -> None:
    """Adds one tree's prompt region to the trie and hangs its sampled subtrees below."""
    n = len(tree)
    own = np.flatnonzero(tree.sampled | tree.trainable)
    edges = np.zeros(n + 1, dtype=np.int64)
    np.add.at(edges, own, 1)
    np.subtract.at(edges, tree.subtree_end[own], 1)
    prompt = np.cumsum(edges[:n]) == 0  # no sampled token at or above

    above = tree.parent
    starts_below_prompt = ~prompt & ((above < 0) | prompt[above])
    branches = np.flatnonzero((above != np.arange(n) - 1) & (prompt | starts_below_prompt))
    cut = np.zeros(n + 1, dtype=np.bool_)  # a run begins here
    cut[:1] = True
    cut[branches] = True
    cut[above[branches] + 1] = True
    cut[np.flatnonzero(starts_below_prompt)] = True

    begins = np.flatnonzero(cut[:n] & (prompt | starts_below_prompt))
    run_ends = np.append(np.flatnonzero(cut[:n] | ~prompt), n)
    end_of: dict[int, _Run] = {-1: root}
    for a in begins.tolist():
        at = end_of[int(above[a])]
        if prompt[a]:
            b = int(run_ends[np.searchsorted(run_ends, a, side="right")])
            end_of[b - 1] = _walk(at, k, a, tree.tokens[a:b])
        else:
            at.blocks.append((k, a, int(tree.subtree_end[a])))


def _walk(at: _Run, k: int, start: int, tokens: TokenArray) -> _Run:
    """Places ``tokens`` below ``at``, sharing what is there; returns the run in which they end."""
    pos = 0
    while pos < len(tokens):
        child = at.children.get(int(tokens[pos]))
        if child is None:
            child = _Run(tokens[pos:], at)
            at.children[int(tokens[pos])] = child
        else:
            n = min(len(child.tokens), len(tokens) - pos)
            differ = child.tokens[:n] != tokens[pos : pos + n]
            common = int(differ.argmax()) if differ.any() else n
            if common < len(child.tokens):
                child = _split(child, common)
        child.placed.append((k, start + pos))
        pos += len(child.tokens)
        at = child
    return at


def _split(run: _Run, size: int) -> _Run:
    """Cuts a run after ``size`` tokens; the lower part keeps its identity, the upper one is returned."""
    assert run.parent is not None
    upper = _Run(run.tokens[:size], run.parent, placed=list(run.placed))
    upper.children[int(run.tokens[size])] = run
    run.parent.children[int(run.tokens[0])] = upper
    run.placed = [(k, start + size) for k, start in run.placed]
    run.tokens, run.parent = run.tokens[size:], upper
    return upper


def _lay_out(root: _Run, trees: Sequence[PackedTree]) -> MergedTree:
    visits, total = _visits(root)
    out = _empty(total, [len(tree) for tree in trees])
    filled = 0
    begin: dict[int, int] = {}
    last = {id(root): -1}
    for run, entering in visits:
        if not entering:
            out.subtree_end[begin[id(run)] : last[id(run)] + 1] = filled
            continue
        size = len(run.tokens)
        if run.parent is not None:
            _place_run(out, run, filled, last[id(run.parent)], trees)
        begin[id(run)] = filled
        last[id(run)] = filled + size - 1 if run.parent is not None else -1
        filled += size
        for k, a, b in run.blocks:
            _place_block(out, trees[k], k, slice(a, b), filled, last[id(run)])
            filled += b - a
    return out


def _visits(root: _Run) -> tuple[list[tuple[_Run, bool]], int]:
    """Visits in depth-first order, each run once on entering and once on leaving; and the number of tokens."""
    visits: list[tuple[_Run, bool]] = []
    stack = [(root, True)]
    total = 0
    while stack:
        run, entering = stack.pop()
        visits.append((run, entering))
        if entering:
            total += len(run.tokens) + sum(b - a for _, a, b in run.blocks)
            stack.append((run, False))
            stack.extend((child, True) for child in reversed(run.children.values()))
    return visits, total


def _empty(total: int, sizes: Sequence[int]) -> MergedTree:
    return MergedTree(
        tokens=np.empty(total, dtype=np.int64),
        parent=np.empty(total, dtype=np.int64),
        depth=np.empty(total, dtype=np.int64),
        subtree_end=np.empty(total, dtype=np.int64),
        rollout=np.full(total, SHARED, dtype=np.int64),
        sampled=np.zeros(total, dtype=np.bool_),
        trainable=np.zeros(total, dtype=np.bool_),
        log_probs=np.full(total, np.nan, dtype=np.float32),
        versions=np.full(total, -1, dtype=np.int64),
        call=np.full(total, -1, dtype=np.int64),
        n_leaves=np.zeros(total, dtype=np.int64),
        credit=np.ones(total, dtype=np.float32),
        index_of=[np.empty(size, dtype=np.int64) for size in sizes],
    )


def _place_run(out: MergedTree, run: _Run, at: int, above: int, trees: Sequence[PackedTree]) -> None:
    size = len(run.tokens)
    here = slice(at, at + size)
    out.tokens[here] = run.tokens
    out.parent[here] = np.arange(at - 1, at + size - 1)
    out.parent[at] = above
    first_tree, first_start = run.placed[0]
    out.depth[here] = trees[first_tree].depth[first_start : first_start + size]
    if len({k for k, _ in run.placed}) == 1:
        out.rollout[here] = first_tree
    for k, start in run.placed:
        out.n_leaves[here] += trees[k].n_leaves[start : start + size]
        out.index_of[k][start : start + size] = np.arange(at, at + size)


def _place_block(out: MergedTree, tree: PackedTree, k: int, source: slice, at: int, above: int) -> None:
    shift = at - source.start
    here = slice(at, source.stop + shift)
    for name in ("tokens", "depth", "sampled", "trainable", "log_probs", "versions", "call", "n_leaves", "credit"):
        getattr(out, name)[here] = getattr(tree, name)[source]
    out.parent[here] = tree.parent[source] + shift
    out.parent[at] = above
    out.subtree_end[here] = tree.subtree_end[source] + shift
    out.rollout[here] = k
    out.index_of[k][source] = np.arange(at, source.stop + shift)
