"""The sandboxes' benchmark at a tiny size: it measures what it says; nothing here asserts a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_sandbox_start(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks/sandbox_start.py"), "--rounds", "2", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert {"bubblewrap", "raw bwrap, true", "raw bwrap, python"} <= set(results["rows"])
    for name, row in results["rows"].items():
        assert 0 < row["least_ms"] <= row["total_ms"]
        assert name in done.stdout
    assert results["rates"]["bubblewrap"]["a_second"] > 0
    assert set(results["ratios"]) == {"raw bwrap, true", "raw bwrap, python"}
