"""The training loop: supervised fine-tuning and tree GRPO, each one readable function over a run folder.

Invariant: both can be killed at any time and go on from their last save (``torchrl_ext.workbench``).
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, lazy_stack
from transformers import PreTrainedModel

from clawgym_env.errors import ConfigError
from clawgym_env.evaluation import evaluate
from clawgym_env.rollout import Rollout, RolloutSpec
from clawgym_env.store import RunFolder
from torchrl_ext.collector import TreeCollector
from torchrl_ext.data import to_training_batch, tree_td
from torchrl_ext.estimators import TreeGroupAdvantage
from torchrl_ext.losses import TreeGRPOLoss, TreeSFTLoss
from torchrl_ext.metrics import log_prob_gaps, rollout_metrics
from torchrl_ext.mixture import allot
from torchrl_ext.models import save_policy
from torchrl_ext.optim import PolicyOptimizer, make_optimizer
from torchrl_ext.recipes.stages import EvalStage, GRPOStage, SFTStage
from torchrl_ext.sft import prompt_length, shared_prompts, shorten_prompt
from torchrl_ext.workbench import Workbench, restore_state, save_state


def fine_tune(bench: Workbench, stage: SFTStage, source: RunFolder, prefix: str = "") -> None:
    """Fits the policy to the captured rollouts of ``source`` whose batch names begin with ``prefix``."""
    if stage.steps == 0:
        return
    rows = _training_rows(source, prefix, stage.min_score)
    prompts = shared_prompts(rows)
    loss_module = TreeSFTLoss(bench.model, normalisation="token_mean")
    optimiser = make_optimizer(bench.model, kind=stage.optimiser, lr=stage.lr, weight_decay=stage.weight_decay)
    first = restore_state(bench, "sft", optimiser)
    if first >= stage.steps:
        return
    bench.progress.begin("fine-tuning", stage.steps - first)
    began, losses = time.monotonic(), []
    for step in range(first, stage.steps):
        rng = np.random.default_rng([bench.settings.seed, 1, step])
        picked = [rows[i] for i in rng.choice(len(rows), size=min(stage.batch, len(rows)), replace=False)]
        keep = prompt_length(step / stage.steps, stage.curriculum)
        set_lr(optimiser, stage.lr * min(1.0, (step + 1) / max(1, stage.warmup)) * (1.0 - 0.95 * step / stage.steps))
        parts = (loss_module(part).loss_sft for part in _by_prompt(picked, keep, prompts))
        losses.append(update(bench.model, optimiser, parts, stage.max_grad_norm)[0])
        bench.progress.advance()
        if (step + 1) % stage.save_every == 0 or step + 1 == stage.steps:
            recent = float(np.mean(losses[-stage.save_every :]))
            seconds = time.monotonic() - began
            bench.log("sft", {"step": step + 1, "loss": recent, "seconds": seconds, "prompt": keep})
            save_state(bench, "sft", step + 1, optimiser)
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


def reinforce(bench: Workbench, stage: GRPOStage, eval_stage: EvalStage) -> None:
    """Improves the policy by tree GRPO; the checkpoint that validation favours becomes the policy."""
    bench.model.eval()  # no dropout: the ratio of the first update is 1
    loss_module = TreeGRPOLoss(
        bench.model, clip_epsilon=(stage.clip_low, stage.clip_high), tis_cap=stage.tis_cap,
        node_weight=stage.node_weight, normalisation=stage.normalisation, constant=stage.constant,
        temperature=bench.settings.temperature,
    )  # fmt: skip
    advantage = TreeGroupAdvantage(scale=stage.scale, baseline=stage.baseline, negative_weight=stage.negative_weight)
    optimiser = make_optimizer(
        bench.model, kind=stage.optimiser, lr=stage.lr, weight_decay=stage.weight_decay, betas=stage.betas
    )
    first = restore_state(bench, "grpo", optimiser)
    with (
        bench.engine() as engine,
        bench.collector(engine, lambda k: _instances(bench, stage, k), stage.steps) as collector,
    ):
        engine.update_weights(first + 1)
        collector.load_state_dict(OrderedDict(batch=first))
        for step in range(first, stage.steps):
            bench.progress.begin(f"step {step + 1}/{stage.steps}", stage.tasks * stage.group)
            began = time.monotonic()
            batch = advantage.inv(next(iter(collector)))
            collected = time.monotonic()
            set_lr(optimiser, stage.lr * _schedule(step, stage))
            figures, gaps = _grpo_update(bench.model, loss_module, optimiser, batch, collector.rollouts, stage)
            collector.increment_version()
            seconds = {"rollouts": collected - began, "update": time.monotonic() - collected}
            bench.folder.write_rollouts(f"grpo-{step:04d}", collector.rollouts)
            row = {"step": step + 1, **rollout_metrics(collector.rollouts), **figures, "seconds": seconds}
            for label, gap in gaps.items():
                row["by_harness"][label] |= gap
            if (step + 1) % stage.validate_every == 0 or step + 1 == stage.steps:
                row["validation"] = _validate(bench, collector, eval_stage, step)
            bench.log("grpo", row)
            save_state(bench, "grpo", step + 1, optimiser)
            bench.progress.end()
            bench.progress.line(describe_step(row, stage.steps))
    best = bench.folder.path / "checkpoints" / "best"
    if best.is_dir():
        _load_weights(bench.model, best)


def _instances(bench: Workbench, stage: GRPOStage, batch: int) -> list[RolloutSpec]:
    """The rollouts of a batch: tasks, each under the harnesses that the mixture gives it."""
    mixture, history = bench.settings.mixture, []
    if mixture.curriculum is not None:
        steps = [row for row in bench.folder.metrics() if row["stage"] == "grpo" and row["step"] <= batch]
        history = [{k: v["group_variance"] for k, v in row["by_harness"].items()} for row in steps]
        history = [{k: v for k, v in step.items() if v is not None} for step in history]
    tasks = bench.tasks("train", stage.tasks, "grpo", batch)
    shares = mixture.shares(history)
    under = mixture.assign(len(tasks), stage.group, shares, bench.random("harnesses", "grpo", batch))
    return bench.specs(tasks, f"grpo-{batch:04d}", under=under)


def _grpo_update(
    model: PreTrainedModel,
    loss_module: TreeGRPOLoss,
    optimiser: PolicyOptimizer,
    batch: TensorDictBase,
    rollouts: Sequence[Rollout],
    stage: GRPOStage,
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """One batch's updates; rollouts whose advantage is 0 are booked as dropped and cost no forward.

    Returns:
        Figures of the step, and the log-prob gap by harness.
    """
    scored = [bool(td["next", "scored"]) for td in batch.unbind(0)]
    useful = []
    for td, ok, rollout in zip(batch.unbind(0), scored, rollouts, strict=True):
        if ok and float(td["advantage"].abs().max()) > 0 and bool(td["tree", "trainable"].any()):
            useful.append(td)
        elif ok:
            rollout.ledger.drop("group without variance", rollout.ledger.trained)
    if not useful:
        return {"trained_rollouts": 0}, {}
    data = to_training_batch(lazy_stack(useful), n_rollouts=sum(scored))
    with torch.no_grad():
        data["old_log_prob"] = loss_module.log_prob(data)
    for _ in range(stage.epochs):
        out = loss_module(data)
        loss, norm = update(model, optimiser, [out.loss_objective], stage.max_grad_norm)
    figures = {
        "trained_rollouts": len(useful),
        "loss": loss,
        "grad_norm": norm,
        "lr": float(optimiser.param_groups[0]["lr"]),
        "clip_fraction": float(out.clip_fraction),
        "log_prob_gap_mean": float(out.log_prob_gap_mean),
        "log_prob_gap_max": float(out.log_prob_gap_max),
        "tis_clipped": float(out.tis_clipped),
        "computed_tokens": int(data.shape[0]),
    }
    return figures, log_prob_gaps(data, [td["harness"] for td in useful])


def _schedule(step: int, stage: GRPOStage) -> float:
    """Linear warm-up, then constant for the first third and down to 15%."""
    return min(1.0, (step + 1) / max(1, stage.warmup)) * min(1.0, max(0.15, 1.5 * (1 - step / stage.steps)))


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


def describe_step(row: dict[str, Any], steps: int) -> str:
    """One line for a person."""
    gap = row.get("log_prob_gap_max")
    validation, each = row.get("validation"), row["by_harness"]
    passed = [f"{label} {100 * own['pass_at_1']:.0f}%" for label, own in each.items()] if len(each) > 1 else []
    parts = [
        f"step {row['step']}/{steps}: reward {row['reward']:.3f}",
        f"Pass@1 {100 * row['pass_at_1']:.0f}%" + (f" ({', '.join(passed)})" if passed else ""),
        f"tokens {row['captured']} captured, {row['trained']} trained",
        f"unique/total {row['unique_tokens'] / max(1, row['total_tokens']):.2f}",
        f"log-prob gap {gap:.1e}" if gap is not None else "no update",
        f"{row['seconds']['rollouts']:.1f} + {row['seconds']['update']:.1f} s",
        f"validation {100 * validation:.0f}%" if validation is not None else "",
    ]
    return ", ".join(p for p in parts if p)


def update(
    model: PreTrainedModel, optimiser: PolicyOptimizer, losses: Iterable[torch.Tensor], max_grad_norm: float
) -> tuple[float, float]:
    """One optimiser step on a sum of losses, a graph at a time; returns it and the gradient's norm before clipping."""
    optimiser.zero_grad()
    total = 0.0
    for loss in losses:
        loss.backward()
        total += float(loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimiser.step()
    return total, float(norm)


def set_lr(optimiser: PolicyOptimizer, lr: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimiser.param_groups:
        group["lr"] = lr


def _load_weights(model: PreTrainedModel, path: Path) -> None:
    model.load_state_dict(type(model).from_pretrained(path, dtype=model.dtype, local_files_only=True).state_dict())
