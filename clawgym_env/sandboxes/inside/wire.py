"""What host and first process say to each other, over one ``SOCK_SEQPACKET`` connection: the *lease*.

Invariant: messages have a fixed form; big payloads travel as descriptors, so that no send ever blocks.

| to the sandbox | descriptors | answer |
|---|---|---|
| ``EXEC, id`` | request, stdin, stdout, stderr | ``EXIT, id, rc`` |
| ``KILL, id`` | | none of its own: the ``EXIT`` of ``id`` |
| ``KILL_ALL, id`` | | ``DONE, id, 0`` once nothing else runs |
| ``PUT, id`` | files | ``DONE, id, errno`` |

The first message from the sandbox is ``HELLO``: its descriptors are the workspace's directory, the listeners (as many
as its value's lower byte says) and the counters of its control groups (those whose bit is set). ``OVER_MEMORY`` comes
unasked, whenever processes were killed for the memory they held.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

EXEC, KILL, KILL_ALL, PUT = 1, 2, 3, 4
HELLO, EXIT, DONE, OVER_MEMORY = 1, 2, 3, 4
REQUEST = struct.Struct("<BI")
REPLY = struct.Struct("<BIi")
MAX_FDS = 4
MAX_LISTENERS = 16
HAS_MEMORY_EVENTS, HAS_PIDS_EVENTS = 1 << 8, 1 << 9


def encode_exec(argv: Sequence[bytes], env: Sequence[bytes], cwd: bytes) -> bytes:
    """Packs a command: NUL cannot occur in any of its parts.

    Args:
        env: ``NAME=value`` items.
    """
    return b"\0".join([cwd, b"%d" % len(argv), *argv, *env])


def decode_exec(data: bytes) -> tuple[list[bytes], list[bytes], bytes]:
    """Undoes ``encode_exec``; returns (argv, env, cwd)."""
    cwd, count, *rest = data.split(b"\0")
    return rest[: int(count)], rest[int(count) :], cwd


def encode_files(files: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Packs ``(path, content)`` pairs of bytes."""
    parts: list[bytes] = []
    for path, content in files:
        parts += [path, b"\0", b"%d" % len(content), b"\0", content]
    return b"".join(parts)


def decode_files(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Undoes ``encode_files``, one pair at a time."""
    at = 0
    while at < len(data):
        path_end = data.index(b"\0", at)
        size_end = data.index(b"\0", path_end + 1)
        end = size_end + 1 + int(data[path_end + 1 : size_end])
        yield data[at:path_end], data[size_end + 1 : end]
        at = end
