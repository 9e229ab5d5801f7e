"""Access patterns in a folder: which arrays a field is kept as, and the rule, in JSON, that makes its samples of them again.

A rule is {"kind", "arrays", ...}: it says how the field was asked for, and goes through the same checks when it is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import windows
from .errors import DataError
from .ragged import ragged
from .samples import Rows, Samples

OFFSETS = ".offsets"
RULES, ORDER = "samples", "order"  # what the meta of a manifest holds: a rule a field that needs one, and all fields


def restored(found: Mapping[str, Any], meta: Mapping[str, Any], fields: Sequence[str] | None) -> dict[str, Any]:
    """Give the fields of a folder, some of them if asked for, from its arrays and the rules that were saved with them."""
    rules = meta.get(RULES, {})
    parts = {part for rule in rules.values() for part in rule["arrays"]}
    order = meta.get(ORDER, []) if fields is None else fields
    names = [name for name in order if name in found or name in rules]
    names += [name for name in found if name not in names and name not in parts] if fields is None else []
    return {name: _made(name, rules[name], found) if name in rules else found[name] for name in names}


def ragged_rule(name: str) -> dict[str, Any]:
    """Give the rule of ragged rows, which are kept as their values and their offsets."""
    return {"kind": "ragged", "arrays": [name, name + OFFSETS]}


def check_names(fields: Sequence[str], rules: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse fields called like an array that another one is kept as."""
    for name, rule in rules.items():
        for part in rule["arrays"]:
            if part != name and part in fields:
                raise DataError(f"field {name!r}: is kept with an array {part!r}, and a field is called that")


class Kept(NamedTuple):
    """Fields that are kept by their rules: these, the series they are cut from, and the tables that they need beside."""

    rules: dict[str, dict[str, Any]]
    series: dict[str, Samples]
    tables: dict[str, np.ndarray]


def by_rules(fields: Mapping[str, Samples]) -> Kept:
    """Give the windows among some fields as series and rules, where these take fewer bytes than the windows themselves."""
    rules: dict[str, dict[str, Any]] = {}
    series: dict[str, Samples] = {}
    tables: dict[str, np.ndarray] = {}
    known: dict[Any, str] = {}

    def named(key: Any, name: str, value: Any, into: dict[str, Any]) -> str:
        if key not in known:
            known[key], into[name] = name, value
        return known[key]

    spelled = 0
    for field, samples in fields.items():
        rule = samples.rule
        if not isinstance(rule, windows.Rule):
            continue
        spelled += samples.rows.count * samples.spec.nbytes
        parts: dict[str, Any] = {}
        if rule.what == "data":
            base = windows.series_of(samples)
            places = tuple((id(p.flat), p.offset, p.stride, p.count) for p in base.parts)
            parts["series"] = named((places, base.spec.dtype.str, base.shape), f"{field}.series", base, series)
        if rule.bounds is not None:
            parts["groups"] = named(id(rule.bounds), f"{field}.groups", rule.bounds, tables)
        rows = windows.chosen(samples)
        if rows.table is not None:
            parts["rows"] = named(id(samples.rows.table), f"{field}.rows", rows.table, tables)
        told = rule._replace(bounds=None)._asdict()
        told["chosen"] = None if rows.table is not None else [rows.start, rows.step, rows.count]
        rules[field] = {"kind": "windows", "arrays": [*parts.values()], "parts": parts, "rule": told}
    taken = sum(s.rows.count * s.spec.nbytes for s in series.values()) + sum(t.nbytes for t in tables.values())
    return Kept(rules, series, tables) if taken < spelled else Kept({}, {}, {})


def _made(name: str, rule: Mapping[str, Any], found: Mapping[str, Any]) -> Any:
    try:
        if rule["kind"] == "ragged":
            values, offsets = (found[part] for part in rule["arrays"])
            return ragged(values, offsets, field=name)
        if rule["kind"] == "windows":
            told, parts = dict(rule["rule"]), rule["parts"]
            chosen, table = told.pop("chosen"), parts.get("rows")
            bounds = found[parts["groups"]] if "groups" in parts else None
            how = windows.Rule(
                **{**told, "pads": tuple(told["pads"]), "elements": tuple(told["elements"]), "bounds": bounds}
            )
            rows = Rows(len(found[table]), 0, 1, found[table]) if table else Rows(chosen[2], chosen[0], chosen[1])
            return windows.cut_again(how, found[parts["series"]] if "series" in parts else None, rows, name)
        raise ValueError(f"unknown kind {rule['kind']!r}")
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise DataError(f"field {name!r}: its rule in the manifest does not fit its arrays: {error}") from None
