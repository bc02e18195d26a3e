"""A prefix tree as flat arrays in depth-first order: the form that mathematics and attention want.

Invariant: ``parent[i] < i``; the descendants of token ``i`` are exactly ``i + 1 .. subtree_end[i] - 1``, so query ``i``
may see key ``j`` iff ``j <= i < subtree_end[j]``. Each unique token of the rollout appears once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import FloatArray, TokenArray

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class PackedTree:
    """N unique tokens of one rollout in depth-first order.

    Attributes:
        tokens: [N] int64.
        parent: [N] int64, index of the token before this one; -1 at a root.
        depth: [N] int64, tokens before this one on its path: its position id.
        subtree_end: [N] int64, one past the last descendant.
        sampled: [N] bool, made by the policy.
        trainable: [N] bool, sampled and kept by the filters.
        log_probs: [N] float32, of the sampled distribution; NaN where not sampled.
        versions: [N] int64, policy version; -1 where not sampled.
        call: [N] int64, the call that sampled the token; -1 where not sampled.
        n_leaves: [N] int64, retained leaf calls at or below this token.
        credit: [N] float32, multiplies the advantage of the token; 1 where nothing says otherwise.
    """

    tokens: TokenArray
    parent: TokenArray
    depth: TokenArray
    subtree_end: TokenArray
    sampled: BoolArray
    trainable: BoolArray
    log_probs: FloatArray
    versions: TokenArray
    call: TokenArray
    n_leaves: TokenArray
    credit: FloatArray

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """One root-to-leaf trajectory.

    Attributes:
        index: [T] int64, positions of its tokens in the packed tree.
        leaf_call: The call at its end.
    """

    index: TokenArray
    leaf_call: int


def pack(
    tree: PrefixTree, *, keep_calls: frozenset[int] | None = None, credit: Mapping[int, float] | None = None
) -> PackedTree:
    """Lays a tree out depth first, children in order of creation.

    Args:
        keep_calls: Calls whose tokens may train; ``None`` keeps all. Leaves are counted among these.
        credit: Call -> what the advantage of its tokens is multiplied by; 1 where it is not named.
    """
    order = tree.depth_first()
    sizes = np.array([len(tree.nodes[n].tokens) for n in order], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    total = int(starts[-1])
    where = {n: int(starts[k]) for k, n in enumerate(order)}
    parent = np.arange(-1, total - 1, dtype=np.int64)
    depth = np.empty(total, dtype=np.int64)
    subtree_end = np.empty(total, dtype=np.int64)
    sampled = np.zeros(total, dtype=np.bool_)
    trainable = np.zeros(total, dtype=np.bool_)
    log_probs = np.full(total, np.nan, dtype=np.float32)
    versions = np.full(total, -1, dtype=np.int64)
    call = np.full(total, -1, dtype=np.int64)
    n_leaves = np.zeros(total, dtype=np.int64)
    tokens = np.empty(total, dtype=np.int64)
    credits = np.ones(total, dtype=np.float32)

    leaves: dict[int, int] = {}
    ends: dict[int, int] = {}
    for n in reversed(order):
        node = tree.nodes[n]
        kept = node.call is not None and (keep_calls is None or node.call in keep_calls)
        leaves[n] = max(sum(leaves[c] for c in node.children), int(kept))
        ends[n] = max([where[n] + len(node.tokens)] + [ends[c] for c in node.children])

    for n in order:
        node = tree.nodes[n]
        a, size = where[n], len(node.tokens)
        if size == 0:
            continue
        b = a + size
        tokens[a:b] = node.tokens
        if node.parent is not None and tree.nodes[node.parent].end > 0:
            up = tree.nodes[node.parent]
            parent[a] = where[node.parent] + len(up.tokens) - 1
        else:
            parent[a] = -1
        depth[a:b] = np.arange(node.start, node.end)
        subtree_end[a:b] = ends[n]
        n_leaves[a:b] = leaves[n]
        if node.call is not None:
            sampled[a:b] = True
            call[a:b] = node.call
            trainable[a:b] = keep_calls is None or node.call in keep_calls
            log_probs[a:b] = node.log_probs
            versions[a:b] = node.versions
            credits[a:b] = (credit or {}).get(node.call, 1.0)
    return PackedTree(
        tokens, parent, depth, subtree_end, sampled, trainable, log_probs, versions, call, n_leaves, credits
    )


def paths(packed: PackedTree) -> list[Path]:
    """Root-to-leaf trajectories: one for each token without descendants."""
    size = len(packed)
    ends = np.flatnonzero(packed.subtree_end == np.arange(1, size + 1))
    out = []
    for end in ends:
        on_path = packed.subtree_end[: end + 1] > end
        index = np.flatnonzero(on_path).astype(np.int64)
        out.append(Path(index, int(packed.call[end])))
    return out
