"""The ASGI application behind every rollout's model endpoint.

Invariants:
    1. A request belongs to the rollout that its path names (``/rollout/<id>/v1/...``), and a rollout's own listener
       serves that rollout only. Anything else is refused with an error that says so.
    2. A call is committed before its terminal event is sent; a client that goes away and a rollout that ended meanwhile
       commit nothing.
    3. Every stream ends in its terminal events or in an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from clawgym_env.errors import BudgetExhausted, ContextOverflow, EngineError, ProxyError, RenderingError, WireError
from clawgym_env.proxy.session import Draft, Session
from clawgym_env.types import ChatRequest
from clawgym_env.wire import openai_chat as wire
from clawgym_env.wire.sse import KEEP_ALIVE

log = logging.getLogger("clawgym.proxy")

MAX_BODY_BYTES = 64 << 20
KEEP_ALIVE_S = 10.0


class ClientGone(Exception):
    """The client closed its connection."""


class Proxy:
    """Sessions by rollout id, and the application that serves them."""

    def __init__(self) -> None:
        self._live: dict[str, Session] = {}
        self._ended: set[str] = set()
        self.app = Starlette(
            routes=[
                Route("/rollout/{rollout}/v1/chat/completions", _Completions(self)),
                Route("/rollout/{rollout}/v1/models", self._models, methods=["GET", "HEAD"]),
                Route("/{path:path}", self._unattributed, methods=["GET", "HEAD", "POST"]),
            ]
        )

    def register(self, session: Session) -> None:
        """Opens a rollout's endpoint.

        Raises:
            ProxyError: a live rollout has that id already.
        """
        if session.rollout_id in self._live:
            raise ProxyError(f"rollout {session.rollout_id!r} is live already; rollout ids must be unique")
        self._ended.discard(session.rollout_id)
        self._live[session.rollout_id] = session

    def unregister(self, rollout_id: str) -> None:
        """Closes a rollout's endpoint; late calls are answered 410."""
        if self._live.pop(rollout_id, None) is not None:
            self._ended.add(rollout_id)

    def session_of(self, scope: Scope) -> Session:
        """The session that a request belongs to.

        Raises:
            WireError: unknown, finished, or another rollout's listener.
        """
        rollout = scope["path_params"]["rollout"]
        owner = scope.get("state", {}).get("rollout")
        if owner is not None and owner != rollout:
            raise WireError(f"this listener serves rollout {owner!r} only", status=403, code="wrong_rollout")
        session = self._live.get(rollout)
        if session is not None:
            return session
        if rollout in self._ended:
            raise WireError(f"rollout {rollout!r} has ended", status=410, code="rollout_ended")
        raise WireError(f"there is no rollout {rollout!r}", status=404, code="unknown_rollout")

    def is_live(self, session: Session) -> bool:
        """Whether calls of a session still count."""
        return self._live.get(session.rollout_id) is session

    async def _models(self, request: Request) -> Response:
        try:
            session = self.session_of(request.scope)
        except WireError as error:
            return JSONResponse(wire.render_error(error), error.status)
        return JSONResponse(wire.render_models(["policy"], session.engine.max_context))

    async def _unattributed(self, request: Request) -> Response:
        error = WireError(
            f"{request.method} {request.url.path} belongs to no rollout or is not served; base URLs look like "
            "http://HOST:PORT/rollout/<id>/v1",
            status=404,
            code="unattributed",
        )
        return JSONResponse(wire.render_error(error), error.status)


class _Completions:
    """``POST .../chat/completions`` as a plain ASGI endpoint: it must see the client go away while it generates."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(receive, send)
        session: Session | None = None
        try:
            session = self._proxy.session_of(scope)
            if scope["method"] != "POST":
                raise WireError("only POST is served here", status=405)
            await self._answer(exchange, session, wire.parse_request(await exchange.body()))
        except ClientGone:
            if session is not None:
                session.ledger.note("client went away while a call was pending")
        except WireError as error:
            if session is not None:
                session.ledger.note(f"refused: {error}")
            await exchange.refuse(error)
        except Exception as error:
            log.exception("%s: a call failed", scope["path"])
            if session is not None:
                session.fail(f"{type(error).__name__}: {error}")
            await exchange.refuse(WireError("internal error at the model boundary", status=500, code="internal_error"))

    async def _answer(self, exchange: _Exchange, session: Session, request: ChatRequest) -> None:
        async with exchange.unless_gone(_draft(session, request)) as pending:
            # What fails without sampling is refused with its own status: harnesses compact on a 400, not on an event.
            await asyncio.wait([pending], timeout=0)
            if request.stream and not pending.done():
                await exchange.hold(pending)
            draft = await pending
            try:
                reply = _reply(draft)
                if request.stream:
                    await exchange.write(wire.stream_deltas(reply))
                if exchange.gone:
                    raise ClientGone
                if not self._proxy.is_live(session):
                    raise WireError(f"rollout {session.rollout_id!r} has ended", status=410, code="rollout_ended")
            except BaseException:
                session.abort(draft)
                raise
            session.commit(draft)
        if request.stream:
            await exchange.write(wire.stream_end(reply, include_usage=request.include_usage))
            await exchange.end()
        else:
            await exchange.json(wire.render_reply(reply), 200)


async def _draft(session: Session, request: ChatRequest) -> Draft:
    """A draft, with every expected failure turned into what the wire says."""
    try:
        return await session.draft(request)
    except ContextOverflow as error:
        session.ledger.note("prompt longer than the context")
        raise WireError(str(error), param="messages", code="context_length_exceeded") from error
    except BudgetExhausted as error:
        raise WireError(str(error), code="rollout_budget_exhausted") from error
    except RenderingError as error:
        raise WireError(str(error), param="messages", code="unrenderable") from error
    except EngineError as error:
        raise WireError(f"the policy engine failed: {error}", status=500, code="engine_error") from error


def _reply(draft: Draft) -> wire.Reply:
    generation = draft.generation
    usage = wire.Usage(len(draft.prompt_ids), len(generation.token_ids), generation.cached_tokens)
    ident = f"chatcmpl-{draft.number}"
    return wire.Reply(ident, int(time.time()), draft.request.model, draft.reply, generation.finish_reason, usage)


class _Exchange:
    """One HTTP request and its response, aware of the client going away."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._streaming = False
        self.gone = False

    async def body(self) -> bytes:
        parts, size = [], 0
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise ClientGone
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            if size > MAX_BODY_BYTES:
                raise WireError(f"the request body exceeds {MAX_BODY_BYTES} bytes", status=413)
            if not event.get("more_body"):
                return b"".join(parts)

    @asynccontextmanager
    async def unless_gone(self, work: Coroutine[Any, Any, Draft]) -> AsyncIterator[asyncio.Task[Draft]]:
        """Runs a coroutine as a task that is cancelled when the client goes away, or when the caller leaves.

        Raises:
            ClientGone: the client went away before the work was done.
        """
        task = asyncio.create_task(work)
        watch = asyncio.create_task(self._watch(task))
        try:
            yield task
        except asyncio.CancelledError:
            if not self.gone:
                raise
            raise ClientGone from None
        finally:
            watch.cancel()
            task.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _watch(self, task: asyncio.Task[Draft]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        task.cancel()

    async def hold(self, pending: asyncio.Task[Draft]) -> None:
        """Opens the stream and keeps the client waiting until a task is done."""
        await self._start_stream()
        while not pending.done():
            await asyncio.wait([pending], timeout=KEEP_ALIVE_S)
            if not pending.done():
                await self.write([KEEP_ALIVE])

    async def refuse(self, error: WireError) -> None:
        """Ends the response with an error: with its status, or as an event where the headers have gone out."""
        if self._streaming:
            await self.write(wire.stream_error(error))
            await self.end()
        else:
            await self.json(wire.render_error(error), error.status)

    async def json(self, payload: object, status: int) -> None:
        body = orjson.dumps(payload)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _start_stream(self) -> None:
        self._streaming = True
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, events: Iterable[bytes]) -> None:
        """Sends events, and the stream's headers before the first."""
        if not self._streaming:
            await self._start_stream()
        await self._send({"type": "http.response.body", "body": b"".join(events), "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})
