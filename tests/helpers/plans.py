"""What tests ask of planning and geometry in one call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torchrelay.checkpoint.format.mesh_geometry import Bounds, Placement, local_intervals
from torchrelay.checkpoint.save.assignments import NodeClass
from torchrelay.checkpoint.save.plan import SavePlan, plan_classes
from torchrelay.checkpoint.state.leaf import LeafSpec


def plan_replicas(specs: Sequence[LeafSpec], nodes: int, **inputs: Any) -> SavePlan:
    """Plan a save of `nodes` nodes that all have the leaves `specs`; see `plan_classes` for the rest."""
    return plan_classes([NodeClass(tuple(range(nodes)), tuple(specs))], **inputs)


def local_boxes(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[Bounds]:
    """The boxes at a coordinate of the mesh, in the row-major order of the local tensor."""
    per_dim = [local_intervals(size, dim, mesh, coordinate, placements) for dim, size in enumerate(shape)]
    return [tuple(box) for box in itertools.product(*per_dim)]
