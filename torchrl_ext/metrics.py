"""Figures of a batch of rollouts, over all of it and by harness."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from clawgym_env.evaluation import by_harness, evaluate
from clawgym_env.rollout import Rollout
from clawgym_env.tree.ledger import total


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """A row of ``metrics.jsonl``; ``by_harness`` holds the same figures of each harness, and its seconds a rollout."""
    each = {label: {**_figures(own), **_of_harness(own)} for label, own in by_harness(rollouts).items()}
    return {**_figures(rollouts), "by_harness": each}


def _figures(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    summary = evaluate(rollouts)
    rewards = [r.reward.score for r in rollouts if r.reward is not None]
    return {
        "rollouts": len(rollouts),
        "reward": float(np.mean(rewards)) if rewards else float("nan"),
        "pass_at_1": summary.overall.rate,
        "by_family": {k: v.rate for k, v in summary.by_family.items()},
        "unscored": summary.unscored,
        "calls": summary.calls,
        **total([r.ledger for r in rollouts]).as_dict(),
        "unique_tokens": sum(r.tree.unique_tokens for r in rollouts),
        "total_tokens": sum(r.tree.total_tokens for r in rollouts),
        "cached_tokens": sum(c.call.cached_tokens for r in rollouts for c in r.records),
    }


def _of_harness(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """What is told of a harness alone: mean seconds of a rollout by phase, and its groups' mean variance of reward."""
    groups: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is not None:
            groups[rollout.group].append(rollout.reward.score)
    phases = dict.fromkeys(phase for rollout in rollouts for phase in rollout.seconds)
    return {
        "group_variance": float(np.mean([np.var(scores) for scores in groups.values()])) if groups else float("nan"),
        "seconds": {phase: float(np.mean([r.seconds.get(phase, 0.0) for r in rollouts])) for phase in phases},
    }


def log_prob_gaps(batch: TensorDictBase, labels: Sequence[str]) -> dict[str, dict[str, float]]:
    """Mean and largest |log π_old − log μ| over the trainable tokens of each harness.

    Args:
        batch: Flat batch [N] of ``to_training_batch`` with ``old_log_prob``.
        labels: Harness of each rollout of the batch.
    """
    index_M = batch["masks", "all_assistant_mask"].nonzero().squeeze(-1)
    gap_M = (batch["old_log_prob"][index_M] - batch["token_log_prob"][index_M]).abs()
    rollout_M = batch["tree", "rollout"][index_M]
    out = {}
    for label in dict.fromkeys(labels):
        own = torch.tensor([k for k, name in enumerate(labels) if name == label])
        gap = gap_M[torch.isin(rollout_M, own)]
        if len(gap):
            out[label] = {"log_prob_gap_mean": float(gap.mean()), "log_prob_gap_max": float(gap.max())}
    return out
