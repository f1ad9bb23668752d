"""A checkpoint in a dict: leaves as bytes and JSON text, and back, through the real flatten and restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrelay.checkpoint.format import canonical_json, dtypes
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import LeafSpec, Value, spec_of
from torchrelay.checkpoint.state.restore.findings import RestoreOptions
from torchrelay.checkpoint.state.restore.restoration import Restoration, restoration


@dataclass(frozen=True)
class Saved:
    """What an epoch would hold."""

    specs: Mapping[str, LeafSpec]
    tensors: Mapping[str, bytes]
    texts: Mapping[str, bytes]

    @property
    def values(self) -> dict[str, Any]:
        return {name: canonical_json.loads(text, what=name) for name, text in self.texts.items()}

    @property
    def content(self) -> dict[str, bytes]:
        """Everything by leaf name, to compare states bit by bit."""
        return {**self.tensors, **self.texts}

    def only(self, *blobs: str) -> Saved:
        """The leaves of some blobs, as a partial load sees them."""
        specs = {name: spec for name, spec in self.specs.items() if spec.blob in blobs}
        return Saved(specs, self.tensors, self.texts)


def save(objects: Mapping[str, Any]) -> Saved:
    leaves = [(leaf, spec_of(leaf)) for leaf in leaves_of(objects)]
    stored = [leaf for leaf, _ in leaves if leaf.alias_of is None]
    tensors = [leaf for leaf in stored if not isinstance(leaf.content, Value)]
    texts = [leaf for leaf in stored if isinstance(leaf.content, Value)]
    return Saved(
        {spec.name: spec for _, spec in leaves},
        {leaf.name: bytes(dtypes.stored_bytes(leaf.content, leaf.name)) for leaf in tensors},
        {leaf.name: canonical_json.dumps(leaf.content.json) for leaf in texts},
    )


def plan(saved: Saved, objects: Mapping[str, Any], **options: Any) -> Restoration:
    same = {"same_content": lambda one, other: saved.tensors[one] == saved.tensors[other], **options}
    return restoration(objects, saved.specs, saved.values, RestoreOptions(**same))


def load(saved: Saved, objects: Mapping[str, Any], **options: Any) -> dict[str, object]:
    """Restore, reading every leaf once per destination; returns what was created."""
    found = plan(saved, objects, **options)
    for read in found.reads:
        memory = dtypes.memory_of(read.memory())
        memory[:] = saved.tensors[read.leaf]
    return found.finish()
