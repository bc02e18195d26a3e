"""Family ``script``: fix a failing shell script.

Invariant: a fixed script is judged by what it prints on data the agent never saw, in a fresh sandbox, so an answer that
is written into the script, or data put where the script looks for it, does not pass.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from clawgym_env.tasks.base import FreshSandbox, Snapshot, Verifier
from clawgym_env.tasks.builtin import checks, content, words
from clawgym_env.tasks.builtin.family import Family, Instance, Level, Slots
from clawgym_env.types import Reward

_PHRASES = (
    "{script}.sh reads {wrong}.csv but the file is called {table}.csv. Fix {script}.sh.",
    "Fix {script}.sh: it should read {table}.csv instead of {wrong}.csv.",
    "{script}.sh fails, {wrong}.csv was renamed to {table}.csv. Repair {script}.sh.",
)


def output_verifier(
    files: Mapping[str, bytes],
    edited: Sequence[str],
    hidden: Mapping[str, bytes],
    expected: Sequence[str],
    output: str = "",
) -> Verifier:
    """Runs a script on hidden data and compares what comes out, line by line, blanks normalised.

    Args:
        files: Starting files.
        edited: Paths that the fix may change; the first is the script to run.
        hidden: Data files that replace the visible ones for the run.
        expected: Lines that a right script makes of them.
        output: File that the script writes them to, taken away before the run; empty when it prints them.
    """
    script = edited[0]

    async def verify(snapshot: Snapshot, fresh: FreshSandbox) -> Reward:
        kept = checks.kept_share(snapshot, files, changed=edited)
        if script not in snapshot or kept < 1.0:
            return checks.verdict({"runs": 0.0, "output": 0.0}, kept)
        stale = output.partition("/")[0]
        start = {path: data for path, data in snapshot.items() if path.partition("/")[0] != stale}
        result = await checks.run_script(fresh, {**start, **hidden}, script, output)
        lines = [" ".join(line.split()) for line in checks.lines_of(result.stdout.decode(errors="replace"))]
        runs = float(result.rc == 0 and not result.timed_out)
        return checks.verdict({"runs": runs, "output": runs * (lines == list(expected))}, kept)

    return verify


def _wrong_file(slots: Slots, rng: random.Random) -> Instance:
    script, wrong, path = f"{slots['script']}.sh", f"{slots['wrong']}.csv", f"{slots['table']}.csv"
    column = rng.choice(("units", "rating"))
    position = words.COLUMNS[column]
    lines = [
        "#!/bin/bash",
        f"# Prints the number of rows and the sum of the {column} column.",
        "set -euo pipefail",
        f"rows=$(tail -n +2 {wrong} | wc -l)",
        f"total=$(awk -F, 'NR>1{{s+=${position}}} END{{print s}}' {wrong})",
        'echo "rows $rows"',
        f'echo "{column} $total"',
    ]
    files = {script: content.joined(lines), path: content.plain_table(rng)[1], "README.md": content.opaque(rng, "md")}
    records, data = content.plain_table(rng)
    expected = [f"rows {len(records)}", f"{column} {sum(int(row[column]) for row in records)}"]
    edit = f"'s/{wrong}/{path}/' {script}"
    return Instance(
        instruction=rng.choice(_PHRASES).format(**slots),
        files=files,
        oracle=(f"sed -i {edit}",),
        mistakes=((f"sed {edit}",), (f"cp {path} {wrong}",)),
        verify=output_verifier(files, (script,), {path: data}, expected),
    )


_TWO_BUGS = (
    "{script}.sh should print one line: the word {column}, a blank, and the {op} of the {column} column of {table}.csv "
    "with two decimals. It fails. Fix it.",
    "Fix {script}.sh. It is meant to print {column} and then the {op} of that column of {table}.csv with two decimals, "
    "on one line, but it does not work.",
)
_AWK = {"sum": "{s+=$C}", "maximum": "{if($C+0>s)s=$C}"}


def _numbers(rng: random.Random) -> list[content.Row]:
    return content.rows(rng, rng.randint(8, 14), {"region": words.REGIONS})


def _two_bugs(slots: Slots, rng: random.Random) -> Instance:
    column, op = slots["column"], slots["op"]
    script, path = f"{slots['script']}.sh", f"{slots['table']}.csv"
    layout = ["id", "date", "region", *words.COLUMNS]
    rng.shuffle(layout)
    right = layout.index(column) + 1

    def answer(records: list[content.Row], name: str) -> float:
        values = [float(row[name]) for row in records]
        return sum(values) if op == "sum" else max(values)

    other = rng.choice([name for name in words.COLUMNS if name != column])
    wrong = layout.index(other) + 1

    def apart(records: list[content.Row]) -> bool:
        return abs(answer(records, column) - answer(records, other)) > 0.05

    visible, hidden = (content.until(apart, lambda: _numbers(rng)) for _ in range(2))
    body = _AWK[op].replace("C", str(wrong))
    lines = [
        "#!/bin/bash",
        f"# Prints the {op} of the {column} column.",
        "set -euo pipefail",
        f"input={path}",
        f'result=$(awk -F, \'NR>1{body} END{{printf "%.2f", s}}\' "$inptu")',
        f'echo "{column} $result"',
    ]
    files = {script: content.joined(lines), path: content.table(visible, layout)}
    expected = [f"{column} {answer(hidden, column):.2f}"]
    spelling, place = f"sed -i 's/inptu/input/' {script}", f"sed -i 's/\\${wrong}/${right}/g' {script}"
    return Instance(
        instruction=rng.choice(_TWO_BUGS).format(**slots),
        files=files,
        oracle=(spelling, place),
        mistakes=((spelling,), (f"echo 'echo \"{column} {answer(visible, column):.2f}\"' > {script}",)),
        verify=output_verifier(files, (script,), {path: content.table(hidden, layout)}, expected),
    )


_LIBRARY = (
    "Running {script}.sh in a fresh copy of this folder should write out/{table}.txt: for every {group} one line with "
    "its name, a blank and the sum of {column} over the rows of {table}.csv with status {status}, sorted by name. It "
    "fails. Fix the script and its library in lib.",
    "{script}.sh and its library in lib are broken. Repair them: the script must create out/{table}.txt with a line "
    '"{group} sum" for each {group}, sorted, summing {column} over the rows of {table}.csv whose status is {status}, '
    "and it must work where the folder out does not exist yet.",
)


def _group_sums(records: list[content.Row], group: str, column: str, status: str) -> list[str]:
    sums: dict[str, int] = {}
    for row in records:
        if row["status"] == status:
            sums[row[group]] = sums.get(row[group], 0) + int(row[column])
    return [f"{name} {sums[name]}" for name in sorted(sums)]


def _library(slots: Slots, rng: random.Random) -> Instance:
    group, column, status = slots["group"], slots["column"], slots["status"]
    script, path, library = f"{slots['script']}.sh", f"{slots['table']}.csv", "lib/helpers.sh"
    layout = ["id", "date", "region", "channel", "status", "units", "rating"]
    rng.shuffle(layout)
    place = {name: layout.index(name) + 1 for name in layout}
    texts = {"region": words.REGIONS, "channel": words.CHANNELS, "status": words.STATUSES}
    records = content.until(
        lambda rows: len(_group_sums(rows, group, column, status)) >= 2, lambda: content.rows(rng, 15, texts)
    )
    where = f'NR>1&&${place["status"]}!="{status}"{{s[${place[group]}]+=${place[column]}}}'
    output = f"out/{slots['table']}.txt"
    script_lines = ["#!/bin/bash", "set -euo pipefail", "source lib/helper.sh", f"group_sum {path} > {output}"]
    library_lines = [
        f"# Sums {column} per {group} over the rows with status {status}.",
        "group_sum() {",
        f"  awk -F, '{where} END{{for(k in s) print k, s[k]}}' \"$1\" | sort",
        "}",
    ]
    visible = content.table(content.rows(rng, 12, texts), layout)
    files = {script: content.joined(script_lines), library: content.joined(library_lines), path: visible}
    fixes = (
        f"sed -i 's/helper.sh/helpers.sh/' {script}",
        f"sed -i 's/^group_sum/mkdir -p out; &/' {script}",
        f"sed -i 's/!=/==/' {library}",
    )
    return Instance(
        instruction=rng.choice(_LIBRARY).format(**slots),
        files=files,
        oracle=fixes,
        mistakes=(fixes[:2], (fixes[0], "mkdir -p out", fixes[2])),
        verify=output_verifier(
            files,
            (script, library),
            {path: content.table(records, layout)},
            _group_sums(records, group, column, status),
            output,
        ),
    )


_ONE = Level({"script": words.SCRIPTS, "wrong": words.WRONG_STEMS, "table": words.TABLES}, _wrong_file)
_TWO = Level(
    {"script": words.SCRIPTS, "table": words.TABLES, "column": tuple(words.COLUMNS), "op": ("sum", "maximum")},
    _two_bugs,
)
_THREE = Level(
    {
        "script": words.SCRIPTS,
        "table": words.TABLES,
        "group": ("region", "channel"),
        "column": ("units", "rating"),
        "status": words.STATUSES,
    },
    _library,
)
FAMILY = Family("script", (_ONE, _TWO, _THREE))
