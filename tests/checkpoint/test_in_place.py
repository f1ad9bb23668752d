"""Loads that look at columns do what those do that look at every tensor: the same bytes, results, errors."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from epochs import Writing, parameter, tensor, value
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay import load_into, open_checkpoint, save_blobs
from torchrelay.checkpoint.files import load_into as from_files
from torchrelay.checkpoint.format.dtypes import BLOCK
from torchrelay.checkpoint.format.shard import reads
from torchrelay.checkpoint.format.shard.entries import form_of
from torchrelay.checkpoint.load import objects as from_epochs
from torchrelay.checkpoint.state.tensor_memory import NOTHING, fitting
from torchrelay.errors import BlobError, RelayError

NAMES = ["a", "b", "c.x", "c.y", "d", "d-e", "f_2"]
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.complex128, torch.uint8]
SHAPES = [(), (0,), (3,), (2, 0), (5, 7), (300, 2), (BLOCK // 4 + 1,)]


def content(number, dtype, shape):
    count = int(torch.Size(shape).numel())
    return (torch.arange(count) * 7 + number).reshape(shape).to(dtype)


@st.composite
def stored(draw):
    """Blobs as they are saved: tensors, parameters, a value, two names of one tensor."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    return {
        name: content(number, draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES)))
        for number, name in enumerate(names)
    }


def _strided(like):
    return torch.zeros((*like.shape, 2), dtype=like.dtype)[..., 0]


def _other_shape(like):
    return torch.zeros((*like.shape, 1), dtype=like.dtype)


def _other_type(like):
    return torch.zeros(like.shape, dtype=torch.int16)


def _conjugated(like):
    return torch.zeros(like.shape, dtype=like.dtype).conj()


def _parameter(like):
    return torch.nn.Parameter(torch.zeros_like(like), requires_grad=False)


LIVE = st.sampled_from(
    [torch.zeros_like] * 12 + [_strided, _other_shape, _other_type, _conjugated, _parameter, lambda like: 3]
)


@st.composite
def live(draw, blobs):
    """What is given to load into: mostly what fits, in another order, with a name too much or too few."""
    chosen = draw(st.lists(st.sampled_from(sorted(blobs)), min_size=1, unique=True))
    makers = {name: draw(LIVE) for name in chosen}
    extra = draw(st.sampled_from([None] * 4 + ["more", chosen[0]]))
    twice = draw(st.sampled_from([None] * 4 + sorted(blobs)))

    def make():
        found = {name: makers[name](blobs[name]) for name in chosen}
        if extra == "more":
            found["more"] = torch.zeros(3)
        if twice is not None:
            found[twice] = found[chosen[0]]
        return found

    return make


def outcome(make, load):
    """Errors and results, and the bytes of all objects afterwards."""
    objects = make()
    try:
        result = load(objects)
        told = (sorted(result.loaded), result.missing, result.unexpected, result.bytes_read)
    except (RelayError, KeyError) as error:
        told = (type(error), str(error))
    return told, {
        name: one.detach().resolve_conj().reshape(-1).tolist()
        for name, one in objects.items()
        if isinstance(one, torch.Tensor) and one.numel() < 1000
    }


@contextmanager
def one_by_one():
    with pytest.MonkeyPatch.context() as patch:
        for module in (from_files, from_epochs):
            patch.setattr(module, "fitting", lambda *args: NOTHING)
        yield


def compare(make, load):
    quick = outcome(make, load)
    with one_by_one():
        assert quick == outcome(make, load)
    return quick


@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.sampled_from(["full", "headers"]))
def test_files_load_as_if_each_tensor_were_looked_at(data, atomic, strict, verify):
    """Whatever fits or does not, by columns a blob file gives what it gives one by one."""
    blobs = data.draw(stored())
    saved = {**blobs, **({"v": [1, blobs[next(iter(blobs))]]} if data.draw(st.booleans()) else {})}
    if data.draw(st.booleans()):
        saved["tied"] = blobs[next(iter(blobs))]
    make = data.draw(live(blobs))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blobs"
        save_blobs(path, saved)
        compare(make, lambda into: load_into(path, into, strict=strict, atomic=atomic, verify=verify))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.integers(1, 3))
def test_epochs_load_as_if_each_tensor_were_looked_at(data, atomic, strict, nodes):
    """The same of epochs, of one node or of several that share the writing."""
    blobs = data.draw(stored())
    make = data.draw(live(blobs))
    kinds = {name: data.draw(st.sampled_from([tensor, parameter])) for name in blobs}
    with tempfile.TemporaryDirectory() as folder, Writing(Path(folder)) as run:
        leaves = [kinds[name](name, one) for name, one in blobs.items()]
        run.save(1, [*leaves, value("v", 3)], nodes=nodes)

        def load(into):
            return open_checkpoint(folder, 1).load(into, strict=strict, atomic=atomic)

        compare(make, load)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_tensor_given_under_a_blob_s_name_and_a_leaf_s(atomic):
    """Whether one of the two is read by columns or not: other bytes of both are refused by name."""
    with tempfile.TemporaryDirectory() as folder, Writing(Path(folder)) as run:
        run.save(1, [tensor("a", torch.zeros(())), tensor("c.x", torch.ones(())), value("v", 3)])
        for names in (("a", "c.x"), ("c.x", "a")):
            live = torch.full((), 5.0)
            with pytest.raises(BlobError, match="one tensor here and two in the checkpoint"):
                open_checkpoint(folder, 1).load(dict.fromkeys(names, live), strict=False, atomic=atomic)
            assert live == 5


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("at", [0, 1, 299, 300, 599])
def test_a_changed_byte_of_any_small_entry_is_named(tmp_path, at, atomic):
    """Among hundreds that are read with one call the damaged one is found; atomic loads change nothing."""
    blobs = {f"t.{number:03}": torch.full((100,), float(number)) for number in range(600)}
    path = tmp_path / "blobs"
    save_blobs(path, blobs)
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + at * 400 + 7] ^= 1
    path.write_bytes(data)
    (told, seen) = compare(
        lambda: {name: torch.zeros(100) for name in blobs}, lambda into: load_into(path, into, atomic=atomic)
    )
    assert f"block 0 of t.{at:03}, at byte {start + at * 400} of the file" in told[1]
    assert not atomic or not any(map(any, seen.values()))


def test_a_file_that_ends_early_names_the_entry(tmp_path):
    """Where the bytes end between the check of the size and the read, the error says in which entry."""
    path = tmp_path / "blobs"
    save_blobs(path, {f"t.{number}": torch.ones(100) for number in range(9)})
    file = from_files.open_blob_file(path)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(RelayError, match=r"ends inside of t\.7"):
        file.fill_memories([f"t.{number}" for number in range(9)], [bytearray(400) for _ in range(9)])


def test_what_is_usual_is_in_place_and_read_with_few_calls(tmp_path, monkeypatch):
    """The quick way is taken: without this, the comparisons above would compare nothing."""
    calls = []
    read = reads.EntryBatch.read
    monkeypatch.setattr(
        reads.EntryBatch,
        "read",
        lambda self, *args, **options: [calls.append(self), read(self, *args, **options)],
    )
    blobs = {f"t.{number}": torch.randn(30) for number in range(1000)}
    save_blobs(tmp_path / "blobs", blobs)
    into = {name: torch.zeros(30) for name in blobs}
    load_into(tmp_path / "blobs", into)
    assert all(torch.equal(into[name], one) for name, one in blobs.items())
    assert len(calls) == 2
    names = list(blobs)
    found = fitting(into, names, [form_of("float32", (30,))] * 1000)
    assert list(found.tensors) == names


def test_one_tensor_under_two_names_is_refused(tmp_path):
    """Two leaves that fit one live tensor are no usual case: it cannot hold both."""
    save_blobs(tmp_path / "blobs", {"a": torch.zeros(3), "b": torch.ones(3), "c": torch.ones(3)})

    def make():
        one = torch.zeros(3)
        return {"a": one, "b": one, "c": torch.zeros(3)}

    told, _ = compare(make, lambda into: load_into(tmp_path / "blobs", into))
    assert "one tensor here and two in the checkpoint" in told[1]
