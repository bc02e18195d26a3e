"""The report shows what a run folder holds, whole or not, and nothing in it can act on the reader's browser."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from clawgym_env.proxy.calls import CallRecord
from clawgym_env.report import write_report
from clawgym_env.report.summary import summarise
from clawgym_env.rollout import Rollout
from clawgym_env.store import RunFolder
from clawgym_env.tree.ledger import Ledger
from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import Generation, Message, ModelCall, Reward, Sampling, Status, ToolCall

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}\"'&"


def rollout(
    name: str, passed: bool | None, *, task: str = "t0", family: str = "csv", text: str = "Done.", detail: str = ""
) -> Rollout:
    """Two calls of 2 sampled tokens each on one path: 9 unique tokens, 13 in total; ``None`` is a sandbox error."""
    tree, ledger, records = PrefixTree(), Ledger(captured=4), []
    asked = Message("user", f"solve {task}")
    said = Message("assistant", "", None, (ToolCall("bash", {"command": text}, "c1"),))
    heard = Message("tool", text, tool_call_id="c1")
    turns = [
        ([1, 2, 3], [4, 5], (asked,), said),
        ([1, 2, 3, 4, 5, 6, 7], [8, 9], (heard,), Message("assistant", text)),
    ]
    for k, (prompt, answer, new, reply) in enumerate(turns):
        generation = Generation(np.array(answer), np.zeros(2, np.float32), np.zeros(2, np.int64), "stop")
        tree.attach(k, np.array(prompt), generation)
        call = ModelCall(k, len(prompt), 2, 0, "stop", Sampling())
        records.append(CallRecord(call, k - 1 if k else None, new, reply, ("bash",), 0.0, 0.1))
    status = Status.SANDBOX_ERROR if passed is None else Status.COMPLETED
    reward = None if passed is None else Reward(float(passed), passed)
    seconds = {"start": 0.25, "harness": 2.0}
    return Rollout(name, task, "builtin", family, "pi", task, status, reward, detail, tree, ledger, records, seconds)


def metrics_row(stage: str, step: int, elapsed: float, **more: Any) -> dict[str, Any]:
    account = {"captured": 100, "aborted": 3, "dropped": {"group without variance": 40}, "notes": {}}
    return {
        "stage": stage, "step": step, "elapsed_s": elapsed, "rollouts": 10, "calls": 2.0, "reward": 0.5,
        "pass_at_1": 0.4, "unscored": {"sandbox_error": 1}, "unique_tokens": 50, "total_tokens": 200, **account, **more,
    }  # fmt: skip


GRPO = {
    "trained_rollouts": 6, "loss": 1e-9, "grad_norm": 0.31, "clip_fraction": 0.01, "log_prob_gap_mean": 2e-6,
    "log_prob_gap_max": 3e-5, "tis_clipped": 0.0, "seconds": {"rollouts": 8.0, "update": 4.0},
}  # fmt: skip


def evaluation(passed: Sequence[bool | None], when: str, **more: Any) -> list[Rollout]:
    families = ["csv", "rename"]
    return [rollout(f"{when}-{k}", ok, task=f"t{k}", family=families[k % 2], **more) for k, ok in enumerate(passed)]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A finished quickstart run: demonstrations, two saves of SFT, three steps of GRPO, evaluations."""
    run = RunFolder(tmp_path / "quickstart-1")
    run.write_config({"recipe": "quickstart", "harness": "pi", "suite": "builtin", "level": 1, "seed": 0})
    (run.path / "policy").mkdir()
    (run.path / "policy" / "config.json").write_text("{}")
    run.append_metrics(metrics_row("demos", 0, 30.0))
    for step in (20, 40):
        run.append_metrics({"stage": "sft", "step": step, "elapsed_s": 30.0 + step, "loss": 20 / step, "seconds": step})
    run.append_metrics({"stage": "eval", "when": "before", "elapsed_s": 80.0, "seconds": 10.0})
    for step in (1, 2, 3):
        row = metrics_row("grpo", step, 80.0 + 15 * step, validation=0.5 if step == 3 else None, **GRPO)
        run.append_metrics(row)
    run.append_metrics({"stage": "eval", "when": "after", "elapsed_s": 135.0, "seconds": 10.0})
    run.write_rollouts("eval-before-sampled", evaluation([False, False, True, None], "before"))
    run.write_rollouts("eval-before-greedy", evaluation([True, False], "greedy"))
    run.write_rollouts("eval-after-sampled", evaluation([True, False, True, True], "after"))
    return run


def text_of(page: str) -> str:
    """What a reader sees, blanks folded."""
    parts: list[str] = []
    parser = HTMLParser()
    parser.handle_data = parts.append  # type: ignore[method-assign]
    parser.feed(page)
    return re.sub(r"\s+", " ", " ".join(parts))


class Tags(HTMLParser):
    """Collects every tag and attribute that a browser would act on."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_a_finished_run(folder: RunFolder) -> None:
    path = write_report(folder)
    assert path == folder.path / "report.html"
    said = text_of(path.read_text())
    assert "33.3% [6.1, 79.2] 1/3" in said  # before, sampled: one of three scored
    assert "75.0% [30.1, 95.4] 3/4" in said  # after
    assert "50.0% [9.5, 90.5] 1/2" in said  # before, greedy
    assert "not come to its end" not in said
    assert "Log-prob gap between trainer and sampler: mean 2.0e-06, largest 3.0e-05" in said
    assert "tree GRPO sandbox_error 3" in said and "held-out evaluation sandbox_error 1" in said
    assert "csv 0.0%" not in said  # csv: one of two before
    assert '"recipe": "quickstart"' in said


def test_a_run_with_a_critic(folder: RunFolder) -> None:
    """Tree PPO in the place of tree GRPO, and the critic's figures beside it."""
    rows = [dict(row) for row in folder.metrics()]
    critic = {"loss_critic": 0.123, "explained_variance": 0.25, "value_mean": 0.4}
    first = metrics_row("value", 1, 82.0, trained_rollouts=9, seconds={"rollouts": 1.0, "update": 0.5}, **critic)
    steps = [{**row, "stage": "ppo", **critic} for row in rows if row["stage"] == "grpo"]
    steps[-1]["explained_variance"] = 0.75
    k = next(k for k, row in enumerate(rows) if row["stage"] == "grpo")
    folder.keep_metrics([*rows[:k], first, *steps, *rows[k + len(steps) :]])
    summary = summarise(folder)
    assert (summary.algorithm, summary.explained_variance) == ("tree PPO", (0.25, 0.75))
    assert [account.stage for account in summary.accounts] == [
        "demonstrations", "critic pretraining", "tree PPO", "held-out evaluation",
    ]  # fmt: skip
    assert summary.seconds["critic pretraining: update"] == 0.5 and "tree GRPO" not in str(summary.seconds)
    said = text_of(write_report(folder).read_text())
    assert "Explained variance of the critic: 0.25 at the first step, 0.75 at the last" in said
    assert "Critic pretraining, step by step" in said and "Tree PPO, step by step" in said
    assert "tree PPO sandbox_error 3" in said and "critic pretraining sandbox_error 1" in said
    assert "0.31 0.75 0.40 0.123 1.0%" in said, "gradient norm, then the critic, then the clip"
    assert said.count("<svg") == 0 and (folder.path / "learning_curve.svg").stat().st_size > 0


def test_ledger_adds_up(folder: RunFolder) -> None:
    demos, grpo, held_out = summarise(folder).accounts
    assert (grpo.rollouts, grpo.calls, grpo.captured, grpo.kept, grpo.aborted) == (30, 60, 300, 180, 9)
    assert grpo.dropped == {"group without variance": 120} and grpo.unique_share == 0.25
    assert (demos.captured, demos.kept) == (100, 60)
    assert (held_out.rollouts, held_out.calls, held_out.captured, held_out.kept) == (10, 20, 40, 0)
    assert (held_out.unique_tokens, held_out.total_tokens) == (90, 140)
    for account in (demos, grpo, held_out):
        assert account.captured == account.kept + sum(account.dropped.values())


def test_seconds_add_up_and_a_resumed_clock_starts_again(folder: RunFolder) -> None:
    seconds = dict(summarise(folder).seconds)
    assert seconds == {
        "demonstrations": 30.0, "supervised fine-tuning": 40.0, "held-out evaluation": 20.0,
        "tree GRPO: rollouts": 24.0, "tree GRPO: update": 12.0, "tree GRPO: validation and saving": 9.0,
    }  # fmt: skip
    assert sum(seconds.values()) == 135.0
    folder.append_metrics(metrics_row("grpo", 4, 20.0, **GRPO))  # a new process: its clock says 20 s
    assert sum(summarise(folder).seconds.values()) == 155.0


def test_families_and_phases(folder: RunFolder) -> None:
    summary = summarise(folder)
    before, after = (summary.measured(when, "sampled, T = 1") for when in ("before", "after"))
    assert before is not None and after is not None
    assert {k: (v.passed, v.scored) for k, v in before.by_family.items()} == {"csv": (1, 2), "rename": (0, 1)}
    assert {k: (v.passed, v.scored) for k, v in after.by_family.items()} == {"csv": (2, 2), "rename": (1, 2)}
    assert summary.rollout_seconds == {"start": 0.25, "harness": 2.0}


def test_examples_are_the_first_of_each_outcome(folder: RunFolder) -> None:
    examples = summarise(folder).examples
    assert [(e.task_id, e.outcome) for e in examples] == [
        ("t0", "before: not solved, after: solved"),
        ("t1", "before: not solved, after: not solved"),
        ("t2", "before: solved, after: solved"),
    ]
    assert examples[0].instruction == "solve t0"
    roles = [turn.role for turn in examples[0].rollouts[1].turns]
    assert roles == ["user", "assistant", "tool", "assistant"]


def test_examples_say_what_a_call_was_for_where_it_is_not_the_agents_own(folder: RunFolder) -> None:
    (one,) = evaluation([True], "x")
    one.records[0] = replace(one.records[0], call=replace(one.records[0].call, kind="side"))
    folder.write_rollouts("eval-before-sampled", [one])
    folder.write_rollouts("eval-after-sampled", [one])
    said = text_of(write_report(folder).read_text())
    assert "user, side solve t0" in said and "assistant, side bash" in said and "tool Done." in said


@pytest.fixture
def mixed(folder: RunFolder) -> RunFolder:
    """The run as one under two harnesses, with a third held out."""
    folder.write_config({"recipe": "mix", "harnesses": ["pi", "codex"], "held_out": ["openclaw"]})
    for when, passed in (("before", [False, False, True]), ("after", [True, True, False])):
        made = evaluation([*passed, None], when)
        for one, label in zip(made, ("pi", "codex", "openclaw", "codex"), strict=True):
            one.harness = label
        folder.write_rollouts(f"eval-{when}-sampled", made)
    rows = [row for row in folder.metrics() if row["stage"] != "grpo"]
    each = metrics_row("grpo", 0, 0.0, group_variance=0.2, seconds={"start": 0.5, "harness": 1.5})
    for step, (pi, codex) in enumerate(((0.0, 0.25), (0.25, 0.5), (1.0, None)), 1):
        own = {"pi": {**each, "reward": pi, "log_prob_gap_mean": 1e-6 * step, "log_prob_gap_max": 1e-5 * step}}
        if codex is not None:
            own["codex"] = {**each, "reward": codex, "rollouts": 5, "seconds": {"start": 1.0, "harness": 4.0}}
        rows.append(metrics_row("grpo", step, 90.0 + step, by_harness=own, **GRPO))
    folder.keep_metrics(rows)
    return folder


def test_each_harness_has_its_figures(mixed: RunFolder) -> None:
    summary = summarise(mixed)
    assert [(h.label, h.held_out, h.trained is not None) for h in summary.harnesses] == [
        ("pi", False, True), ("codex", False, True), ("openclaw", True, False),
    ]  # fmt: skip
    pi, codex, _ = summary.harnesses
    key = ("after", "sampled, T = 1")
    assert [(h.measured[key].passed, h.measured[key].scored) for h in summary.harnesses] == [(1, 1), (1, 1), (0, 1)]
    assert pi.trained is not None and codex.trained is not None
    assert (pi.trained.steps, pi.trained.rollouts, pi.trained.captured, pi.trained.kept) == (3, 30, 300, 180)
    assert pi.trained.reward == (0.125, 1.0) and codex.trained.reward == (0.25, 0.5)
    assert pi.trained.gap == pytest.approx((2e-6, 3e-5)) and codex.trained.gap is None
    assert (pi.trained.seconds, codex.trained.seconds) == (2.0, 5.0)
    assert pi.trained.unscored == {"sandbox_error": 3} and codex.trained.dropped == {"group without variance": 80}


def test_what_is_held_out_has_no_part_in_the_whole(mixed: RunFolder) -> None:
    after = summarise(mixed).measured("after", "sampled, T = 1")
    assert after is not None and (after.overall.passed, after.overall.scored) == (2, 2)
    said = text_of(write_report(mixed).read_text())
    assert "harness pi, codex" in said and "By harness" in said and "openclaw held out" in said
    assert "pi 3 30 0.125 1.000 2.00 300 180 group without variance 120 sandbox_error 3 2.0e-06 3.0e-05 2.00" in said


def test_one_harness_has_no_table_of_its_own(folder: RunFolder) -> None:
    assert "By harness" not in text_of(write_report(folder).read_text())


def test_hostile_text_is_only_text(folder: RunFolder) -> None:
    rollouts = evaluation([True], "x", text=HOSTILE, detail=HOSTILE)
    rollouts[0].family = rollouts[0].task_id = HOSTILE
    rollouts.append(rollout(HOSTILE, None, task="t9", text=HOSTILE, detail=HOSTILE))
    rollouts[0].ledger.note(HOSTILE)
    folder.write_rollouts("eval-before-sampled", rollouts)
    folder.write_rollouts("eval-after-sampled", rollouts)
    folder.write_config({"recipe": HOSTILE, "harness": HOSTILE})
    page = write_report(folder).read_text()
    tags = Tags(page).seen
    assert not [tag for tag, _ in tags if tag in ("script", "iframe", "object", "link", "form")]
    assert not [name for _, attrs in tags for name in attrs if name.startswith("on")]
    images = [attrs["src"] for tag, attrs in tags if tag == "img"]
    assert len(images) == 1 and str(images[0]).startswith("data:image/svg+xml;base64,")
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 8
    assert page.count("{{ 7 * 7 }}") == page.count("&lt;script&gt;alert(1)")  # never a template of its own


def test_the_page_stands_alone(folder: RunFolder) -> None:
    page = write_report(folder).read_text()
    assert "http://" not in page and "https://" not in page
    assert not re.search(r"url\(|@import|<script", page)


def test_long_text_is_cut_and_says_so(folder: RunFolder) -> None:
    folder.write_rollouts("eval-after-sampled", evaluation([True], "after", text="x" * 100_000))
    page = write_report(folder).read_text()
    assert "[97000 more characters]" in page
    assert len(page) < 200_000


def test_curve_shows_points_and_is_reproducible(folder: RunFolder) -> None:
    write_report(folder)
    picture = (folder.path / "learning_curve.svg").read_bytes()
    root = ElementTree.fromstring(picture)
    assert root.tag.endswith("svg") and len(list(root.iter())) > 50
    write_report(folder)
    assert (folder.path / "learning_curve.svg").read_bytes() == picture
    folder.append_metrics(metrics_row("grpo", 4, 200.0, **GRPO))
    write_report(folder)
    assert (folder.path / "learning_curve.svg").read_bytes() != picture


def test_a_killed_run_shows_what_is_there(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "killed")
    run.write_config({"recipe": "quickstart"})
    said = text_of(write_report(run).read_text())
    assert "not come to its end" in said and "No evaluation is stored" in said
    assert not (run.path / "learning_curve.svg").exists()
    run.write_rollouts("demos-0000", [rollout("d0", True, text="first demonstration")])
    run.append_metrics(metrics_row("demos", 0, 3.0))
    run.append_metrics(metrics_row("grpo", 1, 9.0, reward=float("nan"), trained_rollouts=0, seconds=GRPO["seconds"]))
    with (run.path / "metrics.jsonl").open("ab") as torn:
        torn.write(b'{"stage": "grpo", "st')
    said = text_of(write_report(run).read_text())
    assert "first demonstration" in said
    assert "demonstrations 10 20 100 60" in said


def test_an_evaluation_alone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "eval")
    run.write_config({"recipe": "eval", "harness": "pi", "temperature": 0.7})
    run.write_rollouts("eval", evaluation([True, False, None], "e", detail="the disk is full"))
    said = text_of(write_report(run).read_text())
    assert "T = 0.7 50.0% [9.5, 90.5] 1/2" in said
    assert "not come to its end" not in said
    assert "held-out evaluation sandbox_error 1 the disk is full" in said
    assert not (run.path / "learning_curve.svg").exists()


def test_without_matplotlib_the_page_says_so(folder: RunFolder) -> None:
    """In a fresh interpreter in which neither matplotlib nor torch can be imported."""
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from clawgym_env.report import write_report\n"
        "from clawgym_env.store import RunFolder\n"
        "print(write_report(RunFolder(Path(sys.argv[1]))))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder.path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = text_of((folder.path / "report.html").read_text())
    assert "The learning curve needs the extra 'train'" in said
    assert not (folder.path / "learning_curve.svg").exists()
