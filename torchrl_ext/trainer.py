"""The training loop: supervised fine-tuning, and steps of reinforcement learning, over a run folder.

Invariant: every stage can be killed at any time and goes on from its last save (``torchrl_ext.workbench``).
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from transformers import PreTrainedModel

from clawgym_env.errors import ConfigError
from clawgym_env.evaluation import evaluate
from clawgym_env.rollout import RolloutSpec
from clawgym_env.store import RunFolder
from torchrl_ext.collector import TreeCollector
from torchrl_ext.data import to_training_batch, tree_td
from torchrl_ext.losses import TreeSFTLoss
from torchrl_ext.metrics import rollout_metrics
from torchrl_ext.mixture import allot
from torchrl_ext.models import save_policy
from torchrl_ext.optim import descend, make_optimizer
from torchrl_ext.recipes.stages import EvalStage, PolicyStage, RolloutStage, SFTStage
from torchrl_ext.sft import prompt_length, shared_prompts, shorten_prompt
from torchrl_ext.updates import PolicyUpdate, Update, ValueUpdate
from torchrl_ext.workbench import Workbench, restore_state, save_state


def fine_tune(bench: Workbench, stage: SFTStage, source: RunFolder, prefix: str = "") -> None:
    """Fits the policy to the captured rollouts of ``source`` whose batch names begin with ``prefix``."""
    if stage.steps == 0:
        return
    rows = _training_rows(source, prefix, stage.min_score)
    prompts = shared_prompts(rows)
    loss_module = TreeSFTLoss(bench.model, normalisation="token_mean")
    optimiser = make_optimizer(bench.model, kind=stage.optimiser, lr=stage.lr, weight_decay=stage.weight_decay)
    first = restore_state(bench, "sft", {"optimiser": optimiser})
    if first >= stage.steps:
        return
    bench.progress.begin("fine-tuning", stage.steps - first)
    began, losses = time.monotonic(), []
    for step in range(first, stage.steps):
        rng = np.random.default_rng([bench.settings.seed, 1, step])
        picked = [rows[i] for i in rng.choice(len(rows), size=min(stage.batch, len(rows)), replace=False)]
        keep = prompt_length(step / stage.steps, stage.curriculum)
        optimiser.set_lr(stage.lr * min(1.0, (step + 1) / max(1, stage.warmup)) * (1.0 - 0.95 * step / stage.steps))
        parts = (loss_module(part).loss_sft for part in _by_prompt(picked, keep, prompts))
        losses.append(descend(optimiser, parts, stage.max_grad_norm)[0])
        bench.progress.advance()
        if (step + 1) % stage.save_every == 0 or step + 1 == stage.steps:
            recent = float(np.mean(losses[-stage.save_every :]))
            seconds = time.monotonic() - began
            bench.log("sft", {"step": step + 1, "loss": recent, "seconds": seconds, "prompt": keep})
            save_state(bench, "sft", step + 1, {"optimiser": optimiser})
            bench.progress.line(f"fine-tuning {step + 1}/{stage.steps}: loss {recent:.3f}, {seconds:.0f} s")
    bench.progress.end()


def _training_rows(source: RunFolder, prefix: str, min_score: float | None) -> list[TensorDictBase]:
    stored = (r for name in source.batches() if name.startswith(prefix) for r in source.rollouts(name))
    rows: list[TensorDictBase] = [
        tree_td(r.packed, reward=r.reward.score, query=r.group, status=r.status, harness=r.harness)
        for r in stored
        if r.reward is not None and (min_score is None or r.reward.score >= min_score) and r.packed.trainable.any()
    ]
    if not rows:
        raise ConfigError(f"{source.path} holds no scored rollouts named {prefix}* with score >= {min_score}")
    return rows


def _by_prompt(
    rows: Sequence[TensorDictBase], keep: int | None, prompts: Mapping[str, int]
) -> Iterator[TensorDictBase]:
    """One flat batch a harness, whose losses add up: what is shortened is the prompt that its rollouts share."""
    n_tokens = sum(int(row["tree", "trainable"].sum()) for row in rows)
    for label in dict.fromkeys(row["harness"] for row in rows):
        own = [row for row in rows if row["harness"] == label]
        part: TensorDictBase = to_training_batch(own, n_rollouts=len(rows), n_tokens=n_tokens)
        yield part if keep is None else shorten_prompt(part, keep, prompts[label])


def reinforce(bench: Workbench, update: PolicyUpdate, eval_stage: EvalStage) -> None:
    """Improves the policy by an algorithm; the checkpoint that validation favours becomes the policy."""
    _steps(bench, update, eval_stage)
    best = bench.folder.path / "checkpoints" / "best"
    if best.is_dir():
        _load_weights(bench.model, best)


def pretrain_critic(bench: Workbench, update: ValueUpdate) -> None:
    """Fits a critic to rollouts of the policy, which stays as it is."""
    _steps(bench, update, EvalStage(validation=0))


def _steps(bench: Workbench, update: Update, eval_stage: EvalStage) -> None:
    """Collect, learn, write down, save: step after step from the last save."""
    bench.model.eval()  # no dropout: the ratio of the first update is 1
    name, stage = update.name, update.stage
    first = restore_state(bench, name, update.parts)
    if first >= stage.steps:
        return
    with (
        bench.engine() as engine,
        bench.collector(engine, lambda k: _instances(bench, name, stage, k), stage.steps) as collector,
    ):
        engine.update_weights(first + 1 if isinstance(update, PolicyUpdate) else 1)
        collector.load_state_dict(OrderedDict(batch=first))
        for step in range(first, stage.steps):
            bench.progress.begin(f"{update.said} {step + 1}/{stage.steps}", stage.tasks * stage.group)
            began = time.monotonic()
            batch = next(iter(collector))
            collected = time.monotonic()
            figures = update(batch, collector.rollouts, _schedule(step, stage))
            seconds = {"rollouts": collected - began, "update": time.monotonic() - collected}
            bench.folder.write_rollouts(f"{name}-{step:04d}", collector.rollouts)
            row = {"step": step + 1, **rollout_metrics(collector.rollouts), **figures.whole, "seconds": seconds}
            for label, own in figures.by_harness.items():
                row["by_harness"][label] |= own
            if isinstance(update, PolicyUpdate):
                collector.increment_version()
                if (step + 1) % update.stage.validate_every == 0 or step + 1 == stage.steps:
                    row["validation"] = _validate(bench, collector, eval_stage, step)
            bench.log(name, row)
            save_state(bench, name, step + 1, update.parts)
            bench.progress.end()
            bench.progress.line(f"{update.said} {step + 1}/{stage.steps}: {describe_step(row)}")


def _instances(bench: Workbench, name: str, stage: RolloutStage, batch: int) -> list[RolloutSpec]:
    """The rollouts of a batch: tasks, each under the harnesses that the mixture gives it."""
    mixture, history = bench.settings.mixture, []
    if mixture.curriculum is not None:
        steps = [row for row in bench.folder.metrics() if row["stage"] == name and row["step"] <= batch]
        history = [{k: v["group_variance"] for k, v in row["by_harness"].items()} for row in steps]
        history = [{k: v for k, v in step.items() if v is not None} for step in history]
    tasks = bench.tasks("train", stage.tasks, name, batch)
    shares = mixture.shares(history)
    under = mixture.assign(len(tasks), stage.group, shares, bench.random("harnesses", name, batch))
    return bench.specs(tasks, f"{name}-{batch:04d}", under=under)


def _schedule(step: int, stage: RolloutStage) -> float:
    """Linear warm-up, then constant for the first third and down to 15%."""
    warmup = stage.warmup if isinstance(stage, PolicyStage) else 1
    return min(1.0, (step + 1) / max(1, warmup)) * min(1.0, max(0.15, 1.5 * (1 - step / stage.steps)))


def _validate(bench: Workbench, collector: TreeCollector, stage: EvalStage, step: int) -> float | None:
    """Pass@1 on the validation split; the checkpoint is kept where ``favoured``."""
    if stage.validation == 0:
        return None
    tasks = bench.tasks("validation", stage.validation, "validation")
    labels = allot(len(tasks), bench.settings.mixture.weights, bench.random("harnesses", "validation"))
    specs = bench.specs(tasks, f"validation-{step:04d}", under=[[label] for label in labels])
    rate = evaluate(collector.run(specs)).overall.rate
    seen = [row["validation"] for row in bench.folder.metrics() if row.get("validation") is not None]
    if favoured(rate, seen, stage.validation):
        save_policy(bench.model, bench.tokenizer_dir, bench.folder.path / "checkpoints" / "best")
    return rate


def favoured(rate: float, earlier: Sequence[float], n: int) -> bool:
    """Whether a checkpoint takes the place of those before it.

    A small split cannot tell neighbours apart, and later checkpoints have learnt from more: the later one wins unless
    an earlier one was better by more than a standard error (the one-standard-error rule, Breiman et al. 1984).

    Args:
        rate: Pass rate of the new checkpoint in [0, 1]; NaN never wins.
        earlier: Pass rates of those before it.
        n: Tasks that each was tried on.
    """
    best = max([rate, *earlier])
    return rate >= best - math.sqrt(best * (1 - best) / n)


def describe_step(row: dict[str, Any]) -> str:
    """One line for a person."""
    gap, explained = row.get("log_prob_gap_max"), row.get("explained_variance")
    validation, each = row.get("validation"), row["by_harness"]
    passed = [f"{label} {100 * own['pass_at_1']:.0f}%" for label, own in each.items()] if len(each) > 1 else []
    parts = [
        f"reward {row['reward']:.3f}",
        f"Pass@1 {100 * row['pass_at_1']:.0f}%" + (f" ({', '.join(passed)})" if passed else ""),
        f"tokens {row['captured']} captured, {row['trained']} trained",
        f"unique/total {row['unique_tokens'] / max(1, row['total_tokens']):.2f}",
        f"log-prob gap {gap:.1e}" if gap is not None else "",
        f"explained variance {explained:.2f}" if explained is not None else "",
        "no update" if row["trained_rollouts"] == 0 else "",
        f"{row['seconds']['rollouts']:.1f} + {row['seconds']['update']:.1f} s",
        f"validation {100 * validation:.0f}%" if validation is not None else "",
    ]
    return ", ".join(p for p in parts if p)


def _load_weights(model: PreTrainedModel, path: Path) -> None:
    model.load_state_dict(type(model).from_pretrained(path, dtype=model.dtype, local_files_only=True).state_dict())
