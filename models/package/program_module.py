"""Module that runs a program with torch operators; tensors keep their original names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from torchrelay.errors import DamagedError, UsageError
from torchrelay.jobs.runtime import Signature
from torchrelay.jobs.session import warn
from torchrelay.models.package.program import PackagedProgram, built, leaves_in, operator_of, resolved


class ProgramModule(nn.Module):
    """The model of a package in eval mode; its state dict has the original names.

    It is called like the original; `flat` takes and returns tensors in the order of `signature`. Supports
    gradients. `train()` is refused if parts of the original behave differently in training (`still`), such as
    dropout and batch normalisation.
    """

    def __init__(
        self,
        program: PackagedProgram,
        signature: Signature,
        states: Mapping[str, torch.Tensor],
        constants: Mapping[str, torch.Tensor],
        still: Sequence[str] | None = (),
    ) -> None:
        super().__init__()
        self._still = None if still is None else tuple(still)
        self.signature = signature
        self._program = program
        self._calls = tuple((step, operator_of(step.operator)) for step in program.steps)
        self._held: dict[str, tuple[str, str]] = {}
        for name, tensor in states.items():
            self._hold(name, tensor, persistent=True)
        for name, tensor in constants.items():
            self._hold(name, tensor, persistent=False)
        if missing := [name for _, name in program.tensors.values() if name not in self._held]:
            raise DamagedError(f"the program needs {missing[0]!r}, which the package does not have")

        # `forward` whose signature has the names of the original's arguments.
        def forward(self: ProgramModule, *args: Any, **kwargs: Any) -> Any:
            return self._called(*args, **kwargs)

        kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        named = [inspect.Parameter(one.name, kinds[one.positional]) for one in program.arguments]
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = inspect.Signature([own, *named])  # type: ignore[attr-defined]
        self.forward = MethodType(forward, self)
        self.eval()

    def train(self, mode: bool = True) -> ProgramModule:
        """Set the mode; raises UsageError for training if parts of the model would stay in eval mode."""
        if mode and self._still is None and self.__dict__.get("_held"):  # not during construction
            warn(
                "the package is of an earlier version and does not say which parts train otherwise than its "
                "program, which is the model in eval mode: dropout and batch normalisation stand still",
                stacklevel=2,
            )
        if mode and self._still:
            more = f" and {len(self._still) - 5} more" if len(self._still) > 5 else ""
            raise UsageError(
                f"this program is the model in eval mode: {', '.join(self._still[:5])}{more} would stand "
                "still in training. load(path, trust_source=True) makes the real class, if you trust its "
                "source; without train() the parameters train as they are"
            )
        return super().train(mode)

    def _hold(self, name: str, tensor: torch.Tensor, *, persistent: bool) -> None:
        """Register a tensor, also under a name of this class, such as `flat`, which torch would refuse."""
        path, _, leaf = name.rpartition(".")
        owner: nn.Module = self
        for part in path.split(".") if path else ():
            if part not in owner._modules:
                _check_free(owner, part, name)
                owner._modules[part] = nn.Module()
            owner = owner._modules[part]  # type: ignore[assignment]
        _check_free(owner, leaf, name)
        if isinstance(tensor, nn.Parameter):
            owner._parameters[leaf] = tensor
        else:
            owner._buffers[leaf] = tensor
            if not persistent:
                owner._non_persistent_buffers_set.add(leaf)
        self._held[name] = (path, leaf)

    def _tensor(self, name: str) -> torch.Tensor:
        path, leaf = self._held[name]
        owner: nn.Module = self
        for part in path.split(".") if path else ():
            owner = owner._modules[part]  # type: ignore[assignment]
        found = owner._parameters if leaf in owner._parameters else owner._buffers
        return found[leaf]  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        """Device of the tensors; the CPU if there are none."""
        for name in self._held:
            return self._tensor(name).device
        return torch.device("cpu")

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model like the original; raises UsageError for other arguments than the program's."""
        return built(self._program.result, self._run(self._inputs(args, kwargs)))

    def flat(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Run with inputs in the order of `signature.inputs`; outputs are in that of `signature.outputs`."""
        if len(tensors) != len(self._program.inputs):
            raise UsageError(f"the model takes {len(self._program.inputs)} tensors, not {len(tensors)}")
        return self._run(list(tensors))

    def _inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        given = self._program.arguments
        names = [one.name for one in given]
        found = {**dict(zip(names, args, strict=False)), **kwargs}
        odd = len(args) > sum(one.positional for one in given) or found.keys() != set(names)
        if odd or len(args) + len(kwargs) != len(given):
            said = f"{len(args)} positional arguments" + (f" and {', '.join(kwargs)}" if kwargs else "")
            raise UsageError(f"the model takes {', '.join(names) or 'nothing'}, not {said}")
        flat: list[Any] = [None] * len(self._program.inputs)
        for one in given:
            for at, tensor in leaves_in(one.tree, found[one.name], one.name):
                flat[at] = tensor
        return flat

    def _run(self, inputs: Sequence[Any]) -> list[Any]:
        if not torch.compiler.is_exporting():
            # Raise UsageError for the first input that does not match the signature.
            named: dict[str, tuple[int, str]] = {}
            for value, spec in zip(inputs, self.signature.inputs, strict=True):
                if not isinstance(value, torch.Tensor):
                    raise UsageError(f"{spec.name} must be a tensor, not {type(value).__name__}")
                dtype, wanted = str(value.dtype).removeprefix("torch."), ", ".join(map(str, spec.shape))
                fixed = zip(value.shape, spec.shape, strict=False)
                if (
                    dtype != spec.dtype
                    or len(value.shape) != len(spec.shape)
                    or any(isinstance(size, int) and size != have for have, size in fixed)
                ):
                    raise UsageError(
                        f"{spec.name} is {dtype}{list(value.shape)}; the model takes {spec.dtype}[{wanted}]"
                    )
                for have, size in zip(value.shape, spec.shape, strict=True):
                    if not isinstance(size, int) and named.setdefault(size, (have, spec.name))[0] != have:
                        first, where = named[size]
                        raise UsageError(
                            f"{size} is {first} in {where} and {have} in {spec.name}: both must be equal"
                        )
        device = self.device
        found: dict[str, Any] = dict(zip(self._program.inputs, inputs, strict=True))
        for name, (_, stored) in self._program.tensors.items():
            found[name] = self._tensor(stored)
        for step, operator in self._calls:
            args = [resolved(argument, found, device) for argument in step.args]
            kwargs = {key: resolved(argument, found, device) for key, argument in step.kwargs.items()}
            found[step.name] = operator(*args, **kwargs)
            for name in step.free:
                del found[name]
        return [resolved(output, found, device) for output in self._program.outputs]


def _check_free(owner: nn.Module, name: str, stored: str) -> None:
    """Raise DamagedError for a name that is invalid in a module, or taken."""
    taken = name in owner._modules or name in owner._parameters or name in owner._buffers
    if not name or taken or hasattr(_EMPTY, name):
        raise DamagedError(
            f"the package has a tensor {stored[:100]!r}, which is not a valid name in a module"
        )


_EMPTY = nn.Module()
