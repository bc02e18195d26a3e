"""The ASGI application behind every rollout's model endpoint.

Invariants:
    1. A request belongs to the rollout that its path names (``/rollout/<id>/...``), else to the one whose listener it
       came through, else to the one whose key it carries. A rollout's own listener serves that rollout only. Anything
       else is refused with an error that says so.
    2. A call is committed before its terminal event is sent; a client that goes away and a rollout that ended meanwhile
       commit nothing.
    3. Every stream ends in its terminal events or in an error.
    4. Requests that sample nothing (models, token counts, probes) leave no trace in the rollout.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from clawgym_env.errors import BudgetExhausted, ContextOverflow, EngineError, ProxyError, RenderingError, WireError
from clawgym_env.proxy.calls import Admitted, Draft
from clawgym_env.proxy.exchange import ClientGone, Exchange, Receive, Scope, Send
from clawgym_env.proxy.routes import Target, resolve
from clawgym_env.proxy.session import Session
from clawgym_env.wire import models
from clawgym_env.wire.base import Memo, Reply, Usage, Wire

#: The name that stands for the policy in lists of models; any name that no frozen model has means it too.
POLICY = "policy"

log = logging.getLogger("clawgym.proxy")


class Proxy:
    """Sessions by rollout id, and the application that serves them."""

    def __init__(self) -> None:
        self._live: dict[str, Session] = {}
        self._keys: dict[str, Session] = {}
        self._memos: dict[str, dict[Wire, Memo]] = {}
        self._ended: set[str] = set()
        self.app = self._serve

    def register(self, session: Session) -> None:
        """Opens a rollout's endpoint.

        Raises:
            ProxyError: a live rollout has that id already.
        """
        if session.rollout_id in self._live:
            raise ProxyError(f"rollout {session.rollout_id!r} is live already; rollout ids must be unique")
        self._ended.discard(session.rollout_id)
        self._live[session.rollout_id] = session
        self._keys[session.key] = session
        self._memos[session.rollout_id] = {}

    def unregister(self, rollout_id: str) -> None:
        """Closes a rollout's endpoint; late calls are answered 410."""
        session = self._live.pop(rollout_id, None)
        if session is not None:
            del self._keys[session.key], self._memos[rollout_id]
            self._ended.add(rollout_id)

    def _require_live(self, session: Session) -> None:
        if self._live.get(session.rollout_id) is not session:
            raise WireError(f"rollout {session.rollout_id!r} has ended", status=410, code="rollout_ended")

    def session_of(self, rollout: str | None, owner: str | None, headers: Mapping[str, str]) -> Session:
        """The session that a request belongs to.

        Args:
            rollout: Named by the path.
            owner: The rollout whose own listener the request came through.

        Raises:
            WireError: none, an unknown or finished one, or another rollout's listener.
        """
        named = rollout if rollout is not None else owner
        if named is None:
            session = self._keys.get(_key(headers))
            if session is None:
                raise WireError(
                    "this request belongs to no rollout: the base URL should be http://HOST:PORT/rollout/<id>, or the "
                    "API key a live rollout's",
                    status=404,
                    code="unattributed",
                )
            return session
        if owner is not None and owner != named:
            raise WireError(f"this listener serves rollout {owner!r} only", status=403, code="wrong_rollout")
        session = self._live.get(named)
        if session is not None:
            return session
        if named in self._ended:
            raise WireError(f"rollout {named!r} has ended", status=410, code="rollout_ended")
        raise WireError(f"there is no rollout {named!r}", status=404, code="unknown_rollout")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        target = resolve(scope["path"], scope["query_string"])
        exchange = Exchange(scope, receive, send, target.wire)
        session: Session | None = None
        try:
            session = self.session_of(target.rollout, scope.get("state", {}).get("rollout"), exchange.headers)
            await self._dispatch(exchange, scope["method"], target, session)
        except ClientGone:
            if session is not None:
                session.ledger.note("client went away while a call was pending")
        except WireError as error:
            if session is not None and target.action == "generate":
                session.ledger.note(f"refused: {error}")
            elif session is not None and target.action == "nothing" and scope["method"] == "POST":
                session.misdirected = session.misdirected or f"POST {scope['path']}: {error}"
            await exchange.refuse(error)
        except Exception as error:
            log.exception("%s: a call failed", scope["path"])
            if session is not None:
                session.fail(f"{type(error).__name__}: {error}")
            await exchange.refuse(WireError("internal error at the model boundary", status=500, code="internal_error"))
        finally:
            exchange.close()

    async def _dispatch(self, exchange: Exchange, method: str, target: Target, session: Session) -> None:
        if method == "HEAD":
            await exchange.empty()
        elif target.action == "nothing":
            raise WireError("no API that is served here has this path", status=404, code="unknown_path")
        elif method != ("GET" if target.action == "models" else "POST"):
            raise WireError(f"{method} is not served here", status=405)
        elif target.action == "generate":
            await self._generate(exchange, session, target.params)
        elif target.counting is not None:
            body = await exchange.body()
            with _refusals(target.wire):
                tokens = await session.count(target.counting.parse_count_request(body, target.params))
            await exchange.json(target.counting.render_token_count(tokens))
        else:
            await exchange.json(_models(target, session))

    async def _generate(self, exchange: Exchange, session: Session, params: Mapping[str, str]) -> None:
        wire = exchange.wire
        body = await exchange.body()
        # What fails without sampling is refused with its own status: harnesses compact on a 400, not on an event.
        with _refusals(wire):
            self._require_live(session)  # it may have ended while the body came in
            memo = self._memos[session.rollout_id].setdefault(wire, Memo())
            request = exchange.request = wire.parse_request(body, params, memo)
            admitted = await session.admit(request, exchange.headers)
            draft = await _wait(exchange, session, admitted)
            reply = _reply(draft)
            try:
                if request.stream:
                    await exchange.write(wire.stream_deltas(reply))
                    exchange.sent = reply
                if exchange.gone:
                    raise ClientGone
                self._require_live(session)
            except BaseException:
                session.abort(draft)
                raise
            session.commit(draft)
        if request.stream:
            await exchange.end(wire.stream_end(reply))
        else:
            await exchange.json(wire.render_reply(reply))


async def _wait(exchange: Exchange, session: Session, admitted: Admitted) -> Draft:
    """The answer to a request, while its client stays."""
    attempt = session.begin(admitted)
    try:
        await exchange.until(attempt.task)
    except BaseException:
        await session.leave(attempt)
        raise
    return session.take(attempt, admitted)


@contextmanager
def _refusals(wire: Wire) -> Iterator[None]:
    """Turns every expected failure into what the wire says of it."""
    try:
        yield
    except ContextOverflow as error:
        raise wire.overflow(error) from error
    except BudgetExhausted as error:
        raise WireError(str(error), code="rollout_budget_exhausted") from error
    except RenderingError as error:
        raise WireError(str(error), code="unrenderable") from error
    except EngineError as error:
        raise WireError(f"the policy engine failed: {error}", status=500, code="engine_error") from error


def _reply(draft: Draft) -> Reply:
    generation, admitted = draft.generation, draft.admitted
    usage = Usage(len(admitted.prompt_ids), len(generation.token_ids), generation.cached_tokens)
    return Reply(
        draft.number,
        int(time.time()),
        admitted.request,
        draft.reply,
        generation.finish_reason,
        usage,
        draft.stop_text,
    )


def _models(target: Target, session: Session) -> dict[str, Any]:
    """The list of models, or the one that the path names."""
    name = target.params.get("model")
    if name is not None:
        return models.render_model(name, session.context_of(name))
    names = [POLICY, *(n for n in session.frozen if not any(c in n for c in "*?["))]
    return models.render_models(names, session.engine.max_context)


def _key(headers: Mapping[str, str]) -> str:
    """The API key of a request, wherever its API puts it."""
    bearer = headers.get("authorization", "").removeprefix("Bearer ")
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or bearer
