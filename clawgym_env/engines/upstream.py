"""Any OpenAI-compatible endpoint as the policy: for evaluation, not for training.

Invariant: what an endpoint says comes back as text, so its tokens are ours, without log-probabilities (NaN) and with
version -1: such calls can be graded and read, never trained on.
"""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import orjson

from clawgym_env.engines.base import EngineRequest
from clawgym_env.errors import EngineError
from clawgym_env.rendering import ChatRenderer
from clawgym_env.types import Generation, ToolCall
from clawgym_env.wire.openai_chat import message_json, tool_json


class UpstreamEngine:
    """Passes calls on to ``POST <endpoint>/chat/completions``.

    Args:
        endpoint: Base URL that ends in ``/v1`` or the like.
        model: Model name to ask for.
        renderer: Encodes the answers for the record.
        timeout_s: Longest wait for one answer.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        model: str,
        renderer: ChatRenderer,
        api_key: str | None = None,
        max_context: int = 131_072,
        timeout_s: float = 600.0,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout_s)
        self._url = endpoint.rstrip("/") + "/chat/completions"
        self._model = model
        self._renderer = renderer
        self._max_context = max_context

    @property
    def max_context(self) -> int:
        """Tokens that one call may hold, counted with our own tokenizer."""
        return self._max_context

    @property
    def policy_version(self) -> int:
        """Unknown: -1."""
        return -1

    async def generate(self, request: EngineRequest) -> Generation:
        """Asks the endpoint.

        Raises:
            EngineError: it cannot be reached, refused, or answered something else than a chat completion.
        """
        try:
            response = await self._client.post(self._url, json=self._body(request))
            response.raise_for_status()
            choice = response.json()["choices"][0]
            message = choice["message"]
            content = message.get("content") or ""
            if not isinstance(content, str):
                raise TypeError(f"content is {type(content).__name__}, not text")
            calls = [_tool_call(c["function"]) for c in message.get("tool_calls") or []]
        except httpx.HTTPStatusError as error:
            answer = error.response
            raise EngineError(f"{self._url} answered {answer.status_code}: {answer.text[:500]}") from error
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url} cannot be asked: {type(error).__name__}: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise EngineError(f"{self._url} did not answer with a chat completion: {error!r}") from error
        ids = self._renderer.encode_reply(content, *calls)
        length = choice.get("finish_reason") == "length"
        return Generation(
            ids, np.full(len(ids), np.nan, np.float32), np.full(len(ids), -1), "length" if length else "stop"
        )

    async def aclose(self) -> None:
        """Closes the connection pool."""
        await self._client.aclose()

    def _body(self, request: EngineRequest) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [message_json(m) for m in request.chat.messages],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        if request.chat.tools:
            body["tools"] = [tool_json(t) for t in request.chat.tools]
        return body


def _tool_call(function: dict[str, Any]) -> ToolCall:
    text = function.get("arguments") or "{}"
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        parsed = text
    return ToolCall(function["name"], parsed if isinstance(parsed, dict) else text)
