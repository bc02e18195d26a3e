"""One rollout's life: sandbox up, harness run, settle, snapshot, tear down, verify.

Invariants:
    1. Whatever happens, the sandbox is stopped and the endpoint closed before this returns or raises.
    2. A failed rollout is data with a status. Only scored statuses carry a reward; the others never count as 0.
    3. The verifier sees a snapshot taken after every process of the agent is dead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace

from clawgym_env.engines.base import Engine
from clawgym_env.errors import SandboxError, VerifierError, WorkspaceTooLarge
from clawgym_env.harnesses.base import Harness, LaunchContext
from clawgym_env.proxy.app import Proxy
from clawgym_env.proxy.calls import CallRecord, FrozenCall, FrozenModel
from clawgym_env.proxy.classify import CallFacts, classify
from clawgym_env.proxy.server import ProxyServer
from clawgym_env.proxy.session import SamplingPolicy, Session
from clawgym_env.rendering import ChatRenderer
from clawgym_env.sandboxes.base import Backend, ExecResult, Limits, Sandbox, SandboxSpec
from clawgym_env.tasks.base import Snapshot, Task
from clawgym_env.tree.filters import Filters, Kept
from clawgym_env.tree.filters import apply as apply_filters
from clawgym_env.tree.ledger import Ledger
from clawgym_env.tree.pack import PackedTree, pack
from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import Budget, Reward, Sampling, Status

#: Model name that every harness is told to ask for.
MODEL_NAME = "policy"


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What holds for every rollout of a run.

    Attributes:
        timeout_s: Wall time of the harness.
        verify_timeout_s: Wall time of the verifier: a budget of its own.
        settle_timeout_s: Longest wait, after the harness ended, for calls that are still pending.
        grace_s: Time a harness gets to end by itself once its budget is met.
        sampling_policy: ``override``: ``sampling`` holds whatever the harness asks for; ``honour``: what it asks for
            takes its place, field by field. The token limit is the lower of the two either way.
        call_timeout_s: Longest time that one answer of the policy may take.
        filters: Which calls of a rollout train.
    """

    sampling: Sampling = field(default_factory=Sampling)
    budget: Budget = field(default_factory=Budget)
    timeout_s: float = 120.0
    verify_timeout_s: float = 60.0
    settle_timeout_s: float = 5.0
    grace_s: float = 2.0
    sampling_policy: SamplingPolicy = "override"
    call_timeout_s: float = 600.0
    limits: Limits = field(default_factory=Limits)
    filters: Filters = field(default_factory=Filters)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutSpec:
    """One rollout to be run.

    Attributes:
        group: Rollouts of one group share a baseline: one task under one harness.
        seed: Seeds the policy's sampling; ``None`` leaves it unseeded.
        label: What records call the harness, where its own name is not enough (one program with two settings).
    """

    id: str
    task: Task
    harness: Harness
    group: str
    seed: int | None = None
    label: str | None = None


@dataclass(slots=True, eq=False)
class Rollout:
    """What one rollout left behind.

    Attributes:
        reward: ``None`` unless ``status.scored``.
        detail: One line for a person: why it failed, or what the verifier noted.
        records: Its calls, with what they were for.
        seconds: Wall time by phase.
        kept: Calls that train; ``None`` where no filter was applied.
    """

    id: str
    task_id: str
    suite: str
    family: str
    harness: str
    group: str
    status: Status
    reward: Reward | None
    detail: str
    tree: PrefixTree
    ledger: Ledger
    records: list[CallRecord]
    seconds: dict[str, float]
    kept: Kept | None = None
    frozen_calls: list[FrozenCall] = field(default_factory=list)

    def packed(self) -> PackedTree:
        """The tree as depth-first arrays; nothing is trainable in a rollout without a score."""
        if not self.status.scored:
            return pack(self.tree, keep_calls=frozenset())
        if self.kept is None:
            return pack(self.tree)
        return pack(self.tree, keep_calls=self.kept.calls, credit=self.kept.credit)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutRunner:
    """Runs rollouts of one engine behind one proxy.

    Attributes:
        frozen: Model names (shell patterns) -> models that answer them in the policy's place; theirs to close.
    """

    proxy: Proxy
    server: ProxyServer
    backend: Backend
    engine: Engine
    renderer: ChatRenderer
    settings: RolloutSettings = field(default_factory=RolloutSettings)
    frozen: Mapping[str, FrozenModel] = field(default_factory=dict)

    async def run(self, spec: RolloutSpec) -> Rollout:
        """Runs one rollout to its record; raises only when cancelled or misconfigured."""
        clock = _Clock()
        settings = self.settings
        session = Session(
            spec.id,
            self.engine,
            self.renderer,
            settings.sampling,
            settings.budget,
            seed=spec.seed,
            sampling_policy=settings.sampling_policy,
            frozen=self.frozen,
            call_timeout_s=settings.call_timeout_s,
            dialect=spec.harness.info.dialect,
        )
        snapshot: Snapshot = {}
        mounts = spec.harness.mounts()
        try:
            box = await self.backend.create(SandboxSpec(files=spec.task.files, mounts=mounts, limits=settings.limits))
            async with box:
                clock.mark("start")
                status, detail = await self._drive(spec, session, box)
                clock.mark("harness")
                detail = _with_limits(detail, box.limits_met(), settings.limits)
                snapshot = await box.collect()
        except WorkspaceTooLarge as error:  # the policy's doing: it is judged by what could be taken over, nothing
            detail = f"{detail}; {error}" if detail else str(error)
        except SandboxError as error:
            status, detail = Status.SANDBOX_ERROR, str(error)
        clock.mark("stop")
        reward = None
        if status.scored:
            status, reward, detail = await self._verify(spec, snapshot, status, detail)
        clock.mark("verify")
        records = _labelled(session.records)
        kept = None
        if status.scored:
            kept = apply_filters(session.tree, [r.call for r in records], session.continued, settings.filters)
            for reason, tokens in kept.dropped.items():
                session.ledger.drop(reason, tokens)
        else:
            session.ledger.drop(f"rollout {status}", session.ledger.trained)
        task = spec.task
        harness = spec.label or spec.harness.info.name
        return Rollout(
            spec.id, task.id, task.suite, task.family, harness, spec.group, status, reward, detail,
            session.tree, session.ledger, records, clock.seconds, kept, session.frozen_calls,
        )  # fmt: skip

    async def _drive(self, spec: RolloutSpec, session: Session, box: Sandbox) -> tuple[Status, str]:
        """Runs the harness against this rollout's endpoint and settles."""
        assert box.listener is not None
        self.proxy.register(session)
        try:
            await self.server.attach(spec.id, box.listener)
            result, stopped = await self._run_harness(spec, session, box)
            await box.kill_all()
            await self._settle(session)
        finally:
            self.proxy.unregister(spec.id)
            await self.server.close(spec.id)
        return _status(spec.harness, session, result, stopped, self.settings)

    async def _run_harness(self, spec: RolloutSpec, session: Session, box: Sandbox) -> tuple[ExecResult | None, bool]:
        """The harness's result, and whether it had to be stopped for its budget or a failed engine."""
        settings = self.settings
        context = LaunchContext(
            instruction=spec.task.instruction,
            base_url=f"{box.base_url}/rollout/{spec.id}",
            api_key=session.key,
            model=MODEL_NAME,
            max_context=self.engine.max_context,
            max_tokens=settings.sampling.max_tokens,
            timeout_s=settings.timeout_s,
        )
        launch = spec.harness.launch(context, box)
        for path, data in launch.files.items():
            await box.put(path, data)
        work = asyncio.ensure_future(
            box.exec(launch.argv, env=launch.env, stdin=launch.stdin, timeout_s=settings.timeout_s)
        )
        alarms = [asyncio.ensure_future(e.wait()) for e in (session.exhausted, session.failed)]
        try:
            await asyncio.wait([work, *alarms], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await asyncio.wait([work], timeout=settings.grace_s)
            return (work.result(), False) if work.done() else (None, True)
        finally:
            for task in (work, *alarms):
                task.cancel()
            await asyncio.gather(work, *alarms, return_exceptions=True)

    async def _settle(self, session: Session) -> None:
        """Waits until no call is pending and the record has stopped growing, within a fixed time."""
        deadline = time.monotonic() + self.settings.settle_timeout_s
        quiet, seen = 0, -1
        while quiet < 2 and time.monotonic() < deadline:
            still = session.in_flight == 0 and len(session.records) == seen
            quiet, seen = (quiet + 1 if still else 0), len(session.records)
            await asyncio.sleep(0.005)

    async def _verify(
        self, spec: RolloutSpec, snapshot: Snapshot, status: Status, detail: str
    ) -> tuple[Status, Reward | None, str]:
        limits = self.settings.limits

        @asynccontextmanager
        async def fresh(files: Snapshot) -> AsyncIterator[Sandbox]:
            async with await self.backend.create(SandboxSpec(files=files, limits=limits, network="none")) as box:
                yield box

        try:
            async with asyncio.timeout(self.settings.verify_timeout_s):
                reward = await spec.task.verify(snapshot, fresh)
            _check(reward)
        except TimeoutError:
            return Status.VERIFIER_ERROR, None, f"the verifier ran past {self.settings.verify_timeout_s:g} s"
        except SandboxError as error:
            return Status.SANDBOX_ERROR, None, f"the verifier's sandbox failed: {error}"
        except Exception as error:
            return Status.VERIFIER_ERROR, None, f"the verifier failed: {type(error).__name__}: {error}"
        return status, reward, detail or reward.note


def _labelled(records: Sequence[CallRecord]) -> list[CallRecord]:
    """The records of a settled rollout with what each call was for."""
    facts = [CallFacts(r.call.call_id, r.parent, r.messages, r.reply, r.tools, r.answers, r.hints) for r in records]
    return [
        replace(record, call=replace(record.call, **asdict(label)))
        for record, label in zip(records, classify(facts), strict=True)
    ]


def _with_limits(detail: str, met: Sequence[str], limits: Limits) -> str:
    """The detail, with the sandbox's limits that something inside ran into."""
    said = ", ".join(f"{name} ({getattr(limits, name)})" for name in met)
    return "; ".join(part for part in (detail, f"met the sandbox's {said}" if met else "") if part)


def _check(reward: Reward) -> None:
    if not 0.0 <= reward.score <= 1.0:  # NaN fails too
        raise VerifierError(f"a score must lie in [0, 1], not {reward.score}")


def _status(
    harness: Harness, session: Session, result: ExecResult | None, stopped: bool, settings: RolloutSettings
) -> tuple[Status, str]:
    """What the end of a run means; see :class:`clawgym_env.types.Status`."""
    if session.failed.is_set():
        return Status.ENGINE_ERROR, session.failure or "the engine failed"
    if session.exhausted.is_set() or stopped:
        budget = settings.budget
        return Status.BUDGET_EXHAUSTED, f"met its budget of {budget.max_calls} calls, {budget.max_tokens} tokens"
    assert result is not None
    error = harness.exit_error(result)
    if not session.records:
        seen = "ran into the time limit" if result.timed_out else f"exited {result.rc}"
        note = next(iter(session.ledger.notes), session.misdirected)
        return Status.NO_CALLS, "; ".join(x for x in (f"no model call was answered; {seen}", error, note) if x)
    if result.timed_out:
        return Status.AGENT_TIMEOUT, f"stopped after {settings.timeout_s:g} s"
    if result.rc < 0 or result.rc > 128:
        return Status.HARNESS_CRASHED, error or f"killed, exit code {result.rc}"
    if error is not None:
        return Status.HARNESS_FAILED, error
    return Status.COMPLETED, ""


class _Clock:
    """Wall seconds between marks."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now
