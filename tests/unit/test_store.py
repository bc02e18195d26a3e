"""The run folder: what is written is read back, and a killed writer leaves nothing that cannot be read."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from clawgym_env.errors import ConfigError
from clawgym_env.proxy.calls import CallRecord, FrozenCall
from clawgym_env.rollout import Rollout
from clawgym_env.store import RunFolder, write_whole
from clawgym_env.tree.filters import Kept
from clawgym_env.tree.ledger import Ledger
from clawgym_env.tree.pack import PackedTree
from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import Generation, Message, ModelCall, Reward, Sampling, Status, ToolCall


def rollout(ident: str, status: Status = Status.COMPLETED, *, log_prob: float = -0.25, calls: int = 2) -> Rollout:
    """A chain of calls of two sampled tokens each."""
    tree, ledger, records, history = PrefixTree(), Ledger(), [], np.empty(0, np.int64)
    for k in range(calls):
        prompt = np.concatenate([history, [10 + k, 20 + k]])
        generation = Generation(
            np.array([30 + k, 2]), np.array([log_prob, -1.5], np.float32), np.array([k, k]), "stop", cached_tokens=k
        )
        tree.attach(k, prompt, generation)
        ledger.captured += 2
        history = np.concatenate([prompt, generation.token_ids])
        reply = Message("assistant", "żółć", None, (ToolCall("bash", {"command": "ls"}, f"call{k}x0"),))
        facts = ModelCall(k, len(prompt), 2, k, "stop", Sampling(0.5, max_tokens=9, seed=2**62))
        new = (Message("tool", "out", tool_call_id=f"call{k - 1}x0"),) if k else (Message("user", "Go."),)
        records.append(CallRecord(facts, k - 1 if k else None, new, reply, ("bash",), 0.123456, 1.0))
    reward = Reward(0.5, True, {"files": 0.5}, "half") if status.scored else None
    if not status.scored:
        ledger.drop(f"rollout {status}", ledger.trained)
    ledger.note("a note")
    return Rollout(
        ident, "task-1", "builtin", "count", "pi", "task-1/pi", status, reward, "why", tree, ledger, records,
        {"start": 0.1},
    )  # fmt: skip


def same(a: PackedTree, b: PackedTree) -> None:
    for f in fields(PackedTree):
        left, right = getattr(a, f.name), getattr(b, f.name)
        assert left.dtype == right.dtype, f.name
        assert np.array_equal(left, right, equal_nan=left.dtype.kind == "f"), f.name


def test_rollouts_are_read_back_as_they_were(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    written = [
        rollout("r/1"),
        rollout("r/2", log_prob=float("nan")),
        rollout("r/3", Status.SANDBOX_ERROR),
        rollout("r/4", Status.NO_CALLS, calls=0),
    ]
    folder.write_rollouts("grpo-0001", written)
    read = list(folder.rollouts("grpo-0001"))
    for a, b in zip(written, read, strict=True):
        same(a.packed(), b.packed)
        for name in ("id", "task_id", "suite", "family", "harness", "group", "status", "reward", "detail", "ledger"):
            assert getattr(a, name) == getattr(b, name), name
        assert b.seconds == {"start": 0.1}
        assert len(b.calls) == len(a.records)
    assert np.isnan(read[1].packed.log_probs[read[1].packed.sampled]).sum() == 2
    assert read[2].reward is None and not read[2].packed.trainable.any() and read[2].packed.sampled.any()
    assert len(read[3].packed) == 0


def test_a_stored_call_reads_like_a_conversation(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_rollouts("a", [rollout("r")])
    _, call = next(folder.rollouts("a")).calls
    assert call == {
        "call_id": 1,
        "prompt_tokens": 6,
        "sampled_tokens": 2,
        "cached_tokens": 1,
        "finish_reason": "stop",
        "continues": None,
        "kind": "main",
        "agent": "main",
        "segment": 0,
        "spawned_by": None,
        "confidence": 1.0,
        "sampling": {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "max_tokens": 9, "seed": 2**62},
        "parent": 0,
        "messages": [{"role": "tool", "content": "out", "tool_call_id": "call0x0"}],
        "reply": {
            "role": "assistant",
            "content": "żółć",
            "tool_calls": [
                {"id": "call1x0", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
            ],
        },
        "tools": ["bash"],
        "started_s": 0.1235,
        "seconds": 1.0,
    }


def test_a_tool_that_failed_is_told(tmp_path: Path) -> None:
    done = rollout("r")
    done.records[-1] = replace(done.records[-1], messages=(Message("tool", "boom", tool_call_id="c", is_error=True),))
    folder = RunFolder(tmp_path)
    folder.write_rollouts("a", [done])
    _, call = next(folder.rollouts("a")).calls
    assert call["messages"] == [{"role": "tool", "content": "boom", "tool_call_id": "c", "is_error": True}]


def test_fields_that_were_not_acted_on_are_told_where_they_change(tmp_path: Path) -> None:
    one = rollout("r", calls=5)
    for k, extra in enumerate([{}, {"user": "u"}, {"user": "u"}, {"user": "v", "store": False}, {}]):
        one.records[k] = replace(one.records[k], extra=extra)
    folder = RunFolder(tmp_path)
    folder.write_rollouts("a", [one])
    calls = next(folder.rollouts("a")).calls
    assert [c.get("extra") for c in calls] == [None, {"user": "u"}, None, {"user": "v", "store": False}, {}]


def test_what_other_models_said_is_read_back(tmp_path: Path) -> None:
    one = rollout("r")
    one.frozen_calls.append(FrozenCall("judge", Message("assistant", "fine"), 7, 3, 0.5, 0.25))
    folder = RunFolder(tmp_path)
    folder.write_rollouts("a", [one])
    assert next(folder.rollouts("a")).frozen_calls == [
        {
            "model": "judge",
            "reply": {"role": "assistant", "content": "fine"},
            "prompt_tokens": 7,
            "sampled_tokens": 3,
            "started_s": 0.5,
            "seconds": 0.25,
        }
    ]


def test_what_filters_left_is_read_back(tmp_path: Path) -> None:
    folder, whole, part = RunFolder(tmp_path), rollout("r/whole"), rollout("r/part")
    part.kept = Kept(frozenset({1}), {1: 0.25}, Counter({"dead leaf": 2}))
    folder.write_rollouts("a", [whole, part])
    with np.load(tmp_path / "rollouts" / "a.npz") as arrays:
        assert "r/part/credit" in arrays and "r/whole/credit" not in arrays, "as in files from before there was credit"
    for a, b in zip([whole, part], folder.rollouts("a"), strict=True):
        same(a.packed(), b.packed)
    assert set(b.packed.call[b.packed.trainable].tolist()) == {1}
    assert set(b.packed.credit[b.packed.trainable].tolist()) == {0.25}


def test_a_verifier_may_score_in_numpy(tmp_path: Path) -> None:
    folder, done = RunFolder(tmp_path), rollout("r")
    found: dict[str, Any] = {"score": np.float64(0.75), "passed": np.bool_(True), "parts": {"part": np.float32(0.5)}}
    done.reward = Reward(**found)
    folder.write_rollouts("a", [done])
    assert next(folder.rollouts("a")).reward == Reward(0.75, True, {"part": 0.5})


def test_batches_are_listed_in_order_and_only_whole_ones(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("grpo-0002", "grpo-0001", "empty"):
        folder.write_rollouts(name, [] if name == "empty" else [rollout("r")])
    (tmp_path / "rollouts" / "killed.npz").write_bytes(b"half")
    assert folder.batches() == ["empty", "grpo-0001", "grpo-0002"]
    assert list(folder.rollouts("empty")) == []
    assert {p.name[0] for p in (tmp_path / "rollouts").iterdir()} != {"."}, "nothing temporary is left"
    assert not [p for p in (tmp_path / "rollouts").iterdir() if p.name.startswith(".")]


def test_metrics_ignore_a_torn_last_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.metrics() == []
    folder.append_metrics({"step": 1, "loss": np.float32(0.5), "n": np.int64(3)})
    folder.append_metrics({"step": 2})
    with (tmp_path / "metrics.jsonl").open("ab") as out:
        out.write(b'{"step": 3, "lo')
    assert folder.metrics() == [{"step": 1, "loss": 0.5, "n": 3}, {"step": 2}]
    folder.keep_metrics(folder.metrics()[:1])
    folder.append_metrics({"step": 2, "again": True})
    assert folder.metrics() == [{"step": 1, "loss": 0.5, "n": 3}, {"step": 2, "again": True}]


def test_a_row_appended_after_a_torn_line_is_not_lost(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1})
    with (tmp_path / "metrics.jsonl").open("ab") as out:
        out.write(b'{"step": 2, "lo')
    folder.append_metrics({"step": 2})
    assert folder.metrics() == [{"step": 1}, {"step": 2}]


def test_the_configuration_is_kept(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").write_config({"lr": 1e-3, "task": "żółć"})
    assert RunFolder.existing(tmp_path / "run").config == {"lr": 1e-3, "task": "żółć"}


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        RunFolder.existing(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.json").write_bytes(orjson.dumps([1]))
    with pytest.raises(ConfigError, match="JSON object"):
        _ = RunFolder.existing(tmp_path).config


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_whole(path, b"old")
    with path.open("rb") as reader:
        write_whole(path, b"new and longer")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new and longer"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
