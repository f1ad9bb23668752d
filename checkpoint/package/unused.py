"""Inputs that no answer depends on, such as the labels of a batch, left out of a program. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchrelay.checkpoint.package.arguments import names_in
from torchrelay.checkpoint.package.program import Program
from torchrelay.checkpoint.package.trees import Tree
from torchrelay.jobs.runtime import TensorSpec


def without_unused(program: Program, specs: Sequence[TensorSpec]) -> tuple[Program, tuple[TensorSpec, ...]]:
    """The program and its inputs (`specs`, in their order) without those that no step and no output uses.

    Sequences get shorter, dicts lose keys; an argument of nothing else goes too.
    """
    used = set(names_in(list(program.outputs)))
    for step in program.steps:
        used.update(names_in([*step.args, *step.kwargs.values()]))
    kept = [at for at, name in enumerate(program.inputs) if name in used]
    numbers = {at: number for number, at in enumerate(kept)}
    arguments = tuple(
        replace(one, tree=tree) for one in program.arguments if (tree := _kept(one.tree, numbers)) is not None
    )
    inputs = tuple(program.inputs[at] for at in kept)
    return replace(program, arguments=arguments, inputs=inputs), tuple(specs[at] for at in kept)


def _kept(tree: Tree, numbers: Mapping[int, int]) -> Tree | None:
    """The tree of the leaves that stay, renumbered; None where none of its leaves does."""
    match tree:
        case {"leaf": at}:
            return {"leaf": numbers[at]} if at in numbers else None
        case {"dict": pairs}:
            found = [[key, one] for key, item in pairs if (one := _kept(item, numbers)) is not None]
            return {"dict": found} if found or not pairs else None
        case {"list": items} | {"tuple": items}:
            inside = [one for item in items if (one := _kept(item, numbers)) is not None]
            return {next(iter(tree)): inside} if inside or not items else None
    return tree
