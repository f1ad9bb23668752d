"""The keys as a table for people, made of the classes that read configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchrelay.jobs.config.forms import Form, ListOf
from torchrelay.jobs.config.json_schema import sections
from torchrelay.jobs.config.key import KeySpec
from torchrelay.jobs.config.resolved import scalar
from torchrelay.jobs.config.schema_lookup import TOP
from torchrelay.jobs.config.section_forms import Named, Section


def key_table() -> str:
    """Markdown: a table for each section, its keys with form, default, meaning, part in identity."""
    paths = dict(_paths(TOP, ""))
    return "\n".join(_section(section, paths[section.of]) for section in sections(TOP))


def _paths(form: Form, path: str) -> Iterator[tuple[type, str]]:
    """How people write the place of each section."""
    if isinstance(form, (ListOf, Named)):
        yield from _paths(form.item, f"{path}[]" if isinstance(form, ListOf) else f"{path}.<alias>")
    elif isinstance(form, Section):
        yield form.of, path
        for name, spec in form.spec.keys.items():
            yield from _paths(spec.form, f"{path}.{name}" if path else name)


def _section(section: Section, path: str) -> str:
    rows = [_row(spec) for spec in section.spec.keys.values()]
    if section.spec.free is not None:
        rows.append(f"| … | anything | | {section.spec.free_doc} | yes |")
    rows += [f"| `{name}` | refused | | {_cell(remedy)} | |" for name, remedy in section.spec.refused.items()]
    title = f"### {path}" if path else "### At the top"
    head = "| key | may be | default | meaning | another run? |\n|---|---|---|---|---|"
    return f"{title}\n\n{(section.of.__doc__ or '').strip()}\n\n{head}\n" + "\n".join(rows) + "\n"


def _row(spec: KeySpec) -> str:
    default = "required" if spec.required else _default(spec.default)
    other = "yes" if spec.identity else "no"
    return f"| `{spec.name}` | {_cell(spec.form.word)} | {default} | {_cell(spec.doc)} | {other} |"


def _default(default: Any) -> str:
    return "" if default in (None, [], {}) else f"`{scalar(default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
