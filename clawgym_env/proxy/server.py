"""Sockets for the proxy's application: one loopback server, and any listener that a sandbox hands out.

Invariant: only loopback addresses and passed listeners are served. A passed listener is tied to one rollout.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from contextlib import suppress
from typing import Any

import uvicorn

from clawgym_env.errors import ProxyError
from clawgym_env.proxy.app import Proxy


class ProxyServer:
    """Serves a :class:`Proxy`; an async context manager.

    Attributes:
        base_url: ``http://127.0.0.1:PORT`` of the shared loopback listener.
    """

    def __init__(self, proxy: Proxy) -> None:
        self._config = uvicorn.Config(
            proxy.app,
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            lifespan="off",
            timeout_keep_alive=600,
            ws="none",
        )
        self._state = uvicorn.Server(self._config).server_state
        self._servers: dict[str, asyncio.Server] = {}
        self.base_url = ""

    async def __aenter__(self) -> ProxyServer:
        self._config.load()
        listener = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await self._serve("", listener)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for key in list(self._servers):
            await self.close(key)
        for connection in list(self._state.connections):
            connection.shutdown()
        pending = [t for t in self._state.tasks if not t.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for connection in list(self._state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def attach(self, rollout_id: str, listener: socket.socket) -> None:
        """Serves a rollout on a listener of its own; the socket object stays the caller's to close.

        Raises:
            ProxyError: the rollout has a listener already.
        """
        if rollout_id in self._servers:
            raise ProxyError(f"rollout {rollout_id!r} is served on a listener already")
        await self._serve(rollout_id, listener.dup())

    async def close(self, rollout_id: str) -> None:
        """Stops accepting for a rollout; idempotent."""
        server = self._servers.pop(rollout_id, None)
        if server is not None:
            server.close()

    async def _serve(self, key: str, listener: socket.socket) -> None:
        listener.setblocking(False)
        protocol_class: Any = self._config.http_protocol_class
        protocol = functools.partial(
            protocol_class,
            config=self._config,
            server_state=self._state,
            app_state={"rollout": key or None},
        )
        with suppress(OSError):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._servers[key] = await asyncio.get_running_loop().create_server(protocol, sock=listener, backlog=256)
