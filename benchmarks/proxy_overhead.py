"""What a model call costs in the proxy, capture included, beside a raw ASGI echo and other proxies.

    python benchmarks/proxy_overhead.py --out proxy.json [--peers VENV/bin] [--profile]

CPU microseconds a request: CPU time of the server's process over the requests of a window, sent by this process over
eight connections; the least of the rounds, since neighbours on the machine only add to it (what streaming adds is the
median of paired differences). Requests are those of natural rollouts, which grow side by side: each history by the
answer and a tool's result. The engine answers at once.
``own`` is what is left of ours without the limit, an ASGI application on the same uvicorn that reads the same bytes and
answers fixed ones. The chat format's part of it (templates, tokens, parsing: the ``renderers`` and ``tokenizers``
libraries) is shown beside. Other proxies get the same bytes where they are installed; LiteLLM answers from its own
mock, vllm-router asks a server of ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import serving
from conversation import Conversation, events
from serving import Answer, Client, Served
from tables import table

CONNECTIONS = 8
CONCURRENT = 64
#: Pairs of windows a round, plain and streamed: their difference is far below the noise of either.
PAIRS = 4


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        small: Rollouts of three calls with bodies of 1 KB.
        grown: Rollouts that grow to ``calls`` calls; the 50th has a body of 100 KB and 100 messages.
        rate: Requests a second over all of the concurrent rollouts; ``seconds`` is how long.
    """

    rounds: int = 3
    small: int = 100
    grown: int = 8
    calls: int = 200
    marks: tuple[int, ...] = (1, 50, 200)
    rate: float = 40.0
    seconds: float = 10.0

    @property
    def short(self) -> Plan:
        """Up to bodies of 100 KB only."""
        return replace(self, calls=self.marks[1] + 2, marks=self.marks[:2])


TINY = Plan(rounds=1, small=2, grown=1, calls=6, marks=(1, 3, 6), rate=200.0, seconds=0.5)


@dataclass(frozen=True)
class Window:
    """What one window of requests cost."""

    requests: list[bytes]
    cpu_us: float
    chunks: float
    chat_format_us: dict[str, float] = field(default_factory=dict)

    @property
    def body_kb(self) -> float:
        return statistics.mean(len(body) for body in self.requests) / 1e3


class Rollouts:
    """Rollouts of the proxy under measurement: opened for a while, their names never used again."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._made = 0

    @contextmanager
    def opened(self, count: int, tools: int) -> Iterator[list[str]]:
        """Names of new rollouts; they begin with how many tools each answer calls."""
        names = [f"{tools}-{self._made + k}" for k in range(count)]
        self._made += count
        self.served.tell("register", names=names)
        try:
            yield names
        finally:
            self.served.tell("unregister", names=names)


def small(rollouts: Rollouts, count: int, *, stream: bool, tools: int = 1) -> Window:
    """The first three calls of rollouts with bodies of about 1 KB."""
    windows = _talk(rollouts, count, tools, (400, 120), stream, calls=3, mark_of=lambda number: 1)
    return windows[1]


def grown(rollouts: Rollouts, plan: Plan, *, stream: bool) -> dict[int, Window]:
    """Windows of up to five calls around each mark, of rollouts that grow by 2 KB a call."""

    def mark_of(number: int) -> int | None:
        return next((m for m in plan.marks if m - 2 <= number <= m + 2 and (m > 1 or number == 1)), None)

    return _talk(rollouts, plan.grown, 1, (1_000, 1_750), stream, calls=plan.calls, mark_of=mark_of)


def _talk(
    rollouts: Rollouts,
    count: int,
    tools: int,
    sizes: tuple[int, int],
    stream: bool,
    *,
    calls: int,
    mark_of: Callable[[int], int | None],
) -> dict[int, Window]:
    """Rollouts side by side; the calls that belong to a mark are its window."""
    spent: dict[int, float] = {}
    requests: dict[int, list[bytes]] = {}
    chunks: dict[int, int] = {}
    methods: dict[int, Counter[str]] = {}
    with rollouts.opened(count, tools) as names, Client(rollouts.served, CONNECTIONS) as client:
        talks = [Conversation(name, opening=sizes[0], shown=sizes[1], stream=stream) for name in names]
        for number in range(1, calls + 1):
            bodies = [talk.body() for talk in talks]
            asked = [rollouts.served.request(b, rollout=talk.name) for b, talk in zip(bodies, talks, strict=True)]
            rollouts.served.tell("metered")
            answers, cpu_us = client.ask(asked)
            metered = rollouts.served.tell("metered")
            for talk, answer in zip(talks, answers, strict=True):
                talk.hear(answer)
            mark = mark_of(number)
            if mark is not None:
                spent[mark] = spent.get(mark, 0.0) + cpu_us - metered["clock"] / 1e3
                requests.setdefault(mark, []).extend(bodies)
                chunks[mark] = chunks.get(mark, 0) + _chunks(answers, stream)
                methods.setdefault(mark, Counter()).update(metered["spent"])
    return {
        mark: Window(
            asked,
            spent[mark] / len(asked),
            chunks[mark] / len(asked),
            {name: ns / 1e3 / len(asked) for name, ns in methods[mark].items()},
        )
        for mark, asked in requests.items()
    }


def _chunks(answers: list[Answer], stream: bool) -> int:
    return sum(len(events(answer.body)) for answer in answers) if stream else 0


def replay(served: Served, requests: list[bytes], *, stream: bool) -> Window:
    """The same bodies to a server that remembers nothing."""
    with Client(served, CONNECTIONS) as client:
        answers, cpu_us = client.ask([served.request(body, stream=stream) for body in requests])
    return Window(requests, cpu_us / len(requests), _chunks(answers, stream) / len(requests))


def overhead(proxy: Served, others: dict[str, Served], plan: Plan) -> dict[str, Any]:
    """CPU a request by body and by streaming, ours and the others' in turn; and how ours grows with the rollout."""
    rollouts = Rollouts(proxy)
    rows: dict[str, dict[str, list[Window]]] = {}
    growth: dict[int, list[Window]] = {mark: [] for mark in plan.marks}
    for number in range(-1, plan.rounds):  # round -1 warms up
        for stream in (False, True):
            kind = "streamed" if stream else "plain"
            windows = grown(rollouts, plan.short if stream else plan, stream=stream)
            first = small(rollouts, plan.small, stream=stream)
            for case, window in {f"1 KB {kind}": first, f"100 KB {kind}": windows[plan.marks[1]]}.items():
                row = rows.setdefault(case, {name: [] for name in ("ours", *others)})
                if number < 0:
                    for other in others.values():
                        replay(other, window.requests[:16], stream=stream)
                    continue
                row["ours"].append(window)
                for name, other in others.items():
                    row[name].append(replay(other, window.requests, stream=stream))
            if number >= 0 and not stream:
                for mark, window in windows.items():
                    growth[mark].append(window)
    return {
        "cpu_us_a_request": {case: _figures(row) for case, row in rows.items()},
        "chat_format_us": {case: _least(row["ours"]).chat_format_us for case, row in rows.items()},
        "growth": {
            str(mark): {
                "body_kb": windows[0].body_kb,
                "cpu_us": _least(windows).cpu_us,
                "cpu_us_a_kb": _least(windows).cpu_us / windows[0].body_kb,
            }
            for mark, windows in growth.items()
        },
    }


def _figures(row: dict[str, list[Window]]) -> dict[str, float]:
    least = {name: _least(windows).cpu_us for name, windows in row.items()}
    own = least["ours"] - least["echo"]
    chat_format = sum(_least(row["ours"]).chat_format_us.values())
    body_kb = row["ours"][0].body_kb
    return {"body_kb": body_kb, **least, "own": own, "chat format": chat_format, "rest": own - chat_format}


def _least(windows: list[Window]) -> Window:
    return min(windows, key=lambda window: window.cpu_us)


def chunk_cost(proxy: Served, others: dict[str, Served], plan: Plan) -> dict[str, Any]:
    """CPU that streaming adds, a chunk: answers of one tool call, and of eight."""
    rollouts = Rollouts(proxy)
    rows: dict[str, dict[str, float]] = {}
    for tools in (1, 8):
        pairs = [
            [small(rollouts, plan.small, stream=stream, tools=tools) for stream in (False, True)]
            for _ in range(PAIRS * plan.rounds)
        ]
        rows[f"ours, {pairs[0][1].chunks:g} chunks"] = _added(pairs)
        if tools == 1:
            plain, streamed = ([window.requests for window in pair] for pair in zip(*pairs, strict=True))
    for name, other in others.items():
        asked = zip(plain, streamed, strict=True)
        pairs = [[replay(other, body, stream=bool(k)) for k, body in enumerate(both)] for both in asked]
        rows[f"{name}, {pairs[0][1].chunks:g} chunks"] = _added(pairs)
    return rows


def _added(pairs: list[list[Window]]) -> dict[str, float]:
    """What a request costs more streamed than plain: the median of pairs of windows, each pair one after the other."""
    added = statistics.median(streamed.cpu_us - plain.cpu_us for plain, streamed in pairs)
    return {"added_us": added, "us_a_chunk": added / pairs[0][1].chunks}


def chunk_writing(rounds: int) -> dict[str, dict[str, float]]:
    """What writing a stream's chunks takes, by wire: an answer of thinking, text and eight tool calls."""
    from clawgym_env.types import ChatRequest, Message, ToolCall
    from clawgym_env.wire import anthropic_messages, gemini, openai_chat, openai_responses
    from clawgym_env.wire.base import Reply, Usage

    calls = tuple(ToolCall("bash", {"command": f"grep -n {k} notes.txt"}, f"call_{k}") for k in range(8))
    message = Message("assistant", "I look for them. " * 8, "Which are there? " * 8, calls)
    rows = {}
    request = ChatRequest("policy", (Message("user", "Find them."),), stream=True)
    for wire in (openai_chat, openai_responses, anthropic_messages, gemini):
        reply = Reply(1, 0, request, message, "stop", Usage(900, 120, 800))

        def write(reply: Reply = reply, wire: Any = wire) -> int:
            return len([*wire.stream_deltas(reply), *wire.stream_end(reply)])

        chunks = write()
        took = min(timeit.repeat(write, number=20, repeat=5 * rounds)) / 20 * 1e6
        rows[wire.__name__.rpartition(".")[2]] = {"chunks": chunks, "us_a_chunk": took / chunks}
    return rows


class _Channel(asyncio.Protocol):
    """One keep-alive connection of the load."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[Answer] | None = None
        self._answer = Answer()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer.feed(data) and self._waiting is not None:
            self._waiting.set_result(self._answer)

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        self._answer, self._waiting = Answer(), asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiting


async def load(served: Served, plan: Plan, names: list[str]) -> list[float]:
    """Latencies in microseconds, from when a request was due, at a fixed rate spread over concurrent rollouts."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    period = len(names) / plan.rate

    async def rollout(k: int, name: str) -> None:
        _, channel = await loop.create_connection(_Channel, "127.0.0.1", served.port)
        talk = Conversation(name, opening=2_000, shown=400)
        due = began + k / plan.rate
        while due < began + plan.seconds:
            request = served.request(talk.body(), rollout=name)
            await asyncio.sleep(due - loop.time())
            answer = await channel.ask(request)
            latencies.append((loop.time() - due) * 1e6)
            if not answer.ok:
                raise RuntimeError(f"refused: {bytes(answer.data[:600])!r}")
            talk.hear(answer)
            due += period
        channel._transport.close()

    began = loop.time() + 0.2
    await asyncio.gather(*(rollout(k, name) for k, name in enumerate(names)))
    return latencies


def latency(proxy: Served, others: dict[str, Served], plan: Plan) -> dict[str, Any]:
    """Percentiles of each server, and what it adds to the echo's."""
    rollouts = Rollouts(proxy)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("ours", *others)}
    for _ in range(plan.rounds):
        for name in found:
            with rollouts.opened(CONCURRENT, 1) as names:
                took = sorted(asyncio.run(load(proxy if name == "ours" else others[name], plan, names)))
            found[name].append((took[len(took) // 2], took[min(len(took) - 1, int(0.99 * len(took)))]))
    limit = [statistics.median(rank) for rank in zip(*found["echo"], strict=True)]
    out = {}
    for name, ranks in found.items():
        p50, p99 = (statistics.median(rank) for rank in zip(*ranks, strict=True))
        out[name] = {"p50_us": p50, "p99_us": p99, "added_p50_us": p50 - limit[0], "added_p99_us": p99 - limit[1]}
    return out


def profile(proxy: Served, plan: Plan) -> None:
    """Prints where the time goes, by body size."""
    rollouts = Rollouts(proxy)
    runs: dict[str, Callable[[], Any]] = {
        "bodies of 1 KB": lambda: small(rollouts, plan.small, stream=False),
        "bodies up to 100 KB": lambda: grown(rollouts, plan.short, stream=False),
    }
    for name, run in runs.items():
        proxy.tell("start_profile")
        run()
        print(f"\nprofile, {name}\n{proxy.tell('stop_profile')}")


def main() -> None:
    """Starts the servers, measures, prints tables, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--peers", type=Path, default=Path("/nonexistent"), help="where litellm and vllm-router are")
    parser.add_argument("--profile", action="store_true", help="print the functions that take the most time, and end")
    parser.add_argument("--tiny", action="store_true", help="a few requests of each kind: for tests")
    arguments = parser.parse_args()
    plan = TINY if arguments.tiny else Plan()
    with ExitStack() as stack:
        proxy = stack.enter_context(serving.ours("proxy"))
        if arguments.profile:
            profile(proxy, plan)
            return
        upstream = stack.enter_context(serving.ours("upstream"))
        found: dict[str, Served | None] = {
            "echo": stack.enter_context(serving.ours("echo")),
            "vllm-router": stack.enter_context(serving.vllm_router(arguments.peers, upstream)),
            "LiteLLM": stack.enter_context(serving.litellm(arguments.peers, upstream)),
        }
        others = {name: served for name, served in found.items() if served is not None}
        missing = [name for name, served in found.items() if served is None]
        results = overhead(proxy, others, plan)
        results["sse"] = chunk_cost(proxy, others, plan)
        results["chunks"] = chunk_writing(plan.rounds)
        results["latency"] = latency(proxy, others, plan)
        results["not_installed"] = missing
    for title, key in (
        ("CPU us a request", "cpu_us_a_request"),
        ("the chat format's part, CPU us a request", "chat_format_us"),
        ("growth: call of a rollout", "growth"),
        ("what streaming adds, CPU us", "sse"),
        ("writing a chunk, CPU us", "chunks"),
        (f"latency, {CONCURRENT} rollouts, {plan.rate:g} requests a second", "latency"),
    ):
        print(f"\n{title}\n{table(results[key], lambda row: row)}")
    print(f"\nnot installed: {', '.join(missing) or 'none'}")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
