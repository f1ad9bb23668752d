"""`--model module:function`: what such a text names, the module seen from the working directory."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from torchrelay.errors import UsageError


def named(text: str, what: str) -> Any:
    """What `module:name` names, imported from here; raises UsageError where there is no such thing.

    `what` is the option, for messages. The working directory stays on `sys.path`: functions import, too.
    """
    module, colon, name = text.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(f"{what} {text!r:.80}: give module:name")
    here = os.getcwd()  # noqa: PTH109 - the text
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise UsageError(f"{what}: there is no module {error.name}, seen from here") from None
        raise
    if not callable(found):
        raise UsageError(f"{what}: {module} has no {name} that can be called")
    return found
