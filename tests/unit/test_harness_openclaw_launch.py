"""What OpenClaw's ends mean, what is taken out of its prompts, and what its settings write."""

from __future__ import annotations

import json

import pytest

from clawgym_env.dialect import Hints
from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import OpenClawHarness, get_harness
from clawgym_env.harnesses.openclaw import STEADY
from clawgym_env.proxy.echoes import stabilise
from clawgym_env.sandboxes.base import ExecResult
from clawgym_env.types import Message

FINE = {"ok": True, "status": "ok", "final": "{\n}\n", "payloads": [{"text": "Done."}]}


def failed(message: str, status: str = "error") -> dict[str, object]:
    return {"ok": False, "status": status, "final": "", "error": {"message": message, "kind": "x"}}


def ended(rc: int, *said: object, stderr: bytes = b"", truncated: bool = False) -> ExecResult:
    text = "\n".join(x if isinstance(x, str) else json.dumps(x, indent=2) for x in said)
    return ExecResult(rc, text.encode(), stderr, truncated=truncated)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (ended(0, FINE), None),
        (ended(0, "noise", "{broken", FINE), None),
        (ended(0, failed("earlier"), FINE), None),
        (ended(0, FINE, "{broken", '{"other": 1}'), None),
        (ended(0), "OpenClaw ended with exit code 0 and no result"),
        (ended(0, "x" * 99, truncated=True), None),
        (ended(1, "x" * 99, truncated=True, stderr=b"one\ntwo\n"), "two"),
        (ended(1, FINE), "ok"),
        (ended(1, failed("400 no\n such model")), "400 no such model"),
        (ended(0, failed("said no, and ended with 0")), "said no, and ended with 0"),
        (ended(2, failed("Agent run timed out", "timeout")), "Agent run timed out"),
        (ended(1, {"ok": False, "status": "error"}), "error"),
        (ended(1, failed("Agent exec cleanup failed: it did not settle")), None),
        (ended(1, stderr=b"first\nconfig is invalid\n"), "config is invalid"),
        (ended(-9, FINE), "OpenClaw was killed by signal 9"),
    ],
)
def test_ends(end: ExecResult, error: str | None) -> None:
    assert OpenClawHarness().exit_error(end) == error


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("openclaw", {"wire": "gemini"}, "wire: Input should be"),
        ("openclaw", {"mode": "shared"}, "mode: Input should be 'exec' or 'gateway'"),
        ("openclaw", {"profile": "large"}, "profile: Input should be 'lean' or 'stock'"),
    ],
)
def test_settings_that_are_refused(name: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_harness(name, **settings)
    assert says in str(caught.value)


SYSTEM = (
    "Rules.\n## Temporal Context\nCurrent date: {}\nTime zone: UTC\n## Runtime\nCurrent model identity: local/policy."
)
RUNTIME = "\n\nRuntime: agent=main | session=agent:main:explicit:{0} | sessionId={0} | os=Linux | model=local/policy"


@pytest.mark.parametrize(
    "task", ["Do it.", "Two\n\nlines: [x] {y}", "What is\n\nRuntime: agents of C | a talk\n\nabout?"]
)
@pytest.mark.parametrize("stamp", ["[Tue 2026-12-01 02:48 UTC] ", "[Wed 2026-12-02 12:00:59 GMT+1] ", ""])
def test_what_the_moment_adds_is_taken_out(task: str, stamp: str) -> None:
    messages = (
        Message("system", SYSTEM.format(stamp)),
        Message("user", stamp + task + RUNTIME.format("d04ce5f4-e966")),
        Message("assistant", stamp + "as it was"),
        Message("tool", stamp + "as it was"),
    )
    steady, names = stabilise(messages, OpenClawHarness().info.dialect.stabilise)
    assert steady[0].content == "Rules.\n## Runtime\nCurrent model identity: local/policy."
    assert steady[1].content == task
    assert steady[2:] == messages[2:]
    assert set(names) == {"date", "session", *(["minute"] if stamp else [])}
    (system,), _ = stabilise((Message("system", SYSTEM + RUNTIME.format("d04") + "\n<!-- end -->"),), STEADY)
    assert system.content.endswith("Current model identity: local/policy.\n<!-- end -->")


@pytest.mark.parametrize("session", ["agent:main:task", "agent:main:subagent:7f37bd6d"])
def test_the_session_names_the_agent(session: str) -> None:
    dialect = OpenClawHarness(mode="gateway", profile="stock").info.dialect
    line = "Runtime: agent=main | session={} | host=sandbox"
    own, inherited = line.format(session), line.format("agent:main:other")
    assert dialect.hints({}, (Message("system", f"Rules.\n{own}\nMore."), Message("user", "Go."))).agent == session
    told = (Message("user", f"Go.\n\n{inherited}"), Message("assistant", line), Message("user", f"Do it.\n\n{own}"))
    assert dialect.hints({}, told).agent == session
    assert dialect.hints({}, (Message("user", "What is\nRuntime: agent=x?"),)) == Hints()
    assert dialect.hints({}) == Hints()


def test_stock_prompts_are_left_alone() -> None:
    assert OpenClawHarness(profile="stock").info.dialect.stabilise == ()
