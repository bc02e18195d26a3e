"""Each benchmark runs at a tiny size and measures what it says it does; nothing here asserts a time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, tmp_path: Path, *options: str) -> tuple[Any, str]:
    """A script's JSON and what it printed."""
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--out", str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def test_tree_attach(tmp_path: Path) -> None:
    results, printed = run("tree_attach.py", tmp_path, "--size", "0.03", "--rounds", "1")
    assert set(results["shapes"]) == {"chain", "agents", "long"}
    for name, row in results["shapes"].items():
        assert row["agree"], "every structure finds the same prefixes"
        assert {"ours", "ours_from_root", "radix", "trie", "memcmp"} <= set(row["ns_a_token"])
        assert row["ns_a_token"].keys() - {"memcmp"} == row["stored_bytes_a_unique_token"].keys()
        # Eight bytes a token; 12 more where it was sampled, and the objects around it.
        assert 8 < row["stored_bytes_a_unique_token"]["ours"] < row["stored_bytes_a_unique_token"]["radix"]
        assert name in printed
    chain = results["shapes"]["chain"]
    assert (chain["calls"], chain["unique_tokens"]) == (6, 3_000)
    assert chain["prompt_tokens"] == sum(500 * k + 400 for k in range(6))
    agents = results["shapes"]["agents"]
    assert agents["unique_tokens"] < agents["prompt_tokens"]


def test_tree_gae(tmp_path: Path) -> None:
    results, printed = run("tree_gae.py", tmp_path, "--size", "0.02", "--rounds", "1")
    for name, row in results["shapes"].items():
        assert name in printed
        assert max(row["error"].values()) < 1e-5, "all estimators agree"
        assert set(row["cpu_ms"]) == {"tree", "flat", "vec", "loop", "limit"}
        assert row["trainable"] <= row["in_trajectories"] and row["trainable"] < row["tokens"]
    chain, _, samples = results["shapes"].values()
    assert chain["trajectories"] == 1 and chain["in_trajectories"] == chain["trainable"]
    assert samples["trajectories"] == 5 and samples["in_trajectories"] > samples["trainable"]


def test_peers_share_what_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from peers.radix import RadixTree  # type: ignore[import-not-found]
    from peers.trie import TokenTrie  # type: ignore[import-not-found]

    for tree in (RadixTree(), TokenTrie()):
        assert tree.attach([1, 2, 3], [4, 5]) == 0
        assert tree.attach([1, 2, 3, 4, 5, 6], [7]) == 5
        assert tree.attach([1, 2, 9], [8]) == 2, "a fork in mid-node"
        assert tree.attach([1, 2], [3, 3]) == 2
        assert tree.attach([1, 2, 3, 3, 5], [5]) == 4
        assert tree.unique_tokens == 12


def test_proxy_overhead(tmp_path: Path) -> None:
    results, _ = run("proxy_overhead.py", tmp_path, "--tiny")
    assert set(results["cpu_us_a_request"]) == {f"{kb} KB {kind}" for kb in (1, 100) for kind in ("plain", "streamed")}
    for case, row in results["cpu_us_a_request"].items():
        assert row["own"] == pytest.approx(row["ours"] - row["echo"]) and row["echo"] > 0
        parts = results["chat_format_us"][case]
        assert {"extend", "parse"} <= set(parts) and row["chat format"] == pytest.approx(sum(parts.values()))
        assert row["rest"] == pytest.approx(row["own"] - row["chat format"])
        assert row["body_kb"] > 0.8
    assert list(results["growth"]) == ["1", "3", "6"]
    sizes = [row["body_kb"] for row in results["growth"].values()]
    assert sizes == sorted(set(sizes))
    assert {"ours, 5 chunks", "ours, 12 chunks", "echo, 5 chunks"} <= set(results["sse"])
    assert {
        wire: row["chunks"] > 8 and row["us_a_chunk"] > 0 for wire, row in results["chunks"].items()
    } == dict.fromkeys(("openai_chat", "openai_responses", "anthropic_messages", "gemini"), True)
    assert results["latency"]["echo"]["added_p50_us"] == 0 < results["latency"]["ours"]["p50_us"]
    assert set(results["not_installed"]) <= {"vllm-router", "LiteLLM"}


def test_proxy_profile_names_the_parts(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "proxy_overhead.py"), "--profile", "--tiny"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    small, large = done.stdout.split("profile, ")[1:]
    for printed in (small, large):
        shares = {part: float(share) for share, part in re.findall(r"^ *([\d.]+)%  (\S+)$", printed, re.MULTILINE)}
        assert {"clawgym_env.proxy", "clawgym_env.wire", "clawgym_env.tree", "renderers", "asyncio"} <= set(shares)
        assert sum(shares.values()) == pytest.approx(100, abs=1)


def test_session_scale(tmp_path: Path) -> None:
    results, printed = run("session_scale.py", tmp_path, "--tiny")
    assert (results["calls"], results["matched_calls"], len(results["cpu_us_a_call"])) == (6, 4, 2)
    assert results["unique_tokens"] < results["total_tokens"]
    assert results["sent_mb"] > 0.01 and results["peak_rss_growth_mb"] >= 0
    assert 8 < results["tree_bytes_a_unique_token"] < results["session_bytes_a_unique_token"]
    assert results["last_over_first"] == pytest.approx(results["cpu_us_a_call_last"] / results["cpu_us_a_call_first"])
    assert "matched_calls" in printed


def test_harness_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shell agents and a third that is held out: every cell is made once, and the second time nothing runs."""
    agent = ROOT / "tests" / "agents" / "shell_agent.py"
    argv = [sys.executable, "-I", "-S", "{agent}", "{openai_base_url}", "{api_key}", "{model}", "{max_tokens}"]
    options = json.dumps({"argv": argv, "mounts": {"agent": str(agent)}})
    small = ["demos.rollouts=6", "demos.batch=3", "sft.steps=2", "sft.batch=4", "grpo.steps=1", "grpo.tasks=2"]
    small += ["grpo.group=2", "sandbox=process", "max_tokens=24", "max_calls=2", "max_context=1024"]
    own = [f"per_harness.{x}.{key}" for x in ("a", "b", "c") for key in ("program=command", f"options={options}")]
    out = tmp_path / "matrix"
    command = [sys.executable, str(ROOT / "benchmarks" / "harness_matrix.py"), "--out", str(out), "--harnesses", "a,b"]
    command += ["--held-out", "c", "--seeds", "0", "1", "--tasks", "2", "--held-out-tasks", "1", *small, *own]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def make() -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = make()
    summary = json.loads((out / "matrix.json").read_text())
    assert list(summary["rows"]) == ["base", "a", "b", "mix"]
    assert len(summary["seconds"]) == 2 * 4 + 2 * 4 * 3
    for row in summary["rows"].values():
        assert {label: cell["scored"] for label, cell in row.items()} == {"a": 4, "b": 4, "c": 2}
        for cell in row.values():
            assert cell["low"] <= cell["pass_at_1"] <= cell["high"] and len(cell["seeds"]) == 2
    assert summary["rows"]["base"]["a"]["gain"] == 0.0
    assert "| trained under | a | b | c (held out) |" in (out / "matrix.md").read_text() and "| mix |" in first
    assert (out / "matrix.svg").read_text().count("<svg") == 1
    (out / "train-mix-s1" / "policy" / "config.json").unlink()  # a training that was stopped goes on from its last save
    second = make()
    assert json.loads((out / "matrix.json").read_text())["rows"] == summary["rows"]
    made = [line.partition(" (")[0] for line in second.splitlines() if line.endswith(" s)")]
    assert made == ["train-mix-s1"]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from harness_matrix import main  # type: ignore[import-not-found]

    monkeypatch.setattr(sys, "argv", [*command[1:], "grpo.lr=1"])
    with pytest.raises(SystemExit, match="holds a matrix with other settings"):
        main()
