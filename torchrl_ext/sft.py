"""Supervised fine-tuning on captured trees: batches, and a curriculum over the common prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

#: First tokens of the prompt that a shortened one keeps: the opening of the system turn.
HEAD = 8


def common_prompt(batch: TensorDictBase) -> int:
    """Number of leading tokens that every path of a flat batch begins with."""
    n = batch.shape[0]
    common = (batch["tree", "subtree_end"] == n) & ~batch["masks", "all_assistant_mask"]
    return int(common.long().cumprod(0).sum())


def shared_prompts(rows: Sequence[TensorDictBase]) -> dict[str, int]:
    """Harness -> number of leading tokens that all of its rollouts begin with; 0 of a harness with one rollout.

    Args:
        rows: TensorDicts of ``tree_td``, all that there are: a few may share parts of their tasks as well.
    """
    first: dict[str, Tensor] = {}
    shared: dict[str, int] = {}
    for row in rows:
        label, tokens, sampled = row["harness"], row["tree", "tokens"], row["tree", "sampled"]
        prompt = tokens[: int((~sampled).long().cumprod(0).sum())]
        if label not in first:
            first[label], shared[label] = prompt, 0
            continue
        known = first[label]
        length = min(len(known), len(prompt))
        first[label] = known[: int((known[:length] == prompt[:length]).long().cumprod(0).sum())]
        shared[label] = len(first[label])
    return shared


def shorten_prompt(batch: TensorDictBase, keep: int, common: int | None = None) -> TensorDictBase:
    """Leaves the middle of the common prompt out: its first ``HEAD`` and last ``keep`` tokens stay.

    A policy made from scratch learns to copy words of the task only when they are near at first; whole prompts come
    later (a schedule of ``keep``). Positions close up, so the distances within what stays are the real ones.

    Args:
        batch: Flat batch [N] of ``to_training_batch``.
        keep: Last tokens of the common prompt to keep.
        common: Length of the common prompt, where the batch is too small to show it.
    """
    seen = common_prompt(batch)
    cut = (seen if common is None else min(seen, common)) - HEAD - keep
    if cut <= 0:
        return batch
    kept = torch.cat([torch.arange(HEAD), torch.arange(HEAD + cut, batch.shape[0])])
    out: TensorDict = batch[kept]
    tree = out["tree"]
    tree["parent"] = torch.where(tree["parent"] >= HEAD + cut, tree["parent"] - cut, tree["parent"])
    tree["parent"][HEAD] = HEAD - 1
    tree["depth"] = torch.where(tree["depth"] >= HEAD + cut, tree["depth"] - cut, tree["depth"])
    tree["subtree_end"] = tree["subtree_end"] - cut
    return out


def prompt_length(share_done: float, curriculum: tuple[tuple[float, int], ...]) -> int | None:
    """Tokens of the common prompt to show when that share of the steps is done; ``None`` for all."""
    return next((keep for until, keep in curriculum if share_done < until), None)
