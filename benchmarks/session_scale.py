"""What a very long rollout costs the proxy: 1,000 calls, 200,000 unique tokens, 50 MB of request bodies.

    python benchmarks/session_scale.py --out scale.json

One rollout through the real application on a real socket. Its history grows by an answer and a tool's result a call,
and is begun anew six times, as compaction does. All of these segments ask for the same work, so that CPU a call must
not grow from the first to the last; it is the least of three such rollouts. Memory is that of the process while the
first of them ran, and of the objects that it keeps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import serving
from conversation import Conversation
from serving import Connection, Served
from tables import table

OPENING, SHOWN = 1_500, 450
ROUNDS = 3


def run(proxy: Served, name: str, segments: int, calls: int) -> dict[str, Any]:
    """One rollout of ``segments`` histories of ``calls`` calls each; CPU of each segment, and what was sent."""
    proxy.tell("register", names=[name])
    talk, connection = Conversation(name, opening=OPENING, shown=SHOWN), Connection(proxy.port)
    cpu_us, sent = [], 0
    for segment in range(segments):
        if segment:
            talk.restart(OPENING)
        began = proxy.cpu_ns()
        for _ in range(calls):
            body = talk.body()
            sent += len(body)
            connection.send(proxy.request(body, rollout=name))
            talk.hear(connection.answer())
        cpu_us.append((proxy.cpu_ns() - began) / 1e3 / calls)
    connection.close()
    return {"cpu_us_a_call": cpu_us, "sent_mb": sent / 1e6}


def measure(proxy: Served, segments: int, calls: int) -> dict[str, Any]:
    """The figures of a long rollout, after a shorter one that warms the server up."""
    run(proxy, "1-warm", 1, calls)
    proxy.tell("unregister", names=["1-warm"])
    proxy.forget_peak()
    before, _ = proxy.memory()
    found = run(proxy, "1-long", segments, calls)
    after, peak = proxy.memory()
    stats = proxy.tell("stats", name="1-long")
    again = [run(proxy, f"1-again-{k}", segments, calls) for k in range(ROUNDS - 1)]
    cpu_us = [min(segment) for segment in zip(*(r["cpu_us_a_call"] for r in (found, *again)), strict=True)]
    return {
        "calls": stats["calls"],
        "unique_tokens": stats["unique_tokens"],
        "total_tokens": stats["total_tokens"],
        "sent_mb": found["sent_mb"],
        "matched_calls": stats["matched"],
        "rss_growth_mb": (after - before) / 1e6,
        "peak_rss_growth_mb": (peak - before) / 1e6,
        "tree_bytes_a_unique_token": stats["tree_bytes"] / stats["unique_tokens"],
        "session_bytes_a_unique_token": stats["session_bytes"] / stats["unique_tokens"],
        "cpu_us_a_call_first": cpu_us[0],
        "cpu_us_a_call_last": cpu_us[-1],
        "last_over_first": cpu_us[-1] / cpu_us[0],
        "cpu_us_a_call": cpu_us,
    }


def main() -> None:
    """Starts the proxy, measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--tiny", action="store_true", help="a few calls: for tests")
    arguments = parser.parse_args()
    with serving.ours("proxy") as proxy:
        results = measure(proxy, *((2, 3) if arguments.tiny else (7, 143)))
    figures = {key: value for key, value in results.items() if key != "cpu_us_a_call"}
    print(table({key: {"": value} for key, value in figures.items()}, lambda row: row))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
