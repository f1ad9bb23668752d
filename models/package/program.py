"""Programs: the steps of a model's forward pass as data, without the model's class.

A program is a list of calls of torch operators, whose arguments are values of earlier steps and constants. It
contains no Python source and nothing is unpickled, unlike files of `torch.export.save`, which contain pickles
and evaluate text as expressions of sizes. `program_module.py` runs it.

- Arguments of a step: `{"at": name}` is the value of a step or input. `{"layout": ...}` and
  `{"memory_format": ...}` are torch's. `{"device": ...}` is the model's device when the program was made, and
  means its current device. Other constants are typed values (`format/values.py`).
- Structure of arguments and results: `{"leaf": 0}` is the first tensor; `{"list": [...]}`,
  `{"tuple": [...]}` and `{"dict": [[key, tree], ...]}` contain others; `{"value": ...}` is a constant. A
  named tuple is stored as a tuple.
- Operators: all of torch's `aten` library except those that access files or trust their arguments with
  memory, and a fixed table of arithmetic with sizes.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.format.canonical_json import Fields, check_stamp, stamp
from torchrelay.errors import BlobError, DamagedError, FormatError, UsageError
from torchrelay.records import Json, dataclass

LAYOUTS = {"strided": torch.strided}
MEMORY_FORMATS = {
    name: getattr(torch, name)
    for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}


@dataclass(frozen=True)
class Ref:
    """Reference to the value of a step or input."""

    name: str


@dataclass(frozen=True)
class ProgramDevice:
    """The device when the program was made."""

    text: str


def encode(value: Any) -> Json:
    """Encode an argument as JSON; raises BlobError for unsupported values."""
    if isinstance(value, Ref):
        return {"at": value.name}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, table in (("layout", LAYOUTS), ("memory_format", MEMORY_FORMATS)):
        for name, known in table.items():
            if value is known:
                return {kind: name}
    return values.encode(value, "an argument")


def decode(json: Json) -> Any:
    """Decode an argument, with `Ref` and `ProgramDevice`; raises DamagedError, FormatError."""
    if isinstance(json, list):
        return [decode(item) for item in json]
    if not isinstance(json, dict):
        return json
    match json:
        case {"at": str(name)}:
            return Ref(name)
        case {"device": str(text)}:
            return ProgramDevice(text)
        case {"layout": str(name)} if name in LAYOUTS:
            return LAYOUTS[name]
        case {"memory_format": str(name)} if name in MEMORY_FORMATS:
            return MEMORY_FORMATS[name]
        case {"$": str(), "v": _}:
            return values.decode(json)
    raise DamagedError(f"invalid argument of a step: {str(json)[:100]}")


def resolved(argument: Any, found: Mapping[str, Any], device: torch.device) -> Any:
    """Replace references in an argument with the values of this call."""
    if isinstance(argument, Ref):
        return found[argument.name]
    if isinstance(argument, list):
        return [resolved(item, found, device) for item in argument]
    return device if isinstance(argument, ProgramDevice) else argument


def names_in(argument: Any) -> list[str]:
    """Return the names of steps and inputs that an argument refers to."""
    return [leaf.name for leaf in pytree.tree_leaves(argument) if isinstance(leaf, Ref)]


Tree = Json
_DEPTH = 32


def tree_of(
    value: Any, is_leaf: Callable[[Any], bool], what: str, first: int = 0
) -> tuple[Tree, list[tuple[str, Any]]]:
    """Return the tree of a value, with leaves counted from `first` on, and the leaves with their names."""
    leaves: list[tuple[str, Any]] = []

    def inside(name: str, key: int | str) -> str:
        return f"{name}_{key}" if name else str(key)

    def walk(one: Any, name: str, depth: int) -> Tree:
        if depth > _DEPTH:
            raise BlobError(f"{what} is nested deeper than {_DEPTH} levels")
        if is_leaf(one):
            leaves.append((name, one))
            return {"leaf": first + len(leaves) - 1}
        if isinstance(one, (list, tuple)):
            kind = "list" if isinstance(one, list) else "tuple"
            return {kind: [walk(item, inside(name, at), depth + 1) for at, item in enumerate(one)]}
        if isinstance(one, Mapping):
            if not all(type(key) is str for key in one):
                raise BlobError(f"{name} is a dict with keys other than strings")
            return {"dict": [[key, walk(item, inside(name, key), depth + 1)] for key, item in one.items()]}
        return {"value": values.encode(one, name)}

    return walk(value, what, 0), leaves


def built(tree: Tree, leaves: Sequence[Any], depth: int = 0) -> Any:
    """Build the value of a tree with these leaves; raises DamagedError for anything but a tree."""
    if depth <= _DEPTH:
        match tree:
            case {"leaf": int(at)} if 0 <= at < len(leaves):
                return leaves[at]
            case {"list": [*items]}:
                return [built(item, leaves, depth + 1) for item in items]
            case {"tuple": [*items]}:
                return tuple(built(item, leaves, depth + 1) for item in items)
            case {"dict": [*pairs]} if all(type(pair) is list and len(pair) == 2 for pair in pairs):
                if all(type(key) is str for key, _ in pairs):
                    return {key: built(item, leaves, depth + 1) for key, item in pairs}
            case {"value": json}:
                return values.decode(json)
    raise DamagedError(f"invalid description of a call: {str(tree)[:100]}")


def leaves_in(tree: Tree, value: Any, what: str) -> Iterator[tuple[int, Any]]:
    """Return the leaves of a value by number; raises UsageError if it does not have the tree's structure."""
    match tree:
        case {"leaf": int(at)}:
            yield at, value
        case {"list": [*items]} | {"tuple": [*items]}:
            if not isinstance(value, (list, tuple)) or len(value) != len(items):
                raise UsageError(f"{what} must be a sequence of {len(items)}, not {_shown(value)}")
            for number, (item, inside) in enumerate(zip(items, value, strict=True)):
                yield from leaves_in(item, inside, f"{what}[{number}]")
        case {"dict": [*pairs]}:
            keys = [key for key, _ in pairs]
            if not isinstance(value, Mapping) or set(value) != set(keys):
                raise UsageError(f"{what} must be a dict of {', '.join(keys)}, not {_shown(value)}")
            for key, item in pairs:
                yield from leaves_in(item, value[key], f"{what}[{key!r}]")
        case {"value": json}:
            if values.encode(value, what) != json:
                raise UsageError(
                    f"{what} was {values.decode(json)!r} when the program was made, which fixed it; "
                    f"it cannot be {_shown(value)} now"
                )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"[:200]
    return (
        f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else repr(value)[:80]
    )


STATE, CONSTANT = "state", "constant"


@dataclass(frozen=True)
class ProgramStep:
    """One call; `name` is the name of its value, `free` are values that are not needed after it."""

    name: str
    operator: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    free: tuple[str, ...] = ()


@dataclass(frozen=True)
class Argument:
    """One argument of the call: its name in `forward` and its structure."""

    name: str
    tree: Tree
    positional: bool


@dataclass(frozen=True)
class PackagedProgram:
    """A program.

    `inputs`: names of the input tensors in flat order. `tensors`: names within the program to (STATE or
    CONSTANT, stored name). `outputs`: flat outputs; `result` is their structure.
    """

    arguments: tuple[Argument, ...]
    inputs: tuple[str, ...]
    tensors: Mapping[str, tuple[str, str]]
    steps: tuple[ProgramStep, ...]
    outputs: tuple[Any, ...]
    result: Tree

    def to_json(self) -> Json:
        """Return the JSON form."""
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


def program_from_json(json: Json, what: str) -> PackagedProgram:
    """Parse the JSON form and check all references, but not operators; DamagedError, FormatError."""
    if not isinstance(json, dict):
        raise DamagedError(f"{what}: not a program")
    check_stamp(json.get("format"), what=what)
    fields = Fields(json, what)
    inputs = fields.texts("inputs")
    tensors: dict[str, tuple[str, str]] = {}
    for name, where in fields.fields("tensors").values.items():
        match where:
            case [("state" | "constant") as kind, str(stored)]:
                tensors[name] = kind, stored
            case _:
                raise DamagedError(f"{what}: invalid location of a tensor: {str(where)[:100]}")
    known = {*inputs, *tensors}
    if len(known) != len(inputs) + len(tensors):
        raise DamagedError(f"{what}: inputs and tensors share a name")
    steps = []
    for step in fields.each("steps", _step):
        _check_known(step.args, known, what)
        _check_known(list(step.kwargs.values()), known, what)
        if step.name in known:
            raise DamagedError(f"{what}: two steps are called {step.name!r}")
        known.add(step.name)
        steps.append(step)
    outputs = tuple(decode(item) for item in fields.items("outputs"))
    _check_known(outputs, known, what)
    given = fields.each(
        "arguments", lambda one: Argument(one.text("name"), one.values.get("tree"), one.flag("positional"))
    )
    for one in given:
        built(one.tree, range(len(inputs)))
    built(json.get("result"), range(len(outputs)))
    # Add to each step the values that it is the last one to use.
    made = {step.name for step in steps}
    needed = set(names_in(list(outputs)))
    found: list[ProgramStep] = []
    for step in reversed(steps):
        used = {step.name, *names_in([*step.args, *step.kwargs.values()])} & made
        free = tuple(sorted(used - needed))
        needed |= used
        found.append(ProgramStep(step.name, step.operator, step.args, step.kwargs, free))
    return PackagedProgram(given, inputs, tensors, tuple(reversed(found)), outputs, json["result"])


def _step(fields: Fields) -> ProgramStep:
    args = tuple(decode(item) for item in fields.items("args"))
    kwargs = {key: decode(item) for key, item in fields.fields("kwargs").values.items()}
    return ProgramStep(fields.text("name"), fields.text("operator"), args, kwargs)


def _check_known(found: Any, known: set[str], what: str) -> None:
    for name in names_in(list(found)):
        if name not in known:
            raise DamagedError(f"{what}: a step uses {name[:100]!r}, which no earlier step defines")


_ATEN = re.compile(r"aten\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)")
_NEVER = re.compile(
    r"from_file|save|print|_print|warn|format|set|set_|set_data|.*storage.*|_?nested.*|.*_unsafe|_reshape_alias"
    r"|.*_with_dims.*|sparse_resize.*|_?coalesced_?|_?(ccol_|crow_|col_|row_)?indices(_copy)?"
    r"|_convert_indices.*|_ctc_loss.*|ctc_loss.*|.*max_pool.*_backward|.*embedding.*_backward.*"
)
"""Files, foreign memory, constructors that skip the checks of what they are given, ways to change the indices
of sparse tensors after these were checked, and what torch 2.13 does not check: it writes where indices say.
"""

_PLAIN: dict[str, Callable[..., Any]] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (operator, "add sub mul floordiv truediv mod neg pow getitem eq ne lt le gt ge and_ or_ not_"),
        (math, "ceil floor trunc sqrt"),
        (torch, "sym_max sym_min sym_not sym_int sym_float sym_ite sym_sum"),
    )
    for name in names.split()
}
_PLAIN["round"] = round
_NAMES = {id(function): name for name, function in _PLAIN.items()}


def name_of(target: Any) -> str | None:
    """Return the stored name of an operator; None if programs do not support it."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target) if _aten(str(target)) is target else None
    return _NAMES.get(id(target))


def operator_of(name: str) -> Callable[..., Any]:
    """Return the operator of a stored name; raises FormatError for any other name."""
    found = _PLAIN.get(name) or _aten(name)
    if found is None:
        raise FormatError(f"the program uses {name[:100]!r}, which programs do not support")
    return found


def _aten(name: str) -> Callable[..., Any] | None:
    matched = _ATEN.fullmatch(name)
    if matched is None or _NEVER.fullmatch(matched[1]):
        return None
    packet = getattr(torch.ops.aten, matched[1], None)
    found = getattr(packet, matched[2], None) if isinstance(packet, torch._ops.OpOverloadPacket) else None
    if not isinstance(found, torch._ops.OpOverload) or not torch._C._dispatch_has_kernel(found.name()):
        return None  # not a tensor operator, but one of TorchScript, which can access files
    trusts = any(argument.name == "unsafe" for argument in found._schema.arguments)
    return None if trusts else found
