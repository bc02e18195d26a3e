"""Rollouts of a policy under real harnesses, as a TorchRL collector.

Proxy-driven: harnesses run concurrently and their calls go straight to the engine; the collector harvests finished
trees. Each item it yields is one batch of whole groups as a lazy stack of ``tree_td`` TensorDicts; with a replay
buffer attached it extends the buffer and yields ``None``, as TorchRL's own LLM collector does.

Invariant: batch ``k`` holds the same tasks and the same sampling seeds whether or not the run was interrupted before
it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.collectors._base import BaseCollector
from torchrl.data import ReplayBuffer

from clawgym_env.engines.base import Engine
from clawgym_env.loop import LoopThread
from clawgym_env.pool import RolloutPool, open_runner
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rollout import Rollout, RolloutRunner, RolloutSettings, RolloutSpec
from clawgym_env.sandboxes.base import Backend
from clawgym_env.types import Sampling
from torchrl_ext.data import tree_td
from torchrl_ext.engine import TorchEngine

#: Called with each finished rollout and the number that is still out.
OnRollout = Callable[[Rollout, int], None]
#: Batch number -> the rollouts of that batch.
Plan = Callable[[int], Sequence[RolloutSpec]]


class TreeCollector(BaseCollector):  # type: ignore[misc]
    """Runs batches of rollouts and yields them as TensorDict trees.

    Args:
        engine: Serves the policy; ``increment_version`` needs a :class:`TorchEngine`.
        plan: Batch number -> specs.
        total_batches: Batches to yield; -1 goes on for ever.
        concurrency: Rollouts in flight.
        replay_buffer: Extended with each batch, which is then not yielded.
        postproc: Applied to each batch, before the replay buffer.
        on_rollout: Called for progress, in the collector's thread.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        backend: Backend,
        plan: Plan,
        *,
        settings: RolloutSettings | None = None,
        total_batches: int = -1,
        concurrency: int = 4,
        replay_buffer: ReplayBuffer | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        on_rollout: OnRollout | None = None,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.plan = plan
        self.total_batches = total_batches
        self.concurrency = concurrency
        self.replay_buffer = replay_buffer
        self.postproc = postproc
        self.on_rollout = on_rollout
        self.batch = 0
        self.rollouts: list[Rollout] = []
        self._loop = LoopThread("clawgym-collector")
        self._stack = AsyncExitStack()
        self._runner: RolloutRunner = self._loop.run(
            self._stack.enter_async_context(open_runner(engine, renderer, backend, settings))
        )

    @property
    def policy_version(self) -> int:
        """Version that the next batch's first tokens will carry."""
        return self.engine.policy_version

    def increment_version(self) -> None:
        """Tells the engine that its weights have changed; the embedded engine shares them by reference.

        Raises:
            TypeError: the engine's weights are not in this process.
        """
        if not isinstance(self.engine, TorchEngine):
            raise TypeError("increment_version needs the embedded TorchEngine: other engines get weights by a scheme")
        self.engine.update_weights(self.engine.policy_version + 1)

    def run(self, specs: Sequence[RolloutSpec], sampling: Sampling | None = None) -> list[Rollout]:
        """Runs rollouts outside the plan (evaluation), in the order of the specs.

        Args:
            sampling: In place of the collector's own.
        """
        runner = self._runner
        if sampling is not None:
            runner = replace(runner, settings=replace(runner.settings, sampling=sampling))
        return self._loop.run(self._run(RolloutPool(runner, concurrency=self.concurrency), specs))

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yields batch after batch; ``rollouts`` holds the records of the last one."""
        while self.total_batches < 0 or self.batch < self.total_batches:
            self.rollouts = self.run(self.plan(self.batch))
            self.batch += 1
            batch: TensorDictBase = lazy_stack([rollout_td(r) for r in self.rollouts])
            if self.postproc is not None:
                batch = self.postproc(batch)
            if self.replay_buffer is None:
                yield batch
            else:
                self.replay_buffer.extend(batch)
                yield None

    def __len__(self) -> int:
        """Batches of a whole pass.

        Raises:
            TypeError: the collector goes on for ever.
        """
        if self.total_batches < 0:
            raise TypeError("a collector without total_batches has no length")
        return self.total_batches

    async def _run(self, pool: RolloutPool, specs: Sequence[RolloutSpec]) -> list[Rollout]:
        done: dict[str, Rollout] = {}
        async for rollout in pool.as_completed(specs):
            done[rollout.id] = rollout
            if self.on_rollout is not None:
                self.on_rollout(rollout, len(specs) - len(done))
        return [done[spec.id] for spec in specs]

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Closes the proxy and the collector's thread; the engine stays the caller's."""
        if self._loop.closed:
            return
        self._loop.run(self._stack.aclose())
        self._loop.close()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds are the plan's; nothing here draws."""
        return seed

    def state_dict(self) -> OrderedDict[str, Any]:
        """The number of the next batch."""
        return OrderedDict(batch=self.batch)

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Goes on at a batch."""
        self.batch = int(state_dict["batch"])


def rollout_td(rollout: Rollout) -> TensorDict:
    """One record as a TensorDict tree."""
    return tree_td(
        rollout.packed(),
        reward=rollout.reward.score if rollout.reward is not None else None,
        query=rollout.group,
        status=rollout.status,
        rollout_id=rollout.id,
        task_id=rollout.task_id,
        harness=rollout.harness,
    )
