"""Random pairs of meshes: what the one wrote, the other reads back bit for bit."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from meshes import Saved, load, local_part, random_mesh, random_shape, target

from torchrelay.checkpoint.format.mesh import Mesh

PAIRS = 10
"""Pairs of one save: as many leaves, each read by another mesh."""
DTYPES = (torch.float32, torch.bfloat16, torch.complex128, torch.bool, torch.int64)


@dataclass(frozen=True)
class Unlike:
    """A pair that came back other than it was; `written` None is a tensor that every node had whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    written: Mesh | None
    read: Mesh


def unlike_pairs(rng: random.Random, *, large: bool) -> list[Unlike]:
    """Save `PAIRS` random tensors on random meshes and read each on another: those that came back unlike.

    Every read happens twice: whole, and as the parts of every node of the other mesh.
    """
    wholes = {f"m.{number}": _whole(rng, large) for number in range(PAIRS)}
    meshes = {
        name: None if rng.random() < 0.1 else random_mesh(rng, whole.shape) for name, whole in wholes.items()
    }
    world = max((max(mesh.nodes) + 1 for mesh in meshes.values() if mesh is not None), default=3)
    reader = Saved(wholes, meshes, world).run()
    found = []
    for name, whole in wholes.items():
        other = random_mesh(rng, whole.shape)
        parts = (
            (load(reader, name, whole, target(other, whole.shape, node)), local_part(whole, other, node))
            for node in other.nodes
        )
        pairs = [(load(reader, name, whole, None), whole), *parts]
        if not all(torch.equal(read, wanted) for read, wanted in pairs):
            found.append(Unlike(tuple(whole.shape), whole.dtype, meshes[name], other))
    return found


def _whole(rng: random.Random, large: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    numbers = torch.randint(0, 1 << 30, random_shape(rng, large=large), generator=generator)
    return numbers.to(rng.choice(DTYPES))
