"""What a long rollout costs in memory: a chain of calls whose history grows, stored as a prefix tree.

Prints unique and total tokens, bytes a unique token, and nanoseconds of attachment a prompt token, beside what storing
every call's prompt would take. Writes the same as JSON with ``--json FILE``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import Generation


def grow(calls: int, tokens: int, sampled: int, seed: int = 0) -> tuple[PrefixTree, float]:
    """A rollout whose last history has ``tokens`` tokens; returns the tree and the seconds spent attaching."""
    rng = np.random.default_rng(seed)
    observed = tokens // calls - sampled
    history = np.empty(0, dtype=np.int64)
    tree, seconds = PrefixTree(), 0.0
    for call in range(calls):
        prompt = np.concatenate([history, rng.integers(0, 150_000, observed)])
        answer = rng.integers(0, 150_000, sampled)
        generation = Generation(answer, np.zeros(sampled, np.float32), np.zeros(sampled, np.int64), "stop")
        began = time.perf_counter()
        tree.attach(call, prompt, generation, prefer=call - 1 if call else None)
        seconds += time.perf_counter() - began
        history = np.concatenate([prompt, answer])
    return tree, seconds


def measure(calls: int, tokens: int, sampled: int) -> dict[str, float]:
    """The figures of one shape."""
    tree, seconds = grow(calls, tokens, sampled)
    stored = sum(n.tokens.nbytes + n.log_probs.nbytes + n.versions.nbytes for n in tree.nodes)
    return {
        "calls": calls,
        "unique_tokens": tree.unique_tokens,
        "total_tokens": tree.total_tokens,
        "stored_mb": stored / 1e6,
        "every_prompt_mb": 8 * tree.total_tokens / 1e6,
        "bytes_per_unique_token": stored / tree.unique_tokens,
        "attach_ns_per_prompt_token": 1e9 * seconds / tree.total_tokens,
    }


def main() -> None:
    """Runs three shapes and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    rows = [measure(20, 10_000, 100), measure(200, 100_000, 100), measure(1_000, 200_000, 60)]
    print("  ".join(f"{key:>26}" for key in rows[0]))
    for row in rows:
        print("  ".join(f"{value:26,.2f}" for value in row.values()))
    arguments = parser.parse_args()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
