"""What 2 ranks replicate is divided between them on disk; read with safetensors and from the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exact_story import StoryOf
from safetensors import safe_open

from torchrelay import open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]


def stored_bytes(files: list[Path], prefix: str) -> int:
    """Bytes of the tensors, or pieces of them, whose key begins with `prefix`."""
    found = 0
    for path in files:
        with safe_open(path, "pt") as file:
            found += sum(file.get_tensor(key).nbytes for key in list(file.keys()) if key.startswith(prefix))
    return found


def test_both_ranks_write_bytes_of_the_replicated_parameters(story_of: StoryOf) -> None:
    """Each of 2 ranks writes half of the parameters and of the optimizer state, and nothing twice."""
    run = story_of(2).folder / "large"
    for prefix, copies in (("model.", 1), ("optimizer.state.", 2)):
        whole = copies * (1024 * 1024 + 1024) * 4
        shares = [
            stored_bytes(list(run.glob(f"checkpoints/data/*/trainer_{rank}.1.*.safetensors")), prefix)
            for rank in (0, 1)
        ]
        assert abs(shares[0] - shares[1]) <= 1 << 20, "cuts are at multiples of 1 MiB"
        assert whole <= sum(shares) <= whole + 16, "step counts are 4 bytes each"


def test_the_manifest_says_who_wrote_what(story_of: StoryOf) -> None:
    """The pieces of a split parameter name both nodes, lie in their files, and together are the tensor."""
    run = story_of(2).folder / "large"
    checkpoint = open_checkpoint(run, epoch=1)
    manifest = checkpoint.manifest
    (row,) = manifest.rows["model.weight"]
    leaf = manifest.leaves[row]
    pieces = manifest.layouts[leaf.layout].pieces(row, leaf.elements)
    assert leaf.scope == "replicated" and {piece.node for piece in pieces} == {0, 1}
    stored = []
    for piece in pieces:
        (path,) = run.glob(f"checkpoints/data/*/trainer_{piece.node}.1.main.safetensors")
        with safe_open(path, "pt") as file:
            stored.append(file.get_tensor(f"model.weight@flat[{piece.first}:{piece.last}]"))
    weight = checkpoint.load_tensors("model.weight")["model.weight"]
    assert weight.shape == (1024, 1024)
    assert torch.cat(stored).equal(weight.reshape(-1))
