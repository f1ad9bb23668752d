"""Epochs that were written once stay readable: by this reader, and by what docs/format.md says alone."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from torchrelay import open_checkpoint

FROZEN = Path(__file__).resolve().parent.parent / "golden/epochs_v1"
STEP = torch.arange(6.0).reshape(2, 3)


def test_every_frozen_epoch_is_read() -> None:
    """State after init, epoch 1, epoch 2 and the one that a rewind abandoned: proved, and what they were."""
    for epoch, counted in ((0, 0), (1, 1), (2, 2), ("2,branch=0", 2)):
        ckpt = open_checkpoint(FROZEN, epoch=epoch)
        assert torch.equal(ckpt.load_tensors("weights")["weights"], counted * STEP)
        for rank in (0, 1):
            (own,) = ckpt.load_tensors(f"trainer_{rank}:own").values()
            assert own.tolist() == [10.0 * rank + counted] * 2
        assert ckpt.value("words") == {"à": [1, 2.5, None]}
        assert ckpt.metrics == ({"val/acc": counted / 4} if counted else {})


def unsealed(data: bytes, key: str) -> Any:
    """The body of a sealed file, by the page: the digest is that of its bytes as they lie there."""
    found = re.fullmatch(rb'\{"%s":(.*),"sha256":"([0-9a-f]{64})"\}' % key.encode(), data, re.DOTALL)
    assert found and hashlib.sha256(found[1]).hexdigest() == found[2].decode()
    return json.loads(found[1])


def test_the_page_is_enough_to_read_them() -> None:
    """From the newest slot of the log to a tensor: json, hashlib, safetensors, nothing of torchrelay."""
    slots = sorted((FROZEN / "log").glob("[0-9]*.json"))
    records = [unsealed(slot.read_bytes(), "record") for slot in slots]
    assert [one["slot"] for one in records] == list(range(len(slots)))
    for before, record in zip(slots, records[1:], strict=False):
        assert record["previous_sha256"] == hashlib.sha256(before.read_bytes()).hexdigest()
    newest = records[-1]
    job = unsealed((FROZEN / "job.json").read_bytes(), "job")
    assert newest["released"] and newest["job"] == job["uuid"] and job["name"] == "frozen"
    (entry,) = (one for one in newest["live"] if (one["branch"], one["epoch"]) == (newest["branch"], 2))
    data = (FROZEN / "data" / entry["try"] / "manifest.json").read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (
        entry["manifest_bytes"],
        entry["manifest_sha256"],
    )
    manifest = json.loads(data)
    assert manifest["position"] == {"epoch": 2, "step": 0} and manifest["tries"] == [entry["try"]]
    for node, size in zip(("trainer_0", "trainer_1"), manifest["shards"]["bytes"], strict=True):
        path = FROZEN / "data" / entry["try"] / f"{node}.2.main.safetensors"
        assert path.stat().st_size == size
        with safe_open(path, "pt") as shard:
            assert torch.equal(shard.get_tensor("own"), torch.full((2,), 10.0 * int(node[-1]) + 2))
            if "weights" in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                assert torch.equal(shard.get_tensor("weights"), 2 * STEP)
