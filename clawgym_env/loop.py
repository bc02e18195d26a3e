"""An event loop in a thread of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for synchronous code; ``close`` ends the thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end; interrupting the caller cancels it and waits until it has cleaned up."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                drained = asyncio.run_coroutine_threadsafe(_drain(), self._loop)
                drained.result(timeout=30)
            raise

    @property
    def closed(self) -> bool:
        """Whether the loop has ended."""
        return self._loop.is_closed()

    def close(self) -> None:
        """Stops the loop and joins its thread; idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _drain() -> None:
    """Waits for every other task of this loop that is being cancelled."""
    here = asyncio.current_task()
    cancelled = [t for t in asyncio.all_tasks() if t is not here and t.cancelling()]
    await asyncio.gather(*cancelled, return_exceptions=True)
