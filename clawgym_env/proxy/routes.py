"""Which path means what: ``[/rollout/<id>]/<API path>``, for the four APIs that harnesses speak.

Invariant: a path is read once, here. Whatever it is, an error about it can be told in the form of an API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl

from clawgym_env.wire import anthropic_messages, gemini, openai_chat, openai_responses
from clawgym_env.wire.base import CountingWire, Wire

Action = Literal["generate", "count", "models", "nothing"]

_ROLLOUT = re.compile(r"/rollout/([^/]+)(/.*)?")
_GEMINI = re.compile(r"/v1(?:beta|alpha)?/models/(?P<model>.+):(?P<method>\w+)")
_MODELS = re.compile(r"/v1(?:beta|alpha)?/models(?:/(?P<model>.+))?")
_GENERATE: Mapping[str, Wire] = {
    "/v1/chat/completions": openai_chat,
    "/v1/responses": openai_responses,
    "/v1/messages": anthropic_messages,
}
_COUNT = "/v1/messages/count_tokens"
_GEMINI_METHODS: Mapping[str, Action] = {
    "generateContent": "generate",
    "streamGenerateContent": "generate",
    "countTokens": "count",
}


@dataclass(frozen=True, slots=True)
class Target:
    """What a request is about.

    Attributes:
        rollout: The rollout that the path names, if it names one.
        action: ``nothing`` for paths that are not served.
        wire: Whose forms the answer takes; ``counting`` is the same where the action is to count.
        params: Path and query parameters that the wire may read; ``model`` where the path names one.
    """

    rollout: str | None
    action: Action
    wire: Wire
    params: Mapping[str, str] = field(default_factory=dict)
    counting: CountingWire | None = None


def resolve(path: str, query: bytes) -> Target:
    """Reads a path.

    Args:
        path: Decoded, as ASGI gives it.
    """
    rollout = None
    match = _ROLLOUT.fullmatch(path)
    if match is not None:
        rollout, path = match[1], match[2] or "/"
    wire = _GENERATE.get(path)
    if wire is not None:
        return Target(rollout, "generate", wire)
    if path == _COUNT:
        return Target(rollout, "count", anthropic_messages, counting=anthropic_messages)
    match = _GEMINI.fullmatch(path)
    if match is not None and match["method"] in _GEMINI_METHODS:
        params = dict(parse_qsl(query.decode("latin-1"))) | match.groupdict()
        return Target(rollout, _GEMINI_METHODS[match["method"]], gemini, params, gemini)
    form = gemini if path.startswith(("/v1beta", "/v1alpha")) else openai_chat
    match = _MODELS.fullmatch(path)
    if match is None:
        return Target(rollout, "nothing", form)
    return Target(rollout, "models", form, {} if match["model"] is None else match.groupdict())
