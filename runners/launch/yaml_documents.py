"""YAML for machines of others, made of plain values: no text of a user can be anything but a text.

A text stands without quotes only where every reader, of YAML 1.1 and of 1.2, takes it for a text; `y`, `1e3`
and `0o17` are something else to some. All else is quoted and escaped. Keys stand in the order given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

_PLAIN = re.compile(r"(--?)?[A-Za-z/]([A-Za-z0-9_./:=@-]*[A-Za-z0-9_./-])?")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


def documents(several: Iterable[Mapping[str, Any]], head: str = "") -> str:
    """Several documents as one text; every line of `head` becomes a comment above them."""
    comments = "".join(f"# {line}\n" for line in head.splitlines())
    text: str = yaml.dump_all(
        [dict(one) for one in several],
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        explicit_start=True,
        width=1 << 30,
    )
    return comments + text


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """A value that stands twice is written twice."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Lists stand below their key, not beside it."""
        super().increase_indent(flow, indentless=False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text)
