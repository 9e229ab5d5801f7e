"""Access patterns in a folder: which arrays a field is kept as, and the rule, in JSON, that makes its samples of them again.

A rule is {"kind", "arrays", ...}: it says how the field was asked for, and goes through the same checks when it is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import DataError
from .ragged import ragged

RULES, ORDER = "samples", "order"  # what the meta of a manifest holds: a rule a field that needs one, and all fields


def restored(found: Mapping[str, Any], meta: Mapping[str, Any], fields: Sequence[str] | None) -> dict[str, Any]:
    """Give the fields of a folder, some of them if asked for, from its arrays and the rules that were saved with them."""
    rules = meta.get(RULES, {})
    parts = {part for rule in rules.values() for part in rule["arrays"]}
    order = meta.get(ORDER, []) if fields is None else fields
    names = [name for name in order if name in found or name in rules]
    names += [name for name in found if name not in names and name not in parts] if fields is None else []
    return {name: _made(name, rules[name], found) if name in rules else found[name] for name in names}


def _made(name: str, rule: Mapping[str, Any], found: Mapping[str, Any]) -> Any:
    try:
        if rule["kind"] == "ragged":
            values, offsets = (found[part] for part in rule["arrays"])
            return ragged(values, offsets, field=name)
        raise ValueError(f"unknown kind {rule['kind']!r}")
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"field {name!r}: its rule in the manifest does not fit its arrays: {error}") from None
