"""A harness and a suite of tasks as a Gymnasium environment: a step is one intercepted model call.

``reset`` starts a rollout in a fresh sandbox and returns the harness's first model call; ``step`` answers the call in
hand with token ids and returns the next one, or the end with the verified reward. Several calls may pend at once
(sub-agents): they are answered first in, first out.

Invariant: at most one rollout is live; ``reset`` and ``close`` end it and everything that waits for it.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import orjson
from gymnasium import spaces

from clawgym_env.engines.stepwise import PendingCall, StepwiseEngine
from clawgym_env.errors import ClawGymError, ConfigError
from clawgym_env.loop import LoopThread
from clawgym_env.pool import open_runner
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rollout import Rollout, RolloutRunner, RolloutSettings, RolloutSpec
from clawgym_env.spaces import TokenSequence, UnicodeText
from clawgym_env.tasks.base import Split, Task
from clawgym_env.types import Budget, Sampling, Status, TokenArray, ToolCall
from clawgym_env.wire.openai_chat import message_json, tool_json
from clawgym_env.world import open_world

Observation = dict[str, Any]


class HarnessEnv(gymnasium.Env[Observation, TokenArray]):
    """One agent program working on the tasks of one suite.

    Observation: ``prompt_ids`` [P] int64, exactly what a policy is to continue; ``messages``, the same conversation
    and tools as JSON; ``call_id``, the number of the call within the episode. Action: [T] int64 token ids of the
    answer, end of turn included (``encode`` makes them from text). The reward is 0 until the last step, then the
    verifier's score; ``info`` of the last step holds the rollout's status, reward parts and ledger. A rollout that
    failed for no fault of the policy ends truncated, with reward NaN: it must not be learnt from.

    Args:
        harness: Name of the agent program.
        suite: Name of the task suite.
        split: Tasks to draw from; ``reset(options={"task_id": ...})`` names one.
        sandbox: Backend that commands run in.
        tokenizer: Model folder whose tokenizer is used; ``None`` takes the one that ClawGym ships.
        max_context: Longest prompt plus answer in tokens.
        max_tokens: Longest answer in tokens.
        max_calls: Model calls of one episode.
        timeout_s: Wall time of one episode, the policy's thinking included.
        harness_options: Settings of the harness.

    Raises:
        ConfigError: an unknown harness, suite or backend.
        HarnessNotInstalled: with the command that installs it.
        SandboxUnavailable: naming the ways out.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - Gymnasium's own convention

    def __init__(
        self,
        harness: str = "pi",
        suite: str = "builtin",
        *,
        split: Split = "train",
        sandbox: str = "bubblewrap",
        tokenizer: str | None = None,
        max_context: int = 32_768,
        max_tokens: int = 4_096,
        max_calls: int = 64,
        timeout_s: float = 3_600.0,
        harness_options: dict[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"render_mode {render_mode!r} is unknown; there is 'ansi'")
        self.render_mode = render_mode
        self._world = open_world(harness, suite, sandbox=sandbox, harness_options=harness_options)
        self._split = split
        self._settings = RolloutSettings(
            sampling=Sampling(max_tokens=max_tokens), budget=Budget(max_calls=max_calls), timeout_s=timeout_s
        )
        self._max_context = max_context
        self._renderer = ChatRenderer.from_folder(Path(tokenizer) if tokenizer else None)
        self._loop = LoopThread("clawgym-env")
        self._live: _Episode | None = None
        self._episode = 0
        vocab = self._renderer.vocab_size
        self.observation_space = spaces.Dict(
            {
                "prompt_ids": TokenSequence(vocab, max_context),
                "messages": UnicodeText(1 << 30),
                "call_id": spaces.Box(0, np.iinfo(np.int64).max, (), np.int64),
            }
        )
        self.action_space = TokenSequence(vocab, max_tokens, min_length=1)  # type: ignore[assignment]

    def encode(self, content: str = "", *tool_calls: ToolCall) -> TokenArray:
        """Token ids of an answer written by hand."""
        return self._renderer.encode_reply(content, *tool_calls)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts a rollout and waits for its first model call.

        Raises:
            ClawGymError: the harness ended before it called the model.
        """
        super().reset(seed=seed)
        self._end_episode()
        task = self._choose(options or {})
        self._episode += 1
        spec = RolloutSpec(f"env{self._episode}", task, self._world.harness, group=task.id)
        self._live = self._loop.run(_Episode.start(self._engine_settings(), spec))
        rollout = self._loop.run(self._live.advance())
        if rollout is not None:
            self._end_episode()
            raise ClawGymError(f"the rollout ended before its first call: {rollout.status}: {rollout.detail}")
        return self._observation(), {"task_id": task.id, "family": task.family, "instruction": task.instruction}

    def step(self, action: TokenArray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Answers the call in hand and waits for the next one or the end.

        Raises:
            ClawGymError: no episode is live, or the action is outside the action space.
        """
        if self._live is None or self._live.call is None:
            raise ClawGymError("there is no call to answer: call reset() first")
        if not self.action_space.contains(action):
            raise ClawGymError(f"the action must be token ids in {self.action_space}")
        rollout = self._loop.run(self._live.answer(np.asarray(action, dtype=np.int64)))
        if rollout is None:
            return self._observation(), 0.0, False, False, {"waiting": self._live.engine.waiting}
        observation = self._terminal_observation(self._live.answered)
        self._end_episode()
        truncated = rollout.status in (Status.AGENT_TIMEOUT, Status.BUDGET_EXHAUSTED) or not rollout.status.scored
        score = rollout.reward.score if rollout.reward is not None else float("nan")
        return observation, score, not truncated, truncated, _final_info(rollout)

    def render(self) -> str:
        """The call in hand as text."""
        if self._live is None or self._live.call is None:
            return "no call is pending"
        return self._renderer.decode(self._live.call.request.prompt_ids)

    def close(self) -> None:
        """Ends the live rollout and the event loop's thread; idempotent."""
        self._end_episode()
        self._loop.close()

    def _engine_settings(self) -> _EpisodeParts:
        return _EpisodeParts(self._renderer, self._world.backend, self._settings, self._max_context)

    def _choose(self, options: dict[str, Any]) -> Task:
        unknown = set(options) - {"task_id"}
        if unknown:
            raise ConfigError(f"unknown reset options {sorted(unknown)}; there is 'task_id'")
        if "task_id" in options:
            return self._world.suite.get(options["task_id"])
        return self._world.suite.sample(self._split, 1, seed=int(self.np_random.integers(2**31)))[0]

    def _observation(self) -> Observation:
        assert self._live is not None and self._live.call is not None
        request = self._live.call.request
        chat = {
            "messages": [message_json(m) for m in request.chat.messages],
            "tools": [tool_json(t) for t in request.chat.tools],
        }
        return {
            "prompt_ids": request.prompt_ids.copy(),
            "messages": orjson.dumps(chat).decode(),
            "call_id": np.array(self._live.answered, dtype=np.int64),
        }

    def _terminal_observation(self, answered: int) -> Observation:
        return {
            "prompt_ids": np.zeros(0, np.int64),
            "messages": "{}",
            "call_id": np.array(answered, dtype=np.int64),
        }

    def _end_episode(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            self._loop.run(live.close())


def _final_info(rollout: Rollout) -> dict[str, Any]:
    reward = rollout.reward
    return {
        "task_id": rollout.task_id,
        "status": str(rollout.status),
        "detail": rollout.detail,
        "passed": reward.passed if reward else None,
        "parts": dict(reward.parts) if reward else {},
        "ledger": rollout.ledger.as_dict(),
    }


class _EpisodeParts:
    """What every episode of an environment shares."""

    def __init__(self, renderer: ChatRenderer, backend: Any, settings: RolloutSettings, max_context: int) -> None:
        self.renderer, self.backend, self.settings, self.max_context = renderer, backend, settings, max_context


class _Episode:
    """One live rollout in the loop thread, and the call in hand."""

    def __init__(self, engine: StepwiseEngine, stack: AsyncExitStack, task: asyncio.Task[Rollout]) -> None:
        self.engine = engine
        self.call: PendingCall | None = None
        self.answered = 0
        self._stack = stack
        self._task = task

    @classmethod
    async def start(cls, parts: _EpisodeParts, spec: RolloutSpec) -> _Episode:
        engine = StepwiseEngine(max_context=parts.max_context)
        stack = AsyncExitStack()
        runner: RolloutRunner = await stack.enter_async_context(
            open_runner(engine, parts.renderer, parts.backend, parts.settings)
        )
        return cls(engine, stack, asyncio.create_task(runner.run(spec)))

    async def answer(self, token_ids: TokenArray) -> Rollout | None:
        assert self.call is not None
        self.engine.answer(self.call, token_ids)
        self.call, self.answered = None, self.answered + 1
        return await self.advance()

    async def advance(self) -> Rollout | None:
        """Waits for the next pending call (``None``) or the end of the rollout (its record)."""
        waiter = asyncio.create_task(self.engine.next_call())
        await asyncio.wait([waiter, self._task], return_when=asyncio.FIRST_COMPLETED)
        if waiter.done():
            self.call = waiter.result()
            return None
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        return await self._task

    async def close(self) -> None:
        await self.engine.aclose()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._stack.aclose()
