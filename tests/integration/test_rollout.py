"""What a rollout's end means, with real programs that die, hang, never call or never stop."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import pytest

from clawgym_env.engines.base import EngineRequest
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.errors import VerifierError
from clawgym_env.rollout import Rollout, RolloutSettings
from clawgym_env.tasks.base import FreshSandbox, Snapshot
from clawgym_env.types import Budget, Generation, Reward, Sampling, Status
from tests.rollout_world import RENDERER, as_json, run, says

QUICK = RolloutSettings(timeout_s=3.0, grace_s=0.5)


def one(source: str, **kwargs: object) -> Rollout:
    (rollout,) = run(source, **kwargs)  # type: ignore[arg-type]
    assert rollout.ledger.captured == rollout.ledger.trained + sum(rollout.ledger.dropped.values())
    assert (rollout.reward is not None) == rollout.status.scored, as_json(rollout)
    if not rollout.status.scored:
        assert rollout.ledger.trained == 0
        assert not rollout.packed().trainable.any()
    return rollout


def test_a_run_that_works() -> None:
    rollout = one("open('answer.txt', 'w').write(ask())")
    assert rollout.status is Status.COMPLETED
    assert rollout.reward == Reward(1.0, True)
    assert [r.reply.content for r in rollout.records] == ["fine"]
    assert rollout.ledger.trained == rollout.ledger.captured > 0
    assert set(rollout.seconds) == {"start", "harness", "stop", "verify"}


def test_the_verifier_sees_the_workspace_after_every_process_is_dead() -> None:
    seen = {}

    async def verify(snapshot: Snapshot, fresh: FreshSandbox) -> Reward:
        seen.update(snapshot)
        async with fresh({"a.txt": b"x", **snapshot}) as box:
            found = await box.exec(["sh", "-c", "cat a.txt answer.txt; echo; ls"])
        return Reward(1.0, found.stdout.split() == [b"xfine", b"a.txt", b"answer.txt", b"given.txt", b"ticks"])

    source = """
        open('answer.txt', 'w').write(ask())
        if os.fork() == 0:
            os.setsid()
            while True:
                open('ticks', 'a').write('.')
                time.sleep(0.01)
        time.sleep(0.2)
    """
    rollout = one(source, verify=verify)
    assert rollout.reward is not None and rollout.reward.passed
    assert seen["answer.txt"] == b"fine" and seen["given.txt"] == b"1" and seen["ticks"]


@pytest.mark.parametrize(
    ("source", "status", "says_why"),
    [
        ("sys.exit(0)", Status.NO_CALLS, "exited 0"),
        ("sys.exit(3)", Status.NO_CALLS, "exit code 3"),
        ("time.sleep(60)", Status.NO_CALLS, "time limit"),
        ("ask(); time.sleep(60)", Status.AGENT_TIMEOUT, "3 s"),
        ("ask(); sys.exit(3)", Status.HARNESS_FAILED, "exit code 3"),
        ("ask(); os.kill(os.getpid(), signal.SIGSEGV)", Status.HARNESS_CRASHED, "-11"),
        ("ask(raw=b'{nonsense')", Status.NO_CALLS, "not valid JSON"),
        ("ask(url=URL.replace('/rollout/r0', ''))", Status.COMPLETED, ""),
        ("ask(url=URL.replace('r0', 'other'))", Status.NO_CALLS, "exit code 1"),
        ("ask(url=URL + '/v2')", Status.NO_CALLS, "POST /rollout/r0/v2/v1/chat/completions: no API that is served"),
        ("ask(url=URL + '/v2?')", Status.NO_CALLS, "POST /rollout/r0/v2: no API that is served here has this path"),
    ],
)
def test_how_it_ended(source: str, status: Status, says_why: str) -> None:
    rollout = one(source, settings=QUICK)
    assert rollout.status is status, as_json(rollout)
    assert says_why in rollout.detail


def test_a_harness_that_calls_for_ever_meets_its_budget() -> None:
    settings = RolloutSettings(timeout_s=30.0, grace_s=0.5, budget=Budget(max_calls=3))
    source = """
        n = 0
        while True:
            try:
                ask(str(n))
            except OSError:
                time.sleep(0.05)
            n += 1
    """
    began = time.monotonic()
    rollout = one(source, settings=settings)
    assert rollout.status is Status.BUDGET_EXHAUSTED
    assert len(rollout.records) == 3
    assert time.monotonic() - began < 15


def test_a_prompt_longer_than_the_context_is_refused_and_noted() -> None:
    engine = ScriptedEngine(lambda request, turn: RENDERER.encode_reply("fine"), max_context=64)
    rollout = one("ask('word ' * 500)", engine=engine, settings=QUICK)
    assert rollout.status is Status.NO_CALLS
    assert "context" in rollout.detail


def test_an_engine_that_fails_is_nobodys_zero() -> None:
    def script(request: EngineRequest, turn: int) -> object:
        raise RuntimeError("out of memory")

    rollout = one("ask()", engine=ScriptedEngine(script), settings=QUICK)  # type: ignore[arg-type]
    assert rollout.status is Status.ENGINE_ERROR
    assert "out of memory" in rollout.detail


class _Silent:
    """An engine that never answers."""

    max_context = 4096
    policy_version = 0
    cancelled = 0

    async def generate(self, request: EngineRequest) -> Generation:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError

    async def aclose(self) -> None:
        """Nothing to free."""


def test_an_engine_that_never_answers_is_cancelled_at_the_time_limit() -> None:
    engine = _Silent()
    rollout = one("ask()", engine=engine, settings=RolloutSettings(timeout_s=1.0))
    assert rollout.status is Status.NO_CALLS
    assert engine.cancelled == 1


async def _raises(snapshot: Snapshot, fresh: FreshSandbox) -> Reward:
    raise VerifierError("cannot tell")


async def _hangs(snapshot: Snapshot, fresh: FreshSandbox) -> Reward:
    await asyncio.sleep(3600)
    return Reward(0.0, False)


async def _nan(snapshot: Snapshot, fresh: FreshSandbox) -> Reward:
    return Reward(math.nan, False)


async def _two(snapshot: Snapshot, fresh: FreshSandbox) -> Reward:
    return Reward(2.0, True)


@pytest.mark.parametrize(
    ("verify", "says_why"), [(_raises, "cannot tell"), (_hangs, "ran past"), (_nan, "[0, 1]"), (_two, "[0, 1]")]
)
def test_a_verifier_that_fails_gives_no_reward(verify: object, says_why: str) -> None:
    settings = RolloutSettings(timeout_s=5.0, verify_timeout_s=0.5)
    rollout = one("ask()", verify=verify, settings=settings)
    assert rollout.status is Status.VERIFIER_ERROR
    assert says_why in rollout.detail
    assert rollout.ledger.dropped == {"rollout verifier_error": rollout.ledger.captured}


def test_an_agent_that_runs_out_of_time_is_scored_as_its_workspace_is() -> None:
    async def verify(snapshot: Snapshot, fresh: FreshSandbox) -> Reward:
        return Reward(0.5, "half.txt" in snapshot)

    rollout = one("open('half.txt', 'w').write(ask()); time.sleep(60)", verify=verify, settings=QUICK)
    assert rollout.status is Status.AGENT_TIMEOUT
    assert rollout.reward == Reward(0.5, True)


def test_the_harness_s_limit_and_the_recipe_s_sampling_meet() -> None:
    long = says("one two three four five six seven", renderer=RENDERER)
    rollout = one("ask()", engine=long, settings=RolloutSettings(timeout_s=5.0, sampling=Sampling(max_tokens=3)))
    assert rollout.status is Status.COMPLETED
    assert rollout.records[0].call.sampled_tokens == 3
    assert rollout.records[0].call.finish_reason == "length"


def test_rollouts_at_once_do_not_mix() -> None:
    source = """
        me = URL.rsplit('/', 1)[1]
        for n in range(5):
            assert ask(me + str(n)) == 'fine'
        open('me', 'w').write(me)
    """
    rollouts = run(source, n=8)
    assert [r.id for r in rollouts] == [f"r{k}" for k in range(8)]
    for rollout in rollouts:
        assert rollout.status is Status.COMPLETED
        assert [m.content for r in rollout.records for m in r.messages] == [f"{rollout.id}{n}" for n in range(5)]


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def _programs() -> list[int]:
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"mark-of-this-test" in command:
                out.append(int(entry.name))
    return out


@pytest.mark.parametrize("sandbox", ["bubblewrap", "process"])
def test_cancelling_a_batch_leaves_nothing_running(sandbox: str) -> None:
    def act(work: asyncio.Task[list[Rollout]]) -> None:
        asyncio.get_running_loop().call_later(1.5, work.cancel)

    before = descriptors()
    with pytest.raises(asyncio.CancelledError):
        run("ask(); time.sleep(60)  # mark-of-this-test", n=6, act=act, sandbox=sandbox)
    deadline = time.monotonic() + 5
    while _programs() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _programs() == []
    assert len(descriptors() - before) <= 1
