"""Random packed forests with a mask, and tree GAE the slow way: one trajectory at a time, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.trees import path_of


@dataclass(frozen=True, eq=False)
class Forest:
    """Depth-first nodes; ``n_leaves`` counts the last trainable tokens at or below each."""

    parent: Tensor
    trainable: Tensor
    n_leaves: Tensor
    value: Tensor
    reward: Tensor

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def trajectories(self) -> list[list[int]]:
        """Trainable positions of each trajectory, first token first; one a last trainable token."""
        parent, mask = self.parent.numpy(), self.trainable.numpy()
        above = {p for i in np.flatnonzero(mask) for p in path_of(parent, int(i))[:-1]}
        ends = [int(i) for i in np.flatnonzero(mask) if i not in above]
        return [[t for t in path_of(parent, end) if mask[t]] for end in ends]


def forest(parent: Any, trainable: Any, *, seed: int = 0, reward: float | None = None) -> Forest:
    """Values and rewards are drawn, float64; with ``reward`` every trajectory ends with it and earns nothing before."""
    rng = np.random.default_rng(seed)
    parent, mask = np.asarray(parent, dtype=np.int64), np.asarray(trainable, dtype=np.bool_)
    n = len(parent)
    below, leaves = mask.copy(), np.zeros(n, dtype=np.int64)
    has = np.zeros(n, dtype=np.bool_)  # a trainable token below
    for i in range(n - 1, -1, -1):
        leaves[i] = max(leaves[i], int(mask[i] and not has[i]))
        if parent[i] >= 0:
            leaves[parent[i]] += leaves[i]
            has[parent[i]] |= has[i] | below[i]
    last = mask & ~has
    r = rng.normal(size=n) if reward is None else np.where(last, reward, 0.0)
    return Forest(*map(torch.from_numpy, (parent, mask, leaves, rng.normal(size=n), r)))


def random_parents(n: int, fork: float, root: float, rng: np.random.Generator) -> list[int]:
    """Depth-first parents: each token goes on, forks off an ancestor, or begins a new tree."""
    parent, stack = [-1], [0]
    for i in range(1, n):
        u = rng.random()
        if u < root:
            stack = []
        elif u < root + fork:
            stack = stack[: rng.integers(1, len(stack) + 1)]
        parent.append(stack[-1] if stack else -1)
        stack.append(i)
    return parent


def comb(spine: int) -> list[int]:
    """A spine with a one-token branch before each of its tokens."""
    parent, last = [-1], 0
    for _ in range(spine):
        parent += [last, last]
        last = len(parent) - 1
    return parent


def star(branches: int) -> list[int]:
    return [-1, *[0] * branches]


@st.composite
def forests(draw: st.DrawFn, max_size: int = 60, *, reward: float | None = None) -> Forest:
    """Bushy, deep, wide and degenerate forests, with anything from one to all tokens trainable."""
    n = draw(st.integers(1, max_size))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    parent = random_parents(n, draw(st.sampled_from([0.0, 0.1, 0.4, 0.9])), draw(st.sampled_from([0.0, 0.05])), rng)
    mask = rng.random(n) < draw(st.sampled_from([0.2, 0.6, 1.0]))
    mask[rng.integers(n)] = True
    return forest(parent, mask, seed=seed, reward=reward)


def chain_gae(value: Tensor, reward: Tensor, gamma: float, lmbda: float) -> list[float]:
    """GAE of one trajectory by the recursion of arXiv:1506.02438, last token first."""
    out: list[float] = []
    advantage = next_value = 0.0
    for v, r in zip(reversed(value.tolist()), reversed(reward.tolist()), strict=True):
        advantage = r + gamma * next_value - v + gamma * lmbda * advantage
        next_value = v
        out.append(advantage)
    return out[::-1]


def branch_advantages(f: Forest, gamma: float, lmbda: float) -> dict[int, list[float]]:
    """Position -> its advantage in each trajectory that holds it, every trajectory taken alone."""
    out: dict[int, list[float]] = {}
    for path in f.trajectories:
        for t, a in zip(path, chain_gae(f.value[path], f.reward[path], gamma, lmbda), strict=True):
            out.setdefault(t, []).append(a)
    return out
