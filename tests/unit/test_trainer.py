"""Which checkpoint is kept, and what a person is told of a step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from tensordict import lazy_stack

from clawgym_env.tree.ledger import Ledger
from clawgym_env.tree.pack import PackedTree
from tests.trees import Call, packed_of_calls, tiny_qwen3
from torchrl_ext.data import tree_td
from torchrl_ext.losses import TreeGRPOLoss
from torchrl_ext.optim import make_optimizer
from torchrl_ext.recipes.stages import GRPOStage
from torchrl_ext.trainer import _grpo_update, describe_step, favoured


@pytest.mark.parametrize(
    ("rate", "earlier", "expected"),
    [
        (0.2, [], True),
        (0.50, [0.57], True),  # one standard error of 0.57 on 28 tasks is 0.094
        (0.47, [0.57], False),
        (0.60, [0.50, 0.65], True),
        (1.0, [1.0], True),
        (0.99, [1.0], False),  # all passed: no error left
        (math.nan, [0.5], False),
        (math.nan, [], False),
    ],
)
def test_the_later_checkpoint_wins_within_a_standard_error(rate: float, earlier: list[float], expected: bool) -> None:
    assert favoured(rate, earlier, 28) is expected


def test_a_rollout_whose_calls_were_all_filtered_out_makes_no_update() -> None:
    nothing = packed_of_calls([Call([0, 1], [2])], keep=frozenset())
    something = packed_of_calls([Call([0, 1], [2, 3])])
    model = tiny_qwen3()
    args = model, TreeGRPOLoss(model), make_optimizer(model, kind="adamw", lr=1e-3, weight_decay=0.0)

    def step(*trees: PackedTree) -> dict[str, float]:
        tds = [tree_td(t, reward=1 - k, query="q", advantage=1.0 - 2 * k) for k, t in enumerate(trees)]
        records: Any = [SimpleNamespace(ledger=Ledger()) for _ in trees]
        return _grpo_update(*args, lazy_stack(tds), records, GRPOStage(epochs=1))[0]

    assert step(nothing, nothing) == {"trained_rollouts": 0}
    assert step(nothing, something)["trained_rollouts"] == 1


def test_a_step_without_an_update_says_so() -> None:
    row = {
        "step": 1, "reward": math.nan, "pass_at_1": 0.0, "captured": 0, "trained": 0, "unique_tokens": 0,
        "total_tokens": 0, "seconds": {"rollouts": 1.0, "update": 0.0}, "by_harness": {"pi": {"pass_at_1": 0.0}},
    }  # fmt: skip
    line = describe_step(row, 3)
    assert "step 1/3" in line and "no update" in line and "validation" not in line
