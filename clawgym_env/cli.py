"""The command line: the one room that knows both wings."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Collection
from dataclasses import asdict
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from clawgym_env.errors import ClawGymError, ConfigError, HarnessNotInstalled
from clawgym_env.tasks.base import Split

if TYPE_CHECKING:
    from clawgym_env.world import Program

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Train language models through real agent harnesses."
)
harness_app = typer.Typer(no_args_is_help=True, help="Agent harnesses: what there is, what is installed, where.")
app.add_typer(harness_app, name="harness")
sandbox_app = typer.Typer(no_args_is_help=True, help="Sandboxes: what earlier runs left behind.")
app.add_typer(sandbox_app, name="sandbox")
out = Console(highlight=False, markup=False)  # what is shown may hold brackets: paths, messages, '.[train]'
WIDE = 240  # columns of a table that goes into a file or another program
err = Console(stderr=True, highlight=False, markup=False)


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Our own errors end in one clear line, not in a traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except ClawGymError as error:
            message = " ".join(str(error).split())
            err.print(Text.assemble(("error:", "bold red"), f" {message}"), soft_wrap=True)
            raise typer.Exit(2) from None

    return run


@app.command()
@_guarded
def train(
    recipe: Annotated[str | None, typer.Argument(help="quickstart, sft, grpo, ppo or mix")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="settings as key=value")] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", file_okay=False, help="run folder; runs/RECIPE-TIME by default")
    ] = None,
    resume_dir: Annotated[Path | None, typer.Option("--resume", help="go on with a run that was stopped")] = None,
) -> None:
    """Train a policy: clawgym train quickstart seed=1 steps=20"""
    if (recipe is None) == (resume_dir is None):
        raise ConfigError("name a recipe (clawgym train quickstart) or a run to go on with (--resume RUN), not both")
    if resume_dir is not None and out_dir is not None:
        raise ConfigError("a resumed run stays in its folder; leave --out out")
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ConfigError("training needs the extra 'train': pip install -c constraints.txt -e '.[train]'") from None
    from torchrl_ext.progress import RunProgress
    from torchrl_ext.recipes import config as recipes
    from torchrl_ext.recipes import run

    progress = RunProgress()
    if resume_dir is not None:
        path = resume_dir
        go: Callable[[], Any] = partial(run.resume, path, progress)
        settings = recipes.stored(_config_of(resume_dir), resume_dir)
    else:
        settings = recipes.build(str(recipe), overrides or [])
        path = out_dir or Path("runs") / f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
        go = partial(run.train, str(recipe), settings, path, progress)
    _ensure_harnesses(settings.programs.values())
    try:
        folder = go()
    except KeyboardInterrupt:
        err.print(f"stopped; go on with: clawgym train --resume {path}", soft_wrap=True, markup=False)
        raise typer.Exit(130) from None
    from clawgym_env.report import write_report

    progress.line(f"report: {escape(str(write_report(folder)))}")


@app.command("eval")
@_guarded
def evaluate(
    harness: Annotated[list[str] | None, typer.Option(help="agent harness; several may be named [default: pi]")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="setting of the harness, KEY=VALUE; of one of several, HARNESS.KEY=VALUE")
    ] = None,
    tasks: Annotated[str, typer.Option(help="task suite")] = "builtin",
    model: Annotated[str | None, typer.Option(help="run folder or Hugging Face folder")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="OpenAI-compatible base URL, such as http://host:8000/v1")
    ] = None,
    model_name: Annotated[str, typer.Option(help="model name to ask the endpoint for")] = "policy",
    n: Annotated[int, typer.Option(min=1, help="tasks")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="rollouts of each task")] = 1,
    level: Annotated[int, typer.Option(min=1, max=3)] = 1,
    split: Annotated[Split, typer.Option()] = "test",
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="longest answer; 96 local, 4096 endpoint")] = None,
    max_context: Annotated[int | None, typer.Option(min=16, help="of a local model; its run's, else 4096")] = None,
    max_calls: Annotated[int | None, typer.Option(min=1, help="calls a rollout; 4 local, 64 endpoint")] = None,
    timeout_s: Annotated[float | None, typer.Option(min=1.0, help="of a rollout; 60 local, 900 endpoint")] = None,
    concurrency: Annotated[int, typer.Option(min=1)] = 4,
    sandbox: Annotated[str, typer.Option()] = "bubblewrap",
    limit: Annotated[list[str] | None, typer.Option(help="of each sandbox, such as memory_mb=4096")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out_dir: Annotated[Path | None, typer.Option("--out", file_okay=False, help="folder for the rollouts")] = None,
) -> None:
    """Measure Pass@1, by task family, with its 95% interval; under several harnesses, also by harness.

    The endpoint's key is read from OPENAI_API_KEY.
    """
    if (model is None) == (endpoint is None):
        raise ConfigError("say what to measure: --model RUN_OR_FOLDER or --endpoint URL")
    if out_dir is not None and (out_dir / "config.json").exists():
        raise ConfigError(f"{out_dir} holds a run already: name another --out")
    from clawgym_env import measuring
    from clawgym_env.overrides import parse_overrides
    from clawgym_env.world import limits_of

    small = model is not None
    programs = measuring.programs_of(harness or ["pi"], option or [])
    _ensure_harnesses(programs.values())
    wall_s = timeout_s or (60.0 if small else 900.0)
    plan = measuring.Plan(
        harnesses=programs, suite=tasks, level=level, split=split, n=n, seed=seed, temperature=temperature,
        max_tokens=max_tokens or (96 if small else 4096), max_calls=max_calls or (4 if small else 64),
        timeout_s=wall_s, sandbox=sandbox, concurrency=concurrency, repeats=repeats,
        limits=limits_of(parse_overrides(limit or []), wall_s),
    )  # fmt: skip
    if endpoint is not None:
        opened = measuring.open_endpoint(endpoint, model_name, os.environ.get("OPENAI_API_KEY"))
    else:
        opened = _open_model(str(model), max_context)
    say = partial(_say_how_far, plan.rollouts)
    rollouts = asyncio.run(measuring.run(plan, *opened, on_done=say))
    if out_dir is not None:
        measuring.store(out_dir, plan, rollouts)
    _print_evaluation(rollouts, f"{model or endpoint} under {', '.join(programs)}, {tasks} level {level}, {split}")


@app.command()
@_guarded
def report(run: Annotated[Path, typer.Argument(help="run folder")]) -> None:
    """Write a run's report again."""
    from clawgym_env.report import write_report
    from clawgym_env.store import RunFolder

    out.print(str(write_report(RunFolder.existing(run))))


@app.command()
@_guarded
def doctor(
    model: Annotated[
        Path | None, typer.Option(help="look at a model's chat format: model folder, run folder or tokenizer.json")
    ] = None,
    family: Annotated[str, typer.Option(help="chat family, as the renderers library names it")] = "qwen3",
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Say what works on this machine and what is missing; exit with 1 where something failed."""
    from clawgym_env.doctor import check_machine, check_model

    checks = list(check_machine() if model is None else check_model(model, family))
    if as_json:
        out.print(json.dumps([asdict(check) for check in checks], indent=2), soft_wrap=True)
    else:
        table = Table("check", "state", Column("detail", overflow="fold"), box=None)
        colours = {"ok": "green", "warning": "yellow", "failed": "bold red"}
        for check in checks:
            detail = f"{check.detail}\n-> {check.advice}" if check.advice else check.detail
            table.add_row(Text(check.name), Text(check.state, style=colours[check.state]), Text(detail))
        out.print(table)
    if any(check.state == "failed" for check in checks):
        raise typer.Exit(1)


@harness_app.command("list")
@_guarded
def harness_list() -> None:
    """List harnesses with version, licence, wires, size, and whether they are installed."""
    from clawgym_env.harnesses import HARNESSES, get_harness
    from clawgym_env.harnesses.install import state

    folded = [Column(name, overflow="fold") for name in ("licence", "wires", "size", "installed")]
    table = Table("name", "title", "version", *folded, box=None)
    for name in HARNESSES:
        info = get_harness(name).info
        place = state(name) if info.install_mb else "built in"
        size = f"{info.install_mb} MB" if info.install_mb else "-"
        table.add_row(name, info.title, info.version or "-", info.licence, ", ".join(info.wires), size, place)
    wide = out if out.is_terminal else Console(highlight=False, markup=False, width=WIDE)
    wide.print(table)


@harness_app.command("install")
@_guarded
def harness_install(name: str) -> None:
    """Install a harness at its pinned version into the cache."""
    from clawgym_env.harnesses.install import install

    out.print(str(install(name, lambda text: err.print(text))), soft_wrap=True)


@harness_app.command("path")
@_guarded
def harness_path(name: str) -> None:
    """Print where a harness is installed."""
    from clawgym_env.harnesses.install import require

    out.print(str(require(name)), soft_wrap=True)


@sandbox_app.command("reap")
@_guarded
def sandbox_reap() -> None:
    """Remove what the sandboxes of runs that were killed left on this machine; those of living runs stay."""
    from clawgym_env.sandboxes import BACKENDS, get_backend

    for name in BACKENDS:
        removed = get_backend(name).reap()
        out.print(f"{name}: {removed} leftover{'s' * (removed != 1)} removed")


def _ensure_harnesses(programs: Collection[Program]) -> None:
    """Installs what a run needs on first use, with a line that says so.

    Raises:
        ConfigError: there is no such harness, or it does not take the settings; nothing was installed then.
        HarnessNotInstalled: what only a person may install is missing; said before anything is installed.
    """
    from clawgym_env.harnesses import get_harness
    from clawgym_env.harnesses.install import PACKAGES, ensure, installed

    for program in programs:
        get_harness(program.name, **program.options)
    wanted = dict.fromkeys(program.name for program in programs)
    needed = [name for name in wanted if name in PACKAGES]
    theirs = [name for name in needed if PACKAGES[name].proprietary and installed(name) is None]
    if theirs and len(wanted) > 1:
        left = ",".join(name for name in wanted if name not in theirs)
        said = "; ".join(f"{PACKAGES[name].proprietary}: clawgym harness install {name}" for name in theirs)
        raise HarnessNotInstalled(
            f"{', '.join(theirs)} is not installed, and only you may do that. {said}. Or go without: name only {left}"
        )
    for name in needed:
        ensure(name, lambda text: err.print(text))


def _say_how_far(total: int, done: int) -> None:
    err.print(f"{done}/{total}", end="\r")


def _config_of(path: Path) -> dict[str, Any]:
    from clawgym_env.store import RunFolder

    return RunFolder.existing(path).config


def _open_model(name: str, max_context: int | None) -> Any:
    try:
        from torchrl_ext.recipes.run import open_model
    except ImportError:
        raise ConfigError(
            "a local model needs the extra 'train': pip install -c constraints.txt -e '.[train]'"
        ) from None
    return open_model(name, max_context=max_context)


def _print_evaluation(rollouts: list[Any], title: str) -> None:
    from clawgym_env.evaluation import bootstrap, by_harness, passes_by_task
    from clawgym_env.evaluation import evaluate as summarise

    summary, each = summarise(rollouts), by_harness(rollouts)
    table = Table("family", "Pass@1", "95% interval", "passed", title=title, title_justify="left", box=None)
    for name, rate in [*summary.by_family.items(), ("all", summary.overall)]:
        table.add_row(name, *_shares(rate.rate, rate.low, rate.high), f"{rate.passed}/{rate.scored}")
    out.print(table)
    if summary.unscored:
        out.print("not scored: " + ", ".join(f"{k} {v}" for k, v in summary.unscored.items()))
    if len(each) == 1:
        return
    table = Table("harness", "Pass@1", "95% over tasks", "passed", "calls", "not scored", box=None)
    for label, own in each.items():
        found, (low, high) = summarise(own), bootstrap(list(passes_by_task(own).values()))
        unscored = ", ".join(f"{k} {v}" for k, v in found.unscored.items()) or "-"
        passed = f"{found.overall.passed}/{found.overall.scored}"
        table.add_row(label, *_shares(found.overall.rate, low, high), passed, f"{found.calls:.1f}", unscored)
    out.print(table)


def _shares(rate: float, low: float, high: float) -> tuple[str, str]:
    """A pass rate and its interval in percent; a rate that is NaN was not measured."""
    return f"{100 * rate:.1f}%" if rate == rate else "-", f"{100 * low:.1f} - {100 * high:.1f}"


def main() -> None:
    """Entry point of the ``clawgym`` command."""
    # Harness processes want the cores: threads that wait for work must sleep, not spin (read when torch is imported).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    app()
