"""Family ``csv``: aggregate a column of a table.

Invariant: the answer is computed in Python from the records that the table was written from, never by parsing it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

from clawgym_env.tasks.base import Snapshot
from clawgym_env.tasks.builtin import checks, content, words
from clawgym_env.tasks.builtin.family import Family, Instance, Level, Slots
from clawgym_env.types import Reward

#: Operation -> awk body over column {c}, awk result, and the words for it.
_AWK = {
    "sum": ("{{s+=${c}}}", "s", ("sum", "total")),
    "mean": ("{{s+=${c};n++}}", "s/n", ("mean", "average")),
    "max": ("&&${c}>m{{m=${c}}}", "m", ("maximum", "highest")),
    "min": ("&&(!m||${c}<m){{m=${c}}}", "m", ("minimum", "lowest")),
}
_PHRASES = (
    "Compute the {op} of the {column} column in {table}.csv and save it to answer.txt.",
    "Save the {op} of column {column} of {table}.csv to answer.txt.",
    "What is the {op} {column} in {table}.csv? Write it to answer.txt.",
)


def aggregate(op: str, values: Sequence[float]) -> float:
    """Sum, mean, max or min."""
    return {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values), "min": min(values)}[op]


def _number_answer(files: Mapping[str, bytes], expected: float, path: str = "answer.txt") -> checks.Judge:
    def judge(snapshot: Snapshot) -> Reward:
        answer = checks.number_is(checks.text_of(snapshot, path), expected)
        return checks.verdict({"answer": float(answer)}, checks.kept_share(snapshot, files))

    return judge


def _one_column(slots: Slots, rng: random.Random) -> Instance:
    records, data = content.plain_table(rng)
    path = f"{slots['table']}.csv"
    other = rng.choice([name for name in words.TABLES if name != slots["table"]])
    files = {path: data, f"{other}.csv": content.plain_table(rng)[1]}
    expected = aggregate(slots["op"], [float(row[slots["column"]]) for row in records])
    body, result, names = _AWK[slots["op"]]
    program = f"'NR>1{body.format(c=words.COLUMNS[slots['column']])} END{{print {result}}}'"
    phrase = rng.choice(_PHRASES)
    return Instance(
        instruction=phrase.format(op=rng.choice(names), column=slots["column"], table=slots["table"]),
        files=files,
        oracle=(f"awk -F, {program} {path} > answer.txt",),
        mistakes=((f"awk -F, {program} {path}",), (f"awk {program} {path} > answer.txt",)),
        verify=checks.pure(_number_answer(files, expected)),
    )


_FILTERED = (
    "In {table}.csv, take the rows whose region is {region} and whose status is not cancelled. "
    "Save the {op} of their {column}, with two decimals, to answer.txt.",
    "What is the {op} of {column} in {table}.csv over the rows with region {region}, leaving out the cancelled ones "
    "(see the status column)? Write the number with two decimals to answer.txt.",
)
_TEXT = {"region": words.REGIONS, "origin": words.REGIONS, "status": words.STATUSES}


def _filtered(slots: Slots, rng: random.Random) -> Instance:
    op, column, region, path = slots["op"], slots["column"], slots["region"], f"{slots['table']}.csv"

    def answer(records: list[content.Row], keep_cancelled: bool = False) -> float:
        chosen = [row for row in records if row["region"] == region]
        chosen = [row for row in chosen if keep_cancelled or row["status"] != "cancelled"]
        return aggregate(op, [float(row[column]) for row in chosen] or [0.0])

    records = content.until(
        lambda rows: answer(rows) > 0 and abs(answer(rows) - answer(rows, keep_cancelled=True)) > 0.05,
        lambda: content.rows(rng, rng.randint(11, 15), _TEXT),
    )
    layout = ["id", "date", *_TEXT, *words.COLUMNS]
    rng.shuffle(layout)
    files = {path: content.table(records, layout), "README.md": content.opaque(rng, "md")}
    body, result, names = _AWK[op]
    place = {name: layout.index(name) + 1 for name in layout}
    action = body.format(c=place[column])
    where = f'NR>1&&${place["region"]}=="{region}"'
    paid = f'&&${place["status"]}!="cancelled"'
    end = f'END{{printf "%.2f\\n",{result}}}'
    command = f"awk -F, '{where}{paid}{action} {end}' {path}"
    return Instance(
        instruction=rng.choice(_FILTERED).format(**{**slots, "op": rng.choice(names)}),
        files=files,
        oracle=(f"{command} > answer.txt",),
        mistakes=((command,), (f"awk -F, '{where}{action} {end}' {path} > answer.txt",)),
        verify=checks.pure(_number_answer(files, answer(records))),
    )


_JOINED = (
    "{table}.csv lists orders and catalog.csv the price of every item. For each {group}, add up units times price over "
    "the orders with status {status}. Write report.csv with the header {group},revenue, two decimals, {order} first.",
    "Join {table}.csv with catalog.csv on item and write report.csv (header {group},revenue): the revenue, units times "
    "price, of every {group}, counting orders with status {status} only, two decimals, {order} revenue first.",
)
_ORDER_TEXT = {"region": words.REGIONS, "channel": words.CHANNELS, "item": words.GOODS, "status": words.STATUSES}


def _revenues(records: list[content.Row], prices: Mapping[str, float], group: str, status: str) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row in records:
        if status in ("", row["status"]):
            totals[row[group]] = totals.get(row[group], 0.0) + int(row["units"]) * prices[row["item"]]
    return totals


def _joined(slots: Slots, rng: random.Random) -> Instance:
    group, status, path = slots["group"], slots["status"], f"{slots['table']}.csv"
    prices = {item: float(content.number(rng, "price")) for item in words.GOODS}

    def telling(records: list[content.Row]) -> bool:
        right = _revenues(records, prices, group, status)
        values = sorted(right.values())
        apart = all(high - low > 0.05 for low, high in itertools.pairwise(values))
        return len(right) >= 2 and apart and right != _revenues(records, prices, group, "")

    records = content.until(telling, lambda: content.rows(rng, 15, _ORDER_TEXT))
    layout = ["id", "date", "units", *_ORDER_TEXT]
    rng.shuffle(layout)
    catalog = ["item,weight,price", *(f"{item},{content.number(rng, 'weight')},{prices[item]:.2f}" for item in prices)]
    files = {path: content.table(records, layout), "catalog.csv": content.joined(catalog)}
    totals = _revenues(records, prices, group, status)
    falling = slots["order"] == "highest"
    expected = {name: totals[name] for name in sorted(totals, key=lambda name: totals[name], reverse=falling)}

    def judge(snapshot: Snapshot) -> Reward:
        header, *found = checks.cells_of(checks.text_of(snapshot, "report.csv")) or [[]]
        goals = {"header": float(header == [group, "revenue"]), **checks.pairs_goals(found, expected)}
        return checks.verdict(goals, checks.kept_share(snapshot, files))

    place = {name: layout.index(name) + 1 for name in layout}
    add = f"{{r[${place[group]}]+=${place['units']}*p[${place['item']}]}}"
    end = """END{for(k in r)printf "%s,%.2f\\n",k,r[k]}'"""
    where = f'FNR>1&&${place["status"]}=="{status}"'
    load = "awk -F, 'NR==FNR{p[$1]=$3;next}"
    tail = f"catalog.csv {path} | sort -t, -k2,2{'nr' if falling else 'n'} >> report.csv"
    head = f"echo {group},revenue > report.csv"
    return Instance(
        instruction=rng.choice(_JOINED).format(**slots),
        files=files,
        oracle=(head, f"{load} {where}{add} {end} {tail}"),
        mistakes=((head, f"{load} FNR>1{add} {end} {tail}"), (f"{load} {where}{add} {end} {tail}",)),
        verify=checks.pure(judge),
    )


_ONE = Level({"table": words.TABLES, "column": tuple(words.COLUMNS), "op": tuple(_AWK)}, _one_column)
_TWO = Level({**_ONE.space, "region": words.REGIONS}, _filtered)
_THREE = Level(
    {
        "table": words.TABLES,
        "group": ("region", "channel", "item"),
        "status": words.STATUSES,
        "order": ("highest", "lowest"),
    },
    _joined,
)
FAMILY = Family("csv", (_ONE, _TWO, _THREE))
