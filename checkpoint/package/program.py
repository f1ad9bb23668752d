"""A program: the steps of a model's forward pass, without the model's class.

It is data: a list of calls of operators of torch (`operators.py`), each with the values of earlier steps and
constants. Nothing of it is Python source, and nothing is unpickled, unlike in a file of `torch.export.save`,
whose loading runs pickles of sample inputs and constants, and evaluates text as expressions of sizes.
`program_module.py` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrelay.checkpoint.format.canonical_json import Fields, Json, check_stamp, stamp
from torchrelay.checkpoint.package import arguments
from torchrelay.checkpoint.package.trees import Tree, check_tree
from torchrelay.errors import DamagedError
from torchrelay.records import dataclass

STATE, CONSTANT = "state", "constant"


@dataclass(frozen=True)
class Step:
    """One call: `name` is what later steps call its value; `free` are values that nobody needs after it."""

    name: str
    operator: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    free: tuple[str, ...] = ()


@dataclass(frozen=True)
class Argument:
    """One argument of the call: its name in `forward`, and how its tensors lie in it."""

    name: str
    tree: Tree
    positional: bool


@dataclass(frozen=True)
class Program:
    """The whole of it.

    `inputs`: names of the tensors that a call brings, in flat order. `tensors`: name within the program to
    (STATE or CONSTANT, stored name). `outputs`: what comes out, flat; `result` puts it together.
    """

    arguments: tuple[Argument, ...]
    inputs: tuple[str, ...]
    tensors: Mapping[str, tuple[str, str]]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    result: Tree

    def to_json(self, encode: Any) -> Json:
        """As JSON has it; `encode` writes one argument."""
        return {
            "format": stamp(),
            "arguments": [
                {"name": one.name, "tree": one.tree, "positional": one.positional} for one in self.arguments
            ],
            "inputs": list(self.inputs),
            "tensors": {name: list(where) for name, where in self.tensors.items()},
            "steps": [
                {
                    "name": step.name,
                    "operator": step.operator,
                    "args": [encode(item) for item in step.args],
                    "kwargs": {key: encode(item) for key, item in step.kwargs.items()},
                }
                for step in self.steps
            ],
            "outputs": [encode(item) for item in self.outputs],
            "result": self.result,
        }


def program_from_json(json: Json, what: str) -> Program:
    """Back, every reference checked; raises DamagedError, FormatError. Operators are looked up later."""
    if not isinstance(json, dict):
        raise DamagedError(f"{what}: no program")
    check_stamp(json.get("format"), what=what)
    fields = Fields(json, what)
    inputs = fields.texts("inputs")
    tensors = {name: _where(where, what) for name, where in fields.fields("tensors").values.items()}
    known = {*inputs, *tensors}
    if len(known) != len(inputs) + len(tensors):
        raise DamagedError(f"{what}: inputs and tensors share a name")
    steps = []
    for step in fields.each("steps", _step):
        _check_known(step.args, known, what)
        _check_known(list(step.kwargs.values()), known, what)
        if step.name in known:
            raise DamagedError(f"{what}: {step.name!r} stands twice")
        known.add(step.name)
        steps.append(step)
    outputs = tuple(arguments.decode(item) for item in fields.items("outputs"))
    _check_known(outputs, known, what)
    given = fields.each("arguments", _argument)
    for one in given:
        check_tree(one.tree, len(inputs))
    check_tree(json.get("result"), len(outputs))
    return Program(given, inputs, tensors, _freeing(steps, outputs), outputs, json["result"])


def _where(where: Json, what: str) -> tuple[str, str]:
    match where:
        case [("state" | "constant") as kind, str(name)]:
            return kind, name
    raise DamagedError(f"{what}: a tensor lies at {str(where)[:100]}")


def _argument(fields: Fields) -> Argument:
    return Argument(fields.text("name"), fields.values.get("tree"), fields.flag("positional"))


def _step(fields: Fields) -> Step:
    args = tuple(arguments.decode(item) for item in fields.items("args"))
    kwargs = {key: arguments.decode(item) for key, item in fields.fields("kwargs").values.items()}
    return Step(fields.text("name"), fields.text("operator"), args, kwargs)


def _check_known(found: Any, known: set[str], what: str) -> None:
    for name in arguments.names_in(list(found)):
        if name not in known:
            raise DamagedError(f"{what}: a step uses {name[:100]!r}, which no step before it makes")


def _freeing(steps: list[Step], outputs: tuple[Any, ...]) -> tuple[Step, ...]:
    """The steps, each with the values of steps that it is the last to need."""
    made = {step.name for step in steps}
    needed = set(arguments.names_in(list(outputs)))
    found: list[Step] = []
    for step in reversed(steps):
        used = {step.name, *arguments.names_in([*step.args, *step.kwargs.values()])} & made
        free = tuple(sorted(used - needed))
        needed |= used
        found.append(Step(step.name, step.operator, step.args, step.kwargs, free))
    return tuple(reversed(found))
