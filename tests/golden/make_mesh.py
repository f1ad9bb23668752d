"""Makes `manifest_mesh_rule2.json` and `stored_boxes*.json`: sharded leaves, frozen.

The manifest has a leaf on a mesh, one on two sub-meshes, and an alias; the tables say who stores which
boxes of a leaf by rules 1 and 2. To change one is to change the format. `manifest_mesh_v1.json` was written
when there was rule 1 alone.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest, ShardRow
from torchrelay.checkpoint.format.mesh import Mesh, placements_json
from torchrelay.checkpoint.format.mesh_geometry import Placement, Replicated, Sharded
from torchrelay.checkpoint.format.position import Facts, Position
from torchrelay.checkpoint.log.view import LeaseInfo
from torchrelay.checkpoint.save.assignments import NodeClass
from torchrelay.checkpoint.save.commit import compose, world_of
from torchrelay.checkpoint.save.plan import plan_classes
from torchrelay.checkpoint.state.leaf import LeafSpec, Role
from torchrelay.jobs.cluster import NodePlace

HERE = Path(__file__).parent
R = Replicated()
CASES: list[tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...], int]] = [
    ((4,), (Sharded(0),), (10, 3), 4),
    ((4,), (Sharded(0),), (2,), 4),
    ((2, 2), (Sharded(0, 2), Sharded(0)), (10, 3), 4),
    ((2, 2), (R, Sharded(1)), (6, 4), 4),
    ((2, 2), (R, Sharded(1)), (1025, 1024), 4),
    ((3,), (R,), (1, 1 << 20), 8),
    ((2, 2, 2), (R, Sharded(0), Sharded(1)), (7, 5, 3), 2),
    ((2,), (R,), (), 8),
    ((2,), (Sharded(0),), (0, 4), 8),
]
OF_RULE_2 = [
    *CASES,
    ((5,), (R,), (3, 1 << 20), 1),
    ((5,), (R,), (7, 1 << 18), 2),
    ((2, 3), (R, Sharded(0)), (12, 1 << 18), 4),
    ((3, 2, 2), (R, Sharded(0, 2), Sharded(0)), (16, 1 << 18), 4),
]


def box_rows(rule: int) -> list[dict[str, Any]]:
    """Who stores which boxes by a rule."""
    rows = []
    for number, (extents, placements, shape, item_bytes) in enumerate(CASES if rule == 1 else OF_RULE_2):
        name = f"model.w{number}"
        mesh = Mesh(tuple(range(math.prod(extents))), extents, placements, rule)
        stored = [[node, [list(side) for side in box]] for node, box in mesh.stored(name, shape, item_bytes)]
        rows.append(
            {
                "name": name, "shape": list(shape), "item_bytes": item_bytes, "mesh": list(extents),
                "placements": placements_json(placements), "stored": stored,
            }
        )  # fmt: skip
    return rows


def _leaf(name: str, mesh: Mesh, alias: str | None = None) -> LeafSpec:
    return LeafSpec(name, "model", Role.PARAMETER, "main", "tensor", "float32", (10, 3), 120, alias, mesh)


def manifest() -> Manifest:
    """Four nodes: `model.all` over all of them, `model.pair` over two pairs."""
    grid = Mesh((0, 1, 2, 3), (2, 2), (Sharded(0, 2), Sharded(0)))
    classes = [
        NodeClass(
            pair,
            (
                _leaf("model.all", grid),
                _leaf("model.tied", grid, "model.all"),
                _leaf("model.pair", Mesh(pair, (2,), (Sharded(1),))),
            ),
        )
        for pair in ((0, 1), (2, 3))
    ]
    places = [NodePlace(f"trainer_{rank}", rank, 4, "gpu0", 0) for rank in range(4)]
    written = LeaseInfo("golden", "0" * 32, 0, 0), Position(1), "e00000001-0123456789ab"
    shards = [ShardRow(node, "main", 1, 9000 + node, 4096, f"{node:02x}" * 32) for node in range(4)]
    return compose(plan_classes(classes), *written, world_of(places), shards, {}, Facts())


if __name__ == "__main__":
    (HERE / "manifest_mesh_rule2.json").write_bytes(codec.encode(manifest()))
    for rule, name in ((1, "stored_boxes.json"), (2, "stored_boxes_rule2.json")):
        text = ",\n".join(json.dumps(row) for row in box_rows(rule))
        (HERE / name).write_text(f"[\n{text}\n]\n")
