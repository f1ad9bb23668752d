"""What makes a run this run: the part of a configuration that, changed, makes another one.

Left out are limits, intervals, what is kept and where, the kind and number of processes, and everything
that only `infer` uses. Values that are the default count as not written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from torchrelay.jobs.config.forms import Form, ListOf
from torchrelay.jobs.config.key import KeySpec
from torchrelay.jobs.config.runner_keys import is_infer
from torchrelay.jobs.config.schema_lookup import TOP
from torchrelay.jobs.config.section_forms import Named, Section

_EMPTY: tuple[Any, ...] = (None, {}, [])


def identity(normal: Mapping[str, Any], runner: str | None = None) -> dict[str, Any]:
    """The identifying part of a normal, valid configuration; of one runner, else of all that train."""
    runners = list(normal.get("runner", []))
    if runner is not None:
        chosen = [one for one in runners if one["name"] == runner]
    else:
        chosen = [one for one in runners if not is_infer(one)] or runners
    phases = _used(normal, "phase", [one.get("phases") for one in chosen])
    datasets = _used(normal, "dataset", [_listed(one.get("dataset_name")) for one in phases])
    found = _picked(TOP, {**normal, "runner": chosen, "phase": phases, "dataset": datasets})
    return dict(found)


def digest(identifying: Mapping[str, Any]) -> str:
    """SHA-256 of it, in one way of writing."""
    text = json.dumps(identifying, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _listed(name: str | None) -> list[str] | None:
    return None if name is None else [name]


def _used(normal: Mapping[str, Any], section: str, wanted: Collection[list[str] | None]) -> list[Any]:
    """The items of a list that are named; None among the wanted: all of them."""
    items = list(normal.get(section, []))
    if not wanted or any(names is None for names in wanted):
        return items
    named = {name for names in wanted for name in names or ()}
    return [one for one in items if one["name"] in named]


def _picked(form: Form | None, value: Any) -> Any:
    if isinstance(form, Section):
        known = {name: _of_key(spec, value[name]) for name, spec in form.spec.keys.items() if name in value}
        own = {name: one for name, one in value.items() if name not in form.spec.keys}
        return {**{name: one for name, one in known.items() if one not in _EMPTY}, **own}
    if isinstance(form, ListOf):
        return [_picked(form.item, one) for one in value]
    return (
        {name: _picked(form.item, one) for name, one in value.items()} if isinstance(form, Named) else value
    )


def _of_key(spec: KeySpec, value: Any) -> Any:
    """None where it does not count."""
    if not spec.identity or (spec.default is not None and value == spec.form.normal(spec.default)):
        return None
    return _picked(spec.form, value)
