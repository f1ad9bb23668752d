"""Model packages: one file from which a model runs without the code that trained it."""

from torchrelay.checkpoint.package.opening import Package as Package, open_package as open_package
