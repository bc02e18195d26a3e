"""Family ``count``: count in text files.

Invariant: a counted word never occurs inside another word at level 1, and its line and occurrence counts differ, so
that the two questions have different answers.
"""

from __future__ import annotations

import random

from clawgym_env.tasks.base import Snapshot
from clawgym_env.tasks.builtin import checks, content, words
from clawgym_env.tasks.builtin.family import Family, Instance, Level, Slots
from clawgym_env.types import Reward

_PHRASES = {
    "lines": (
        "How many lines of {text}.txt contain {word}? Write the number to answer.txt.",
        "Count the lines with {word} in {text}.txt and save the number to answer.txt.",
    ),
    "times": (
        "How many times does {word} occur in {text}.txt? Write the number to answer.txt.",
        "Count every occurrence of {word} in {text}.txt and save the number to answer.txt.",
    ),
}


def _scatter(rng: random.Random, lines: list[str], word: str, singles: int, doubles: int) -> None:
    """Puts ``word`` once into ``singles`` lines and twice into ``doubles`` others."""
    chosen = rng.sample(range(len(lines)), singles + doubles)
    for place, index in enumerate(chosen):
        parts = lines[index].split(" ")
        for _ in range(1 if place < singles else 2):
            parts.insert(rng.randint(0, len(parts) - 1), word)
        lines[index] = " ".join(parts)


def _one_file(slots: Slots, rng: random.Random) -> Instance:
    word, path = slots["word"], f"{slots['text']}.txt"
    lines = content.prose(rng, rng.randint(9, 14))
    singles, doubles = rng.randint(1, 4), rng.randint(1, 3)
    _scatter(rng, lines, word, singles, doubles)
    other = content.prose(rng, 7)
    _scatter(rng, other, word, 2, 1)
    spare = rng.choice([name for name in words.TEXTS if name != slots["text"]])
    files = {path: content.joined(lines), f"{spare}.txt": content.joined(other)}
    expected = singles + doubles * (1 if slots["unit"] == "lines" else 2)

    def judge(snapshot: Snapshot) -> Reward:
        answer = checks.number_is(checks.text_of(snapshot, "answer.txt"), expected)
        return checks.verdict({"answer": float(answer)}, checks.kept_share(snapshot, files))

    counts = {"lines": f"grep -c {word} {path}", "times": f"grep -o {word} {path} | wc -l"}
    command = counts[slots["unit"]]
    return Instance(
        instruction=rng.choice(_PHRASES[slots["unit"]]).format(**slots),
        files=files,
        oracle=(f"{command} > answer.txt",),
        mistakes=((command,), (f"grep {word} {path} > answer.txt",)),
        verify=checks.pure(judge),
    )


_IN_TREE = {
    "lines": (
        "How many lines contain the word {word} in the .{extension} files of the folder {folder} and its subfolders? "
        "Capitals do not matter; longer words such as {word}s do not count. Write the number to answer.txt.",
        "Count the lines with the whole word {word}, in any case, over all .{extension} files below {folder}, and save "
        "the number to answer.txt.",
    ),
    "times": (
        "How many times does the word {word} occur in the .{extension} files of the folder {folder} and below it? "
        "Capitals do not matter; longer words such as {word}s do not count. Write the number to answer.txt.",
        "Count the occurrences of the whole word {word}, in any case, over all .{extension} files below {folder}, and "
        "save the number to answer.txt.",
    ),
}


def _page(rng: random.Random, word: str) -> tuple[bytes, int, int]:
    """Prose with a word in several spellings and with its plural; also its line and occurrence counts."""
    lines = content.prose(rng, rng.randint(7, 10))
    forms = [word, word.capitalize(), word.upper()]
    singles, doubles = rng.randint(1, 2), rng.randint(1, 2)
    chosen = rng.sample(range(len(lines)), singles + doubles + 1)
    for place, index in enumerate(chosen[1:]):
        put = [forms[(place + k) % 3] for k in range(1 if place < singles else 2)]
        lines[index] = " and ".join([*put, lines[index]])
    lines[chosen[0]] = f"{word}s {lines[chosen[0]]}"
    return content.joined(lines), singles + doubles, singles + 2 * doubles


def _in_tree(slots: Slots, rng: random.Random) -> Instance:
    folder, word, extension, unit = (slots[name] for name in ("folder", "word", "extension", "unit"))
    spare = "md" if extension == "txt" else "txt"
    names = rng.sample(words.TEXTS, 5)
    paths = [f"{folder}/{place}{name}.{extension}" for place, name in zip(("", "", "old/"), names, strict=False)]
    pages = [_page(rng, word) for _ in range(5)]
    others = [f"{folder}/{names[3]}.{spare}", f"{names[4]}.{extension}"]
    files = {path: page[0] for path, page in zip(paths + others, pages, strict=True)}
    expected = sum(line_count if unit == "lines" else times for _, line_count, times in pages[:3])

    def judge(snapshot: Snapshot) -> Reward:
        answer = checks.number_is(checks.text_of(snapshot, "answer.txt"), expected)
        return checks.verdict({"answer": float(answer)}, checks.kept_share(snapshot, files))

    def command(flags: str) -> str:
        only = "" if unit == "lines" else "o"
        return f"grep -rh{only}{flags} --include='*.{extension}' {word} {folder} | wc -l > answer.txt"

    return Instance(
        instruction=rng.choice(_IN_TREE[unit]).format(**slots),
        files=files,
        oracle=(command("iw"),),
        mistakes=((command("i"),), (command("w"),)),
        verify=checks.pure(judge),
    )


_BY_FILE = (
    "For every .txt file in the folder {folder} that has the word {word} but not the word {banned} (whole words, any "
    "case), write a line name,count to counts.csv: the file's name without the folder and how often {word} occurs. "
    "Highest count first, no header.",
    "Write counts.csv without a header: one line name,count for each .txt file in {folder} in which {word} occurs and "
    "{banned} does not, as whole words in any case. Count the occurrences of {word}; sort from high to low.",
)


def _by_file(slots: Slots, rng: random.Random) -> Instance:
    folder, word, banned = slots["folder"], slots["word"], slots["banned"]

    def draw() -> dict[str, tuple[bytes, int]]:
        pages = {name: _page(rng, word) for name in rng.sample(words.TEXTS, 5)}
        return {f"{name}.txt": (data, times) for name, (data, _, times) in pages.items()}

    def telling(pages: dict[str, tuple[bytes, int]]) -> bool:
        counts = {name: times for name, (_, times) in list(pages.items())[:3]}
        falling = sorted(counts, key=lambda name: -counts[name])
        return len(set(counts.values())) == 3 and falling != sorted(counts)

    pages = content.until(telling, draw)
    names = list(pages)
    files = {f"{folder}/{name}": pages[name][0] for name in names[:3]}
    for name, form in zip(names[3:], (banned, banned.upper()), strict=True):
        files[f"{folder}/{name}"] = pages[name][0] + f"then a {form} again.\n".encode()
    files[f"{folder}/plain.txt"] = content.joined([*content.prose(rng, 5), f"no {word}s here."])
    files[f"{folder}/other.md"] = _page(rng, word)[0]
    counts = {name: float(pages[name][1]) for name in names[:3]}
    expected = {name: counts[name] for name in sorted(counts, key=lambda name: -counts[name])}

    def judge(snapshot: Snapshot) -> Reward:
        found = checks.cells_of(checks.text_of(snapshot, "counts.csv"))
        return checks.verdict(checks.pairs_goals(found, expected), checks.kept_share(snapshot, files))

    number = f'n=$(grep -oiw {word} "$f" | wc -l)'
    line = 'echo "$(basename "$f"),$n"'
    order = "sort -t, -k2,2nr > counts.csv"

    def loop(condition: str, tail: str) -> str:
        return f"for f in {folder}/*.txt; do {number}; if {condition}; then {line}; fi; done {tail}"

    clean = f'[ $n -gt 0 ] && ! grep -qiw {banned} "$f"'
    return Instance(
        instruction=rng.choice(_BY_FILE).format(**slots),
        files=files,
        oracle=(loop(clean, f"| {order}"),),
        mistakes=((loop("[ $n -gt 0 ]", f"| {order}"),), (loop(clean, "> counts.csv"),)),
        verify=checks.pure(judge),
    )


def _words_differ(slots: Slots) -> bool:
    return slots["word"] != slots["banned"]


_ONE = Level({"text": words.TEXTS, "word": words.COUNTED, "unit": ("lines", "times")}, _one_file)
_TWO = Level(
    {"folder": words.FOLDERS, "word": words.COUNTED, "extension": ("txt", "md"), "unit": ("lines", "times")}, _in_tree
)
_THREE = Level({"folder": words.FOLDERS, "word": words.COUNTED, "banned": words.COUNTED}, _by_file, _words_differ)
FAMILY = Family("count", (_ONE, _TWO, _THREE))
