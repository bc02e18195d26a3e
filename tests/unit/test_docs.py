"""The documentation is true to the code: its examples run, its commands parse, its names and links exist."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from clawgym_env.cli import app
from clawgym_env.types import Status
from torchrl_ext.recipes.config import RECIPES, build

ROOT = Path(__file__).parents[2]
PAGES = [path for path in (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md") if path.is_file()]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced blocks of some languages."""
    return [body for language, body in FENCE.findall(page.read_text()) if language in languages]


def inline(page: Path) -> list[str]:
    """Code in running text."""
    return INLINE.findall(FENCE.sub("", page.read_text()))


def examples() -> Iterator[object]:
    """Python blocks that say that they run."""
    for page in PAGES:
        for k, body in enumerate(blocks(page, "python")):
            if body.startswith("# runnable\n"):
                yield pytest.param(page, body, id=f"{page.stem}-{k}")


def commands() -> Iterator[object]:
    """Every clawgym command line, in shell blocks and in running text."""
    for page in PAGES:
        lines = "\n".join(blocks(page, "bash", "sh", "console")).replace("\\\n", " ").splitlines()
        for line in [*lines, *inline(page)]:
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[:1] == ["clawgym"] and len(words) > 1:
                yield pytest.param(words[1:], id=f"{page.stem}: {line}")


EXAMPLES, COMMANDS = list(examples()), list(commands())


def test_pages_are_found() -> None:
    names = {page.stem for page in PAGES}
    assert names >= {"concepts", "method", "quickstart", "gymnasium", "torchrl", "harnesses", "sandboxes", "tasks"}
    assert len(EXAMPLES) >= 8 and len(COMMANDS) >= 12


@pytest.mark.parametrize(("page", "source"), EXAMPLES)
def test_examples_run(page: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for body in blocks(page, "python"):
        named = re.match(r"# file: (\w+)\.py\n", body)
        if named:
            (tmp_path / f"{named[1]}.py").write_text(body)
            monkeypatch.delitem(sys.modules, named[1], raising=False)
    exec(compile(source, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("source", [body for page in PAGES for body in blocks(page, "python")])
def test_every_python_block_is_python(source: str) -> None:
    compile(source, "block", "exec")


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_parse(words: list[str]) -> None:
    command = typer.main.get_command(app)
    context = command.make_context("clawgym", list(words))
    while hasattr(command, "resolve_command"):
        _, command, rest = command.resolve_command(context, context._protected_args + context.args)
        context = command.make_context(command.name, rest, parent=context)
    if command.name == "train" and context.params["recipe"] is not None:
        overrides = [item for item in context.params["overrides"] or [] if item.partition("=")[2] != "VALUE"]
        needed = ["rollouts=RUN"] if context.params["recipe"] == "sft" and not overrides else []
        build(context.params["recipe"], [*overrides, *needed])


@pytest.mark.parametrize("words", [["nope"], ["train", "--nope"], ["eval", "--level", "9"], ["harness", "nope"]])
def test_wrong_commands_do_not_parse(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"No such|not in the range|Input should be"):
        test_commands_parse(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_exist(page: Path) -> None:
    """Dotted names of ours, file paths of ours and keys of the recipes, wherever they stand as code."""
    stages = {name: keys(kind) for recipe in RECIPES.values() for name, kind in stage_types(recipe)}
    for code in inline(page):
        if re.fullmatch(r"(clawgym_env|torchrl_ext)(\.\w+)+", code):
            resolve(code)
        if re.fullmatch(r"(clawgym_env|torchrl_ext|docs|tests|benchmarks)/[\w/.-]+", code):
            assert (ROOT / code).exists(), f"{page.name}: {code}"
        setting = re.fullmatch(r"(\w+)\.(\w+)(=.*)?", code)
        if setting and setting[1] in stages:
            assert setting[2] in stages[setting[1]], f"{page.name}: {code} is no setting"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", FENCE.sub("", page.read_text())):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_status_is_explained_as_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \|", (ROOT / "docs" / "concepts.md").read_text(), re.MULTILINE)
    assert {name: said == "yes" for name, said in rows} == {str(s): s.scored for s in Status}


def test_every_family_and_harness_is_listed() -> None:
    from clawgym_env.harnesses import HARNESSES, get_harness
    from clawgym_env.tasks.builtin.suite import FAMILIES

    tasks = (ROOT / "docs" / "tasks.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", tasks, re.MULTILINE)) == set(FAMILIES)
    harnesses = (ROOT / "docs" / "harnesses.md").read_text()
    listed = harnesses.partition("\n## ")[0]
    rows = re.findall(r"^\| \[`([\w-]+)`\]\(harnesses/([\w-]+)\.md\) \|", listed, re.MULTILINE)
    assert {name for name, page in rows if name == page} == set(HARNESSES)
    assert all(get_harness(name).info.version in harnesses for name in HARNESSES)


def stage_types(recipe: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Stages of a recipe by name."""
    for name, field in recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield name, field.annotation


def keys(kind: type[BaseModel]) -> set[str]:
    """Settings of a stage."""
    return set(kind.model_fields)


def resolve(name: str) -> object:
    """What a dotted name stands for.

    Raises:
        AttributeError: nothing.
    """
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:k]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[k:]:
            found = getattr(found, attribute)
        return found
    raise AttributeError(name)
