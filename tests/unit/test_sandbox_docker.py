"""docker: the suites against a real engine, and images.

Needs an engine (DOCKER_HOST); ``CLAWGYM_TEST_DOCKER=required`` makes a missing one a failure.
"""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from clawgym_env.errors import SandboxError, SandboxUnavailable
from clawgym_env.sandboxes import Mount, SandboxSpec, docker, folders
from tests.conformance.sandbox_lifecycle import LifeCycleSuite
from tests.conformance.sandbox_limits import LimitsSuite
from tests.conformance.sandbox_suite import SandboxSuite
from tests.conformance.sandbox_threats import ThreatsSuite
from tests.conformance.sandbox_world import own_base_folder

__all__ = ["own_base_folder"]  # a fixture: used by name

FOUND = docker.DockerBackend().probe()
needs_engine = pytest.mark.skipif(
    not FOUND.available and os.environ.get("CLAWGYM_TEST_DOCKER") != "required", reason=FOUND.detail
)


@pytest.fixture
def client() -> Iterator[Any]:
    with closing(docker.connect()) as client:
        yield client


@needs_engine
class TestDocker(SandboxSuite, LifeCycleSuite, LimitsSuite, ThreatsSuite):
    backend_name = "docker"
    start_s = 0.6
    pooled_descriptors = 25 + docker.AT_ONCE  # docker-py keeps connections for each of the last 25 addresses

    def kept_elsewhere(self) -> list[str]:
        own = {"label": f"{docker.OWNER_LABEL}={folders.identity(os.getpid())}"}
        with closing(docker.connect()) as client:
            return [c.name for c in client.containers.list(all=True, filters=own, ignore_removed=True)]

    def test_owner_that_died_leaves_containers_only_until_the_next_start(self, client: Any) -> None:
        """A container whose owner is known to be dead is removed; a living owner's and a stranger's are not."""
        image = docker.images.prepare(client, None)
        boot, namespace, pid, start = folders.identity(os.getpid()).split("-")
        owners = {
            "dead": f"{boot}-{namespace}-{pid}-{int(start) - 1}",
            "living": folders.identity(os.getpid()),
            "elsewhere": f"{boot}-{int(namespace) + 1}-{pid}-{start}",
        }
        made = {
            name: client.containers.create(image.id, ["true"], labels={docker.OWNER_LABEL: owner})
            for name, owner in owners.items()
        }
        try:
            self.backend().reap()
            left = {container.id for container in client.containers.list(all=True)}
            assert {name for name, container in made.items() if container.id in left} == {"living", "elsewhere"}
        finally:
            for container in made.values():
                docker._remove(container)


@needs_engine
class TestImages:
    @pytest.fixture
    def context(self, tmp_path: Path) -> Path:
        """A build folder of an image that has a shell, and no Python."""
        programs = ["/bin/sh", "/bin/cat", "/usr/bin/id", "/bin/ls"]
        linked = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
        libraries = {word for word in linked.split() if word.startswith("/") and not word.endswith(":")}
        with tarfile.open(tmp_path / "root.tar", "w") as tar:
            for path in (*programs, *libraries):
                data = Path(path).read_bytes()
                entry = tarfile.TarInfo(path.removeprefix("/usr").lstrip("/"))
                entry.size, entry.mode = len(data), 0o755
                tar.addfile(entry, io.BytesIO(data))
        (tmp_path / "Dockerfile").write_text(
            'FROM scratch\nADD root.tar /\nENV PATH=/bin\nRUN ["/bin/sh", "-c", "echo built > /made"]\n'
        )
        return tmp_path

    def test_a_dockerfile_is_built_once_and_runs_without_python(self, context: Path, client: Any) -> None:
        async def main() -> None:
            for name in ("first", "second"):
                spec = SandboxSpec(image=context, files={"x": name.encode()})
                async with await docker.DockerBackend().create(spec) as sandbox:
                    done = await sandbox.exec(["sh", "-c", "cat /made x; echo; id -u; ls /bin"])
                    assert done.stdout.decode().split() == ["built", name, "1000", "cat", "id", "ls", "sh"], done.stderr
                    assert await sandbox.collect() == {"x": name.encode()}

        tag = f"clawgym-built:{docker.images._digest(context)}"
        try:
            asyncio.run(main())
            assert client.images.get(tag).tags == [tag]
            (context / "more").write_text("")
            assert docker.images._digest(context) != tag.split(":")[1]
        finally:
            client.images.remove(tag, force=True)

    def test_a_named_image_is_used_and_never_pulled(self, context: Path, client: Any) -> None:
        client.images.build(path=str(context), tag="clawgym-test:named", network_mode="host", rm=True)

        async def main() -> None:
            async with await docker.DockerBackend().create(SandboxSpec(image="clawgym-test:named")) as sandbox:
                assert (await sandbox.exec(["cat", "/made"])).stdout == b"built\n"
            with pytest.raises(SandboxError, match="nothing is pulled"):
                await docker.DockerBackend().create(SandboxSpec(image="clawgym-test:missing"))

        try:
            asyncio.run(main())
        finally:
            client.images.remove("clawgym-test:named", force=True)

    def test_a_dockerfile_that_does_not_build_says_why(self, tmp_path: Path) -> None:
        (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY missing /\n")

        async def main() -> None:
            with pytest.raises(SandboxError, match=r"does not build.*missing"):
                await docker.DockerBackend().create(SandboxSpec(image=tmp_path))
            with pytest.raises(SandboxError, match="no Dockerfile"):
                await docker.DockerBackend().create(SandboxSpec(image=tmp_path.parent))

        asyncio.run(main())


def test_without_an_engine_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    found = docker.DockerBackend().probe()
    assert not found.available
    assert "docker.io" in found.detail

    async def main() -> None:
        with pytest.raises(SandboxUnavailable, match=r"clawgym\[docker\]"):
            await docker.DockerBackend().create(SandboxSpec(mounts=[Mount(tmp_path, "/opt/x")]))

    asyncio.run(main())
    assert docker.DockerBackend().reap() == 0
