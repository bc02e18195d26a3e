"""The servers under measurement that are ours: the proxy over a scripted engine, and a raw ASGI echo as its limit.

    python server.py proxy     python server.py echo     python server.py upstream

Both are served by the same uvicorn configuration. The port is printed as a line of JSON; then each line on standard
input is a command whose answer is a line of JSON, and the end of the input ends the server.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import json
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from footprint import reachable

from clawgym_env.proxy.server import ProxyServer

Command = Callable[[dict[str, Any]], Any]


class OurProxy:
    """The proxy; a rollout's name begins with how many tools its answers call."""

    def __init__(self) -> None:
        from clawgym_env.engines.base import EngineRequest
        from clawgym_env.engines.scripted import ScriptedEngine
        from clawgym_env.proxy.app import Proxy
        from clawgym_env.rendering import ChatRenderer
        from clawgym_env.types import ToolCall

        self.proxy = Proxy()
        self.app = self.proxy.app
        self.renderer = ChatRenderer.from_folder()
        self.sessions: dict[str, Any] = {}
        self.spent: Counter[str] = Counter()
        for name in ("prompt", "extend", "parse"):
            setattr(self.renderer, name, self._timed(name, getattr(self.renderer, name)))
        command = ToolCall("bash", {"command": "ls -la src && cat README.md"})
        answers = {n: self.renderer.encode_reply("Let me look at it.", *[command] * n) for n in range(9)}

        def script(request: EngineRequest, turn: int) -> Any:
            return answers[int(request.rollout_id[0])]

        self.engine = ScriptedEngine(script, max_context=1 << 30)

    def register(self, command: dict[str, Any]) -> int:
        from clawgym_env.proxy.session import Session
        from clawgym_env.types import Budget, Sampling

        for name in command["names"]:
            session = Session(
                name, self.engine, self.renderer, Sampling(max_tokens=1 << 20), Budget(1 << 40, 1 << 60), seed=0
            )
            self.sessions[name] = session
            self.proxy.register(session)
        return len(self.sessions)

    def unregister(self, command: dict[str, Any]) -> int:
        for name in command["names"]:
            self.proxy.unregister(name)
            del self.sessions[name]
        return len(self.sessions)

    def stats(self, command: dict[str, Any]) -> dict[str, Any]:
        """What one rollout holds."""
        session = self.sessions[command["name"]]
        tree = session.tree
        return {
            "calls": len(session.records),
            "unique_tokens": tree.unique_tokens,
            "total_tokens": tree.total_tokens,
            "roots": len(tree.nodes[0].children),
            "leaves": len(tree.leaf_calls()),
            "tree_bytes": reachable(tree),
            "session_bytes": reachable(session, without=[self.engine, self.renderer]),
            "matched": sum(record.parent is not None for record in session.records),
            "notes": dict(session.ledger.notes),
        }

    def metered(self, command: dict[str, Any]) -> dict[str, Any]:
        """Nanoseconds by method of the chat format since the last question, and what it took to find them out."""
        spent = dict(self.spent)
        self.spent.clear()
        return {"spent": spent, "clock": spent.pop("clock", 0)}

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        reads = [time.thread_time_ns() for _ in range(1_001)]
        clock = round(statistics.median(b - a for a, b in pairwise(reads)))

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent[name] += time.thread_time_ns() - began - clock
                self.spent["clock"] += 2 * clock

        return timed


def echo(*, upstream: bool) -> Callable[..., Awaitable[None]]:
    """Reads a request and answers fixed bytes, streamed where its path (upstream: its body) says so."""
    head = {"id": "chatcmpl-1", "created": 0, "model": "policy"}
    call = {"name": "bash", "arguments": '{"command":"ls -la src && cat README.md"}'}
    calls = [{"index": 0, "id": "call1x0", "type": "function", "function": call}]
    message = {"role": "assistant", "content": "Let me look at it.", "tool_calls": calls}
    usage = {"prompt_tokens": 100, "completion_tokens": 40, "total_tokens": 140}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    plain = json.dumps({**head, "object": "chat.completion", "choices": [choice], "usage": usage}).encode()
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"content": message["content"]},
        {"tool_calls": calls},
        {},
    ]
    chunks = [json.dumps({**head, "choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    events = [f"data: {chunk}\n\n".encode() for chunk in chunks]
    json_headers = [(b"content-type", b"application/json"), (b"content-length", str(len(plain)).encode())]
    stream_headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        parts, more = [], True
        while more:
            event = await receive()
            parts.append(event.get("body", b""))
            more = event.get("more_body", False)
        body = b"".join(parts)
        streamed = b'"stream":true' in body.replace(b" ", b"") if upstream else scope["path"].endswith("stream")
        await send(
            {"type": "http.response.start", "status": 200, "headers": stream_headers if streamed else json_headers}
        )
        if not streamed:
            await send({"type": "http.response.body", "body": plain})
            return
        await send({"type": "http.response.body", "body": b"".join(events[:-1]), "more_body": True})
        await send({"type": "http.response.body", "body": events[-1] + b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


class Profiler:
    """Profiles what runs between two commands."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def start(self, command: dict[str, Any]) -> None:
        self._profile = cProfile.Profile()
        self._profile.enable()

    def stop(self, command: dict[str, Any]) -> str:
        self._profile.disable()
        out = io.StringIO()
        stats = pstats.Stats(self._profile, stream=out)
        stats.sort_stats("tottime").print_stats(15)
        shares = "".join(f"{share:6.1%}  {part}\n" for part, share in parts(stats).most_common())
        return out.getvalue().rstrip() + "\n\n" + shares


def parts(stats: Any) -> Counter[str]:
    """Share of the time that each part of the server took; a built-in function's is its callers'.

    Args:
        stats: A ``pstats.Stats``. Waiting for sockets does not count.
    """
    spent: Counter[str] = Counter()
    for (path, _, name), (_, _, own, _, callers) in stats.stats.items():
        if path != "~":
            spent[_part(path)] += own
        elif "poll" not in name:
            for (caller, _, _), (_, _, part, _) in callers.items():
                spent[_part(caller)] += part
    whole = sum(spent.values())
    return Counter({part: share / whole for part, share in spent.items()})


def _part(path: str) -> str:
    """Which part of the server a source file belongs to."""
    inside = path.rpartition("/clawgym_env/")[2]
    if inside != path:
        return f"clawgym_env.{inside.partition('/')[0].removesuffix('.py')}"
    for library in ("renderers", "tokenizers", "uvicorn", "asyncio"):
        if f"/{library}/" in path:
            return library
    return "other"


async def serve(proxy: Any, commands: dict[str, Command]) -> None:
    """Serves until the standard input ends."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with ProxyServer(proxy) as server:
        print(json.dumps({"port": int(server.base_url.rpartition(":")[2])}), flush=True)
        while line := await reader.readline():
            command = json.loads(line)
            print(json.dumps(commands[command["do"]](command)), flush=True)


def main() -> None:
    """Runs one server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["proxy", "echo", "upstream"])
    kind = parser.parse_args().kind
    profiler = Profiler()
    commands: dict[str, Command] = {"start_profile": profiler.start, "stop_profile": profiler.stop}
    if kind == "proxy":
        ours = OurProxy()
        for name in ("register", "unregister", "stats", "metered"):
            commands[name] = getattr(ours, name)
        asyncio.run(serve(ours, commands))
    else:
        asyncio.run(serve(SimpleNamespace(app=echo(upstream=kind == "upstream")), commands))


if __name__ == "__main__":
    main()
