"""Family ``logs``: extract facts from logs into JSON.

Invariant: the expected JSON is computed from the entries that the log was written from.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

from clawgym_env.tasks.base import Snapshot
from clawgym_env.tasks.builtin import checks, content, words
from clawgym_env.tasks.builtin.family import Family, Instance, Level, Slots
from clawgym_env.types import Reward

_PHRASES = (
    'Count the {level} lines in {log}.log and save {{"{level}": count}} to answer.json.',
    'How many {level} lines are in {log}.log? Write {{"{level}": count}} to answer.json.',
    'Write the number of {level} lines in {log}.log to answer.json as {{"{level}": number}}.',
)


def _count_level(slots: Slots, rng: random.Random) -> Instance:
    level, path = slots["level"], f"{slots['log']}.log"
    entries = content.log_lines(rng, rng.randint(9, 14))
    entries += [(entries[-1][0], level, "", rng.choice(words.LOG_MESSAGES)) for _ in range(rng.randint(1, 3))]
    other = rng.choice([name for name in words.LOGS if name != slots["log"]])
    files = {
        path: content.joined([f"{clock} {name} {message}" for clock, name, _, message in entries]),
        f"{other}.log": content.joined([f"{c} {name} {m}" for c, name, _, m in content.log_lines(rng, 8)]),
    }
    expected = {level: sum(entry[1] == level for entry in entries)}
    printed = f"printf '{{\"{level}\": %d}}' $(grep -c {level} {path})"
    return Instance(
        instruction=rng.choice(_PHRASES).format(level=level, log=slots["log"]),
        files=files,
        oracle=(f"{printed} > answer.json",),
        mistakes=((printed,), (f"grep -c {level} {path} > answer.json",)),
        verify=checks.pure(json_judge(files, expected)),
    )


def json_judge(files: Mapping[str, bytes], expected: Mapping[str, Any], path: str = "answer.json") -> checks.Judge:
    """Judges a JSON object; each expected key that is right gives its share, unexpected keys spoil the pass."""

    def judge(snapshot: Snapshot) -> Reward:
        value = checks.json_of(snapshot, path)
        found = value if isinstance(value, dict) else {}
        entries = checks.share(key in found and checks.json_is(found[key], want) for key, want in expected.items())
        goals = {"entries": entries, "exact": float(checks.json_is(value, expected))}
        return checks.verdict(goals, checks.kept_share(snapshot, files))

    return judge


_ONE_SERVICE = (
    'From {log}.log, take the {level} lines that [{service}] wrote. Save {{"count": number of them, "last": message of '
    "the last one}} to answer.json.",
    "How many {level} lines did the service {service} write to {log}.log, and what was its last {level} message? "
    'Answer in answer.json as {{"count": number, "last": message}}.',
)


def _lines(entries: list[content.Entry]) -> list[str]:
    return [f"{clock} {level} [{service}] {message}" for clock, level, service, message in entries]


def _service_entries(rng: random.Random, n: int) -> list[content.Entry]:
    """Entries of all services, some of whose messages name other services."""
    entries = content.log_lines(rng, n, words.SERVICES)
    for index in rng.sample(range(n), 3):
        clock, level, service, _ = entries[index]
        entries[index] = (clock, level, service, f"call to {rng.choice(words.SERVICES)} failed")
    return entries


def _service_level(slots: Slots, rng: random.Random) -> Instance:
    level, service, path = slots["level"], slots["service"], f"{slots['log']}.log"

    def messages(entries: list[content.Entry]) -> list[str]:
        return [message for _, name, writer, message in entries if (name, writer) == (level, service)]

    def draw() -> list[content.Entry]:
        entries = _service_entries(rng, 15)
        for index in rng.sample(range(15), 3):
            entries[index] = (entries[index][0], level, service, rng.choice(words.LOG_MESSAGES))
        return entries

    def telling(entries: list[content.Entry]) -> bool:
        found = messages(entries)
        others = [entry for entry in entries if entry[1] == level and entry[2] != service]
        return len(found) >= 2 and found[0] != found[-1] and bool(others)

    entries = content.until(telling, draw)
    found = messages(entries)
    files = {path: content.joined(_lines(entries)), "README.md": content.opaque(rng, "md")}
    blank = '$1=$2=$3=$4="";sub(/^ +/,"");m=$0'
    show = 'END{printf "{\\"count\\": %d, \\"last\\": \\"%s\\"}\\n",n,m}'
    where = f'$3=="{level}"&&$4=="[{service}]"'
    return Instance(
        instruction=rng.choice(_ONE_SERVICE).format(**slots),
        files=files,
        oracle=(f"awk '{where}{{n++;{blank}}} {show}' {path} > answer.json",),
        mistakes=(
            (f"awk '$3==\"{level}\"{{n++;{blank}}} {show}' {path} > answer.json",),
            (f"awk '{where}&&!n++{{{blank}}} {show}' {path} > answer.json",),
        ),
        verify=checks.pure(json_judge(files, {"count": len(found), "last": found[-1]})),
    )


_ALL_SERVICES = (
    "The folder {folder} holds log files. For every service that wrote {level} lines on {day} into its .log files, "
    'save the number of these lines and the time of the latest as {{service: {{"{key}": number, "last": "HH:MM:SS"}}}} '
    "in answer.json.",
    "Read the .log files in {folder} and look at the {level} lines of {day} only. Write answer.json: an object with "
    'one entry per service that has such lines, {{"{key}": number of lines, "last": time of the latest as HH:MM:SS}}.',
)
_DAYS = ("2024-05-03", "2024-05-04", "2024-05-05")


def _summary(entries: list[content.Entry], level: str, day: str, key: str) -> dict[str, dict[str, int | str]]:
    found: dict[str, dict[str, int | str]] = {}
    for clock, name, service, _ in sorted(entries):
        if name == level and clock.startswith(day):
            count = int(found.get(service, {}).get(key, 0)) + 1
            found[service] = {key: count, "last": clock.partition(" ")[2]}
    return found


def _over_files(slots: Slots, rng: random.Random) -> Instance:
    folder, level, day, key = slots["folder"], slots["level"], slots["day"], slots["key"]

    def draw() -> list[list[content.Entry]]:
        logs = [_service_entries(rng, 15) for _ in range(4)]
        return [
            sorted((f"{rng.choice(_DAYS)} {clock[11:]}", name, service, text) for clock, name, service, text in log)
            for log in logs
        ]

    def telling(logs: list[list[content.Entry]]) -> bool:
        entries = list(itertools.chain(*logs[:3]))
        right = _summary(entries, level, day, key)
        return len(right) >= 2 and right not in (_summary(entries, level, "", key), _summary(logs[0], level, day, key))

    logs = content.until(telling, draw)
    names = [f"{folder}/{name}.log" for name in rng.sample(words.LOGS, 3)] + [f"{folder}/notes.txt"]
    files = {name: content.joined(_lines(log)) for name, log in zip(names, logs, strict=True)}
    expected = _summary(list(itertools.chain(*logs[:3])), level, day, key)
    service = "s=substr($4,2,length($4)-2)"
    last = ', \\"last\\": \\"%s\\"'
    collect = f"{{{service};n[s]++;if($2>t[s])t[s]=$2}}"
    show = f'END{{for(s in n){{printf "%s\\"%s\\": {{\\"{key}\\": %d{last}}}",c,s,n[s],t[s];c=", "}}}}'
    bare = f'END{{for(s in n){{printf "%s\\"%s\\": {{\\"{key}\\": %d}}",c,s,n[s];c=", "}}}}'
    wrap = "printf '{%s}\\n' \"$(cat body)\" > answer.json && rm body"
    where = f'$1=="{day}"&&$3=="{level}"'
    into = f"{folder}/*.log > body"
    return Instance(
        instruction=rng.choice(_ALL_SERVICES).format(**slots),
        files=files,
        oracle=(f"awk '{where}{collect} {show}' {into}", wrap),
        mistakes=(
            (f"awk '$3==\"{level}\"{collect} {show}' {into}", wrap),
            (f"awk '{where}{collect} {bare}' {into}", wrap),
        ),
        verify=checks.pure(json_judge(files, expected)),
    )


_ONE = Level({"log": words.LOGS, "level": words.LOG_LEVELS}, _count_level)
_TWO = Level({**_ONE.space, "service": words.SERVICES}, _service_level)
_THREE = Level(
    {"folder": words.FOLDERS, "level": words.LOG_LEVELS, "day": _DAYS, "key": ("count", "total", "lines")}, _over_files
)
FAMILY = Family("logs", (_ONE, _TWO, _THREE))
