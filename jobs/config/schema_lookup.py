"""What the schema says of a place in the tree."""

from __future__ import annotations

from torchrelay.jobs.config.forms import Form, ListOf
from torchrelay.jobs.config.key import KeySpec
from torchrelay.jobs.config.schema import Settings
from torchrelay.jobs.config.section_forms import Named, Section
from torchrelay.jobs.yaml_text import Where

TOP = Section(Settings)
"""The form of a whole configuration."""


def form_at(where: Where) -> Form | None:
    """The form of the value at a place; None where the schema knows nothing, as among the user's own keys."""
    form: Form | None = TOP
    for one in where:
        form = form_below(form, one)
    return form


def form_below(form: Form | None, one: str | int) -> Form | None:
    """The form of what lies below a key or index of a value of `form`."""
    if isinstance(form, Section) and isinstance(one, str):
        spec = form.spec.keys.get(one)
        return None if spec is None else spec.form
    if isinstance(form, ListOf) and isinstance(one, int):
        return form.item
    return form.item if isinstance(form, Named) else None


def key_at(where: Where) -> KeySpec | None:
    """The key of the schema that stands at a place, if it is one."""
    around = form_at(where[:-1]) if where else None
    return around.spec.keys.get(str(where[-1])) if isinstance(around, Section) else None
