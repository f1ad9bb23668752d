"""S14 to S16 of the ancestor's cases: chunks, narrower storage with size estimates, every n-th step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from given_entries import ShardEntry, entries_of

from torchrelay import (
    Job,
    JobRunner,
    LocalSession,
    estimate_bytes,
    load_blobs,
    max_epochs,
    open_checkpoint,
    save_blobs,
)
from torchrelay.checkpoint.format.dtypes import BLOCK, SIZE
from torchrelay.checkpoint.format.names import Whole
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.format.shard.header import ShardIdentity, ShardLimits, cut
from torchrelay.checkpoint.format.shard.reader import read_header
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import UsageError


@pytest.mark.parametrize("elements", [0, 1, 1234, 1_000_010])
def test_s14_a_tensor_has_as_many_blocks_as_its_bytes_need(tmp_path: Path, elements: int) -> None:
    """Ours are digest blocks of 1 MiB: ceil(bytes / 1 MiB) of them, of each tensor, none for no bytes."""
    path = tmp_path / "one"
    save_blobs(path, {"x": torch.zeros(elements)})
    entry = read_header(LocalStorage(tmp_path), path.name).entries["x"]
    assert len(entry.digests) // SIZE == math.ceil(elements * 4 / BLOCK)


def test_s14_many_tensors_are_cut_into_parts_of_a_size() -> None:
    """1234 tensors at 32 to a file are 39 parts; a tensor larger than a part has one for itself."""
    identity = ShardIdentity("job", Position(1), "node", "main", "e00000001-abcdef")
    entries = [ShardEntry(Whole(f"t{i:04d}"), "float32", (8,), memoryview(bytes(32))) for i in range(1234)]
    parts = cut(
        identity, entries_of(entries), {}, {}, ShardLimits(data_bytes=32 * 32 + 1, header_bytes=1 << 20)
    )
    assert len(parts) == 39
    large = ShardEntry(Whole("large"), "float32", (1000,), memoryview(bytes(4000)))
    limits = ShardLimits(data_bytes=65, header_bytes=1 << 20)
    parts = cut(identity, entries_of([*entries[:3], large]), {}, {}, limits)
    assert max(len(part.entries) for part in parts) == 2
    assert [len(part.entries) for part in parts if "large" in part.entries.keys] == [1]


def test_s15_narrower_storage_of_some(tmp_path: Path) -> None:
    """bf16 storage of some blobs: less than 0.6 of the size, values to 2 decimals, neighbours bit-exact."""
    torch.manual_seed(0)
    blobs = {"wide": torch.rand(100_000), "exact": torch.randn(100), "count": torch.arange(9)}
    save_blobs(tmp_path / "full", blobs)
    save_blobs(tmp_path / "half", blobs, dtype={"wide": torch.bfloat16})
    assert (tmp_path / "half").stat().st_size < 0.6 * (tmp_path / "full").stat().st_size
    found = load_blobs(tmp_path / "half")
    assert found["wide"].dtype is torch.bfloat16
    assert torch.allclose(found["wide"].float(), blobs["wide"], atol=5e-3)
    assert torch.equal(found["exact"], blobs["exact"])
    assert torch.equal(found["count"], blobs["count"])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, {"model": torch.float16}])
def test_s15_the_size_is_known_beforehand(tmp_path: Path, dtype: object) -> None:
    """The estimate is the exact size of the file, ties and values included."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 70), torch.nn.Linear(70, 300))
    model[1].weight = torch.nn.Parameter(model[0].weight.detach().T)
    blobs = {"model": model, "again": model[0].weight, "classes": ["cat", "dog"], "x": torch.zeros(1000)}
    expected = estimate_bytes(blobs, dtype=dtype)
    save_blobs(tmp_path / "file", blobs, dtype=dtype)
    assert (tmp_path / "file").stat().st_size == expected


def test_s15_an_odd_type_is_refused(tmp_path: Path) -> None:
    """Types by pattern are floating-point types, too."""
    with pytest.raises(UsageError, match=r"int8.*floating-point"):
        save_blobs(tmp_path / "file", {"x": torch.ones(1)}, dtype={"x": torch.int8})


def counting_job(epochs: int) -> Job:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = Job("counting", blobs=dict(model=model, optimizer=optimizer))

    @job.epoch
    def train(ctx):
        model(torch.ones(2)).sum().backward()
        optimizer.step()

    job.stop_when(max_epochs(epochs))
    return job


def tries(run: Path) -> list[int]:
    return sorted(int(one.name[1:9]) for one in (run / "checkpoints/data").iterdir())


def test_s16_every_tenth_is_kept(tmp_path: Path) -> None:
    """keep_every=10 over 35 epochs keeps 10, 20, 30, the first state, and the newest for resuming."""
    with LocalSession() as session:
        JobRunner(counting_job(35), tmp_path / "run", keep_last=1, keep_every=10).train(session)
    assert tries(tmp_path / "run") == [0, 10, 20, 30, 35]
    assert open_checkpoint(tmp_path / "run", 20).position == Position(20)


def test_old_epochs_lose_their_optimizer(tmp_path: Path) -> None:
    """keep_optimizer_last=2: older epochs are loadable, are not resumed from, and have no optimizer files."""
    run = tmp_path / "run"
    with LocalSession() as session:
        JobRunner(counting_job(5), run, keep_last=4, keep_optimizer_last=2).train(session)
    assert tries(run) == [2, 3, 4, 5]
    files = sorted(one.parent.name[1:9] for one in (run / "checkpoints/data").glob("*/*.optim.safetensors"))
    assert files == ["00000004", "00000005"]
    old = open_checkpoint(run, 3)
    assert not old.entry.resumable
    assert len(old.load_tensors("model")) == 2
    with pytest.raises(UsageError, match="retention deleted"):
        old.load_tensors("optimizer")
    with pytest.raises(UsageError, match="retention deleted"):
        old["optimizer.state.model.weight.momentum_buffer"]
    with LocalSession() as session, pytest.raises(UsageError, match="cannot be resumed from"):
        JobRunner(counting_job(6), run, resume_from_epoch=3).train(session)
    with LocalSession() as session:
        runner = JobRunner(counting_job(6), run, keep_last=4, keep_optimizer_last=2)
        assert runner.train(session, resume_from_epoch=4) == 6


def test_a_retired_optimizer_does_not_hide_a_weights_only_job(tmp_path: Path) -> None:
    """Epochs that have no optimizer at all stay whole."""
    model = torch.nn.Linear(2, 1)
    job = Job("plain", blobs=dict(model=model))
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(3))
    with LocalSession() as session:
        JobRunner(job, tmp_path / "run", keep_optimizer_last=1).train(session)
    assert all(open_checkpoint(tmp_path / "run", epoch).entry.resumable for epoch in range(4))


@pytest.mark.parametrize("name", ["keep_last", "keep_every", "keep_optimizer_last"])
@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2"])
def test_keeping_counts_from_one(tmp_path: Path, name: str, count: object) -> None:
    """Odd numbers are refused by name before anything is made, as is retention without a directory."""
    with pytest.raises(UsageError, match=name):
        JobRunner(counting_job(1), tmp_path / "run", **{name: count})
    with pytest.raises(UsageError, match=name):
        JobRunner(counting_job(1), None, **{name: 2})
    assert not (tmp_path / "run").exists()
