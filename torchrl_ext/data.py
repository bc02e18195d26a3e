"""From packed trees to TensorDicts: one a rollout for storage, one flat forest a batch for the loss.

Invariants: a rollout's TensorDict holds everything that training reads, so it survives a replay buffer alone; a
rollout without a score has a NaN reward and ``("next", "scored")`` False, never reward 0; in the flat batch each
trainable token lies once.

Rows for stock TorchRL losses are made by ``call_rows`` and ``path_rows``.

Shape legend: ``N`` unique token-nodes, ``R`` rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from clawgym_env.tree.pack import PackedTree
from clawgym_env.types import Status
from torchrl_ext.merge import MergedTree, merge_trees, prune
from torchrl_ext.rows import call_rows, path_rows

__all__ = [
    "MergedTree",
    "call_rows",
    "merge_trees",
    "packed_of",
    "path_rows",
    "prune",
    "rows_of",
    "to_training_batch",
    "tree_td",
]

_FIELDS = tuple(PackedTree.__dataclass_fields__)


def tree_td(
    packed: PackedTree,
    *,
    reward: float | None,
    query: str,
    status: Status = Status.COMPLETED,
    rollout_id: str = "",
    task_id: str = "",
    harness: str = "",
    advantage: float | None = None,
) -> TensorDict:
    """One rollout as a TensorDict of batch size [], for ``lazy_stack``, ``LazyStackStorage`` and ``ReplayBuffer``.

    | key | value |
    |---|---|
    | ``("tree", <field of PackedTree>)`` | [N], ragged between rollouts |
    | ``("next", "reward")`` | [1, 1] float32, NaN where there is no score |
    | ``("next", "scored")`` | [1] bool, whether the rollout takes part in baselines and the loss |
    | ``("next", "done" / "terminated" / "truncated")`` | [1] bool; truncated where the rollout is not scored |
    | ``("next", "policy_version")`` | [] int64, the oldest version among the sampled tokens; -1 without any |
    | ``"advantage"`` | [1, 1] float32, where given |
    | ``"query"``, ``"status"``, ``"rollout_id"``, ``"task_id"``, ``"harness"`` | str |

    Args:
        packed: The rollout's tree.
        reward: The verifier's score; ``None`` where there is none.
        query: The prompt group's key: rollouts of one task under one harness share it.
        status: How the rollout ended; one that is not ``scored`` hides the reward.
    """
    scored = reward is not None and status.scored
    sampled = packed.versions[packed.sampled]
    flag = {"done": True, "terminated": scored, "truncated": not scored, "scored": scored}
    td = TensorDict(
        {
            "tree": TensorDict({name: torch.as_tensor(getattr(packed, name)) for name in _FIELDS}),
            "query": query,
            "status": str(status),
            "rollout_id": rollout_id,
            "task_id": task_id,
            "harness": harness,
            "next": TensorDict(
                {
                    "reward": torch.full((1, 1), reward if scored and reward is not None else torch.nan),
                    "policy_version": torch.tensor(int(sampled.min()) if len(sampled) else -1),
                    **{name: torch.tensor([value]) for name, value in flag.items()},
                }
            ),
        }
    )
    if advantage is not None:
        td["advantage"] = torch.full((1, 1), float(advantage))
    return td


def packed_of(td: TensorDictBase) -> PackedTree:
    """The tree of a rollout's TensorDict; arrays are views where the tensors lie on the CPU."""
    return PackedTree(**{name: td["tree", name].cpu().numpy() for name in _FIELDS})


def rows_of(
    rollouts: Sequence[TensorDictBase] | TensorDictBase, kind: Literal["call", "path"] = "call"
) -> TensorDictBase:
    """Rows for stock TorchRL losses, of every scored rollout that trains: a ``postproc`` for the collector.

    Args:
        rollouts: TensorDicts of ``tree_td``, or their lazy stack.
        kind: ``call_rows`` or ``path_rows``.

    Returns:
        1-D lazy stack; the rows of a rollout follow each other and end with the one that is done.

    Raises:
        ValueError: no rollout of the batch is scored and trains.
    """
    make = {"call": call_rows, "path": path_rows}[kind]
    tds = list(rollouts.unbind(0)) if isinstance(rollouts, TensorDictBase) else list(rollouts)
    rows: list[TensorDictBase] = []
    for k, td in enumerate(tds):
        if not bool(td["next", "scored"]) or not bool(td["tree", "trainable"].any()):
            continue
        given = td.get("advantage", None)
        advantage = None if given is None else float(given.reshape(()))
        reward = float(td["next", "reward"].reshape(()))
        made = make(packed_of(td), reward=reward, query=td["query"], advantage=advantage, rollout=k)
        rows.extend(made.unbind(0))
    if not rows:
        raise ValueError("no rollout of this batch is scored and trains: there is nothing to make rows of")
    return lazy_stack(rows)


def to_training_batch(
    rollouts: Sequence[TensorDictBase] | TensorDictBase,
    *,
    n_rollouts: int | None = None,
    n_tokens: int | None = None,
    n_prompts: int | None = None,
) -> TensorDict:
    """Lays rollouts out as one flat forest, batch size [N]: what ``TreeGRPOLoss`` and ``TreeSFTLoss`` take.

    Rollouts without a score are left out whole. So are tokens on no path to a trainable one. Common prompts lie once.

    | key | value, each [N] |
    |---|---|
    | ``"token"`` | int64 |
    | ``"token_log_prob"`` | float32, log μ of sampled tokens; NaN elsewhere |
    | ``"advantage"`` | float32, its rollout's times its credit; 0 where shared; absent where the rollouts have none |
    | ``"policy_version"`` | int64, -1 where not sampled |
    | ``("masks", "all_assistant_mask")`` | bool, the tokens that train |
    | ``("tree", "parent" / "depth" / "subtree_end")`` | int64, positions in this batch |
    | ``("tree", "rollout")`` | int64, index into ``rollouts``; -1 where shared |
    | ``("tree", "n_leaves" / "rollout_leaves")`` | int64, retained leaves below the token / of its whole rollout |
    | ``("tree", "prompt")`` | int64, number of the rollout's group; 0 where shared |
    | ``("tree", "credit")`` | float32, multiplies a token's advantage; already in ``"advantage"`` |
    | ``("next", "reward")`` | float32, the score at each trajectory's own last trainable token; 0 elsewhere |
    | ``("next", "done" / "terminated")`` | bool, those tokens |
    | ``("batch", "n_rollouts" / "n_tokens" / "n_prompts")`` | int64, one number everywhere (stride 0): G, Σ Nᵢ, Q |

    Args:
        rollouts: TensorDicts of ``tree_td``, or their lazy stack.
        n_rollouts: G of the whole batch, where this is one micro-batch of it; ``None`` counts the scored rollouts here.
        n_tokens: Trainable tokens of the whole batch; ``None`` counts those here. With both given, the losses of the
            micro-batches add up to the loss of the batch.
        n_prompts: Groups of the whole batch; ``None`` counts those here. ``prompt_mean`` needs it, and whole groups.

    Raises:
        ValueError: some scored rollouts have an advantage and others none, or a trainable token opens a tree (nothing
            predicts it).
    """
    tds = list(rollouts.unbind(0)) if isinstance(rollouts, TensorDictBase) else list(rollouts)
    scored = np.array([bool(td["next", "scored"]) for td in tds], dtype=np.bool_)
    trees = [_retained(packed_of(td), bool(ok)) for td, ok in zip(tds, scored, strict=True)]
    merged = merge_trees(trees)
    if bool((merged.trainable & (merged.parent < 0)).any()):
        raise ValueError("a trainable token has no token before it: every sampled token needs a prompt")
    total = len(merged)
    g = int(scored.sum()) if n_rollouts is None else n_rollouts
    n = int(merged.trainable.sum()) if n_tokens is None else n_tokens
    leaves = np.array([int(tree.n_leaves[tree.parent < 0].sum()) for tree in trees], dtype=np.int64)
    names: dict[str, int] = {}
    prompt = np.array([names.setdefault(td["query"], len(names)) for td in tds], dtype=np.int64)
    q = len(set(prompt[scored].tolist())) if n_prompts is None else n_prompts
    last = _last_trainable(merged)
    score = np.array([float(td["next", "reward"].reshape(())) for td in tds], dtype=np.float32)
    batch = TensorDict(
        {
            "token": torch.from_numpy(merged.tokens),
            "token_log_prob": torch.from_numpy(merged.log_probs),
            "policy_version": torch.from_numpy(merged.versions),
            "masks": {"all_assistant_mask": torch.from_numpy(merged.trainable)},
            "tree": {
                "parent": torch.from_numpy(merged.parent),
                "depth": torch.from_numpy(merged.depth),
                "subtree_end": torch.from_numpy(merged.subtree_end),
                "rollout": torch.from_numpy(merged.rollout),
                "n_leaves": torch.from_numpy(merged.n_leaves),
                "rollout_leaves": _per_token(leaves, merged),
                "prompt": _per_token(prompt, merged),
                "credit": torch.from_numpy(merged.credit),
            },
            "next": {
                "reward": torch.where(last, _per_token(score, merged), 0.0),
                "done": last,
                "terminated": last.clone(),
            },
            "batch": {
                "n_rollouts": torch.tensor(g).expand(total),
                "n_tokens": torch.tensor(n).expand(total),
                "n_prompts": torch.tensor(q).expand(total),
            },
        },
        batch_size=[total],
    )
    advantage = _advantages(tds, scored)
    if advantage is not None:
        batch["advantage"] = _per_token(advantage, merged) * torch.from_numpy(merged.credit)
    return batch


def _retained(packed: PackedTree, scored: bool) -> PackedTree:
    if not scored:
        packed = replace(packed, trainable=np.zeros_like(packed.trainable))
    return prune(packed)[0]


def _advantages(tds: Sequence[TensorDictBase], scored: np.ndarray) -> np.ndarray | None:
    """[R] float32, 0 where not scored; ``None`` where no scored rollout has one."""
    has = np.array(["advantage" in td for td in tds], dtype=np.bool_)
    if not (has & scored).any():
        return None
    if not (has | ~scored).all():
        raise ValueError("some scored rollouts have no advantage: apply TreeGroupAdvantage to the whole batch first")
    return np.array(
        [float(td["advantage"].reshape(())) if ok else 0.0 for td, ok in zip(tds, scored, strict=True)],
        dtype=np.float32,
    )


def _last_trainable(merged: MergedTree) -> Tensor:
    """[N] bool: trainable tokens with none below."""
    below = np.concatenate([[0], np.cumsum(merged.trainable)])
    return torch.from_numpy(merged.trainable & (below[merged.subtree_end] == below[1:]))


def _per_token(values_R: np.ndarray, merged: MergedTree) -> Tensor:
    """[N]: the value of the token's rollout; 0 where several rollouts share it."""
    padded = np.append(values_R, np.zeros(1, dtype=values_R.dtype))
    return torch.from_numpy(padded[merged.rollout])
