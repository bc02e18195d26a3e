"""Ctrl-C in the middle of a real run: nothing is left behind, and the run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from clawgym_env.harnesses import install
from clawgym_env.store import RunFolder

ROOT = Path(__file__).parents[2]
SMALL = (
    *("demos.rollouts=12", "demos.batch=4", "sft.steps=2", "sft.batch=4", "grpo.steps=1", "grpo.tasks=1"),
    *("grpo.group=2", "eval.test=2", "eval.greedy=0", "eval.validation=0", "threads=1"),
)


def clawgym(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "clawgym_env", *arguments]
    return subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_interrupts,
    )


def _heed_interrupts() -> None:
    """Tests that were started in the background ignore interrupts, and so would their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def running(session: int) -> list[str]:
    """Command lines of processes of a session, and of sandboxes whose owner is gone."""
    out = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[0] != "Z" and (int(fields[3]) == session or "/opt/clawgym/pi" in command):
            out.append(command)
    return out


def wait_for(path: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def test_ctrl_c_leaves_no_process_and_a_run_that_goes_on(tmp_path: Path) -> None:
    install.ensure("pi", print)
    path = tmp_path / "run"
    run = clawgym("train", "quickstart", *SMALL, "--out", str(path))
    wait_for(path / "rollouts" / "demos-0000.jsonl", 120)
    time.sleep(0.3)
    os.killpg(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 130, said
    assert f"clawgym train --resume {path}" in said.replace("\n", " ")
    deadline = time.monotonic() + 5
    while running(run.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running(run.pid) == []

    folder = RunFolder.existing(path)
    before = (path / "rollouts" / "demos-0000.jsonl").read_bytes()
    resumed = clawgym("train", "--resume", str(path))
    _, said = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, said
    assert (path / "rollouts" / "demos-0000.jsonl").read_bytes() == before, "stored batches are not run again"
    stages = [row["stage"] for row in folder.metrics()]
    assert stages == ["demos"] * 3 + ["sft", "eval", "grpo", "eval"]
    assert (path / "report.html").is_file()
    model = AutoModelForCausalLM.from_pretrained(path / "policy", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path / "policy", local_files_only=True)
    assert len(tokenizer) == model.config.vocab_size == 2048
    stored = [r for name in folder.batches() for r in folder.rollouts(name)]
    assert len(stored) == 12 + 2 + 2 + 2
    for rollout in stored:
        assert rollout.ledger.captured == rollout.packed.sampled.sum()
