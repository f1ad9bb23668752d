"""Trains with optimizer state in a wrapper subclass, and plain parameters: DIRECTORY EPOCHS.

Registered are, one run after the other, the optimizer, an object around it, one that shows what to load
into, and an optimizer of which a copy cannot step, by itself and so shown. Of each a line of JSON is printed.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import torchrelay
from torchrelay import Job, JobRunner, max_epochs
from torchrelay.errors import RelayError

aten = torch.ops.aten


class State8(torch.Tensor):
    """Codes of eight bits and a scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.signed, self.shape]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> State8:
        return cls(inner["codes"], inner["scale"], context[0])

    def value(self) -> torch.Tensor:
        """What it stands for."""
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            copied = State8(func(args[0].codes), func(args[0].scale), args[0].signed)
            return return_and_correct_aliasing(func, args, kwargs or {}, copied)
        return func(*[one.value() if isinstance(one, State8) else one for one in args], **(kwargs or {}))


class Momentum8(torch.optim.Optimizer):
    """SGD whose momentum has eight bits, and noise from the random stream."""

    def __init__(self, params: Any, closed: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.steps, self.closed = 0, closed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step; where asked for, only with a closure."""
        if self.closed:
            closure()
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["m"] = new_state(parameter)
                moment = state["m"].value() * 0.9 + parameter.grad + torch.rand(()) * 1e-3
                state["m"].scale.fill_(float(moment.abs().max()) / 127 + 1e-12)
                state["m"].codes.copy_((moment / state["m"].scale).round())
                state["step"] += 1
                parameter.sub_(group["lr"] * moment)


def new_state(parameter: torch.Tensor) -> State8:
    """The state that a first step makes."""
    return State8(torch.zeros_like(parameter, dtype=torch.int8), torch.ones(()), True)


class Around:
    """An object that stands for an optimizer which is registered nowhere."""

    def __init__(self, optimizer: Momentum8) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The optimizer's."""
        self.optimizer.load_state_dict(state)


class Showing(Around):
    """Shows what its state will be, as the refusal of the others says."""

    def state_dict_to_load_into(self) -> dict[str, Any]:
        """A state dict with the tensors that a first step makes."""
        state = self.optimizer.state_dict()
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        made = {number: {"m": new_state(one)} for number, one in enumerate(parameters)}
        return {**state, "state": state["state"] or made}


def run(directory: str, epochs: int, how: str) -> str:
    """Train; what is left of it as JSON, or the error."""
    torchrelay.seed(0)
    model = nn.Linear(4, 2)
    optimizer = Momentum8(model.parameters(), closed=how in ("closed", "advised"))
    kind: Any = {"around": Around, "showing": Showing, "advised": Showing}.get(how)
    job = Job("eight bits", blobs={"model": model, "optimizer": kind(optimizer) if kind else optimizer})

    @job.epoch
    def train(ctx: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step(lambda: None)

    job.stop_when(max_epochs(epochs))
    try:
        JobRunner(job, f"{directory}/{how}", best=None, code=False).train()
    except RelayError as error:
        return str(error)
    return json.dumps([optimizer.steps, [one.tolist() for one in model.parameters()]])


for registered in ("optimizer", "around", "showing", "closed", "advised"):
    print(json.dumps([registered, run(sys.argv[1], int(sys.argv[2]), registered)]))
    gc.collect()  # the next run must not find the optimizer of this one
