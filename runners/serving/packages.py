"""A model package as what is served: held to its signature, without the code that trained it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.load.handle import checked_device
from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.models.package.reader import Package, open_package
from torchrelay.runners.serving.models import MakeHandler
from torchrelay.runners.serving.served import Served
from torchrelay.runners.serving.tensor_handler import Sample, TensorHandler
from torchrelay.runners.serving.trees import shape_of


class PackageHandler(TensorHandler):
    """Samples are rows of the inputs; of the outputs those with the batch's size are shared out by rows.

    Where the inputs' first size is 1 and no name, samples are computed one by one.
    """

    def __init__(self, module: Any, signature: Signature) -> None:
        super().__init__(module, signature)
        self._specs = signature
        self._batch = batch_size_of(signature)

    def alike(self, sample: Sample) -> Hashable:
        """As for any tensors, unless the batch is of one alone."""
        return object() if self._batch == 1 else shape_of(sample)

    def predict(self, samples: Sequence[Sample]) -> Sequence[Any]:
        """One run of the program for all of them."""
        inputs = [
            torch.stack([one[spec.name] for one in samples]).to(self.device) for spec in self._specs.inputs
        ]
        outputs: list[Any] = self.module.flat(inputs)  # type: ignore[operator]
        return [self._of_sample(outputs, at) for at in range(len(samples))]

    def _of_sample(self, outputs: Sequence[Any], at: int) -> Any:
        found = {
            spec.name: one[at] if self._is_shared(spec, one) else one
            for spec, one in zip(self._specs.outputs, outputs, strict=True)
        }
        return next(iter(found.values())) if len(found) == 1 else found

    def _is_shared(self, spec: TensorSpec, output: Any) -> bool:
        return isinstance(output, torch.Tensor) and bool(spec.shape) and spec.shape[0] == self._batch

    def encode(self, result: Any) -> Any:
        """As it is: the names are those of the signature already."""
        return result


def batch_size_of(signature: Signature) -> int | str:
    """The first size that all inputs share; raises UsageError where it is no batch's."""
    sizes = {spec.shape[0] if spec.shape else None for spec in signature.inputs}
    size = next(iter(sizes), None)
    if len(sizes) != 1 or size is None or (isinstance(size, int) and size != 1):
        told = ", ".join(f"{spec.name} {spec.shape}" for spec in signature.inputs)
        raise UsageError(
            f"the inputs are {told}: to be served all have the same first size, of the batch, which is 1 "
            "or free; save the package with inputs of that kind"
        )
    return size


class PackageSource:
    """One package; it never changes."""

    follows = False

    def __init__(self, path: str, handler: MakeHandler | None, device: str | None) -> None:
        self._path, self._handler, self._device = path, handler, device

    def first(self) -> Served:
        """Load it; raises the errors of `open_package` and of `Package.module`."""
        package = open_package(self._path)
        module = package.module()
        if package.signature is None:
            raise UsageError(f"{self._path} has no signature: save it with inputs")
        module.to(checked_device(self._device) or torch.device("cpu"))
        make = self._handler or PackageHandler
        known = package.metadata
        return Served(
            str(known.get("run") or Path(self._path).name),
            make(module, package.signature),
            _whole(known.get("epoch")),
            None,
            known.get("code_id"),
            package.signature,
            self._path,
            {"package": self._path, **_told(package)},
        )

    def newer(self, served: Served) -> Served | None:
        """Nothing ever."""
        return None


def _told(package: Package) -> dict[str, Any]:
    labels = list(package.labels) if package.labels is not None else None
    text = package.preprocessing if isinstance(package.preprocessing, str) else None
    return {"labels": labels, "preprocessing": text}


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None
