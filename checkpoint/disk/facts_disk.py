"""What a manifest remembers of the run at a position, as it lies in the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrelay.checkpoint.disk import values
from torchrelay.checkpoint.disk.fields import Fields
from torchrelay.checkpoint.facts import Facts
from torchrelay.checkpoint.selection import Selection

Json = Any


def facts_json(facts: Facts) -> Json:
    """Facts as they lie in a manifest."""
    return {
        "metrics": _metrics_json(facts.metrics),
        **({"carried": _metrics_json(facts.carried)} if facts.carried else {}),
        "stop": {name: dict(verdict) for name, verdict in facts.stop.items()},
        "total_steps": facts.total_steps,
        "elapsed_secs": float(facts.elapsed_secs),
        "seed": values.encode(facts.seed, "seed"),
        "run": facts.run_id,
        "over": facts.over,
        **_selection_json(facts.selection),
        **({} if facts.made_by_init is None else {"made_by_init": list(facts.made_by_init)}),
        **({"built": dict(facts.built)} if facts.built else {}),
        **({"places": dict(facts.places)} if facts.places else {}),
    }


def facts_of(value: Json, what: str) -> Facts:
    """Read what `facts_json` made; raises DamagedError naming `what`."""
    return facts_in(Fields(value if isinstance(value, dict) else {}, what))


def _metrics_json(metrics: Mapping[str, float]) -> dict[str, Json]:
    return {name: values.encode(float(value), f"metric {name}") for name, value in metrics.items()}


def _metrics(fields: Fields, key: str) -> dict[str, float]:
    metrics = {name: values.decode(value) for name, value in fields.fields(key).values.items()}
    if not all(type(value) in (int, float) for value in metrics.values()):
        raise fields.wrong(key)
    return metrics


def _selection_json(selection: Selection) -> dict[str, Json]:
    include = None if selection.include is None else list(selection.include)
    said = {"include": include, "exclude": list(selection.exclude)}
    return {} if selection.everything else {"selection": said}


def _selection(fields: Fields) -> Selection:
    if fields.values.get("selection") is None:
        return Selection()
    said = fields.fields("selection")
    return Selection(said.optional("include", said.texts), said.texts("exclude"))


def facts_in(fields: Fields) -> Facts:
    """Read what `facts_json` made; raises DamagedError naming the part that is wrong."""
    seed = values.decode(fields.values.get("seed"))
    stop = fields.fields("stop").values
    elapsed = fields.values.get("elapsed_secs")
    if not all(isinstance(verdict, dict) for verdict in stop.values()):
        raise fields.wrong("stop")
    if type(elapsed) not in (int, float) or not (seed is None or type(seed) is int):
        raise fields.wrong("elapsed_secs" if type(elapsed) not in (int, float) else "seed")
    return Facts(
        metrics=_metrics(fields, "metrics"),
        carried=_metrics(fields, "carried") if "carried" in fields.values else {},
        stop=stop,
        total_steps=fields.integer("total_steps"),
        elapsed_secs=float(elapsed or 0),
        seed=seed,
        run_id=fields.optional("run", fields.text),
        over=fields.flag("over"),
        selection=_selection(fields),
        made_by_init=fields.texts("made_by_init") if "made_by_init" in fields.values else None,
        built=fields.fields("built").values if "built" in fields.values else {},
        places=fields.fields("places").values if "places" in fields.values else {},
    )
