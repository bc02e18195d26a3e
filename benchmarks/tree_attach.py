"""What it costs to attach a call to the prefix tree, beside other structures and the speed of memory.

    python benchmarks/tree_attach.py --out attach.json

Nanoseconds of CPU a prompt token, all calls of a shape together, the least of the rounds; what is not attachment
(making the rollout, turning ids into each structure's own type) is left out, and the garbage collector is off. Every
structure must find the same prefix for each call. The limit is one comparison of the same bytes, ``numpy.array_equal``.
Stored bytes are those of every object that is reachable from the structure. ``verifiers`` is measured where it is
installed, on the shapes that its messages can spell.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from footprint import reachable
from peers.radix import RadixTree
from peers.trie import TokenTrie
from shapes import Call, Shape, agent, chain
from tables import table

from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import Generation

try:
    from peers.message_graph import MessageGraph
except ImportError:
    MessageGraph = None  # type: ignore[assignment, misc]

AGENTS = 8


class Structure(Protocol):
    """What is measured: ``prepare`` is not timed, ``attach`` is."""

    def prepare(self, number: int, call: Call) -> Any: ...

    def attach(self, prepared: Any) -> None: ...

    @property
    def unique_tokens(self) -> int: ...


class Ours:
    """The prefix tree, told which call a prompt goes on from, as the proxy tells it, or not."""

    def __init__(self, *, told: bool = True) -> None:
        self.tree = PrefixTree()
        self._told = told

    @property
    def unique_tokens(self) -> int:
        return self.tree.unique_tokens

    def prepare(self, number: int, call: Call) -> Any:
        size = len(call.response)
        generation = Generation(call.response, np.zeros(size, np.float32), np.zeros(size, np.int64), "stop")
        return number, call.prompt, generation, call.prefer if self._told else None

    def attach(self, prepared: Any) -> None:
        number, prompt, generation, prefer = prepared
        self.tree.attach(number, prompt, generation, prefer=prefer)


class Peer:
    """A structure of plain Python lists."""

    def __init__(self, tree: RadixTree | TokenTrie) -> None:
        self.tree = tree

    @property
    def unique_tokens(self) -> int:
        return self.tree.unique_tokens

    def prepare(self, number: int, call: Call) -> Any:
        return call.prompt.tolist(), call.response.tolist()

    def attach(self, prepared: Any) -> None:
        self.tree.attach(*prepared)


class Messages:
    """The message graph of ``verifiers``."""

    def __init__(self, observed: int, sampled: int) -> None:
        self.graph = MessageGraph(observed, sampled)

    @property
    def unique_tokens(self) -> int:
        return self.graph.unique_tokens

    def prepare(self, number: int, call: Call) -> Any:
        return self.graph.prepare(number, call.prompt.tolist(), call.response.tolist())

    def attach(self, prepared: Any) -> None:
        self.graph.attach(*prepared)


class Limit:
    """Reads each prompt once and compares it with a copy."""

    unique_tokens = 0

    def prepare(self, number: int, call: Call) -> Any:
        return call.prompt, call.prompt.copy()

    def attach(self, prepared: Any) -> None:
        assert np.array_equal(*prepared)


@dataclass(frozen=True)
class Case:
    """Rollouts of one shape; ``turn``: the tokens that every call of theirs observes and samples, if always as many."""

    rollouts: list[Shape]
    turn: tuple[int, int] | None = None

    def structures(self) -> dict[str, Callable[[], Structure]]:
        """What can hold them."""
        turn = self.turn
        found: dict[str, Callable[[], Structure]] = {
            "ours": Ours,
            "ours_from_root": lambda: Ours(told=False),
            "radix": lambda: Peer(RadixTree()),
            "trie": lambda: Peer(TokenTrie()),
            "memcmp": Limit,
        }
        if MessageGraph is not None and turn is not None:
            found["verifiers"] = lambda: Messages(*turn)
        return found


def cases(size: float) -> dict[str, Case]:
    """The benchmark's shapes; ``size`` 1 is all of it."""

    def grown(calls: int, observed: int, sampled: int) -> Case:
        many = max(2, round(calls * size))
        return Case([lambda: chain(many, observed, sampled)], (observed, sampled))

    turns, agents = max(2, round(60 * size)), max(1, round(AGENTS * size))
    return {
        "chain": grown(200, 400, 100),
        "agents": Case([partial(agent, seed, turns) for seed in range(agents)]),
        "long": grown(1_000, 140, 60),
    }


def attach_all(make: Callable[[], Structure], rollouts: list[Shape]) -> dict[str, Any]:
    """Attaches whole rollouts, each to a structure of its own."""
    clock = _clock_ns()
    spent, tokens, calls, unique, stored = 0, 0, 0, 0, 0
    new: list[int] = []
    for shape in rollouts:
        structure = make()
        for number, call in enumerate(shape()):
            prepared, before = structure.prepare(number, call), structure.unique_tokens
            began = time.thread_time_ns()
            structure.attach(prepared)
            spent += time.thread_time_ns() - began - clock
            tokens += len(call.prompt)
            calls += 1
            new.append(structure.unique_tokens - before)
        unique += structure.unique_tokens
        stored += reachable(structure)
    counts = {"calls": calls, "prompt_tokens": tokens, "unique": unique, "stored": stored}
    return {"ns": spent / tokens, "new": new, **counts}


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One shape: every structure in turn, several rounds."""
    structures = case.structures()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in structures}
    gc.disable()
    for _ in range(rounds):
        for name, make in structures.items():
            runs[name].append(attach_all(make, case.rollouts))
            gc.collect()
    gc.enable()
    first = runs["ours"][0]
    trees = [name for name in structures if name != "memcmp"]
    return {
        **{key: first[key] for key in ("calls", "prompt_tokens")},
        "unique_tokens": first["unique"],
        "agree": all(run["new"] == first["new"] for name in trees for run in runs[name]),
        "ns_a_token": {name: min(r["ns"] for r in runs[name]) for name in structures},
        "rounds_ns_a_token": {name: [r["ns"] for r in runs[name]] for name in structures},
        "stored_bytes_a_unique_token": {name: runs[name][0]["stored"] / first["unique"] for name in trees},
    }


def main() -> None:
    """Measures each shape, prints two tables, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--size", type=float, default=1.0, help="share of the whole benchmark")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results = {name: measure(case, arguments.rounds) for name, case in cases(arguments.size).items()}
    print("CPU ns a prompt token")
    print(table(results, lambda row: {**row["ns_a_token"], "ours/memcmp": _ratio(row)}))
    print("\nstored bytes a unique token")
    print(table(results, lambda row: row["stored_bytes_a_unique_token"]))
    print("\nshapes")
    print(table(results, lambda row: {key: row[key] for key in ("calls", "unique_tokens", "prompt_tokens")}))
    if not all(row["agree"] for row in results.values()):
        raise SystemExit("the structures disagree about a prefix")
    missing = [] if MessageGraph is not None else ["verifiers"]
    print(f"\nnot installed: {', '.join(missing) or 'none'}")
    if arguments.out:
        arguments.out.write_text(json.dumps({"shapes": results, "not_installed": missing}, indent=1))


def _clock_ns() -> int:
    """What it costs to read the clock, which is more than to attach a few hundred tokens."""
    reads = [time.thread_time_ns() for _ in range(1_001)]
    return round(statistics.median(b - a for a, b in pairwise(reads)))


def _ratio(row: dict[str, Any]) -> float:
    return float(row["ns_a_token"]["ours"] / row["ns_a_token"]["memcmp"])


if __name__ == "__main__":
    main()
