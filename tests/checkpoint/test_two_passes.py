"""Loads into live objects: all of it or nothing, however the storage fails, without a second copy."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from epochs import Writing
from meshes import MemoryStorage, Saved, local_part, target
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torchrelay import Job, JobRunner, LocalSession, load_into, max_epochs, save_blobs
from torchrelay.checkpoint.files import load_into as file_loads
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Sharded
from torchrelay.checkpoint.load import objects as epoch_loads
from torchrelay.checkpoint.load import partial as run_loads
from torchrelay.checkpoint.load import tensors as atomic_load
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.load.tensors import Loading, TensorRead
from torchrelay.checkpoint.state.leaf import Leaf, LeafSpec, Role
from torchrelay.checkpoint.state.tensor_memory import Read
from torchrelay.checkpoint.storage.local_io import LocalReadHandle
from torchrelay.errors import DamagedError, PartiallyLoadedError, StorageError
from torchrelay.models.archive import api as archive_loads
from torchrelay.models.archive.api import load_states, save_states

MIB = 1 << 20
SIZES = {"large": 4 * MIB + 123, "even": 2 * MIB, "block": MIB, "none": 0, "small.a": 5, "small.b": 70_000}
OLD = 77


def stored() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return {
        name: torch.randint(0, 50, (size,), generator=made, dtype=torch.uint8) for name, size in SIZES.items()
    }


def live() -> dict[str, torch.Tensor]:
    """Tensors of the same shapes; of one the memory is not contiguous."""
    found = {name: torch.full((size,), OLD, dtype=torch.uint8) for name, size in SIZES.items()}
    found["even"] = torch.full((2 * SIZES["even"],), OLD, dtype=torch.uint8)[::2]
    return found


class Model(torch.nn.Module):
    """The same tensors as buffers of a module."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "_"), tensor)


Load = Callable[[dict[str, torch.Tensor]], object]


def from_file(folder: Path) -> tuple[Load, list[Path], Any]:
    save_blobs(folder / "a", stored())
    return lambda into: load_into(folder / "a", into), [folder / "a"], file_loads


def from_epoch(folder: Path) -> tuple[Load, list[Path], Any]:
    """Three nodes have a part each, in two groups of files."""
    with Writing(folder) as writing:
        leaves = [
            Leaf(name, name, Role.TENSOR, "main" if "a" in name else "other", one)
            for name, one in stored().items()
        ]
        writing.save(1, leaves, 3)
    files = sorted((folder / "data").glob("*/*.safetensors"))
    return lambda into: open_checkpoint(folder, 1).load(into), files, epoch_loads


def from_archive(folder: Path) -> tuple[Load, list[Path], Any]:
    save_states(folder / "a.zip", Model(stored()))
    return lambda into: load_states(folder / "a.zip", Model(into)), [folder / "a.zip"], archive_loads


WAYS = {"file": from_file, "epoch": from_epoch, "archive": from_archive}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Load, list[Path], Any]:
    return WAYS[request.param](tmp_path)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << at % 8]))


def content_at(path: Path, name: str) -> int:
    """Where in a file the last byte of a tensor lies, of which this file has the end; -1 elsewhere."""
    end = stored()[name][-500:].numpy().tobytes()
    found = path.read_bytes().find(end)
    return found + len(end) - 1 if found >= 0 else -1


def test_everything_is_loaded(way: Any) -> None:
    """Tensors of no byte, of some, of a block and of several come into memory in order and out of order."""
    into, expected = live(), stored()
    way[0](into)
    assert all(torch.equal(into[name], expected[name]) for name in expected)


def test_an_archive_makes_no_second_copy_of_what_lies_out_of_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors on a device or not in order are filled piece by piece, not read whole before."""
    load, _, _ = from_archive(tmp_path)
    read: list[str] = []
    real = archive_loads._read
    monkeypatch.setattr(archive_loads, "_read", lambda at, names: (read.extend(names), real(at, names))[1])
    into = live()
    load(into)
    assert read == []
    assert all(torch.equal(into[name], one) for name, one in stored().items())


def test_a_flipped_bit_anywhere_changes_no_object(way: Any) -> None:
    """Also one in the last block of the last tensor of the last file; the tensor is named."""
    load, files, _ = way
    rng, met = random.Random(1), set()
    for path in files:
        size = path.stat().st_size
        ends = {content_at(path, name): name for name in SIZES if SIZES[name] > 500}
        for at in [*ends, *(rng.randrange(size) for _ in range(12))]:
            if at < 0:
                continue
            flip(path, at)
            into = live()
            try:
                load(into)
            except StorageError as error:
                assert not isinstance(error, PartiallyLoadedError)
                assert at not in ends or ends[at] in str(error).replace("_", ".")
                assert all(one.eq(OLD).all() for one in into.values()), (path, at)
                met.add(ends.get(at))
            else:  # padding of a header
                assert at not in ends
                assert all(torch.equal(into[name], one) for name, one in stored().items())
            flip(path, at)
    assert met >= {name for name in SIZES if SIZES[name] > 500}


def cut_off(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


CHANGES: dict[str, Callable[[Path], None]] = {
    "flip": lambda path: flip(path, content_at(path, "large") - 600),
    "cut off": cut_off,
    "empty": lambda path: path.write_bytes(b"") and None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_storage_that_changes_between_the_passes_is_told(
    way: Any, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right when it was verified and wrong when it is read: the error names file, tensor and remedy."""
    load, files, module = way
    (path,) = [one for one in files if content_at(one, "large") > 0]
    monkeypatch.setattr(module, "gate", lambda: CHANGES[change](path))
    with pytest.raises(PartiallyLoadedError) as caught:
        load(live())
    text = str(caught.value)
    assert path.name in text and "between the verification of all bytes and their use" in text
    assert "load them again" in text
    assert change != "flip" or "large" in text


@pytest.mark.parametrize("way", ["file", "epoch"], indirect=True)
@pytest.mark.parametrize("second", [False, True])
def test_a_device_that_fails_is_told_with_the_tensor(
    way: Any, second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first pass nothing has changed; in the second the error says that something may have."""
    load, _, module = way
    failing = [not second]
    real = LocalReadHandle.read_into

    def read_into(self: LocalReadHandle, offset: int, into: memoryview, *, once: bool = False) -> int:
        if failing[0] and len(into) == MIB:
            raise OSError(5, "Input/output error")
        return real(self, offset, into, once=once)

    monkeypatch.setattr(LocalReadHandle, "read_into", read_into)
    monkeypatch.setattr(module, "gate", lambda: failing.__setitem__(0, True))
    into = live()
    kind = PartiallyLoadedError if second else StorageError
    with pytest.raises(kind, match=r"Input/output error.*reading (large|even|block)"):
        load(into)
    assert second or all(one.eq(OLD).all() for one in into.values())


def test_a_run_loads_all_blobs_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_blobs_from_checkpoints`: damage of one blob is raised, and leaves all of them as they were."""
    into = live()
    job = Job("all", blobs={name: into[name].copy_(one) for name, one in stored().items()})
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    session, runner = LocalSession(), JobRunner(job, tmp_path / "run")
    runner.train(session)
    (path,) = (tmp_path / "run" / "checkpoints" / "data").glob("e00000000-*/*.main.safetensors")
    places = {name: content_at(path, name) for name in ("large", "small.b")}
    for name, at in places.items():
        for one in into.values():
            one.fill_(OLD)
        flip(path, at)
        with pytest.raises(DamagedError, match=name):
            runner.load_blobs_from_checkpoints(list(SIZES), 1, session)
        assert all(one.eq(OLD).all() for one in into.values())
        flip(path, at)
    assert runner.load_blobs_from_checkpoints(list(SIZES), 1, session)
    assert all(torch.equal(into[name], one) for name, one in stored().items())
    monkeypatch.setattr(run_loads, "gate", lambda: flip(path, places["large"]))
    with pytest.raises(PartiallyLoadedError, match="between the verification"):
        runner.load_blobs_from_checkpoints(list(SIZES), 1, session)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_dtensor_takes_its_part_of_a_file_all_or_none(tmp_path: Path, dim: int) -> None:
    """Rows and columns of a tensor that a file has whole; with damage the local part stays as it was."""
    whole = torch.rand(1200, 800)
    save_blobs(tmp_path / "a", {"w": whole})
    dist.init_process_group("fake", rank=1, world_size=2)
    try:
        part = whole.chunk(2, dim)[1]
        local = torch.full(part.shape, -1.0)
        mesh = init_device_mesh("cpu", (2,))
        live = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
        flip(tmp_path / "a", (tmp_path / "a").stat().st_size - 3)
        with pytest.raises(DamagedError, match="block 3 of w"):
            load_into(tmp_path / "a", {"w": live})
        assert local.eq(-1).all()
        flip(tmp_path / "a", (tmp_path / "a").stat().st_size - 3)
        load_into(tmp_path / "a", {"w": live})
        assert torch.equal(local, part)
    finally:
        dist.destroy_process_group()


class Far(MemoryStorage):
    """A storage each of whose requests takes its time."""

    request_bytes = MIB


@pytest.mark.parametrize("kind", [MemoryStorage, Far])
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_boxes_of_sharded_tensors_are_loaded_all_or_none(
    kind: type[MemoryStorage], damaged: bool, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns into memory in order and out of it, in small pieces; a far one sends bytes once."""
    monkeypatch.setattr(atomic_load, "PIECE", 100_000)
    monkeypatch.setattr(atomic_load, "AT_ONCE", 250_000)
    wholes = {f"m{n}": torch.rand(1000, 300) for n in range(3)}
    rows = Mesh((0, 1), (2,), (Sharded(0),))
    reader = Saved(wholes, {"m0": rows, "m1": rows, "m2": None}, 2, kind()).run()
    wanted = Mesh((0, 1, 2), (3,), (Sharded(dim),))
    places = {name: target(wanted, one.shape, 1) for name, one in wholes.items()}
    lives = {name: torch.full(one.shape, -1.0) for name, one in places.items()}
    lives["m1"] = torch.full(tuple(reversed(places["m1"].shape)), -1.0).t()
    assert not lives["m1"].is_contiguous()
    specs = {
        name: LeafSpec(name, name, Role.PARAMETER, "main", "tensor", "float32", (1000, 300), 1_200_000)
        for name in wholes
    }
    loading = Loading(
        reader, [TensorRead(Read(name, specs[name], lives[name], places[name]), name) for name in wholes]
    )
    storage = reader.shards.storage
    if damaged:
        path = sorted(path for path in storage.files if path.endswith("safetensors"))[-1]
        storage.files[path][-300_000:] = bytes(300_000)
        with pytest.raises(DamagedError):
            loading.first()
        assert all(one.eq(-1).all() for one in lives.values())
        return
    before = storage.bytes_read
    loading.first()
    assert all(one.eq(-1).all() for one in lives.values())
    between = storage.bytes_read
    loading.second()
    assert (storage.bytes_read == between > before) is (kind is Far)
    for name, whole in wholes.items():
        assert torch.equal(lives[name], local_part(whole, wanted, 1)), name


def test_what_is_verified_and_read_counts_once(tmp_path: Path) -> None:
    """`bytes_read` is what was needed: the second pass takes it from the page cache."""
    _, files, _ = from_epoch(tmp_path)
    ckpt = open_checkpoint(tmp_path, 1)
    result = ckpt.load(live())
    sizes = sum(path.stat().st_size for path in files)
    assert sum(SIZES.values()) <= result.bytes_read <= sizes
    assert ckpt.bytes_read < sizes + 100_000


MEMORY = """
import sys, torch, torchrelay
from pathlib import Path
from bench.memory import ExtraMemory
path = Path(sys.argv[1])
into = {name: torch.zeros(3, 11 << 20) for name in "abc"}
into["b"] = torch.zeros(11 << 20, 3).t()
torchrelay.save_blobs(path, {name: one + 1 for name, one in into.items()})
torchrelay.load_into(path, {"a": into["a"]}, strict=False)
for one in into.values():
    one.zero_()
with ExtraMemory() as extra:
    torchrelay.load_into(path, into)
assert all(one.eq(1).all() for one in into.values())
print(extra.nbytes)
"""


def test_a_load_takes_less_than_64_mib_beyond_its_destinations(tmp_path: Path) -> None:
    """Of 396 MiB, a third of which has no memory in order, by the kernel's count of the process's pages."""
    bench = Path(__file__).resolve().parents[2] / "benchmarks"
    program = f"import sys; sys.path.insert(0, {str(bench)!r})\n{MEMORY}"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a")],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 64 * MIB
