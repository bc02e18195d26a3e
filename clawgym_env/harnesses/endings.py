"""What most programs tell of their end: a signal, an exit code, and a last line on stderr."""

from __future__ import annotations

from clawgym_env.sandboxes.base import ExecResult


def last_words(result: ExecResult, program: str) -> str | None:
    """Why a program failed, in one line; ``None`` where its exit code is 0.

    Args:
        program: Its name as the sentence's subject.
    """
    if result.rc == 0:
        return None
    if result.rc < 0:
        return f"{program} was killed by signal {-result.rc}"
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else f"{program} ended with exit code {result.rc} and said nothing"


def after_events(result: ExecResult, program: str, step: str, ended: bool, why: str | None) -> str | None:
    """Why a program failed that tells its story in events on stdout, in one line; ``None`` when it ended as it should.

    Args:
        step: What an ordinary end finishes, in words.
        ended: Whether the events tell of such a step; those of a flood were cut off.
        why: The failure that the events tell of.
    """
    if result.rc < 0:
        return f"{program} was killed by signal {-result.rc}"
    if result.rc == 0 and why is None and (ended or result.truncated):
        return None
    if why is None:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        unfinished = "" if ended else f" and no finished {step}"
        why = lines[-1] if lines else f"{program} ended with exit code {result.rc}{unfinished}"
    return " ".join(why.split())[:500]
