"""A proxy on a real socket with one rollout behind it, as the proxy's tests use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import openai

from clawgym_env.engines.base import Engine, EngineRequest
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.engines.stepwise import StepwiseEngine
from clawgym_env.proxy.app import Proxy
from clawgym_env.proxy.server import ProxyServer
from clawgym_env.proxy.session import Session
from clawgym_env.rendering import ChatRenderer
from clawgym_env.types import TokenArray, ToolCall

RENDERER = ChatRenderer.from_folder()
STOP = RENDERER.stop_token_ids[0]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "bash", "description": "run", "parameters": {"type": "object"}}}
]
START: list[dict[str, Any]] = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "List the files."},
]


def letters(text: str) -> TokenArray:
    """Ids that spell a text letter by letter, as no encoder would: re-encoding them gives others."""
    parts = [RENDERER.tokenizer.encode(c) for c in text]
    return np.array([i for part in parts for i in part] + [STOP], dtype=np.int64)


def raw(text: str) -> TokenArray:
    """Ids of a text with its markup."""
    return np.array(RENDERER.tokenizer.encode(text), dtype=np.int64)


def call(command: str, content: str = "") -> TokenArray:
    """Ids of an answer that calls the tool."""
    return RENDERER.encode_reply(content, ToolCall("bash", {"command": command}))


@dataclass
class World:
    """Everything a test touches; ``prompts`` are the engine's requests in order."""

    proxy: Proxy
    server: ProxyServer
    session: Session
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    engine: Engine
    prompts: list[EngineRequest] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"{self.server.base_url}/rollout/{self.session.rollout_id}/v1/chat/completions"

    @property
    def stepwise(self) -> StepwiseEngine:
        assert isinstance(self.engine, StepwiseEngine)
        return self.engine

    async def ask(
        self, messages: list[dict[str, Any]], *, stream: bool = False, **more: Any
    ) -> tuple[dict[str, Any], str]:
        """One call by the official client: the message as an SDK user would echo it, and the finish reason."""
        create: Any = self.client.chat.completions.create
        if not stream:
            choice = (await create(model="policy", messages=messages, tools=TOOLS, **more)).choices[0]
            return choice.message.model_dump(exclude_none=True), choice.finish_reason
        manager = self.client.chat.completions.stream(model="policy", messages=messages, tools=TOOLS, **more)  # type: ignore[arg-type]
        async with manager as events:
            async for _ in events:
                pass
            choice = events.current_completion_snapshot.choices[0]
        message = choice.message.model_dump(exclude_none=True)
        for tool_call in message.get("tool_calls", []):
            tool_call["function"].pop("parsed_arguments", None)
            tool_call.pop("index", None)
        return {k: v for k, v in message.items() if k != "parsed"}, choice.finish_reason


@asynccontextmanager
async def world(
    answers: list[TokenArray] | Engine,
    *,
    rollout: str = "r1",
    wrap: Callable[[Any, Session], Any] | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    """Serves one rollout whose policy says ``answers`` in turn, or is the given engine."""
    prompts: list[EngineRequest] = []

    def script(request: EngineRequest, turn: int) -> TokenArray:
        prompts.append(request)
        return answers[turn]  # type: ignore[index]

    engine = (
        ScriptedEngine(script, max_context=settings.pop("max_context", 4096)) if isinstance(answers, list) else answers
    )
    proxy, session = Proxy(), Session(rollout, engine, RENDERER, **settings)
    proxy.register(session)
    if wrap is not None:
        proxy.app = wrap(proxy.app, session)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(ProxyServer(proxy))
        base = f"{server.base_url}/rollout/{rollout}/v1"
        # Loading the certificates would take longer than most tests.
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=20, verify=False))
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0, timeout=20, http_client=plain)
        )
        yield World(proxy, server, session, client, http, engine, prompts)


def run(
    scenario: Callable[[World], Awaitable[None]],
    answers: list[TokenArray] | Engine,
    *,
    limit_s: float = 60.0,
    **settings: Any,
) -> Session:
    """Runs a scenario against a fresh world; returns its session."""

    async def main() -> Session:
        async with asyncio.timeout(limit_s), world(answers, **settings) as it:
            await scenario(it)
        return it.session

    return asyncio.run(main())
