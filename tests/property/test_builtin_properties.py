"""Properties of the builtin suite and the tokenizer that must hold for every seed and every text."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_env.rendering.tokenizer import load_tokenizer
from clawgym_env.sandboxes.base import ExecResult
from clawgym_env.tasks.builtin import BuiltinSuite, demonstrate
from clawgym_env.tasks.builtin.suite import FAMILIES

TOKENIZER = load_tokenizer()
SEEDS = st.integers(0, 2**31)
IDS = st.builds(
    "builtin/{}/{}/{}/{:05d}".format,
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["train", "validation", "test"]),
    st.integers(0, 99_999),
)


class _SilentBox:
    """Stands for a sandbox in which a script prints nothing useful."""

    def __init__(self, stdout: bytes):
        self.stdout = stdout

    async def exec(self, argv: list[str], *, timeout_s: float) -> ExecResult:
        return ExecResult(0, self.stdout, b"")


def _fresh(stdout: bytes):  # type: ignore[no-untyped-def]
    @asynccontextmanager
    async def fresh(files):  # type: ignore[no-untyped-def]
        yield _SilentBox(stdout)

    return fresh


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.sampled_from(["<|im_end|>", "<tool_call>", '{"a": 1}', " sales", "\n", "80", "\u00e9", " "])))
def test_markup_round_trips(parts: list[str]) -> None:
    text = "".join(parts)
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(max_examples=25, deadline=None)
@given(SEEDS, SEEDS, SEEDS, st.sampled_from([1, 2, 3]))
def test_splits_share_no_slot_combination(one: int, two: int, three: int, level: int) -> None:
    suite = BuiltinSuite(level)
    drawn = {
        split: {(task.family, *task.metadata["slots"].items()) for task in suite.sample(split, 28, seed=seed)}
        for split, seed in (("train", one), ("validation", two), ("test", three))
    }
    assert not drawn["train"] & drawn["validation"]
    assert not drawn["train"] & drawn["test"]
    assert not drawn["validation"] & drawn["test"]


@settings(max_examples=60, deadline=None)
@given(IDS)
def test_an_id_makes_the_same_task_again(task_id: str) -> None:
    one, two = BuiltinSuite().get(task_id), BuiltinSuite().get(task_id)
    assert one.id == task_id
    assert (one.instruction, one.files, one.oracle) == (two.instruction, two.files, two.oracle)
    assert demonstrate(one, 3) == demonstrate(two, 3)
    assert 1 <= len(one.files) <= 12
    assert sum(map(len, one.files.values())) < 16_384


@settings(max_examples=150, deadline=None)
@given(IDS, st.data())
def test_no_workspace_makes_a_verifier_raise_or_pass_by_luck(task_id: str, data: st.DataObject) -> None:
    task = BuiltinSuite().get(task_id)
    junk = st.one_of(st.binary(max_size=60), st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace")))
    names = [*task.files, "answer.txt", "answer.json", "report.csv", "names.csv", "changed.txt", "counts.csv", "a/b"]
    changes = data.draw(st.dictionaries(st.sampled_from(names), junk))
    gone = data.draw(st.sets(st.sampled_from(sorted(task.files))))
    snapshot = {path: content for path, content in task.files.items() if path not in gone} | changes
    reward = asyncio.run(task.verify(snapshot, _fresh(data.draw(junk))))
    assert 0.0 <= reward.score <= 1.0
    assert all(0.0 <= part <= 1.0 for part in reward.parts.values())
    assert reward.passed == all(part == 1.0 for part in reward.parts.values())


@settings(max_examples=100, deadline=None)
@given(IDS)
def test_an_untouched_workspace_scores_nothing(task_id: str) -> None:
    task = BuiltinSuite().get(task_id)
    reward = asyncio.run(task.verify(task.files, _fresh(b"")))
    assert not reward.passed
    assert reward.parts["kept"] == 1.0
    if task.family != "script":
        assert reward.score == 0.0
