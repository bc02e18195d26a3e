"""Server-sent events as bytes; no I/O."""

from __future__ import annotations

from typing import Any

import orjson

#: A comment: keeps a connection open and is no event.
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def data_event(payload: Any) -> bytes:
    """One ``data:`` event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named_event(name: str, payload: Any) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\n" + data_event(payload)
