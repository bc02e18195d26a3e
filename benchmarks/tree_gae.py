"""Tree GAE beside TorchRL's estimators, which know time: every trajectory of a tree by itself.

    python benchmarks/tree_gae.py --out gae.json

Milliseconds of CPU time on one thread, the least of the rounds, for the advantages of all unique tokens. ``loop`` and
``vec`` are TorchRL's ``generalized_advantage_estimate`` and ``vec_generalized_advantage_estimate`` over the
trajectories laid end to end (one sequence, ``done`` at each trajectory's end), ``flat`` is our own recursion over the
same trajectories; each is followed by the mean over the branches of a shared token, and the error is that mean's
distance from tree GAE. The limit is memory: one read of values and rewards and one write of advantages and targets.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import table
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate, vec_generalized_advantage_estimate

from torchrl_ext import functional as F

GAMMA, LMBDA = 0.999, 0.95


@dataclass(frozen=True, eq=False)
class Problem:
    """A forest: [N] parents, what trains, leaves; and [M] values and rewards of what trains."""

    parent: Tensor
    trainable: Tensor
    n_leaves: Tensor
    value: Tensor
    reward: Tensor


def chain(tokens: int) -> Problem:
    """One trajectory of calls of 300 tokens; the last third of each trains."""
    calls = max(1, tokens // 300)
    return _problem([-1, *range(calls - 1)], [300] * calls)


def agents(turns: int, every: int, branch: int) -> Problem:
    """A main agent of ``turns`` calls, with a side branch of ``branch`` calls after each ``every`` of them."""
    parents, sizes = [-1], [300]
    last = 0
    for turn in range(1, turns):
        if turn % every == 0:
            at = last
            for _ in range(branch):
                parents.append(at)
                sizes.append(300)
                at = len(parents) - 1
        parents.append(last)
        sizes.append(300)
        last = len(parents) - 1
    return _problem(parents, sizes)


def samples(trunk: int, branches: int, tokens: int) -> Problem:
    """A trunk and many answers to it."""
    return _problem([-1, *[0] * branches], [trunk, *[tokens] * branches])


def _problem(parents: list[int], sizes: list[int]) -> Problem:
    """Runs of tokens below each other; of each run the last third is the policy's."""
    rng = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    total = int(starts[-1])
    parent, mask = np.arange(-1, total - 1), np.zeros(total, dtype=np.bool_)
    leaves = [1] * len(parents)
    has_child = [False] * len(parents)
    for k in range(len(parents) - 1, 0, -1):
        up = parents[k]
        leaves[up] = leaves[k] + (leaves[up] if has_child[up] else 0)
        has_child[up] = True
    n = np.repeat(leaves, sizes)
    reward = np.zeros(total, dtype=np.float32)
    for k, size in enumerate(sizes):
        parent[starts[k]] = -1 if parents[k] < 0 else starts[parents[k] + 1] - 1
        mask[starts[k] + size - size // 3 : starts[k + 1]] = True
        if not has_child[k]:
            reward[starts[k + 1] - 1] = 1.0
    value = rng.uniform(size=total).astype(np.float32)
    tensors = (torch.from_numpy(x) for x in (parent, mask, n, value[mask], reward[mask]))
    return Problem(*tensors)


def tree(p: Problem) -> F.TreeEstimate:
    """Ours, the skipping of masked tokens included."""
    return F.tree_gae(
        p.value, p.reward, F.trainable_tree(p.parent, p.trainable, p.n_leaves), gamma=GAMMA, lmbda=LMBDA
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Flat:
    """All trajectories laid end to end; ``node`` names each position's token."""

    chains: F.TrainableTree
    node: Tensor
    weight: Tensor
    value: Tensor
    following: Tensor
    reward: Tensor
    done: Tensor
    size: int

    @classmethod
    def of(cls, p: Problem) -> Flat:
        tree = F.trainable_tree(p.parent, p.trainable, p.n_leaves)
        parent, paths = tree.parent_M.tolist(), []
        for end in tree.terminal_M.nonzero().squeeze(-1).tolist():
            path = []
            while end >= 0:
                path.append(end)
                end = parent[end]
            paths.append(path[::-1])
        node = torch.tensor([t for path in paths for t in path])
        done = torch.zeros(len(node), dtype=torch.bool)
        done[torch.tensor([len(path) for path in paths]).cumsum(0) - 1] = True
        begins = torch.cat([torch.tensor([True]), done[:-1]])
        above = torch.where(begins, -1, torch.arange(-1, len(node) - 1))
        chains = F.TrainableTree(node, above, torch.ones(len(node), dtype=torch.float64), done)
        weight = 1 / torch.bincount(node).float()[node]
        value = p.value[node]
        following = torch.cat([value[1:], value[:1]])
        return cls(chains, node, weight, value, following, p.reward[node], done, len(p.value))

    def mean(self, advantage: Tensor) -> Tensor:
        """[M]: over the branches of each token."""
        return torch.zeros(self.size).index_add(0, self.node, self.weight * advantage)


def stock(kind: Callable[..., tuple[Tensor, Tensor]], flat: Flat) -> Tensor:
    """One of TorchRL's estimators."""
    found = kind(
        GAMMA, LMBDA, *(x[:, None] for x in (flat.value, flat.following, flat.reward, flat.done, flat.done))
    )  # fmt: skip
    return flat.mean(found[0].squeeze(-1))


def flat_ours(flat: Flat) -> Tensor:
    """Our recursion, trajectory by trajectory."""
    return flat.mean(F.tree_gae(flat.value, flat.reward, flat.chains, gamma=GAMMA, lmbda=LMBDA).advantage_M)


def least(run: Callable[[], Any], rounds: int) -> float:
    """Least CPU time of a few rounds, in milliseconds."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return 1_000 * min(times)


def measure(p: Problem, rounds: int) -> dict[str, Any]:
    """Times and errors of one shape."""
    flat, ours = Flat.of(p), tree(p).advantage_M
    loop, vec = generalized_advantage_estimate, vec_generalized_advantage_estimate
    buffer = torch.empty_like(p.value)
    row = {
        "tree": least(lambda: tree(p), rounds),
        "flat": least(lambda: flat_ours(flat), rounds),
        "vec": least(lambda: stock(vec, flat), rounds),
        "loop": least(lambda: stock(loop, flat), 1),
        "limit": least(lambda: (buffer.copy_(p.value), buffer.copy_(p.reward)), rounds),
    }
    errors = {
        name: float((ours - found).abs().max())
        for name, found in (("flat", flat_ours(flat)), ("vec", stock(vec, flat)), ("loop", stock(loop, flat)))
    }
    sizes = {
        "tokens": len(p.parent), "trainable": len(p.value), "in_trajectories": len(flat.node),
        "trajectories": int(flat.done.sum()),
    }  # fmt: skip
    return {**sizes, "cpu_ms": row, "error": errors, "loop_over_tree": row["loop"] / row["tree"]}


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1.0, help="scales the shapes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)

    def scaled(n: int) -> int:
        return max(3, int(n * options.size))

    shapes = {
        "chain, 60k tokens": chain(scaled(60_000)),
        "agent, 200 calls, sub-agents": agents(scaled(200), 10, 5),
        "trunk and 256 answers": samples(scaled(6_000), scaled(256), 150),
    }
    results = {name: measure(p, options.rounds) for name, p in shapes.items()}
    print(
        table(
            results,
            lambda r: {
                "unique trainable": r["trainable"],
                "in trajectories": r["in_trajectories"],
                **{f"{k}, ms": v for k, v in r["cpu_ms"].items()},
                "loop / tree": r["loop_over_tree"],
                "largest error": max(r["error"].values()),
            },
        )
    )
    if options.out:
        options.out.write_text(json.dumps({"gamma": GAMMA, "lmbda": LMBDA, "shapes": results}, indent=1))


if __name__ == "__main__":
    main()
