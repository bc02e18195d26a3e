"""The models there are: one body that the clients of all APIs read, as they ask for it at the same paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clawgym_env.wire import gemini


def render_model(name: str, max_context: int) -> dict[str, Any]:
    """One model.

    Args:
        max_context: Its context in tokens.
    """
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "clawgym", "max_model_len": max_context}
    anthropic = {
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "max_input_tokens": max_context,
        "max_tokens": max_context,
    }
    return {**gemini.render_model(name, max_context), **anthropic, **openai}


def render_models(names: Sequence[str], max_context: int) -> dict[str, Any]:
    """The list of models."""
    every = [render_model(name, max_context) for name in names]
    return {
        "object": "list",
        "data": every,
        "has_more": False,
        "first_id": names[0],
        "last_id": names[-1],
        "models": every,
    }
