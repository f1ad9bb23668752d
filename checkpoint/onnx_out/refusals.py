"""What torch says when it cannot export a model, as one line that names the place in the user's code."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

import torch

from torchrelay.errors import UsageError

_DATA_DEPENDENT = (
    "the forward decides by the values of tensors, which a file cannot: use torch.where, torch.cond or sizes"
)
_CONVERTED = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_CONSTANT = re.compile(r"You marked (\w+) as dynamic but your code specialized it to be a constant \((\d+)\)")
_LONGEST = 300


def refusal(error: Exception, model: str) -> UsageError:
    """The error for a user; what torch said in full is its `__cause__` once it is raised from it."""
    causes = _chain(error)
    place = next((found for one in causes if (found := _place(one))), "")
    return UsageError(f"{model} cannot go into an ONNX file{place}: {_why(causes)}")


def _why(causes: list[BaseException]) -> str:
    texts = [str(one) for one in causes]
    if any("DataDependent" in type(one).__name__ or "data-dependent" in str(one) for one in causes):
        return _DATA_DEPENDENT
    for text in texts:
        if found := _CONSTANT.search(text):
            return (
                f"its size {found[1]!r} is {found[2]} for ever, because forward has it as a number: take it "
                f"from a shape, or leave it fixed with dynamic="
            )
        if found := _CONVERTED.search(text):
            return f"the operator {found[1]} has no form in ONNX: replace it in forward"
    return f"{type(causes[-1]).__name__}: {_line(texts[-1])}"


def _chain(error: BaseException) -> list[BaseException]:
    found = [error]
    while (cause := found[-1].__cause__) is not None and cause not in found:
        found.append(cause)
    return found


def _line(text: str) -> str:
    """The first line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else "no reason was given"
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]} ..."


def _place(error: BaseException) -> str:
    """Where in code that is neither torch's nor ours it happened: ` at model.py:30 (if x.sum() > 0:)`."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
            shown = f" ({line[:80]})" if line else ""
            return f" because of {Path(frame.filename).name}:{frame.lineno}{shown}"
    return ""


def _is_users(file: str) -> bool:
    import torchrelay

    packages = [Path(torch.__file__).parent, Path(torchrelay.__file__).parent, Path(__file__).parents[2]]
    path = Path(file)
    ours = any(path.is_relative_to(one) for one in packages[:2]) or path.parent == Path(__file__).parent
    return path.is_file() and not ours and "site-packages" not in path.parts and "contextlib" not in path.name
