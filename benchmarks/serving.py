"""Starts the servers under measurement as processes of their own, reads what they cost, and speaks HTTP to them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
START_S = 120.0


@dataclass
class Served:
    """A running server.

    Attributes:
        path: Where it takes chat completions; ``{rollout}`` stands for a rollout's name.
        stream_path: The same for streamed ones, where that is another.
    """

    process: subprocess.Popen[bytes]
    port: int
    path: str
    stream_path: str
    commands: bool

    def cpu_ns(self) -> int:
        """CPU time of the process, all threads, in nanoseconds."""
        return time.clock_gettime_ns((~self.process.pid << 3) | 2)

    def memory(self) -> tuple[int, int]:
        """Resident bytes now, and at their peak since :meth:`forget_peak`."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in text.splitlines())
        return tuple(1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]

    def forget_peak(self) -> None:
        """Begins a new measurement of the peak."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def tell(self, do: str, **details: Any) -> Any:
        """Sends a command to one of our own servers; its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **details}).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def request(self, body: bytes, *, rollout: str = "", stream: bool = False) -> bytes:
        """A whole HTTP request."""
        path = (self.stream_path if stream else self.path).format(rollout=rollout)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer x\r\naccept: */*\r\nuser-agent: bench\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@contextmanager
def ours(kind: str) -> Iterator[Served]:
    """One of the servers in ``server.py``."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        path = "/rollout/{rollout}/v1/chat/completions"
        plain, streamed = (path, path) if kind == "proxy" else ("/v1/chat/completions", "/v1/stream")
        yield Served(process, port, plain, plain if kind == "upstream" else streamed, True)
    finally:
        _end(process)


@contextmanager
def litellm(folder: Path, upstream: Served) -> Iterator[Served | None]:
    """LiteLLM's proxy, whose answers are its own mocks; ``None`` where it is not installed."""
    program = shutil.which("litellm", path=_search(folder))
    if program is None:
        yield None
        return
    model = {"model": "openai/policy", "api_key": "x", "mock_response": "Let me look at it."}
    config = {"model_list": [{"model_name": "policy", "litellm_params": model}]}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config, file)  # JSON is YAML
        file.flush()
        port = _free_port()
        command = [program, "--config", file.name, "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        settings = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOG": "ERROR",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            "DO_NOT_TRACK": "1",
        }
        with _peer(command, port, "/health/liveliness", settings) as served:
            yield served


@contextmanager
def vllm_router(folder: Path, upstream: Served) -> Iterator[Served | None]:
    """vllm-router in front of a server that answers fixed bytes; ``None`` where it is not installed."""
    program = shutil.which("vllm-router", path=_search(folder))
    if program is None:
        yield None
        return
    port, metrics = _free_port(), _free_port()
    command = [
        program, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"http://127.0.0.1:{upstream.port}",
        "--policy", "round_robin", "--prometheus-port", str(metrics), "--log-level", "error",
    ]  # fmt: skip
    with _peer(command, port, "/health", {}) as served:
        yield served


@contextmanager
def _peer(command: list[str], port: int, health: str, settings: dict[str, str]) -> Iterator[Served]:
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, **settings}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            deadline = time.monotonic() + START_S
            while not _healthy(f"http://127.0.0.1:{port}{health}"):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"{command[0]} did not start:\n{log.read().decode()[-2000:]}")
                time.sleep(0.2)
            yield Served(process, port, "/v1/chat/completions", "/v1/chat/completions", False)
        finally:
            _end(process)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _search(folder: Path) -> str:
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@dataclass
class Answer:
    """One HTTP response, growing as its bytes come in."""

    data: bytearray = field(default_factory=bytearray)
    _body_at: int = -1
    _length: int | None = None

    def feed(self, data: bytes) -> bool:
        """Takes bytes; whether the response is whole."""
        self.data += data
        if self._body_at < 0:
            end = self.data.find(b"\r\n\r\n")
            if end < 0:
                return False
            self._body_at = end + 4
            head = bytes(self.data[:end]).lower()
            if b"content-length:" in head:
                self._length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        if self._length is not None:
            return len(self.data) >= self._body_at + self._length
        return self.data.endswith(b"0\r\n\r\n")

    @property
    def ok(self) -> bool:
        return self.data.startswith(b"HTTP/1.1 200")

    @property
    def body(self) -> bytes:
        """The content, chunks put together."""
        raw = bytes(self.data[self._body_at :])
        if self._length is not None:
            return raw
        out, at = [], 0
        while (size := int(raw[at : (end := raw.index(b"\r\n", at))], 16)) > 0:
            out.append(raw[end + 2 : end + 2 + size])
            at = end + 4 + size
        return b"".join(out)


class Connection:
    """A blocking keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, request: bytes) -> None:
        """Sends a request."""
        self._socket.sendall(request)

    def answer(self) -> Answer:
        """Waits for the whole answer to what was sent.

        Raises:
            RuntimeError: an answer other than 200.
        """
        answer = Answer()
        while not answer.feed(self._socket.recv(1 << 18)):
            pass
        if not answer.ok:
            raise RuntimeError(f"refused: {bytes(answer.data[:600])!r}")
        return answer

    def close(self) -> None:
        self._socket.close()


class Client:
    """Connections to one server, and what its work for them costs."""

    def __init__(self, served: Served, connections: int) -> None:
        self.served = served
        self._connections = [Connection(served.port) for _ in range(connections)]

    def ask(self, requests: list[bytes]) -> tuple[list[Answer], float]:
        """Sends requests over all connections, so that the server is never idle; the answers, in order, and its CPU
        microseconds, what it does after the last answer included."""
        answers: list[Answer] = []
        time.sleep(0.005)
        began = self.served.cpu_ns()
        many = len(self._connections)
        for at in range(0, len(requests), many):
            batch = requests[at : at + many]
            for connection, request in zip(self._connections, batch, strict=False):
                connection.send(request)
            answers += [connection.answer() for connection in self._connections[: len(batch)]]
        time.sleep(0.005)
        return answers, (self.served.cpu_ns() - began) / 1e3

    def close(self) -> None:
        """Closes the connections."""
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
