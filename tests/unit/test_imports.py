"""The import rules of the architecture, read from the source, and what ``import clawgym_env`` costs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WINGS = ("clawgym_env", "torchrl_ext")

#: Part -> what of ours it may import; ``base`` modules are the interfaces that parts share. Longest name wins.
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "dialect": {"types"},
    "wire": {"types", "errors"},
    "tree": {"types", "errors"},
    "spaces": {"types"},
    "rendering": {"types", "errors", "wire.openai_chat"},
    "rendering.tokenizer": {"errors"},
    "engines": {"types", "errors"},
    "engines.upstream": {"types", "errors", "engines.base", "rendering", "wire"},
    "proxy": {"types", "errors", "dialect", "wire", "rendering", "engines.base", "tree"},
    "sandboxes": {"errors"},
    "harnesses": {"types", "errors", "dialect", "sandboxes"},
    "harnesses.warmup": {"types", "errors", "sandboxes", "wire"},
    "tasks": {
        "types",
        "errors",
        "sandboxes.base",
        "rendering",
        "engines.scripted",
        "engines.base",
    },
}
#: Parts that the learning wing may not import, but for the interfaces that its callers pass in.
CLOSED_TO_LEARNING = ("wire", "proxy", "sandboxes", "report", "cli")
INTERFACES = {"sandboxes.base"}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


EVERY = [pytest.param(name, path, id=name) for wing in WINGS for name, path in modules(wing)]


def imports(path: Path, *, at_import: bool = False) -> set[str]:
    """Modules of ours that a file imports; ``at_import`` leaves out those inside functions and type checks."""
    found: set[str] = set()
    for node in _nodes(ast.parse(path.read_text()), at_import):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is imported"
            assert node.module is not None
            found |= {_module(node.module, alias.name) for alias in node.names}
    return found


def _nodes(tree: ast.AST, at_import: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _nodes(node, at_import)


def _module(module: str, name: str) -> str:
    """``from a import b``: ``a.b`` where that is a module, else ``a``."""
    place = ROOT / module.replace(".", "/") / name
    return f"{module}.{name}" if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() else module


def ours(found: set[str], wing: str) -> set[str]:
    return {name.removeprefix(wing + ".") for name in found if name.startswith(wing + ".")}


def within(name: str, parts: set[str] | tuple[str, ...]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


def allowed(part: str) -> set[str] | None:
    """What a module may import: by its own name, else by the name of the folder it is in; ``None`` is anything."""
    while part:
        if part in MAY_IMPORT:
            return MAY_IMPORT[part] | {part.split(".")[0]} if part not in ("types", "errors") else set()
        part = part.rpartition(".")[0]
    return None


@pytest.mark.parametrize(("name", "path"), EVERY)
def test_modules_import_only_what_lies_below_them(name: str, path: Path) -> None:
    wing, _, part = name.partition(".")
    rule = allowed(part) if wing == "clawgym_env" else None
    if rule is not None:
        assert {found for found in ours(imports(path), wing) if not within(found, rule)} == set()


@pytest.mark.parametrize(("name", "path"), EVERY)
def test_the_running_wing_knows_neither_torch_nor_the_learning_wing(name: str, path: Path) -> None:
    if name.startswith("clawgym_env"):
        found = imports(path, at_import=name == "clawgym_env.cli")
        assert not {f for f in found if within(f, ("torch", "torchrl", "tensordict", "transformers", "torchrl_ext"))}


@pytest.mark.parametrize(("name", "path"), EVERY)
def test_the_learning_wing_knows_no_wire_and_no_box(name: str, path: Path) -> None:
    if name.startswith("torchrl_ext"):
        closed = {f for f in ours(imports(path), "clawgym_env") if within(f, CLOSED_TO_LEARNING)}
        assert closed - INTERFACES == set()


@pytest.mark.parametrize(("name", "path"), EVERY)
def test_nothing_imports_the_command_line(name: str, path: Path) -> None:
    assert name == "clawgym_env.__main__" or "clawgym_env.cli" not in imports(path)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, env=environment, check=True
    )


def test_importing_the_environments_loads_no_torch() -> None:
    heavy = ["torch", "torchrl", "tensordict", "transformers", "renderers", "uvicorn", "starlette", "docker"]
    out = python("-c", f"import sys, clawgym_env; print([m for m in {heavy} if m in sys.modules])")
    assert out.stdout.strip() == "[]"


def test_importing_the_environments_takes_well_under_a_second() -> None:
    lines = python("-X", "importtime", "-c", "import clawgym_env").stderr.splitlines()
    (total,) = (line.split("|")[1] for line in lines if line.endswith("| clawgym_env"))
    assert int(total) < 1_000_000, "microseconds, as the interpreter reports them"
