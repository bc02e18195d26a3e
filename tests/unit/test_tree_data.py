"""Rollouts, batches and rows as TensorDicts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tensordict import lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

from clawgym_env.tree.pack import PackedTree
from clawgym_env.types import Status
from tests.trees import Call, assert_same_tree, packed_of_calls, packed_trees, path_of
from torchrl_ext.data import call_rows, packed_of, path_rows, rows_of, to_training_batch, tree_td
from torchrl_ext.estimators import TreeGroupAdvantage

TREE = packed_of_calls([Call([0, 1], [2, 3]), Call([0, 1, 2, 3, 4], [1]), Call([0, 1, 2, 3, 4], [2, 2])])
OTHER = packed_of_calls([Call([0, 1, 1], [4])])


class TestRollout:
    @given(packed_trees())
    @settings(max_examples=50, deadline=None)
    def test_round_trip(self, tree: PackedTree) -> None:
        assert_same_tree(packed_of(tree_td(tree, reward=0.5, query="q")), tree)

    def test_unscored_is_nan_and_flagged(self) -> None:
        for td in (
            tree_td(TREE, reward=None, query="q"),
            tree_td(TREE, reward=1.0, query="q", status=Status.SANDBOX_ERROR),
        ):
            assert math.isnan(td["next", "reward"].item())
            assert not td["next", "scored"].item()
            assert td["next", "truncated"].item() and td["next", "done"].item() and not td["next", "terminated"].item()

    def test_agent_timeout_is_scored(self) -> None:
        td = tree_td(TREE, reward=0.25, query="q", status=Status.AGENT_TIMEOUT)
        assert td["next", "reward"].shape == (1, 1) and td["next", "reward"].item() == 0.25
        assert td["next", "scored"].item() and td["next", "terminated"].item()

    def test_oldest_policy_version(self) -> None:
        later = replace(TREE, versions=TREE.versions + 3 * TREE.sampled)
        assert tree_td(later, reward=1, query="q")["next", "policy_version"].item() == 3

    def test_survives_a_replay_buffer(self) -> None:
        rb = ReplayBuffer(
            storage=LazyStackStorage(8),
            sampler=SamplerWithoutReplacement(),
            batch_size=3,
            transform=TreeGroupAdvantage(),
        )
        rb.extend(
            lazy_stack(
                [
                    tree_td(TREE, reward=1.0, query="task ü", rollout_id="a", harness="pi"),
                    tree_td(OTHER, reward=0.0, query="task ü", rollout_id="b"),
                    tree_td(OTHER, reward=None, query="task ü", rollout_id="c", status=Status.ENGINE_ERROR),
                ]
            )
        )
        found = {td["rollout_id"]: td for td in rb.sample().unbind(0)}
        assert found["a"]["query"] == "task ü" and found["a"]["harness"] == "pi"
        assert_same_tree(packed_of(found["a"]), TREE)
        assert_same_tree(packed_of(found["b"]), OTHER)
        advantages = [found[k]["advantage"].item() for k in "abc"]
        np.testing.assert_allclose(advantages, [1, -1, 0], atol=1e-5)
        assert found["c"]["status"] == "engine_error"


class TestBatch:
    def test_groups_are_told_apart(self) -> None:
        tds = [tree_td(OTHER, reward=r, query=q) for r, q in ((1.0, "a"), (0.5, "b"), (0.0, "a"), (0.7, "b"))]
        out = TreeGroupAdvantage(scale="none").inv(lazy_stack(tds))
        np.testing.assert_allclose([td["advantage"].item() for td in out.unbind(0)], [0.5, -0.1, -0.5, 0.1], atol=1e-6)

    def test_advantages_below_zero_can_push_less(self) -> None:
        tds = [tree_td(OTHER, reward=r, query="a") for r in (1.0, 0.0, 0.0, 1.0)]
        out = TreeGroupAdvantage(eps=0.0, negative_weight=0.25).inv(lazy_stack(tds))
        np.testing.assert_allclose([td["advantage"].item() for td in out.unbind(0)], [1, -0.25, -0.25, 1], atol=1e-6)

    def test_groups_without_variance_can_be_filtered(self) -> None:
        buffer = ReplayBuffer(
            storage=LazyStackStorage(8),
            sampler=SamplerWithoutReplacement(),
            batch_size=2,
            transform=TreeGroupAdvantage(zero_variance="filter", eps=0.0),
        )
        buffer.extend(lazy_stack([tree_td(OTHER, reward=1.0, query="a"), tree_td(OTHER, reward=1.0, query="a")]))
        assert len(buffer) == 0
        scores = ((1.0, "a"), (1.0, "a"), (1.0, "b"), (0.0, "b"), (None, "b"))
        buffer.extend(lazy_stack([tree_td(OTHER, reward=r, query=q) for r, q in scores]))
        rows = buffer[:].unbind(0)
        assert [(td["query"], td["advantage"].item()) for td in rows] == [("b", 1.0), ("b", -1.0)]
        with pytest.raises(ValueError, match="zero_variance"):
            TreeGroupAdvantage(zero_variance="drop")  # type: ignore[arg-type]

    def test_scored_rollout_without_tokens_counts_in_g(self) -> None:
        empty = packed_of_calls([Call([0, 1], [2])], keep=frozenset())
        td = to_training_batch([tree_td(TREE, reward=1, query="q"), tree_td(empty, reward=1, query="q")])
        assert td["batch", "n_rollouts"][0].item() == 2
        assert "advantage" not in td
        assert len(td) == len(TREE)

    def test_credit_multiplies_the_advantage(self) -> None:
        half = replace(TREE, credit=np.where(TREE.call == 1, np.float32(0.5), np.float32(1)))
        other = tree_td(OTHER, reward=0, query="q", advantage=3)
        td = to_training_batch([tree_td(half, reward=1, query="q", advantage=-2.0), other])
        mask = td["masks", "all_assistant_mask"]
        assert td["advantage"][mask].tolist() == [-2, -2, -1, -2, -2, 3]
        assert td["advantage"].dtype == torch.float32
        rows = call_rows(half, reward=1, query="q", advantage=-2.0).unbind(0)
        assert [r["advantage"].item() for r in rows] == [-2, -1, -2]
        with pytest.raises(ValueError, match="unequal credit"):
            path_rows(half, reward=1, query="q", advantage=-2.0)
        path_rows(half, reward=1, query="q")
        even = path_rows(replace(half, credit=np.full(len(half), np.float32(0.5))), reward=1, query="q", advantage=-2.0)
        assert [r["advantage"].item() for r in even.unbind(0)] == [-1, -1]

    def test_rollouts_that_train_nothing_make_no_rows(self) -> None:
        nothing = tree_td(packed_of_calls([Call([0, 1], [2])], keep=frozenset()), reward=1, query="q")
        rows = rows_of([nothing, tree_td(OTHER, reward=1, query="q")]).unbind(0)
        assert [r["tree", "rollout"].item() for r in rows] == [1]
        with pytest.raises(ValueError, match="scored and trains"):
            rows_of([nothing])

    def test_half_written_advantages_are_refused(self) -> None:
        with pytest.raises(ValueError, match="TreeGroupAdvantage"):
            to_training_batch([tree_td(TREE, reward=1, query="q", advantage=1.0), tree_td(OTHER, reward=1, query="q")])

    def test_an_answer_to_nothing_is_refused(self) -> None:
        rootless = replace(OTHER, **{f: getattr(OTHER, f)[3:] for f in OTHER.__dataclass_fields__})
        rootless = replace(rootless, parent=np.array([-1]), depth=np.array([0]), subtree_end=np.array([1]))
        with pytest.raises(ValueError, match="no token before it"):
            to_training_batch([tree_td(rootless, reward=1, query="q")])

    def test_options_are_checked_at_once(self) -> None:
        with pytest.raises(ValueError, match="baseline"):
            TreeGroupAdvantage(baseline="median")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="negative_weight"):
            TreeGroupAdvantage(negative_weight=-1.0)


class TestRows:
    def test_call_rows_by_hand(self) -> None:
        rows = call_rows(TREE, reward=0.5, query="q", advantage=2.0, rollout=7).unbind(0)
        assert [r["tokens", "full"].tolist() for r in rows] == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 1], [0, 1, 2, 3, 4, 2, 2]]
        assert [r["tokens", "prompt"].tolist() for r in rows] == [[0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
        assert [r["tokens", "response"].tolist() for r in rows] == [[2, 3], [1], [2, 2]]
        np.testing.assert_array_equal(rows[1]["log_probs", "full"], [math.nan] * 5 + [-1])
        assert rows[2]["masks", "all_assistant_mask"].tolist() == [False] * 5 + [True] * 2
        assert [r["next", "reward"].tolist() for r in rows] == [[[0.0]], [[0.0]], [[0.5]]]
        assert [r["next", "done"].tolist() for r in rows] == [[False], [False], [True]]
        assert [r["next", "step_count"].tolist() for r in rows] == [[1], [2], [3]]
        assert [r["next", "policy_version"].item() for r in rows] == [0, 1, 2]
        assert [r["tree", "call"].item() for r in rows] == [0, 1, 2]
        assert [r["tree", "parent_call"].item() for r in rows] == [-1, 0, 0]
        assert rows[0]["advantage"].tolist() == [[2.0]] and rows[0]["query"] == "q"
        assert rows[0]["tree", "rollout"].item() == 7

    def test_path_rows_by_hand(self) -> None:
        rows = path_rows(TREE, reward=0.5, query="q").unbind(0)
        assert [r["tokens", "full"].tolist() for r in rows] == [[0, 1, 2, 3, 4, 1], [0, 1, 2, 3, 4, 2, 2]]
        masks = [r["masks", "all_assistant_mask"].int().tolist() for r in rows]
        assert masks == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1, 1]]
        naive = path_rows(TREE, reward=0.5, query="q", node_weight="per_leaf")
        masks = [r["masks", "all_assistant_mask"].int().tolist() for r in naive.unbind(0)]
        assert masks == [[0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 0, 1, 1]]
        assert all(r["tokens"].prompt is None for r in rows)

    @given(packed_trees(keep_all=True))
    @settings(max_examples=80, deadline=None)
    def test_each_token_trains_once(self, tree: PackedTree) -> None:
        for rows in (call_rows(tree, reward=1, query="q"), path_rows(tree, reward=1, query="q")):
            trained = torch.cat([r["tree", "index"][r["masks", "all_assistant_mask"]] for r in rows.unbind(0)])
            assert sorted(trained.tolist()) == np.flatnonzero(tree.trainable).tolist()
            for row in rows.unbind(0):
                index = row["tree", "index"].tolist()
                assert index == path_of(tree.parent, index[-1])

    @given(packed_trees(keep_all=True))
    @settings(max_examples=80, deadline=None)
    def test_naive_rows_train_a_token_once_a_leaf(self, tree: PackedTree) -> None:
        rows = path_rows(tree, reward=1, query="q", node_weight="per_leaf")
        trained = torch.cat([r["tree", "index"][r["masks", "all_assistant_mask"]] for r in rows.unbind(0)])
        count = np.bincount(trained.numpy(), minlength=len(tree))
        np.testing.assert_array_equal(count, np.where(tree.trainable, tree.n_leaves, 0))

    def test_dropped_calls_make_no_rows(self) -> None:
        tree = packed_of_calls([Call([0, 1], [2]), Call([0, 1, 2], [3])], keep=frozenset({0}))
        for rows in (call_rows(tree, reward=1, query="q"), path_rows(tree, reward=1, query="q")):
            assert [r["tokens", "full"].tolist() for r in rows.unbind(0)] == [[0, 1, 2]]
        with pytest.raises(ValueError, match="no trainable call"):
            call_rows(packed_of_calls([Call([0], [1])], keep=frozenset()), reward=1, query="q")
