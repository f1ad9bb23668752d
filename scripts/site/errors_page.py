#!/usr/bin/env python3
"""Write docs/errors.md from the docstrings of torchrelay.errors."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("Cause", "Message", "Remedy")
HEAD = """# Errors

Every error that torchrelay raises on purpose is a `RelayError`, from `torchrelay.errors`. If it is not
caught, the program ends with one line and its exit code ([all exit codes](guide.md#how-a-program-ends)).
In the messages below, `...` stands for a name, a path or a number.
The [reference](reference/errors.md) has the class hierarchy and attributes.

<!-- made by scripts/site/errors_page.py from the docstrings of torchrelay/errors.py -->
"""


def parts_of(kind: type) -> dict[str, str]:
    """The labelled parts of a class's docstring: `Cause`, `Message` (may be absent) and `Remedy`."""
    parts: dict[str, str] = {}
    label = ""
    for line in inspect.cleandoc(kind.__doc__ or "").splitlines():
        first, colon, rest = line.partition(": ")
        if colon and first[2:] in PARTS:
            label = first[2:]
            parts[label] = rest
        elif label and line.startswith(" "):
            parts[label] += " " + line.strip()
        else:
            label = ""
    return parts


def entry(kind: type) -> str:
    """One class as a section of the page."""
    parts = parts_of(kind)
    lines = [
        f"## {kind.__name__}",
        "",
        f"{(kind.__doc__ or '').splitlines()[0]} Exit code {kind.exit_code}.",  # type: ignore[attr-defined]
        "",
        f"- Cause: {parts['Cause']}",
    ]
    if "Message" in parts:
        lines.append(f"- Message: `{parts['Message'].replace('`', '')}`")
    return "\n".join([*lines, f"- Remedy: {parts['Remedy']}", ""])


def kinds() -> list[type]:
    """The classes that a user can meet, in the order of the module."""
    sys.path.insert(0, str(ROOT / "src"))
    from torchrelay import errors

    found = [one for one in vars(errors).values() if inspect.isclass(one) and hasattr(one, "exit_code")]
    return [one for one in found if one not in (errors.RelayError, errors.ChangedAfterAllError)]


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *map(entry, kinds())])


if __name__ == "__main__":
    (ROOT / "docs" / "errors.md").write_text(page())
