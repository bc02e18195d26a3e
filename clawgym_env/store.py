"""The folder that a run leaves behind, for people and for resuming.

```
RUN/
  config.json          the configuration as run
  metrics.jsonl        one line a step and stage
  rollouts/NAME.jsonl  one rollout a line: status, reward, ledger, calls with their messages
  rollouts/NAME.npz    their trees as depth-first arrays, "<rollout id>/<array>"
  checkpoints/, policy/, report.html   written by the trainer and the report
```

Invariant: files appear whole or not at all (write beside, then rename), so that a killed run can be read and resumed.
``metrics.jsonl`` is the exception: it grows by whole lines, and a torn last line is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from clawgym_env.errors import ConfigError
from clawgym_env.proxy.calls import CallRecord
from clawgym_env.rollout import Rollout
from clawgym_env.tree.ledger import Ledger
from clawgym_env.tree.pack import PackedTree
from clawgym_env.types import Reward, Status
from clawgym_env.wire.openai_chat import message_json

#: Narrower types on disk; widened again when read.
_ON_DISK = {
    "tokens": np.int32,
    "parent": np.int32,
    "depth": np.int32,
    "subtree_end": np.int32,
    "sampled": np.bool_,
    "trainable": np.bool_,
    "log_probs": np.float32,
    "versions": np.int32,
    "call": np.int32,
    "n_leaves": np.int32,
}
#: Written only where some token's is not 1; older files have none.
_CREDIT = "credit"


@dataclass(frozen=True, slots=True, eq=False)
class StoredRollout:
    """A rollout as read back.

    Attributes:
        calls: Per call: parent, new messages, reply, sampling, what it was for, timing, in JSON form; ``extra`` holds
            request fields that were not acted on, where they differ from those of the call before.
        frozen_calls: What models beside the policy answered.
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
    ledger: Ledger
    calls: list[dict[str, Any]]
    seconds: dict[str, float]
    packed: PackedTree
    frozen_calls: list[dict[str, Any]]


class RunFolder:
    """One run's folder; made when missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "rollouts").mkdir(parents=True, exist_ok=True)

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """A run that is there already.

        Raises:
            ConfigError: it is not.
        """
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} is not a run folder: it holds no config.json")
        return cls(path)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as run."""
        return _object(orjson.loads((self.path / "config.json").read_bytes()))

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes the configuration."""
        write_whole(self.path / "config.json", orjson.dumps(config, option=orjson.OPT_INDENT_2))

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Adds one line to ``metrics.jsonl``; a torn one before it is removed."""
        path = self.path / "metrics.jsonl"
        if path.is_file() and _is_torn(path):
            self.keep_metrics(self.metrics())
        with path.open("ab") as out:
            out.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line of ``metrics.jsonl``."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return []
        return [_object(orjson.loads(line)) for line in path.read_bytes().split(b"\n")[:-1]]

    def keep_metrics(self, keep: list[dict[str, Any]]) -> None:
        """Replaces ``metrics.jsonl``: a resumed run drops the lines after its checkpoint."""
        lines = b"".join(orjson.dumps(row) + b"\n" for row in keep)
        write_whole(self.path / "metrics.jsonl", lines)

    def write_rollouts(self, name: str, rollouts: Sequence[Rollout]) -> None:
        """Stores a batch of rollouts under a name such as ``grpo-0007``."""
        arrays, lines = {}, []
        for rollout in rollouts:
            packed = rollout.packed()
            for key, kind in _ON_DISK.items():
                arrays[f"{rollout.id}/{key}"] = getattr(packed, key).astype(kind)
            if (packed.credit != 1).any():
                arrays[f"{rollout.id}/{_CREDIT}"] = packed.credit
            lines.append(orjson.dumps(_record(rollout), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        beside = self.path / "rollouts" / f".{name}.npz"
        with beside.open("wb") as out:
            np.savez(out, **arrays)
        beside.replace(self.path / "rollouts" / f"{name}.npz")
        write_whole(self.path / "rollouts" / f"{name}.jsonl", b"".join(lines))

    def batches(self) -> list[str]:
        """Names of the stored batches, in order."""
        return sorted(p.stem for p in (self.path / "rollouts").glob("*.jsonl"))

    def rollouts(self, name: str) -> Iterator[StoredRollout]:
        """Reads a batch back."""
        folder = self.path / "rollouts"
        with np.load(folder / f"{name}.npz") as arrays:
            for line in (folder / f"{name}.jsonl").read_bytes().splitlines():
                data = orjson.loads(line)
                found: dict[str, Any] = {key: _widen(arrays[f"{data['id']}/{key}"]) for key in _ON_DISK}
                credit = arrays.get(f"{data['id']}/{_CREDIT}", np.ones(len(found["tokens"]), dtype=np.float32))
                yield _stored(data, PackedTree(**found, credit=credit))


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that a reader sees the old content or the new one, never a part."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_bytes(data)
    beside.replace(path)


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return size > 0 and file.read() != b"\n"


def _record(rollout: Rollout) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "task_id": rollout.task_id,
        "suite": rollout.suite,
        "family": rollout.family,
        "harness": rollout.harness,
        "group": rollout.group,
        "status": str(rollout.status),
        "reward": asdict(rollout.reward) if rollout.reward is not None else None,
        "detail": rollout.detail,
        "ledger": rollout.ledger.as_dict(),
        "seconds": {k: round(v, 4) for k, v in rollout.seconds.items()},
        "calls": _calls(rollout.records),
        "frozen_calls": [{**asdict(c), "reply": message_json(c.reply)} for c in rollout.frozen_calls],
    }


def _calls(records: Sequence[CallRecord]) -> list[dict[str, Any]]:
    """One object a call; request fields that were not acted on are told where they change."""
    out: list[dict[str, Any]] = []
    extra: Mapping[str, Any] = {}
    for record in records:
        changed = {} if record.extra == extra else {"extra": record.extra}
        out.append(_call(record) | changed)
        extra = record.extra
    return out


def _call(record: CallRecord) -> dict[str, Any]:
    return {
        **asdict(record.call),
        "parent": record.parent,
        "messages": [message_json(m) | ({"is_error": True} if m.is_error else {}) for m in record.messages],
        "reply": message_json(record.reply),
        "tools": list(record.tools),
        "started_s": round(record.started_s, 4),
        "seconds": round(record.seconds, 4),
    }


def _stored(data: dict[str, Any], packed: PackedTree) -> StoredRollout:
    known = {f.name for f in fields(StoredRollout)} - {"packed", "status", "reward", "ledger", "frozen_calls"}
    return StoredRollout(
        **{key: data[key] for key in known},
        frozen_calls=data.get("frozen_calls", []),
        status=Status(data["status"]),
        reward=Reward(**data["reward"]) if data["reward"] is not None else None,
        ledger=Ledger.from_dict(data["ledger"]),
        packed=packed,
    )


def _widen(array: np.ndarray) -> Any:
    return array.astype(np.int64) if array.dtype == np.int32 else array


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError("expected a JSON object in the run folder")
    return value
