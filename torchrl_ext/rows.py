"""Rows for stock TorchRL code (``GRPOLoss``, ``MCAdvantage``, the GRPO scripts): linear sequences cut from a tree.

Invariant: a row's tokens are exactly what the policy saw and said on one path. Under ``node_weight="once"`` (and in
call rows always) each trainable token is unmasked in exactly one row of its rollout.

The rows of one rollout are a 1-D lazy stack with ragged leaves and form one trajectory: the reward lies on the last
row, which alone is ``done``, so ``MCAdvantage(trajectory_return="sum")`` sees the rollout's reward. Use call rows under
``GRPOLoss(masking_strategy="sft")``; path rows, which have several assistant spans and no ``("tokens", "prompt")``,
under ``"rlhf"`` or ``"sft"``. Rows are for rollouts with a score: stock code cannot express an exclusion.

Shape legend: ``N`` token-nodes of the tree, ``T`` tokens of a row, ``P`` of its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm import LogProbs, Masks, Tokens

from clawgym_env.tree.pack import BoolArray, PackedTree
from clawgym_env.types import TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One sequence.

    Attributes:
        index: [T] int64, positions in the packed tree.
        train: [T] bool, tokens that this row trains.
        call: The call at its end.
        prompt: P where the row is a prompt and one response; ``None`` otherwise.
    """

    index: TokenArray
    train: BoolArray
    call: int
    prompt: int | None


def call_rows(
    packed: PackedTree, *, reward: float, query: str, advantage: float | None = None, rollout: int = 0
) -> TensorDictBase:
    """One row a trainable call: its prompt and its one response, in depth-first order of the calls.

    Args:
        packed: The rollout's tree.
        reward: The rollout's score.
        query: The prompt group's key, ``MCAdvantage``'s ``prompt_key``.
        advantage: Written to every row, times the call's credit, where given.
        rollout: Written to ``("tree", "rollout")``.

    Returns:
        Lazy stack [calls]; see ``path_rows`` for the keys.

    Raises:
        ValueError: the tree has no trainable call.
    """
    rows = []
    for call, index in _responses(packed).items():
        path = _path_to(packed, int(index[-1]))
        prompt = len(path) - len(index)
        rows.append(_Row(path, np.arange(len(path)) >= prompt, call, prompt))
    return _stack(packed, rows, reward=reward, query=query, advantage=advantage, rollout=rollout)


def path_rows(
    packed: PackedTree,
    *,
    reward: float,
    query: str,
    advantage: float | None = None,
    rollout: int = 0,
    node_weight: Literal["once", "per_leaf"] = "once",
) -> TensorDictBase:
    """One row a root-to-leaf path; a leaf is a trainable call that no trainable call extends.

    | key of a row, batch size [] | value |
    |---|---|
    | ``("tokens", "full")`` | [T] int64; call rows also ``"prompt"`` [P] and ``"response"`` [T - P] |
    | ``("masks", "all_attention_mask")``, ``("masks", "all_assistant_mask")`` | [T] bool |
    | ``("log_probs", "full")`` | [T] float32, NaN where the row does not train |
    | ``"advantage"`` | [1, 1] float32 |
    | ``("next", "reward")`` | [1, 1] float32 |
    | ``"done"``, ``"terminated"``, ``"truncated"``, root and ``"next"`` | [1] bool |
    | ``("next", "step_count")``, ``("next", "policy_version")`` | [1] int64, [] int64 |
    | ``("tree", "index")`` | [T] int64, positions in the packed tree |
    | ``("tree", "call" / "parent_call" / "rollout")`` | [] int64 |
    | ``"query"`` | str |

    Args:
        node_weight: ``once`` unmasks a token that several paths share in the first of them only; ``per_leaf`` in all.

    The other arguments and the errors are those of ``call_rows``; moreover a ``ValueError`` where an advantage is given
    and one path holds calls of unequal credit: a row has one advantage.
    """
    below = np.concatenate([[0], np.cumsum(packed.trainable)])
    seen = np.zeros(len(packed), dtype=np.bool_)
    rows = []
    for call, index in _responses(packed).items():
        end = int(index[-1])
        if below[packed.subtree_end[end]] > below[end + 1]:
            continue
        path = _path_to(packed, end)
        train = packed.trainable[path] & ~seen[path]
        if node_weight == "once":
            seen[path] = True
        rows.append(_Row(path, train, call, None))
    return _stack(packed, rows, reward=reward, query=query, advantage=advantage, rollout=rollout)


def _responses(packed: PackedTree) -> dict[int, TokenArray]:
    """Trainable call -> positions of its tokens, ascending; calls in depth-first order of their last token."""
    index = np.flatnonzero(packed.trainable)
    order = np.argsort(packed.call[index], kind="stable")
    index, call = index[order], packed.call[index][order]
    pieces = np.split(index, np.flatnonzero(np.diff(call)) + 1) if len(index) else []
    return {int(packed.call[piece[0]]): piece for piece in sorted(pieces, key=lambda piece: int(piece[-1]))}


def _path_to(packed: PackedTree, end: int) -> TokenArray:
    """[T] positions of ``end`` and what lies before it: j is on the path iff ``j <= end < subtree_end[j]``."""
    return np.flatnonzero(packed.subtree_end[: end + 1] > end)


def _stack(
    packed: PackedTree, rows: list[_Row], *, reward: float, query: str, advantage: float | None, rollout: int
) -> TensorDictBase:
    if not rows:
        raise ValueError("the tree has no trainable call: leave this rollout out")
    out = []
    for step, row in enumerate(rows):
        last = step == len(rows) - 1
        td = _row_td(packed, row, query=query)
        td["tree", "rollout"] = torch.tensor(rollout)
        td["next"] = TensorDict(
            {
                "reward": torch.full((1, 1), float(reward) if last else 0.0),
                "step_count": torch.tensor([step + 1]),
                "policy_version": torch.tensor(int(packed.versions[row.index[row.train]].min())),
                **_done(last),
            }
        )
        if advantage is not None:
            td["advantage"] = torch.full((1, 1), float(advantage) * _credit(packed, row))
        out.append(td)
    return lazy_stack(out)


def _credit(packed: PackedTree, row: _Row) -> float:
    found = np.unique(packed.credit[row.index[row.train]])
    if len(found) > 1:
        raise ValueError(f"calls of one path have unequal credit ({found.tolist()}): make call rows of this rollout")
    return float(found[0])


def _row_td(packed: PackedTree, row: _Row, *, query: str) -> TensorDict:
    full = torch.from_numpy(packed.tokens[row.index])
    train = torch.from_numpy(row.train)
    log_probs = torch.from_numpy(np.where(row.train, packed.log_probs[row.index], np.float32(np.nan)))
    earlier = packed.call[row.index]
    earlier = earlier[(earlier >= 0) & (earlier != row.call)]
    split = {} if row.prompt is None else {"prompt": full[: row.prompt], "response": full[row.prompt :]}
    return TensorDict(
        {
            "query": query,
            "tokens": Tokens(full=full, **split),
            "masks": Masks(all_attention_mask=torch.ones_like(train), all_assistant_mask=train),
            "log_probs": LogProbs(full=log_probs),
            "tree": TensorDict(
                {
                    "index": torch.from_numpy(row.index),
                    "call": torch.tensor(row.call),
                    "parent_call": torch.tensor(int(earlier[-1]) if len(earlier) else -1),
                }
            ),
            **_done(False),
        }
    )


def _done(last: bool) -> dict[str, torch.Tensor]:
    return {
        "done": torch.tensor([last]),
        "terminated": torch.tensor([last]),
        "truncated": torch.tensor([False]),
    }
