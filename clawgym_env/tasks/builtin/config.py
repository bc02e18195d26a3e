"""Family ``config``: edit configuration files in place.

Invariant: the asked-for settings change and every other line stays, in order.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from clawgym_env.tasks.base import Snapshot
from clawgym_env.tasks.builtin import checks, content, words
from clawgym_env.tasks.builtin.family import Family, Instance, Level, Slots
from clawgym_env.types import Reward

_PHRASES = (
    "Set {key} to {value} in {config}.conf.",
    "Edit {config}.conf so that {key} is {value}.",
    "Change the value of {key} to {value} in {config}.conf.",
)
_NUMERIC = ("port", "timeout", "retries", "limit", "workers")


def settings(rng: random.Random) -> dict[str, str]:
    """Every key of the lexicon and some numeric ones, in random order."""
    values = {key: rng.choice(words.VALUES) for key in words.KEYS}
    values |= {key: str(rng.randint(2, 9000)) for key in rng.sample(_NUMERIC, 3)}
    keys = list(values)
    rng.shuffle(keys)
    return {key: values[key] for key in keys}


def _assignment(line: str) -> tuple[str, str]:
    key, _, value = line.partition("=")
    return key.strip(), value.strip()


def conf_judge(files: Mapping[str, bytes], path: str, key: str, value: str) -> checks.Judge:
    """Judges that ``key`` is set once, to ``value``, and that all other lines of ``path`` stayed in order."""
    rest = [line for line in checks.lines_of(files[path].decode()) if _assignment(line)[0] != key]

    def judge(snapshot: Snapshot) -> Reward:
        lines = checks.lines_of(checks.text_of(snapshot, path))
        found = [_assignment(line)[1] for line in lines if _assignment(line)[0] == key]
        others = [line for line in lines if _assignment(line)[0] != key]
        stayed = 1.0 if others == rest else 0.9 * checks.share(line in others for line in rest)
        kept = checks.kept_share(snapshot, files, changed=[path])
        return checks.verdict({"value": float(found == [value])}, kept * stayed)

    return judge


def _one_key(slots: Slots, rng: random.Random) -> Instance:
    key, value, path = slots["key"], slots["value"], f"{slots['config']}.conf"
    current = settings(rng)
    current[key] = rng.choice([word for word in words.VALUES if word != value])
    lines = [f"# settings of the {slots['config']}", *(f"{name}={text}" for name, text in current.items())]
    lines.insert(rng.randint(1, len(lines)), f"#{key}={value}")
    other = rng.choice([name for name in words.CONFIGS if name != slots["config"]])
    spare = [f"{name}={text}" for name, text in settings(rng).items()]
    files = {path: content.joined(lines), f"{other}.conf": content.joined(spare)}
    edit = f"'s/^{key}=.*/{key}={value}/' {path}"
    return Instance(
        instruction=rng.choice(_PHRASES).format(**slots),
        files=files,
        oracle=(f"sed -i {edit}",),
        mistakes=((f"sed {edit}",), (f"echo {key}={value} > {path}",)),
        verify=checks.pure(conf_judge(files, path, key, value)),
    )


_SECTIONED = (
    "In {config}.ini, set {key} to {value} in the section [{section}] and delete {key} from the section [{drop}]. "
    "Change nothing else.",
    "Edit {config}.ini: {key} in [{section}] becomes {value}, and the {key} line of [{drop}] goes away; all other "
    "lines stay as they are.",
)


def ini_lines(text: str | None) -> list[tuple[str, str, str]]:
    """The lines of an INI file as (section, key, value); other lines keep their text in place of the key."""
    section, out = "", []
    for line in checks.lines_of(text):
        if line.startswith("["):
            section = line.strip("[]")
        out.append((section, *_assignment(line)))
    return out


def _one_section(slots: Slots, rng: random.Random) -> Instance:
    key, value, section, drop = slots["key"], slots["value"], slots["section"], slots["drop"]
    path = f"{slots['config']}.ini"
    lines = [f"; settings of the {slots['config']}"]
    for name in rng.sample(words.SECTIONS, len(words.SECTIONS)):
        current = {**settings(rng), key: rng.choice([word for word in words.VALUES if word != value])}
        shown = {key, *rng.sample(sorted(current), 4)}
        lines += ["", f"[{name}]", *(f"{each} = {text}" for each, text in current.items() if each in shown)]
    files = {path: content.joined(lines), "README.md": content.opaque(rng, "md")}
    edited = {(section, key), (drop, key)}
    rest = [line for line in ini_lines("\n".join(lines)) if line[:2] not in edited]

    def judge(snapshot: Snapshot) -> Reward:
        found = ini_lines(checks.text_of(snapshot, path))
        stayed = [line for line in found if line[:2] not in edited]
        goals = {
            "set": float([line[2] for line in found if line[:2] == (section, key)] == [value]),
            "deleted": float(bool(found) and all(line[:2] != (drop, key) for line in found)),
        }
        kept = 1.0 if stayed == rest else 0.9 * checks.share(line in stayed for line in rest)
        return checks.verdict(goals, kept * checks.kept_share(snapshot, files, changed=[path]))

    def within(name: str, command: str) -> str:
        return f"sed -i '/^\\[{name}\\]/,/^\\[/{command}' {path}"

    replace = f"s/^{key} *=.*/{key} = {value}/"
    delete = within(drop, f"{{/^{key} *=/d}}")
    change = within(section, replace)
    return Instance(
        instruction=rng.choice(_SECTIONED).format(**slots),
        files=files,
        oracle=(change, delete),
        mistakes=((f"sed -i '{replace}' {path}", delete), (change,)),
        verify=checks.pure(judge),
    )


_CONDITIONAL = (
    "In every .conf file in the folder {folder} where {key} is {value}, set {other} to {new}; add the line at the end "
    "where it is missing. List the names of these files, sorted, one per line, in changed.txt.",
    "Look at the .conf files in {folder}. Those with {key}={value} need {other}={new}: replace the line, or append it "
    "if there is none. Then write the names of the files you changed to changed.txt, one per line, sorted.",
)


def _where(slots: Slots, rng: random.Random) -> Instance:
    folder, key, value, other, new = (slots[name] for name in ("folder", "key", "value", "other", "new"))
    names = sorted(rng.sample(words.CONFIGS, 5))
    roles = rng.sample(["replace", "replace", "append", "leave", "leave"], 5)
    files = {}
    for name, role in zip(names, roles, strict=True):
        current = settings(rng)
        current[other] = rng.choice([word for word in words.VALUES if word != new])
        current[key] = value if role != "leave" else rng.choice([word for word in words.VALUES if word != value])
        if role == "append":
            del current[other]
        lines = [f"{each}={text}" for each, text in current.items()]
        lines.insert(rng.randint(0, len(lines)), f"#{key}={value}")
        files[f"{folder}/{name}.conf"] = content.joined(lines)
    files[f"{folder}/README.md"] = content.joined([f"{key}={value}", "is only an example here."])
    targets = [f"{folder}/{name}.conf" for name, role in zip(names, roles, strict=True) if role != "leave"]
    judges = [conf_judge(files, path, other, new) for path in targets]

    def judge(snapshot: Snapshot) -> Reward:
        own = [each({**files, path: snapshot.get(path, b"")}) for each, path in zip(judges, targets, strict=True)]
        listed = [line.rpartition("/")[2] for line in checks.lines_of(checks.text_of(snapshot, "changed.txt"))]
        goals = {
            "set": sum(reward.score for reward in own) / len(own),
            "listed": float(listed == [path.rpartition("/")[2] for path in targets]),
        }
        return checks.verdict(goals, checks.kept_share(snapshot, files, changed=targets))

    listing = f"grep -l '^{key}={value}$' {folder}/*.conf | sort | sed 's|.*/||' > changed.txt"
    replace = f"sed -i 's/^{other}=.*/{other}={new}/' {folder}/$f"
    either = f"if grep -q '^{other}=' {folder}/$f; then {replace}; else echo {other}={new} >> {folder}/$f; fi"
    return Instance(
        instruction=rng.choice(_CONDITIONAL).format(**slots),
        files=files,
        oracle=(listing, f"for f in $(cat changed.txt); do {either}; done"),
        mistakes=(
            (listing, f"for f in $(cat changed.txt); do {replace}; done"),
            (f"ls {folder} | grep conf > changed.txt", f"for f in $(cat changed.txt); do {either}; done"),
        ),
        verify=checks.pure(judge),
    )


def _sections_differ(slots: Slots) -> bool:
    return slots["section"] != slots["drop"]


def _keys_differ(slots: Slots) -> bool:
    return slots["key"] != slots["other"]


_ONE = Level({"config": words.CONFIGS, "key": words.KEYS, "value": words.VALUES}, _one_key)
_TWO = Level({**_ONE.space, "section": words.SECTIONS, "drop": words.SECTIONS}, _one_section, _sections_differ)
_THREE = Level(
    {
        "folder": words.FOLDERS[:4],
        "key": words.KEYS,
        "value": words.VALUES,
        "other": words.KEYS,
        "new": words.VALUES,
    },
    _where,
    _keys_differ,
)
FAMILY = Family("config", (_ONE, _TWO, _THREE))
