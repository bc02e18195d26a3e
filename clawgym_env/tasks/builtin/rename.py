"""Family ``rename``: rename files by pattern.

Invariant: a renamed file keeps its bytes, and files outside the pattern keep their names.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypeAlias

from clawgym_env.tasks.base import Snapshot
from clawgym_env.tasks.builtin import checks, content, words
from clawgym_env.tasks.builtin.family import Family, Instance, Level, Slots
from clawgym_env.types import Reward

_PHRASES = (
    "Rename all .{old} files to .{new}.",
    "Change the extension of every .{old} file to .{new}.",
    "Give all .{old} files the extension .{new}.",
)


def moves_goals(snapshot: Snapshot, files: Mapping[str, bytes], moves: Mapping[str, str]) -> dict[str, float]:
    """Partial scores of ``moves`` (old path -> new path).

    Returns:
        ``arrived``: share of the files that are at their new path with their bytes; ``moved``: the same, but no more
        than the share of old paths that are gone.
    """
    arrived = checks.share(snapshot.get(new) == files[old] for old, new in moves.items())
    gone = checks.share(old not in snapshot for old in moves if old not in moves.values())
    return {"arrived": arrived, "moved": min(arrived, gone)}


def moves_judge(files: Mapping[str, bytes], moves: Mapping[str, str]) -> checks.Judge:
    """Judges that every file of ``moves`` moved with its bytes and all others stayed."""

    def judge(snapshot: Snapshot) -> Reward:
        return checks.verdict(moves_goals(snapshot, files, moves), checks.kept_share(snapshot, files, changed=moves))

    return judge


def _extension(slots: Slots, rng: random.Random) -> Instance:
    old, new = slots["old"], slots["new"]
    names = content.stems(rng, 6)
    others = rng.sample([ext for ext in words.EXTENSIONS if ext not in (old, new)], 2)
    cut = rng.randint(2, 4)
    files = {f"{stem}.{old}": content.opaque(rng, old) for stem in names[:cut]}
    moves = {path: f"{path.removesuffix(old)}{new}" for path in files}
    files |= {f"{stem}.{ext}": content.opaque(rng, ext) for stem, ext in zip(names[cut:], others, strict=False)}
    loop = f"for f in *.{old}; do mv "
    return Instance(
        instruction=rng.choice(_PHRASES).format(old=old, new=new),
        files=files,
        oracle=(f'{loop}"$f" "${{f%.{old}}}.{new}"; done',),
        mistakes=((f"mv *.{old} *.{new}",), (f'{loop}"$f" "$f.{new}"; done',)),
        verify=checks.pure(moves_judge(files, moves)),
    )


def _differ(slots: Slots) -> bool:
    return slots["old"] != slots["new"]


_PREFIXED = (
    "In this folder, not in its subfolders, rename every .{old} file whose name starts with {prefix}- so that it "
    "starts with {fresh}- instead and ends in .{new}. Leave all other files alone.",
    "Replace the prefix {prefix}- by {fresh}- and the extension .{old} by .{new} in the names of all files in this "
    "folder that have both; nothing else changes, nor does anything in subfolders.",
)


def _prefixed(slots: Slots, rng: random.Random) -> Instance:
    old, new, prefix, fresh = slots["old"], slots["new"], slots["prefix"], slots["fresh"]
    names = content.stems(rng, 9)
    targets = [f"{prefix}-{names[0]} {names[1]}.{old}", *(f"{prefix}-{name}.{old}" for name in names[2:4])]
    others = [f"{names[4]}.{old}", f"{prefix}-{names[5]}.{new}", f"my-{prefix}-{names[6]}.{old}"]
    others += [f"kept/{prefix}-{names[7]}.{old}", f"{prefix}{names[8]}.{old}"]
    files = {path: content.opaque(rng, path.rpartition(".")[2]) for path in targets + others}
    moves = {path: f"{fresh}-{path.removeprefix(prefix + '-').removesuffix(old)}{new}" for path in targets}
    body = f'n="${{f#{prefix}-}}"; mv "$f" "{fresh}-${{n%.{old}}}.{new}"; done'
    return Instance(
        instruction=rng.choice(_PREFIXED).format(**slots),
        files=files,
        oracle=(f"for f in {prefix}-*.{old}; do {body}",),
        mistakes=(
            (f'for f in {prefix}-*.{old}; do mv "$f" "${{f%.{old}}}.{new}"; done',),
            (f"for f in *.{old}; do {body}",),
        ),
        verify=checks.pure(moves_judge(files, moves)),
    )


_NUMBERED = (
    "The .{extension} files in {folder} start with their date, day-month-year. Rename them to {fresh}-01.{extension}, "
    "{fresh}-02.{extension} and so on, {order} first, and list the renames in names.csv: the header old,new, then one "
    "line of old and new file name each, in the new order.",
    "Number the .{extension} files of the folder {folder} by the date in their names (day-month-year), {order} first: "
    "{fresh}-01.{extension}, {fresh}-02.{extension}, ... Also write names.csv with the header old,new and one line per "
    "renamed file, in that order, file names without the folder.",
)


#: A (year, month, day) and the file name that starts with it.
_Dated: TypeAlias = tuple[tuple[int, int, int], str]


def _numbered(slots: Slots, rng: random.Random) -> Instance:
    folder, extension, fresh = slots["folder"], slots["extension"], slots["fresh"]
    newest = slots["order"] == "newest"

    def draw() -> list[_Dated]:
        days = [(rng.randint(2019, 2024), rng.randint(1, 12), rng.randint(1, 28)) for _ in range(5)]
        pairs = zip(days, content.stems(rng, 5), strict=True)
        return [((y, m, d), f"{d:02d}-{m:02d}-{y}_{stem}.{extension}") for (y, m, d), stem in pairs]

    def telling(dated: list[_Dated]) -> bool:
        by_day = [name for _, name in sorted(dated)]
        return len({day for day, _ in dated}) == 5 and sorted(by_day) not in (by_day, by_day[::-1])

    dated = content.until(telling, draw)
    dated.sort(reverse=newest)
    fresh_names = {name: f"{fresh}-{place:02d}.{extension}" for place, (_, name) in enumerate(dated, start=1)}
    moves = {f"{folder}/{name}": f"{folder}/{new}" for name, new in fresh_names.items()}
    files = {path: content.opaque(rng, extension) for path in sorted(moves)}
    spare = "md" if extension != "md" else "txt"
    files |= {f"{folder}/01-01-2020_index.{spare}": content.opaque(rng, spare)}
    expected = [["old", "new"], *([name, new] for name, new in fresh_names.items())]

    def judge(snapshot: Snapshot) -> Reward:
        listed = checks.cells_of(checks.text_of(snapshot, "names.csv")) == expected
        goals = {**moves_goals(snapshot, files, moves), "listed": float(listed)}
        return checks.verdict(goals, checks.kept_share(snapshot, files, changed=moves))

    flag = "-r" if newest else ""
    by_date = f"sort {flag} -t- -k3.1,3.4 -k2,2 -k1,1".replace("  ", " ")
    move = f'i=$((i+1)); n=$(printf "{fresh}-%02d.{extension}" $i); mv "{folder}/$f" "{folder}/$n"'
    head = "echo old,new > names.csv"

    def loop(order: str, note: str) -> str:
        listing = f"ls {folder} | grep '\\.{extension}$' | {order}"
        return f"{listing} | while read -r f; do {move}{note}; done"

    note = '; echo "$f,$n" >> names.csv'
    return Instance(
        instruction=rng.choice(_NUMBERED).format(**slots),
        files=files,
        oracle=(head, loop(by_date, note)),
        mistakes=((head, loop(f"sort {flag}".strip(), note)), (loop(by_date, ""),)),
        verify=checks.pure(judge),
    )


def _prefixes_differ(slots: Slots) -> bool:
    return slots["prefix"] != slots["fresh"] and _differ(slots)


_ONE = Level({"old": words.EXTENSIONS, "new": words.EXTENSIONS}, _extension, _differ)
_TWO = Level({**_ONE.space, "prefix": words.PREFIXES, "fresh": words.PREFIXES}, _prefixed, _prefixes_differ)
_THREE = Level(
    {
        "folder": words.FOLDERS,
        "extension": words.EXTENSIONS,
        "fresh": words.PREFIXES,
        "order": ("oldest", "newest"),
    },
    _numbered,
)
FAMILY = Family("rename", (_ONE, _TWO, _THREE))
