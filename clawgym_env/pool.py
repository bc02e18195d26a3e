"""Many rollouts at once: bounded, cancellable, with progress.

Invariant: every spec that was handed in comes back as a record, unless the whole batch is cancelled; then nothing runs
on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from clawgym_env.engines.base import Engine
from clawgym_env.proxy.app import Proxy
from clawgym_env.proxy.calls import FrozenModel
from clawgym_env.proxy.server import ProxyServer
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rollout import Rollout, RolloutRunner, RolloutSettings, RolloutSpec
from clawgym_env.sandboxes.base import Backend


class RolloutPool:
    """Runs batches of rollouts through one runner.

    Args:
        concurrency: Rollouts in flight.
    """

    def __init__(self, runner: RolloutRunner, *, concurrency: int) -> None:
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        self.runner = runner
        self._slots = asyncio.Semaphore(concurrency)

    async def as_completed(self, specs: Sequence[RolloutSpec]) -> AsyncIterator[Rollout]:
        """Yields records as rollouts end; closing the iterator cancels the rest and waits for their sandboxes to go."""
        tasks = [asyncio.ensure_future(self._one(spec)) for spec in specs]
        try:
            for next_done in asyncio.as_completed(tasks):
                yield await next_done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def run(self, specs: Sequence[RolloutSpec]) -> list[Rollout]:
        """All records, in the order of the specs."""
        done = {rollout.id: rollout async for rollout in self.as_completed(specs)}
        return [done[spec.id] for spec in specs]

    async def _one(self, spec: RolloutSpec) -> Rollout:
        async with self._slots:
            return await self.runner.run(spec)


@asynccontextmanager
async def open_runner(
    engine: Engine,
    renderer: ChatRenderer,
    backend: Backend,
    settings: RolloutSettings | None = None,
    *,
    frozen: Mapping[str, FrozenModel] | None = None,
) -> AsyncIterator[RolloutRunner]:
    """A runner with a proxy of its own, closed on exit; the engines stay the caller's."""
    proxy = Proxy()
    async with ProxyServer(proxy) as server:
        yield RolloutRunner(proxy, server, backend, engine, renderer, settings or RolloutSettings(), frozen or {})
