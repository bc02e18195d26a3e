"""Family ``folder``: reorganise a folder.

Invariant: files move with their bytes; nothing is lost, copied twice or moved that should stay.
"""

from __future__ import annotations

import random

from clawgym_env.tasks.base import Snapshot
from clawgym_env.tasks.builtin import checks, content, words
from clawgym_env.tasks.builtin.family import Family, Instance, Level, Slots
from clawgym_env.tasks.builtin.rename import moves_goals, moves_judge
from clawgym_env.types import Reward

_PHRASES = (
    "Move all .{extension} files into the folder {folder}.",
    "Create a folder {folder} and move every .{extension} file there.",
    "Put all files ending in .{extension} into the folder {folder}.",
)


def _by_extension(slots: Slots, rng: random.Random) -> Instance:
    extension, folder = slots["extension"], slots["folder"]
    names = content.stems(rng, 6)
    others = rng.sample([ext for ext in words.EXTENSIONS if ext != extension], 2)
    cut = rng.randint(2, 4)
    files = {f"{stem}.{extension}": content.opaque(rng, extension) for stem in names[:cut]}
    moves = {path: f"{folder}/{path}" for path in files}
    files |= {f"{stem}.{ext}": content.opaque(rng, ext) for stem, ext in zip(names[cut:], others, strict=False)}
    move = f"mv *.{extension} {folder}/"
    make = f"mkdir -p {folder} && "
    return Instance(
        instruction=rng.choice(_PHRASES).format(**slots),
        files=files,
        oracle=(make + move,),
        mistakes=((move,), (f"{make}cp *.{extension} {folder}/",)),
        verify=checks.pure(moves_judge(files, moves)),
    )


_TWO_KINDS = (
    "Anywhere below this folder: delete all empty files, then move every .{one} file into {first} and every .{two} "
    "file into {second}, both at the top. Leave other files where they are.",
    "Tidy up, subfolders included: empty files are deleted, all other .{one} files go into the folder {first} at the "
    "top and all other .{two} files into {second}. Nothing else moves.",
)


def _two_kinds(slots: Slots, rng: random.Random) -> Instance:
    one, two, first, second = slots["one"], slots["two"], slots["first"], slots["second"]
    names = content.stems(rng, 11)
    spare = rng.choice([ext for ext in words.EXTENSIONS if ext not in (one, two)])
    places = ("", "inbox/", "inbox/old/")
    targets = {f"{places[k % 3]}{names[k]}.{one if k < 3 else two}": first if k < 3 else second for k in range(6)}
    moves = {path: f"{folder}/{path.rpartition('/')[2]}" for path, folder in targets.items()}
    empty = [f"{names[6]}.{one}", f"inbox/{names[7]}.{two}", f"inbox/old/{names[8]}.{spare}"]
    others = [f"{names[9]}.{spare}", f"inbox/{names[10]}.{spare}"]
    files = {path: content.opaque(rng, path.rpartition(".")[2]) for path in (*moves, *others)}
    files |= dict.fromkeys(empty, b"")

    def judge(snapshot: Snapshot) -> Reward:
        left = sum(data == b"" for data in snapshot.values())
        goals = {**moves_goals(snapshot, files, moves), "deleted": max(0.0, 1 - left / len(empty))}
        return checks.verdict(goals, checks.kept_share(snapshot, files, changed=[*moves, *empty]))

    def sweep(extension: str, folder: str, depth: str = "") -> str:
        return f"find .{depth} -name '*.{extension}' -not -path './{folder}/*' -exec mv {{}} {folder}/ \\;"

    make, delete = f"mkdir -p {first} {second}", "find . -type f -empty -delete"
    return Instance(
        instruction=rng.choice(_TWO_KINDS).format(**slots),
        files=files,
        oracle=(delete, make, sweep(one, first), sweep(two, second)),
        mistakes=(
            (delete, make, f"mv *.{one} {first}/", f"mv *.{two} {second}/"),
            (make, sweep(one, first), sweep(two, second)),
        ),
        verify=checks.pure(judge),
    )


_BY_FIELD = (
    'Each .{extension} file may have a line that starts with "{field}:". Move every .{extension} file into a folder '
    "named after that value, and those without such a line into {rest}. Then write {index}.txt with one line per "
    "folder, its name, a blank and its number of files, sorted by name.",
    'Sort the .{extension} files into folders by the value of their "{field}:" line; {rest} takes the files that have '
    "none. Also write {index}.txt, sorted: for each folder a line with its name, a blank and its number of files.",
)


def _by_field(slots: Slots, rng: random.Random) -> Instance:
    extension, field, rest = slots["extension"], slots["field"], slots["rest"]
    index = f"{slots['index']}.txt"
    names = content.stems(rng, 8)
    values = [*rng.sample(words.TOPICS, 3), *(rng.choice(words.TOPICS) for _ in range(2)), "", ""]
    files, moves = {}, {}
    for name, value in zip(names, values, strict=False):
        lines = content.prose(rng, 5)
        lines[rng.randint(2, 4)] = f"see also {field}: {rng.choice(words.TOPICS)}"
        if value:
            lines.insert(rng.randint(0, 2), f"{field}: {value}")
        path = f"{name}.{extension}"
        files[path] = content.joined(lines)
        moves[path] = f"{value or rest}/{path}"
    files[f"{names[7]}.py"] = content.joined([f"{field}: home", *content.prose(rng, 4)])
    folders = [path.partition("/")[0] for path in moves.values()]
    expected = [f"{name} {folders.count(name)}" for name in sorted(set(folders))]

    def judge(snapshot: Snapshot) -> Reward:
        listed = [" ".join(line.split()) for line in checks.lines_of(checks.text_of(snapshot, index))]
        goals = {**moves_goals(snapshot, files, moves), "listed": float(listed == expected)}
        return checks.verdict(goals, checks.kept_share(snapshot, files, changed=moves))

    value = f"c=$(sed -n 's/^{field}: *//p' \"$f\" | head -n 1)"
    move = 'mkdir -p "$c"; mv "$f" "$c/"; done'
    listing = f'for d in */; do echo "${{d%/}} $(ls "$d" | wc -l)"; done | sort > {index}'
    loop = f"for f in *.{extension}; do {value}"
    return Instance(
        instruction=rng.choice(_BY_FIELD).format(**slots),
        files=files,
        oracle=(f"{loop}; c=${{c:-{rest}}}; {move}", listing),
        mistakes=((f'{loop}; [ -n "$c" ] || continue; {move}', listing), (f"{loop}; c=${{c:-{rest}}}; {move}",)),
        verify=checks.pure(judge),
    )


def _all_differ(slots: Slots) -> bool:
    return slots["one"] != slots["two"] and slots["first"] != slots["second"]


_ONE = Level({"extension": words.EXTENSIONS, "folder": words.FOLDERS}, _by_extension)
_TWO = Level(
    {"one": words.EXTENSIONS, "two": words.EXTENSIONS, "first": words.FOLDERS, "second": words.FOLDERS},
    _two_kinds,
    _all_differ,
)
_THREE = Level(
    {
        "extension": ("txt", "md", "log"),
        "field": ("category", "topic", "owner", "project"),
        "rest": words.FOLDERS,
        "index": ("index", "summary", "overview", "contents"),
    },
    _by_field,
)
FAMILY = Family("folder", (_ONE, _TWO, _THREE))
