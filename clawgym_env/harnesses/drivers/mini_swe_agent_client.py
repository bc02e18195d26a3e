"""Runs in a sandbox: ``mini`` with a chat client that needs no LiteLLM, whose import alone costs five CPU-seconds.

Invariant: mini-swe-agent itself is unchanged. It takes its model from any class that is named to it; these two are its
own clients for OpenRouter, which speaks OpenAI's chat API, with another address and no limit on waiting.
"""

from __future__ import annotations

import os
from typing import Any

import requests
from minisweagent.models.openrouter_model import BASH_TOOL, OpenRouterAPIError, OpenRouterModel
from minisweagent.models.openrouter_textbased_model import OpenRouterTextbasedModel


class ChatModel(OpenRouterModel):  # type: ignore[misc]
    """Calls tools."""

    def _query(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return _ask({"model": self.config.model_name, "messages": messages, "tools": [BASH_TOOL], **kwargs}, self)


class TextModel(OpenRouterTextbasedModel):  # type: ignore[misc]
    """Writes its commands into its text."""

    def _query(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return _ask({"model": self.config.model_name, "messages": messages, **kwargs}, self)


def _ask(body: dict[str, Any], model: OpenRouterModel) -> Any:
    """The endpoint's answer.

    Raises:
        OpenRouterAPIError: it refused.
    """
    url = f"{os.environ['OPENAI_API_BASE']}/chat/completions"
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    response = requests.post(url, json=body | model.config.model_kwargs, headers=headers, timeout=None)
    if not response.ok:
        raise OpenRouterAPIError(f"HTTP {response.status_code}: {response.text}")
    return response.json()


if __name__ == "__main__":
    from minisweagent.run.mini import app

    app()
