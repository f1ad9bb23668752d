"""Model packages: one file from which a model runs without the code that trained it."""

from torchrelay.checkpoint.package.opening import Package, open_package

__all__ = ["Package", "open_package"]
