"""The packages of the extra `onnx`."""

from __future__ import annotations

from importlib.util import find_spec

from torchrelay.errors import UsageError

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def check_packages() -> None:
    """Raise UsageError with the remedy where one is missing; imports none."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(f"ONNX files need {', '.join(missing)}: pip install 'torchrelay[onnx]'")
