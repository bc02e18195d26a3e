"""From settings to a finished run: opens what the stages need and calls them in order."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rich.markup import escape
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from clawgym_env.errors import ConfigError
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rendering.tokenizer import SHIPPED_TOKENIZER
from clawgym_env.store import RunFolder
from clawgym_env.world import open_mixed_world
from torchrl_ext.demos import capture_demonstrations, shell_of
from torchrl_ext.engine import TorchEngine
from torchrl_ext.measure import measure
from torchrl_ext.models import PolicyConfig, create_policy, load_policy, save_policy
from torchrl_ext.progress import RunProgress
from torchrl_ext.recipes.config import (
    GRPOConfig,
    MixConfig,
    PPOConfig,
    QuickstartConfig,
    RunSettings,
    SFTConfig,
    stored,
)
from torchrl_ext.recipes.stages import EvalStage, GRPOStage, PolicyStage
from torchrl_ext.trainer import fine_tune, pretrain_critic, reinforce
from torchrl_ext.updates import CriticLearner, GRPOUpdate, PPOUpdate, ValueUpdate
from torchrl_ext.workbench import Workbench, reference_policy

#: Context of a policy that is measured, where neither its run nor the user says: prompt and answer in tokens.
DEFAULT_CONTEXT = 4096


def train(recipe: str, settings: RunSettings, path: Path, progress: RunProgress) -> RunFolder:
    """Runs a recipe in a new folder.

    Raises:
        ConfigError: the folder holds a run already, or a setting cannot be honoured.
    """
    if (path / "config.json").exists():
        raise ConfigError(f"{path} holds a run already: continue it with --resume {path}, or name another --out")
    bench = open_bench(settings, RunFolder(path), progress)
    bench.folder.write_config({"recipe": recipe, **settings.model_dump(mode="json")})
    return _run(bench)


def resume(path: Path, progress: RunProgress) -> RunFolder:
    """Goes on with a run that was stopped, with the settings it was started with.

    Raises:
        ConfigError: there is no run there.
    """
    folder = RunFolder.existing(path)
    return _run(open_bench(stored(folder.config, path), folder, progress))


def _run(bench: Workbench) -> RunFolder:
    settings, folder = bench.settings, bench.folder
    torch.set_num_threads(settings.threads)
    bench.progress.line(f"run folder: {escape(str(folder.path))}")
    if isinstance(settings, QuickstartConfig | MixConfig):
        capture_demonstrations(bench, settings.demos)
        fine_tune(bench, settings.sft, folder, "demos")
        _grpo(bench, settings.grpo, settings.eval)
    elif isinstance(settings, PPOConfig):
        if settings.demos.rollouts:
            capture_demonstrations(bench, settings.demos)
        fine_tune(bench, settings.sft, folder, "demos")
        _ppo(bench, settings)
    elif isinstance(settings, SFTConfig):
        source = RunFolder.existing(Path(settings.rollouts))
        measure(bench, settings.eval, "before")
        fine_tune(bench, settings.sft, source)
        measure(bench, settings.eval, "after")
    elif isinstance(settings, GRPOConfig):
        _grpo(bench, settings.grpo, settings.eval)
    else:
        raise ConfigError(f"no recipe runs {type(settings).__name__}")
    save_policy(bench.model, bench.tokenizer_dir, folder.path / "policy")
    return folder


def _grpo(bench: Workbench, stage: GRPOStage, eval_stage: EvalStage) -> None:
    measure(bench, eval_stage, "before")
    update = GRPOUpdate(bench.model, stage, temperature=bench.settings.temperature, reference=_reference(bench, stage))
    reinforce(bench, update, eval_stage)
    measure(bench, eval_stage, "after")


def _ppo(bench: Workbench, settings: PPOConfig) -> None:
    measure(bench, settings.eval, "before")
    reference = _reference(bench, settings.ppo)
    learner = CriticLearner(bench.model, settings.critic, settings.ppo)
    pretrain_critic(bench, ValueUpdate(settings.value, learner))
    update = PPOUpdate(bench.model, settings.ppo, learner, temperature=settings.temperature, reference=reference)
    reinforce(bench, update, settings.eval)
    measure(bench, settings.eval, "after")


def _reference(bench: Workbench, stage: PolicyStage) -> PreTrainedModel | None:
    return reference_policy(bench) if stage.kl_coeff is not None else None


def open_bench(settings: RunSettings, folder: RunFolder, progress: RunProgress) -> Workbench:
    """Everything the stages share; what is missing is said before any work begins."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers_logging.disable_progress_bar()  # the run has its own
    world = open_mixed_world(settings.programs, settings.suite, level=settings.level, sandbox=settings.sandbox)
    if isinstance(settings, QuickstartConfig | MixConfig | PPOConfig) and settings.demos.rollouts:
        for harness in world.harnesses.values():
            shell_of(harness)
    source = resolve_model(settings.model) if settings.model else None
    tokenizer_dir = source or SHIPPED_TOKENIZER
    renderer = ChatRenderer.from_folder(tokenizer_dir)
    model: PreTrainedModel
    if source is not None:
        model = load_policy(source)
        longest = int(model.config.max_position_embeddings)
        if settings.max_context > longest:
            raise ConfigError(
                f"max_context={settings.max_context} is beyond the {longest} positions of {settings.model}: "
                f"set max_context={longest}, or start from a policy that was made with more"
            )
    else:
        config = PolicyConfig(vocab_size=renderer.vocab_size, max_positions=settings.max_context, seed=settings.seed)
        model = create_policy(config)
    return Workbench(folder, settings, model, tokenizer_dir, renderer, world, progress)


def resolve_model(name: str) -> Path:
    """The Hugging Face folder that a run folder or a path stands for.

    Raises:
        ConfigError: neither is there.
    """
    path = Path(name)
    for candidate in (path / "policy", path / "checkpoints" / "best", path):
        if (candidate / "config.json").is_file() and any(candidate.glob("*.safetensors")):
            return candidate
    raise ConfigError(
        f"{name} is neither a run folder with a policy nor a Hugging Face folder with safetensors weights"
    )


def open_model(name: str, *, max_context: int | None = None) -> tuple[TorchEngine, ChatRenderer]:
    """A saved policy behind the embedded engine, for evaluation.

    Args:
        max_context: Prompt and answer in tokens; ``None`` takes that of the run that made the policy, else
            ``DEFAULT_CONTEXT``.

    Raises:
        ConfigError: there is no such model, or the embedded engine cannot serve it.
    """
    path = resolve_model(name)
    model = load_policy(path)
    if max_context is None:
        made = Path(name) / "config.json"
        config = RunFolder.existing(Path(name)).config if made.is_file() else {}
        max_context = int(config.get("max_context", DEFAULT_CONTEXT))
    limit = min(max_context, int(model.config.max_position_embeddings))
    return TorchEngine(model, max_context=limit), ChatRenderer.from_folder(path)
