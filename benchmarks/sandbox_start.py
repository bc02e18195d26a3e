"""Start and stop of a sandbox against what it is made of, and against SWE-ReX's local runtime, in one run.

Each row starts something that can run a command, runs ``true`` in it, and ends it; the rounds of all rows are
interleaved, so that a busy machine slows them alike. ``raw`` rows have no control channel, no limits and no files:
the command line of bubblewrap or the engine's API, and the least that they can do. The bar: at most 1.3 x raw bwrap.

    pip install swe-rex   # in an environment of its own: its pins need not fit ours
    python benchmarks/sandbox_start.py --swerex-python /path/to/that/python --out sandbox_start.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from clawgym_env.sandboxes import Backend, SandboxSpec, bubblewrap, docker, get_backend

BAR = 1.3
SWEREX = """
import asyncio, sys, time
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest
from swerex.runtime.local import LocalRuntime

async def once():
    begin = time.perf_counter()
    runtime = LocalRuntime()
    await runtime.create_session(CreateBashSessionRequest(startup_timeout=30.0))
    ready = time.perf_counter()
    await runtime.run_in_session(BashAction(command="true"))
    ran = time.perf_counter()
    await runtime.close()
    print(ready - begin, ran - ready, time.perf_counter() - ran, flush=True)

for line in sys.stdin:
    asyncio.run(once())
"""

#: Seconds of start, of running ``true``, and of stop.
Round = tuple[float, float, float]
#: The same, and CPU seconds of this process and of those it has waited for (a container engine's are not among them).
Measured = tuple[float, float, float, float]


async def ours(backend: Backend) -> Round:
    """One sandbox of a backend."""
    begin = time.perf_counter()
    sandbox = await backend.create(SandboxSpec())
    ready = time.perf_counter()
    await sandbox.exec(["true"])
    ran = time.perf_counter()
    await sandbox.stop()
    return ready - begin, ran - ready, time.perf_counter() - ran


def raw_bwrap(program: list[str]) -> Callable[[], Awaitable[Round]]:
    """bubblewrap with the same binds and namespaces, which runs a program and ends."""

    async def once() -> Round:
        begin = time.perf_counter()
        command = [str(bubblewrap.find_bwrap()), "--unshare-all", "--unshare-user", "--ro-bind", "/usr", "/usr"]
        for name in ("bin", "lib", "lib64"):
            command += ["--symlink", f"usr/{name}", f"/{name}"]
        command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *program]
        process = await asyncio.create_subprocess_exec(*command)
        await process.wait()
        return time.perf_counter() - begin, 0.0, 0.0

    return once


def raw_docker() -> Callable[[], Awaitable[Round]]:
    """The engine's API: create, start, exec, remove."""
    client = docker.connect()
    image = docker.images.prepare(client, None)

    def blocking() -> Round:
        begin = time.perf_counter()
        box = client.containers.create(image.id, ["sleep", "600"], network_mode="none", volumes=image.binds)
        box.start()
        ready = time.perf_counter()
        box.exec_run(["true"])
        ran = time.perf_counter()
        box.remove(force=True)
        return ready - begin, ran - ready, time.perf_counter() - ran

    async def once() -> Round:
        return await asyncio.to_thread(blocking)

    return once


def swerex(python: str) -> Callable[[], Awaitable[Round]]:
    """SWE-ReX's local runtime (a bash session on the bare host), in a process of its own interpreter."""
    process = subprocess.Popen([python, "-c", SWEREX], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def blocking() -> Round:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        start, run, stop = (float(word) for word in process.stdout.readline().split())
        return start, run, stop

    async def once() -> Round:
        return await asyncio.to_thread(blocking)

    return once


async def rate(backend: Backend, total: int, at_once: int) -> tuple[float, float]:
    """Sandboxes a second with several in flight, and CPU seconds of ours and our children's for each."""
    slots = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with slots:
            await ours(backend)

    begin, spent = time.perf_counter(), _cpu_s()
    await asyncio.gather(*(one() for _ in range(total)))
    return total / (time.perf_counter() - begin), (_cpu_s() - spent) / total


def _cpu_s() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


def quantile(values: list[float], share: float) -> float:
    """Of a sample, without interpolation."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


async def measure(rows: dict[str, Callable[[], Awaitable[Round]]], rounds: int) -> dict[str, list[Measured]]:
    """Rounds of each row, interleaved; the first of each is thrown away."""
    found: dict[str, list[Measured]] = {name: [] for name in rows}
    for number in range(rounds + 1):
        for name, once in rows.items():
            before = _cpu_s()
            result = await once()
            if number:
                found[name].append((*result, _cpu_s() - before))
    return found


async def run(options: argparse.Namespace) -> dict[str, Any]:
    python = ["/usr/bin/python3", "-I", "-S", "-c", "pass"]
    bwrap = get_backend("bubblewrap")
    rows = {
        "bubblewrap": lambda: ours(bwrap),
        "raw bwrap, true": raw_bwrap(["true"]),
        "raw bwrap, python": raw_bwrap(python),
    }
    has_engine = docker.DockerBackend().probe().available
    engine = get_backend("docker")
    if has_engine:
        rows |= {"docker": lambda: ours(engine), "raw docker": raw_docker()}
    if options.swerex_python:
        rows["SWE-ReX local"] = swerex(options.swerex_python)
    found = await measure(rows, options.rounds)
    table = {
        name: {
            "start_ms": 1e3 * quantile([each[0] for each in rounds], 0.5),
            "exec_ms": 1e3 * quantile([each[1] for each in rounds], 0.5),
            "stop_ms": 1e3 * quantile([each[2] for each in rounds], 0.5),
            "total_ms": 1e3 * quantile([sum(each[:3]) for each in rounds], 0.5),
            "least_ms": 1e3 * min(sum(each[:3]) for each in rounds),
            "cpu_ms": 1e3 * quantile([each[3] for each in rounds], 0.5),
        }
        for name, rounds in found.items()
    }
    rates = {"bubblewrap": await rate(bwrap, options.rounds * 4, 2 * (os.cpu_count() or 1))}
    if has_engine:
        rates["docker"] = await rate(engine, options.rounds, 2 * (os.cpu_count() or 1))

    def ratio(column: str, peer: str) -> float:
        return table["bubblewrap"][column] / table[peer][column]

    return {
        "rows": table,
        "rates": {name: {"a_second": r, "cpu_ms": 1e3 * cpu} for name, (r, cpu) in rates.items()},
        "ratios": {
            peer: {column: ratio(column, peer) for column in ("total_ms", "least_ms")}
            for peer in ("raw bwrap, true", "raw bwrap, python")
        },
        "bar": BAR,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--swerex-python", help="interpreter that has swe-rex")
    parser.add_argument("--out", type=Path)
    results = asyncio.run(run(parser.parse_args()))
    out = parser.parse_args().out
    print(f"{'':20}{'start':>9}{'true':>9}{'stop':>9}{'p50':>9}{'least':>9}{'CPU':>9}   ms")
    for name, row in results["rows"].items():
        print(f"{name:20}" + "".join(f"{value:9.1f}" for value in row.values()))
    for name, row in results["rates"].items():
        print(f"{name}: {row['a_second']:.1f} a second, {row['cpu_ms']:.0f} ms of CPU of our processes each")
    for peer, row in results["ratios"].items():
        said = ", ".join(f"{column.removesuffix('_ms')} {value:.2f}" for column, value in row.items())
        print(f"bubblewrap / {peer}: {said} (bar {BAR})")
    print(f"load {results['load']:.1f}")
    if out is not None:
        out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    sys.exit(main())
