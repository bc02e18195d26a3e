"""Server-sent events as bytes; no I/O."""

from __future__ import annotations

from typing import Any

import orjson

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def data_event(payload: Any) -> bytes:
    """One ``data:`` event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"
