"""Makes `manifest_v1.json`, the frozen manifest that every later version must read.

It has all that a manifest can have: split, replicated, per-node and per-host leaves, an alias, two node
classes, a value of every place, references to an earlier try of another world, two parts of a shard.
Run it only for a new format version, under a new name: `python tests/golden/make_manifest.py > ...`; with
`frozen` it makes `manifest_frozen.json`, with `learning` `manifest_learning.json`, with `ordered`
`manifest_ordered.json`, with `order_changed` `manifest_order_changed.json`, with `on_devices`
`manifest_devices.json`, with `shared` `manifest_shared.json`.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import BlobRow, Manifest, ShardRow
from torchrelay.checkpoint.format.position import Facts, Position
from torchrelay.checkpoint.log.view import LeaseInfo
from torchrelay.checkpoint.save.assignments import NodeClass
from torchrelay.checkpoint.save.commit import compose, world_of
from torchrelay.checkpoint.save.plan import plan_classes, with_references
from torchrelay.checkpoint.state.leaf import LeafSpec, Role
from torchrelay.jobs.cluster import NodePlace


def spec(name: str, role: Role, count: int = 0, group: str = "main", alias: str | None = None) -> LeafSpec:
    blob = name.split(".", maxsplit=1)[0]
    if role is Role.VALUE:
        return LeafSpec(name, blob, role, group, "value", None, (), 12, alias)
    return LeafSpec(name, blob, role, group, "tensor", "float32", (count, 1024), count * 4096, alias)


def shard(node: int, group: str, part: int = 1, nbytes: int = 9_000_000) -> ShardRow:
    return ShardRow(node, group, part, nbytes + node, 4096, f"{node:02x}{part:02x}" * 16)


def earlier() -> Manifest:
    leaves = (spec("model.frozen", Role.PARAMETER, 512), spec("lora", Role.VALUE))
    places = [NodePlace("trainer_0", 0, 2), NodePlace("helper:0", 1, 2)]
    plan = plan_classes([NodeClass((0, 1), leaves)], cut=1 << 20)
    written = LeaseInfo("golden", "0" * 32, 0, 5), Position(3), "e00000003-abcdef"
    return compose(
        plan, *written, world_of(places), [shard(0, "main"), shard(1, "main")], {"lora": 1}, Facts()
    )


def manifest() -> Manifest:
    common = (
        spec("model.body", Role.PARAMETER, 1000),
        spec("model.tied", Role.PARAMETER, 1000, alias="model.body"),
        spec("model.mean", Role.BUFFER, 2),
        spec("optim.moment", Role.OPTIMIZER, 1000, "optim"),
        spec("total", Role.VALUE),
        spec("mine", Role.VALUE),
        spec("ours", Role.VALUE),
    )
    stages = (spec("stage.a", Role.PARAMETER, 1), spec("stage.b", Role.PARAMETER, 1))
    classes = [NodeClass((0, 1, 2), (*common, stages[0])), NodeClass((3,), (*common, stages[1]))]
    plan = plan_classes(classes, scopes={"mine": "rank", "ours": "host"}, hosts=[0, 0, 1, 1])
    places = [NodePlace(f"trainer_{rank}", rank, 4, f"gpu{rank // 2}", rank // 2) for rank in range(4)]
    facts = Facts(
        metrics={"train/loss": 0.125, "val/acc": float("nan")},
        stop={"max_epochs": {"stop": False, "reason": ""}},
        total_steps=1200,
        elapsed_secs=12.5,
        seed=2**60,
        run_id="hello-1",
    )
    shards = [shard(node, group) for node in range(4) for group in ("main", "optim")] + [shard(2, "main", 2)]
    written = LeaseInfo("golden", "0" * 32, 1, 9), Position(3, 1200), "e00000003s001200-0123456789ab"
    made = compose(plan, *written, world_of(places), shards, {"total": 100}, facts)
    blobs = sorted((*made.blobs, BlobRow("empty", "stateful", "replicated")), key=lambda blob: blob.name)
    made = replace(made, blobs=tuple(blobs), extra={"later": {"kept": True}})
    return with_references(made, earlier(), ["lora", "model.frozen"])


def frozen() -> Manifest:
    """The same, where it is known which parameters have a gradient: `manifest_frozen.json`."""
    made = manifest()
    names = ("model.body", "model.tied")
    leaves = [
        leaf._replace(frozen=leaf.name in names) if leaf.role == "parameter" else leaf for leaf in made.leaves
    ]
    return replace(made, leaves=tuple(leaves))


def learning() -> Manifest:
    """The same, where its buffers are tensors and one of them has a gradient: `manifest_learning.json`."""
    made = frozen()
    leaves = [
        leaf._replace(role="tensor", frozen=leaf.name != "model.mean") if leaf.role == "buffer" else leaf
        for leaf in made.leaves
    ]
    return replace(made, leaves=tuple(leaves))


def ordered() -> Manifest:
    """The same, where two matrices lie transposed in memory: `manifest_ordered.json`."""
    made = learning()
    names = [leaf.name for leaf in made.leaves if leaf.kind == "tensor" and len(leaf.shape) == 2][:2]
    leaves = [leaf._replace(order=(1, 0)) if leaf.name in names else leaf for leaf in made.leaves]
    return replace(made, leaves=tuple(leaves))


def order_changed() -> Manifest:
    """The same, where two matrices were built in another order: `manifest_order_changed.json`."""
    made = ordered()
    names = [leaf.name for leaf in made.leaves if leaf.kind == "tensor" and len(leaf.shape) == 2][1:3]
    return replace(made, leaves=tuple(x._replace(order_changed=x.name in names) for x in made.leaves))


def on_devices() -> Manifest:
    """The same, where what a program holds lay on two GPUs of each process: `manifest_devices.json`."""
    made = order_changed()
    held = [leaf.name for leaf in made.leaves if leaf.role in ("parameter", "tensor")]
    devices = {name: "cuda:1" if number == 1 else "cuda" for number, name in enumerate(held)}
    return replace(made, leaves=tuple(one._replace(device=devices.get(one.name)) for one in made.leaves))


def shared() -> Manifest:
    """The same, where a moment of the optimizer is a layer of the model: `manifest_shared.json`."""
    made = on_devices()
    leaves = [x._replace(same_as="model.body") if x.name == "optim.moment" else x for x in made.leaves]
    return replace(made, leaves=tuple(leaves))


if __name__ == "__main__":
    kinds = {one.__name__: one for one in (frozen, learning, ordered, order_changed, on_devices, shared)}
    which = kinds.get(sys.argv[-1], manifest)
    sys.stdout.buffer.write(codec.encode(which()))
