"""Makes `manifest_referring_rule2.json`: the epoch after that of `manifest_mesh_v1.json`, frozen.

It refers to a sharded leaf and its alias there, stores a tensor that wraps two others, and says which
leaves were left out. That epoch was written when there was rule 1 alone, this one by rule 2;
`manifest_referring_v1.json` is the same by rule 1. Run it only for a new format version, under a new name.
"""

from __future__ import annotations

from pathlib import Path

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest, ShardRow
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Sharded
from torchrelay.checkpoint.format.position import Facts, Position, Selection
from torchrelay.checkpoint.log.view import LeaseInfo
from torchrelay.checkpoint.save.assignments import NodeClass
from torchrelay.checkpoint.save.commit import compose, world_of
from torchrelay.checkpoint.save.plan import plan_classes, with_references
from torchrelay.checkpoint.state.leaf import LeafSpec, Role, Value
from torchrelay.jobs.cluster import NodePlace

HERE = Path(__file__).parent
REFERENCED = ("model.all", "model.tied")
WRAPPER = {
    "class": "package.Scaled",
    "context": "dict('bits': 8)",
    "dtype": "float32",
    "inner": ["data", "scale"],
    "shape": [6, 4],
}


def earlier() -> Manifest:
    """The epoch that is referred to."""
    return codec.decode((HERE / "manifest_mesh_v1.json").read_bytes())


def _wrapper() -> tuple[LeafSpec, ...]:
    return (
        LeafSpec("model.q", "model", Role.SUBCLASS, "main", "value", None, (), Value(WRAPPER).nbytes),
        LeafSpec("model.q.data", "model", Role.PARAMETER, "main", "tensor", "int8", (6, 4), 24),
        LeafSpec("model.q.scale", "model", Role.PARAMETER, "main", "tensor", "float32", (6, 1), 24),
    )


def manifest() -> Manifest:
    """Four nodes; `model.pair` is written again over two pairs of them."""
    classes = [
        NodeClass(
            pair,
            (
                LeafSpec(
                    "model.pair", "model", Role.PARAMETER, "main", "tensor", "float32", (10, 3), 120, None,
                    Mesh(pair, (2,), (Sharded(1),)),
                ),
                *_wrapper(),
            ),
        )
        for pair in ((0, 1), (2, 3))
    ]  # fmt: skip
    places = [NodePlace(f"trainer_{rank}", rank, 4, "gpu0", 0) for rank in range(4)]
    written = LeaseInfo("golden", "0" * 32, 0, 0), Position(2), "e00000002-0123456789ab"
    shards = [ShardRow(node, "main", 1, 8500 + node, 4096, f"{16 + node:02x}" * 32) for node in range(4)]
    facts = Facts(selection=Selection(None, ("optimizer*",)))
    plan = plan_classes(classes, referenced=REFERENCED)
    made = compose(plan, *written, world_of(places), shards, {"model.q": WRAPPER}, facts)
    return with_references(made, earlier(), REFERENCED, for_all=True)


if __name__ == "__main__":
    (HERE / "manifest_referring_rule2.json").write_bytes(codec.encode(manifest()))
