"""What works here and what is missing: the checks behind ``clawgym doctor``.

Invariant: a check tries the thing itself. Nothing is read off a table of models or families: every row about a chat
format comes from real renderings, made the way a rollout makes them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np

from clawgym_env.errors import ClawGymError, ConfigError, HarnessNotInstalled
from clawgym_env.harnesses import HARNESSES, get_harness
from clawgym_env.harnesses.install import PACKAGES, cache_folder, find_node
from clawgym_env.harnesses.warmup import run_once
from clawgym_env.rendering import ChatRenderer, linked
from clawgym_env.rendering.tokenizer import FastTokenizer, load_tokenizer
from clawgym_env.sandboxes import BACKENDS, get_backend
from clawgym_env.sandboxes.cgroups import HOW_TO_GET
from clawgym_env.types import Message, TokenArray, ToolCall, ToolSpec

State = Literal["ok", "warning", "failed"]

#: Memory in bytes below which a run of four harnesses and a small policy gets tight.
TIGHT_MEMORY = 2 << 30
DEFAULT_SANDBOX = "bubblewrap"
TRAINING = ("torch", "torchrl", "tensordict", "transformers")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        advice: What to do about it, where something can be done.
    """

    name: str
    state: State
    detail: str
    advice: str = ""


def check_machine() -> Iterator[Check]:
    """What runs need of this machine."""
    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    for name in BACKENDS:
        found = get_backend(name).probe()
        missing: State = "failed" if name == DEFAULT_SANDBOX else "warning"
        yield Check(f"sandbox {name}", "ok" if found.available else missing, found.detail)
        weak = {limit: means for limit, means in found.limits.items() if "no control groups" in means}
        if found.available and weak and name != "process":
            detail = "; ".join(f"{limit}: {means}" for limit, means in weak.items())
            yield Check(f"limits of {name}", "warning", f"{detail}; cpu is refused", f"needs {HOW_TO_GET}")
    yield _node()
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(_harness, HARNESSES)
    yield _training()
    yield _cache()
    yield _resources()


def check_model(path: Path, family: str = "qwen3") -> Iterator[Check]:
    """What rollouts may expect of a model's chat format; the model itself is not loaded.

    Args:
        path: A model folder, a run folder, or a ``tokenizer.json``.
        family: A configuration name of the ``renderers`` library.
    """
    of_run = [path / "policy", path / "checkpoints" / "best"]
    place = next((folder for folder in of_run if (folder / "tokenizer.json").is_file()), path)
    try:
        tokenizer = load_tokenizer(place)
    except ConfigError as error:
        yield Check("tokenizer", "failed", str(error))
        return
    yield Check("tokenizer", "ok", f"{len(tokenizer)} tokens from {place}")
    yield _round_trip(tokenizer)
    yield from _config(place if place.is_dir() else place.parent, len(tokenizer))
    try:
        renderer = ChatRenderer(tokenizer, family=family)
        thinking = ChatRenderer(tokenizer, family=family, enable_thinking=True)
    except ClawGymError as error:
        yield Check("chat format", "failed", str(error), "name the model's chat family with --family")
        return
    held = [family]
    if renderer.folding.leading:
        held.append("several leading system messages are held as one")
    if renderer.folding.middle:
        held.append("later ones as user messages")
    yield Check("chat format", "ok", ", ".join(held))
    yield from _tokens(renderer, thinking)
    yield from _stability(renderer, thinking)


def _node() -> Check:
    try:
        node = find_node()
    except ClawGymError as error:
        return Check("node", "warning", str(error), "needed by harnesses that npm installs")
    return Check("node", "ok", f"{node.version} at {node.executable}")


def _harness(name: str) -> Check:
    """Whether a harness is here, and whether its program runs: it is run once, against canned answers."""
    harness, row = get_harness(name), f"harness {name}"
    said = f"{harness.info.title} {harness.info.version}".strip()
    try:
        harness.mounts()
        if name in PACKAGES:
            began = time.monotonic()
            run_once(harness)
            said = f"{said}, runs ({time.monotonic() - began:.1f} s)"
    except HarnessNotInstalled as error:
        return Check(row, "warning", str(error))
    except ConfigError as error:  # it has no settings that would do for everyone
        return Check(row, "ok", said, str(error))
    except ClawGymError as error:
        return Check(row, "failed", str(error))
    return Check(row, "ok", said)


def _training() -> Check:
    missing = [name for name in TRAINING if importlib.util.find_spec(name) is None]
    if missing:
        advice = "for training: pip install -c constraints.txt -e '.[train]'"
        return Check("training", "warning", f"not installed: {', '.join(missing)}", advice)
    return Check("training", "ok", ", ".join(f"{name} {metadata.version(name)}" for name in TRAINING))


def _cache() -> Check:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check("cache", "failed", f"cannot write to {folder}: {error.strerror}", "set CLAWGYM_CACHE")
    return Check("cache", "ok", str(folder))


def _resources() -> Check:
    cores, free = len(os.sched_getaffinity(0)), _free_memory()
    detail = f"{cores} core{'s' * (cores > 1)}, {free / (1 << 30):.1f} GiB of memory free"
    if free < TIGHT_MEMORY:
        return Check("resources", "warning", detail, "lower concurrency: a harness takes 0.1 to 1.5 GB a rollout")
    return Check("resources", "ok", detail)


def _free_memory() -> int:
    """Bytes that can still be taken, by the machine's and the control group's account."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, max(int(limit) - int(used), 0))
    except OSError:
        return free


def _round_trip(tokenizer: FastTokenizer) -> Check:
    texts = ["zażółć \U0001f600 \u4e2d\u6587", "e\u0301", "\tif x:\r\n\n\n    y  = 1 \u00a0", "\x00\x1b[0m\ufeff"]
    back = {text: tokenizer.decode(tokenizer.encode(text)) for text in texts}
    said = ", ".join(f"{text!a} -> {read!a}" for text, read in back.items() if read != text)
    if said:
        advice = "tool output reaches the policy changed in this way; what it samples is not touched"
        return Check("round trip", "warning", f"decoding does not undo encoding: {said}", advice)
    return Check("round trip", "ok", "decoding undoes encoding")


def _config(folder: Path, tokens: int) -> Iterator[Check]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError:
        yield Check("context length", "warning", f"no config.json in {folder}: a tokenizer without a model")
        return
    except ValueError as error:
        yield Check("context length", "failed", f"config.json is no JSON: {error}")
        return
    if not isinstance(config, dict):
        yield Check("context length", "failed", "config.json is no JSON object")
        return
    told: dict[str, Any] = {**config, **(config.get("text_config") or {})}
    length = next((told[k] for k in ("max_position_embeddings", "n_positions", "max_seq_len") if told.get(k)), None)
    if length is None:
        yield Check("context length", "warning", "config.json does not say", "see what its engine is set to")
    else:
        yield Check("context length", "ok", f"{length} tokens")
    rows = told.get("vocab_size")
    if isinstance(rows, int) and rows < tokens:
        detail = f"the tokenizer has {tokens} tokens, the model only {rows}"
        yield Check("vocabulary", "failed", detail, "resize the model's embeddings")


_TOOL = ToolSpec("run", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
_START = [Message("system", "You are an agent."), Message("user", "How many files are there?")]
_CALL = ToolCall("run", {"command": "ls | wc -l"})
_TOLD = Message("assistant", "There are four.")
_CALLED = Message("assistant", "I look.", None, (_CALL,))
_TWICE = Message("assistant", "I look twice.", None, (_CALL, ToolCall("run", {"command": "ls -a"})))
_AGAIN = Message("user", "And folders?")
_RESULT = Message("tool", "4\n", tool_call_id="call0x0")
_OTHER = Message("tool", ".\n..\n", tool_call_id="call0x1")
_RULE = Message("system", "Be brief.")
_THOUGHT = "The listing will tell."


def _tokens(renderer: ChatRenderer, thinking: ChatRenderer) -> Iterator[Check]:
    """Whether the marks of the chat format are tokens of their own."""
    tokenizer = renderer.tokenizer

    def row(name: str, ids: set[int], without: str) -> Check:
        texts = {token: tokenizer.decode(token) for token in sorted(ids)}
        torn = [text for token, text in texts.items() if "\ufffd" not in text and tokenizer.encode(text) != [token]]
        if torn:
            detail = f"rendered as one token, but torn where text spells it: {' '.join(torn)}"
            return Check(name, "failed", detail, "add it to the added tokens of tokenizer.json")
        marks = [text for token, text in texts.items() if tokenizer.is_added(token)]
        return Check(name, "ok" if marks else "warning", " ".join(marks) or without)

    said, called = ({*_reply(renderer, message).tolist()} for message in (_TOLD, _CALLED))
    chat = {*renderer.prompt([*_START, _TOLD, _AGAIN], []).tolist()}
    yield row("chat tokens", chat, "turns are marked by ordinary text")
    yield row("tool-call tokens", called - said, "calls are spelled in ordinary text, which tool output can imitate")
    yield _thinking(thinking)
    stops = [f"{tokenizer.decode(token)} ({token})" for token in renderer.stop_token_ids]
    eos = tokenizer.eos_token_id
    if eos is not None and eos not in renderer.stop_token_ids:
        detail = f"{', '.join(stops)}; the tokenizer's own end, {tokenizer.eos_token}, is none of them"
        yield Check("stop tokens", "warning", detail, "is this the model's chat family?")
    else:
        yield Check("stop tokens", "ok", ", ".join(stops))
    yield _calls(renderer)


def _calls(renderer: ChatRenderer) -> Check:
    """Whether tool calls are read as they are written."""
    read = []
    for message in (_CALLED, _TWICE):
        try:
            answer = _reply(renderer, message)
        except ClawGymError as error:
            return Check("tool calls", "warning", str(error), "prefer harnesses that work with one call an answer")
        read.append(renderer.parse(answer, renderer.prompt(_START, [_TOOL]), [_TOOL]).tool_calls == message.tool_calls)
    if not read[0]:
        advice = "harnesses that work by tool calls will not work in this format"
        return Check("tool calls", "failed", "a call is not read back as it was written", advice)
    if not read[1]:
        return Check("tool calls", "warning", "two calls in one answer are not read back as they were written")
    return Check("tool calls", "ok", "read as they are written, two in one answer as well")


def _thinking(renderer: ChatRenderer) -> Check:
    """Whether a thought is read as one, and which tokens are around it."""
    prompt, answer = renderer.prompt(_START, []), _reply(renderer, replace(_TOLD, reasoning=_THOUGHT))
    around = _around(renderer.tokenizer, [*prompt.tolist(), *answer.tolist()], _THOUGHT)
    if around is None:
        return Check("thinking tokens", "ok", "this chat format has no thinking")
    read = renderer.parse(answer, prompt, [])
    if (read.reasoning or "").strip() != _THOUGHT or read.content.strip() != _TOLD.content:
        detail = f"a thought of {_THOUGHT!r} is read back as {read.reasoning!r}"
        return Check("thinking tokens", "failed", detail, "train without thinking in this format")
    if around[1] is None or around[1] in renderer.stop_token_ids:
        return Check("thinking tokens", "warning", "thoughts are marked by ordinary text")
    marks = [renderer.tokenizer.decode(token) for token in around if token is not None]
    return Check("thinking tokens", "ok", f"between {' and '.join(marks)}")


def _around(tokenizer: FastTokenizer, ids: Sequence[int], text: str) -> tuple[int | None, int | None] | None:
    """The marks before and after a text; ``None`` where the text is not there."""
    before: int | None = None
    between: list[int] = []
    for token in [*ids, None]:
        if token is not None and not tokenizer.is_added(token):
            between.append(token)
        elif text in tokenizer.decode(between):
            return before, token
        else:
            before, between = token, []
    return None


def _stability(renderer: ChatRenderer, thinking: ChatRenderer) -> Iterator[Check]:
    """What happens to a history when the next request comes."""
    yield _continued("second turn", renderer, _TOLD, [_AGAIN])
    yield _continued("tool result", renderer, _CALLED, [_RESULT])
    yield _continued("parallel tool results", renderer, _TWICE, [_RESULT, _OTHER])
    yield _continued("mid-list system message", renderer, _CALLED, [_RESULT, _RULE])
    yield _continued("truncated answer", renderer, _TOLD, [_AGAIN], cut=2)
    yield _continued("thinking, tool result", thinking, replace(_CALLED, reasoning=_THOUGHT), [_RESULT])
    yield _continued("thinking, second turn", thinking, replace(_TOLD, reasoning=_THOUGHT), [_AGAIN])


def _continued(name: str, renderer: ChatRenderer, reply: Message, new: Sequence[Message], cut: int = 0) -> Check:
    """Renders a second request both ways, from the tokens of the first and from its messages."""
    try:
        answer = _reply(renderer, reply)
    except ClawGymError as error:
        return Check(name, "warning", str(error))
    try:
        prompt, response = renderer.prompt(_START, [_TOOL]), answer[: len(answer) - cut]
        read = renderer.parse(response, prompt, [_TOOL])
        calls = tuple(replace(c, id=f"call0x{i}") for i, c in enumerate(read.tool_calls))
        messages = linked([*_START, replace(read, tool_calls=calls), *new])
        new = messages[-len(new) :]
        grown = renderer.extend(prompt, response, new, [_TOOL])
        whole = renderer.prompt(messages, [_TOOL])
    except ClawGymError as error:
        return Check(name, "failed", str(error), "requests of this kind will be refused")
    history = np.concatenate([prompt, response])
    kept = f"{len(history)} tokens of history kept"
    shared = _shared(history, whole)
    if grown is not None and np.array_equal(grown, whole):
        return Check(name, "ok", f"append-only: {kept}, and rendering it anew gives the same")
    if shared == len(history):
        return Check(name, "ok", f"append-only: {kept}; rendered anew, only what follows differs")
    if grown is not None:
        detail = f"{kept} as sampled; rendered anew, it forks after {shared}"
        return Check(name, "ok", detail, "costs a branch only where the harness rewrites its history")
    why = renderer.why_not_extended(prompt, response, new)
    detail = f"one new branch at each such turn: {why}; {shared} of {len(history)} tokens stay shared"
    return Check(name, "warning", detail, "nothing is lost; expect about one trajectory a turn of this kind")


def _reply(renderer: ChatRenderer, message: Message) -> TokenArray:
    return renderer.encode_reply(message.content, *message.tool_calls, reasoning=message.reasoning)


def _shared(a: TokenArray, b: TokenArray) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n
