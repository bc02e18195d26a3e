"""One HTTP request and its response, in ASGI's terms: bodies with a limit, streams held open, clients that leave.

Invariant: a response is begun once and ended once, whatever happens; who leaves is noticed while work is done for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import orjson

from clawgym_env.errors import WireError
from clawgym_env.types import ChatRequest
from clawgym_env.wire.base import Reply, Wire

MAX_BODY_BYTES = 64 << 20
KEEP_ALIVE_S = 10.0

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection."""


class Exchange:
    """See the module's invariant.

    Attributes:
        wire: Whose forms the response takes.
        headers: Of the request, names in lower case.
        request: What was asked, once it is known.
        sent: The answer whose message is in the stream, before that has ended.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, wire: Wire) -> None:
        self._receive = receive
        self._send = send
        self._streaming = False
        self._watch: asyncio.Task[None] | None = None
        self.wire = wire
        self.headers: Mapping[str, str] = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self.request: ChatRequest | None = None
        self.sent: Reply | None = None

    async def body(self) -> bytes:
        """The request's body.

        Raises:
            WireError: it is too large, or says that it is no JSON.
            ClientGone: the client left before it was whole.
        """
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind and not kind.endswith(("/json", "+json")):
            raise WireError(f"the request body must be application/json, not {kind}", status=415)
        parts, size = [], 0
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise ClientGone
            part = event.get("body", b"")
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise WireError(f"the request body exceeds {MAX_BODY_BYTES} bytes", status=413)
            parts.append(part)
            if not event.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self._watch is not None and self._watch.done()

    async def until(self, work: asyncio.Task[T]) -> None:
        """Waits until a task is done; opens the stream, where one is asked for, and keeps the client waiting.

        Raises:
            ClientGone: the client left before.
        """
        assert self.request is not None
        self._watch = asyncio.create_task(self._disconnected())
        if self.request.stream:
            await self._start_stream()
        while not work.done():
            timeout = KEEP_ALIVE_S if self.request.stream else None
            await asyncio.wait([work, self._watch], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self.gone and not work.done():
                raise ClientGone
            if not work.done():
                await self.write([self.wire.keep_alive(self.request)])

    def close(self) -> None:
        """Stops watching the client."""
        if self._watch is not None:
            self._watch.cancel()

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def refuse(self, error: WireError) -> None:
        """Ends the response with an error: with its status, or as an event where a client looks for it there."""
        in_stream = self.request is not None and self.request.stream and error.code in self.wire.IN_STREAM
        if self._streaming or in_stream:
            await self.end(self.wire.stream_error(error, self.request, self.sent))
        else:
            await self.json(self.wire.render_error(error), error.status)

    async def json(self, payload: object, status: int = 200) -> None:
        """Sends a whole response."""
        body = orjson.dumps(payload)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def empty(self, status: int = 200) -> None:
        """Sends a response without a body."""
        headers = [(b"content-length", b"0")]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": b""})

    async def _start_stream(self) -> None:
        assert self.request is not None
        self._streaming = True
        headers = [(b"content-type", self.wire.stream_type(self.request)), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, events: Iterable[bytes]) -> None:
        """Sends events, and the stream's headers before the first."""
        if not self._streaming:
            await self._start_stream()
        await self._send({"type": "http.response.body", "body": b"".join(events), "more_body": True})

    async def end(self, events: Iterable[bytes]) -> None:
        """Sends the last events of a stream."""
        if not self._streaming:
            await self._start_stream()
        await self._send({"type": "http.response.body", "body": b"".join(events)})
