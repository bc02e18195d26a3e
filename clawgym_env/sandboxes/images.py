"""Images for the docker backend: the host's own programs, an image by name, or a Dockerfile, built once.

Invariant: nothing is pulled. An image that is named is there, or refused; one that is built is cached by the engine
under a name that its content gives. The first process runs on the host's Python in any image, which need not have one.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawgym_env.errors import SandboxError, SandboxUnavailable
from clawgym_env.sandboxes.base import AGENT_UID, HOME

SYSTEM_PYTHON = "/usr/bin/python3"
HOST_USR = "/run/clawgym-host"  # where a foreign image sees the host's /usr
FOLDERS = ("usr", "etc", "tmp", "proc", "sys", "dev", "run", "opt", "home/agent", "workspace", "var", "root")
SHARED = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl", "/etc/pki", "/etc/nsswitch.conf")
ACCOUNTS = {
    "etc/passwd": f"agent:x:{AGENT_UID}:{AGENT_UID}:agent:{HOME}:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": f"agent:x:{AGENT_UID}:\nnogroup:x:65534:\n",
}


@dataclass(frozen=True, slots=True)
class Image:
    """What a container is made of.

    Attributes:
        id: Of the image in the engine.
        python: Command line of the interpreter for the first process, as seen from inside.
        binds: Host paths that it needs, as ``source:target:ro``.
    """

    id: str
    python: list[str]
    binds: list[str] = field(default_factory=list)


def prepare(client: Any, image: str | Path | None) -> Image:
    """Finds or builds an image.

    Args:
        client: Of a Docker engine.
        image: Name of an image that the engine has, folder with a Dockerfile, or ``None`` for the host's own /usr.

    Raises:
        SandboxError: it is not there, or does not build; the message says why.
        SandboxUnavailable: the host has no system Python to run the first process on.
    """
    if not Path(SYSTEM_PYTHON).exists():
        raise SandboxUnavailable(f"the docker backend runs the first process on {SYSTEM_PYTHON}: install it")
    if image is None:
        shared = [path for path in SHARED if Path(path).exists()]
        binds = [f"{path}:{path}:ro" for path in ("/usr", *shared, *_unmerged())]
        return Image(_host_image(client), [SYSTEM_PYTHON], binds)
    found = _built(client, Path(image)) if isinstance(image, Path) or Path(image).is_dir() else _named(client, image)
    return Image(found, _foreign_python(), [f"/usr:{HOST_USR}:ro"])


def _foreign_python() -> list[str]:
    """The host's Python below another root: its own loader finds its own libraries."""
    python = Path(SYSTEM_PYTHON).resolve()
    found = [*Path("/usr/lib64").glob("ld-linux*"), *Path("/lib64").glob("ld-linux*"), *Path("/lib").glob("ld-linux*")]
    loader = next((path.resolve() for path in found if path.resolve().is_relative_to("/usr")), None)
    if loader is None or not python.is_relative_to("/usr"):
        raise SandboxUnavailable("no dynamic loader below /usr: images other than the host's own need one")
    libraries = dict.fromkeys((str(loader.parent), "/usr/lib64", "/usr/lib"))
    inside = [path.replace("/usr", HOST_USR, 1) for path in libraries if Path(path).is_dir()]
    program, start = (str(path).replace("/usr", HOST_USR, 1) for path in (python, loader))
    return [start, "--library-path", ":".join(inside), program]


def _unmerged() -> list[str]:
    """Top-level folders of a host whose programs are not all below /usr."""
    return [
        f"/{name}"
        for name in ("bin", "sbin", "lib", "lib64")
        if Path("/", name).is_dir() and not Path("/", name).is_symlink()
    ]


def _host_image(client: Any) -> str:
    """An image of empty folders and links, into which the host's /usr is bound."""
    content = _host_layer()
    tag = f"clawgym-host:{hashlib.sha256(content).hexdigest()[:16]}"
    if not _exists(client, tag):
        client.api.import_image_from_data(content, repository=tag.split(":")[0], tag=tag.split(":")[1])
    return tag


def _host_layer() -> bytes:
    """The image's one layer, the same bytes each time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in (*FOLDERS, *(path.strip("/") for path in _unmerged())):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755  # a mount takes it over
            tar.addfile(entry)
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):
            if Path("/", name).is_symlink():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
                tar.addfile(entry)
        link = tarfile.TarInfo("var/tmp")
        link.type, link.linkname = tarfile.SYMTYPE, "/tmp"
        tar.addfile(link)
        for name, text in ACCOUNTS.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _named(client: Any, name: str) -> str:
    if not _exists(client, name):
        raise SandboxError(f"the Docker engine has no image {name!r}; nothing is pulled: docker pull {name}")
    return name


def _built(client: Any, folder: Path) -> str:
    """The image of a Dockerfile, built unless an image of the same content is there."""
    import docker

    if not (folder / "Dockerfile").is_file():
        raise SandboxError(f"{folder} has no Dockerfile")
    tag = f"clawgym-built:{_digest(folder)}"
    if not _exists(client, tag):
        try:
            client.images.build(path=str(folder), tag=tag, rm=True, forcerm=True, network_mode="host", pull=False)
        except docker.errors.BuildError as error:
            said = "".join(str(line.get("stream", line.get("error", ""))) for line in error.build_log)
            raise SandboxError(f"{folder}/Dockerfile does not build: {error.msg}: {said[-800:]}") from error
        except docker.errors.DockerException as error:
            raise SandboxError(f"{folder}/Dockerfile does not build: {error}") from error
    return tag


def _exists(client: Any, name: str) -> bool:
    import docker

    try:
        client.images.get(name)
    except docker.errors.ImageNotFound:
        return False
    except docker.errors.DockerException as error:
        raise SandboxError(f"the Docker engine refused: {error}") from error
    return True


def _digest(folder: Path) -> str:
    """Of names, modes and content of all files of a build folder."""
    digest = hashlib.sha256()
    for path in _files(folder):
        content = path.readlink().as_posix().encode() if path.is_symlink() else path.read_bytes()
        mode = path.lstat().st_mode
        digest.update(f"{path.relative_to(folder)}\0{mode:o}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or path.is_file():
            yield path
