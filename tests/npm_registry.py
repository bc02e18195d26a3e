"""An npm registry on loopback with two packages: one that names a native program's package, and that package."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from clawgym_env.harnesses.npm import cpu


def archive(manifest: Mapping[str, Any], files: Mapping[str, str]) -> bytes:
    """A package as npm downloads it; every file can be run."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, text in {"package.json": json.dumps(manifest), **files}.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size, info.mode = len(text.encode()), 0o755
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def integrity(data: bytes) -> str:
    """The hash that npm writes into lock files."""
    return "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()


def native_packages(version: str, program: str, text: str) -> dict[str, tuple[dict[str, Any], bytes]]:
    """``@fake/tool``, whose install script would leave a mark, and ``@fake/tool-linux-<cpu>`` with the program."""
    host = f"@fake/tool-linux-{cpu()}"
    manifests: list[tuple[dict[str, Any], dict[str, str]]] = [
        (
            {
                "name": "@fake/tool",
                "version": version,
                "scripts": {"postinstall": "touch script-ran"},
                "optionalDependencies": {host: version, "@fake/tool-plan9-mips": version},
            },
            {},
        ),
        ({"name": host, "version": version, "os": ["linux"], "cpu": [cpu()]}, {program: text}),
        ({"name": "@fake/tool-plan9-mips", "version": version, "os": ["plan9"], "cpu": ["mips"]}, {}),
    ]
    return {m["name"]: (m, archive(m, files)) for m, files in manifests}


@contextmanager
def serve(packages: Mapping[str, tuple[dict[str, Any], bytes]]) -> Iterator[str]:
    """Serves them; gives the registry's URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(self.path).strip("/")
            name = path.removesuffix(".tgz")
            if name not in packages:
                self.send_error(404)
                return
            manifest, data = packages[name]
            if not path.endswith(".tgz"):
                url = f"http://127.0.0.1:{server.server_port}/{name}.tgz"
                full = {**manifest, "dist": {"tarball": url, "integrity": integrity(data)}}
                version = manifest["version"]
                document = {"name": name, "dist-tags": {"latest": version}, "versions": {version: full}}
                data = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
