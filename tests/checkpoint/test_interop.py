"""Epochs out to other formats and back in: nothing lost, nothing trusted, nothing half."""

from __future__ import annotations

import json
import struct
import warnings
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from epochs import Writing, moment, parameter, tensor, value
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from torchrelay import DcpReader, export_checkpoint, import_checkpoint, open_checkpoint
from torchrelay.checkpoint.format.dtypes import _NATIVE, _RAW
from torchrelay.errors import BlobError, DamagedError, FormatError, RelayError, StorageError, UsageError

WIDE = torch.arange(2 * 600_000, dtype=torch.float32).reshape(2, 600_000)
SMALL = torch.randn(40, 7).to(torch.bfloat16)
FORMATS = ["safetensors", "hf", "torch", "dcp"]


@pytest.fixture
def run(tmp_path):
    """Epoch 3 of two nodes; `own` is each one's, everything else is shared between both."""
    leaves = [
        parameter("model.wide", WIDE),
        parameter("model.small", SMALL),
        parameter("model.tied", SMALL, alias_of="model.small"),
        parameter("model.scalar", torch.tensor(3.0)),
        parameter("model.empty", torch.empty(0, 3)),
        moment("optimizer.m", torch.ones(4)),
        value("total", 7),
    ]
    nodes = [[*leaves, tensor("own", torch.full((2,), float(rank)))] for rank in range(2)]
    with Writing(tmp_path / "run/checkpoints") as writing:
        writing.save(3, nodes, 2, scopes={"own": "rank"})
    return tmp_path / "run"


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert found[name].dtype == one.dtype
        assert torch.equal(found[name], one), name


def load_dcp(state, reader, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, no_dist=True, **options)


@pytest.mark.parametrize("form", FORMATS)
def test_there_and_back(run, tmp_path, form):
    """What was exported and imported again is bit for bit what it was; ties stay ties where they can."""
    done = export_checkpoint(run, tmp_path / "out", 3, to=form, blobs=["model", "total"], shard_bytes=1 << 20)
    assert done.tensors == 5
    import_checkpoint(tmp_path / "out", tmp_path / "in", format=form, blob=None, trust=True)
    found = open_checkpoint(tmp_path / "in")
    same(found.load_tensors("model"), open_checkpoint(run).load_tensors("model"))
    assert form == "dcp" or sum(leaf.alias_of is not None for leaf in found.leaves) == 1
    if form in ("torch", "dcp"):
        assert found.value("total") == 7
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("names", [list(_NATIVE), [*_RAW, "uint8"]], ids=["native", "raw"])
def test_all_element_types(tmp_path, form, names):
    """Every type that a format has comes back; others, sub-byte types and the like, are refused by name."""
    kinds = {name: getattr(torch, name) for name in names if hasattr(torch, name)}
    leaves = []
    for name, dtype in kinds.items():
        size = {**_RAW, **{one: size for one, (_, size) in _NATIVE.items()}}[name]
        raw = torch.arange(3 * size, dtype=torch.uint8) % 2
        leaves.append(tensor(f"t.{name}", raw.view(dtype)))
    with Writing(tmp_path / "run") as writing:
        writing.save(1, leaves)
    here = []
    for leaf in leaves:
        one = tmp_path / f"one.{leaf.name}"
        try:
            export_checkpoint(tmp_path / "run", one, to=form, blobs=leaf.name)
            here.append(leaf.name)
        except BlobError as error:
            assert leaf.name in str(error)
            assert not one.exists()
    must = kinds if "float32" in kinds else ["complex128", "complex32"] if form in ("torch", "dcp") else []
    assert set(here) >= {f"t.{name}" for name in [*must, "uint8"]}
    export_checkpoint(tmp_path / "run", tmp_path / "out", to=form, blobs=here)
    import_checkpoint(tmp_path / "out", tmp_path / "in", format=form, blob=None, trust=True)
    found, wanted = (open_checkpoint(tmp_path / one).load_tensors(here) for one in ("in", "run"))
    for name, one in wanted.items():
        assert found[name].dtype == one.dtype
        assert torch.equal(found[name].view(torch.uint8), one.view(torch.uint8)), name


def test_the_safetensors_library_reads_exports(run, tmp_path):
    """One file, names without their prefix, half as wide, read by the reference reader."""
    done = export_checkpoint(
        run, tmp_path / "m.safetensors", blobs="model", prefix="model.", dtype={"wide": torch.bfloat16}
    )
    assert done.left_out == ()
    found = load_file(tmp_path / "m.safetensors")
    assert set(found) - {"small", "tied"} == {"wide", "scalar", "empty"}
    assert torch.equal(found["wide"], WIDE.bfloat16())


def test_an_index_leads_to_every_tensor(run, tmp_path):
    """A directory of several files has Hugging Face's index; each file is within its size or one tensor."""
    export_checkpoint(run, tmp_path / "hf", to="hf", blobs="model", shard_bytes=2000)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    wanted = open_checkpoint(run).load_tensors("model")
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, "pt") as shard:
            assert torch.equal(shard.get_tensor(name), wanted[name])
    assert index["metadata"]["total_size"] == sum(wanted[name].nbytes for name in index["weight_map"])


def test_torch_load_reads_exports_with_ties(run, tmp_path):
    """The restricted unpickler reads our file, and tied names are one storage."""
    export_checkpoint(run, tmp_path / "m.pt", to="torch", blobs=["model", "total"])
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert found["total"] == 7
    assert found["model.small"].data_ptr() == found["model.tied"].data_ptr()
    assert torch.equal(found["model.wide"], WIDE)


def test_of_tied_names_the_one_that_the_module_has_first_is_written(tmp_path):
    """The order of the alphabet does not matter: libraries look for the owner, and know the other by it."""
    weight = torch.ones(4, 2)
    tied = [parameter("lm.embed", weight), parameter("lm.a_head", weight, alias_of="lm.embed")]
    with Writing(tmp_path / "run/checkpoints") as writing:
        writing.save(1, tied)
    export_checkpoint(tmp_path / "run", tmp_path / "hf", to="hf", prefix="lm.")
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        assert (list(file.keys()), file.metadata()["a_head"]) == (["embed"], "embed")


@pytest.mark.parametrize("blobs", [None, "own", ["model", "own"], "*"])
def test_no_tensor_with_several_values_is_left_out(run, tmp_path, blobs):
    """An export that would have to choose between nodes is refused with `nodes=`, which takes one's."""
    with pytest.raises(
        UsageError, match=r"'own' has a different value on each of 2 nodes.*nodes='trainer_0'"
    ):
        export_checkpoint(run, tmp_path / "m.pt", to="torch", blobs=blobs)
    done = export_checkpoint(run, tmp_path / "m.pt", to="torch", blobs=blobs, nodes="trainer_1")
    assert done.nodes == {"own": "trainer_1"}
    assert torch.load(tmp_path / "m.pt", weights_only=True)["own"].tolist() == [1.0, 1.0]
    with pytest.raises(UsageError, match="nodes='trainer_7': no such node"):
        export_checkpoint(run, tmp_path / "n.pt", to="torch", blobs=blobs, nodes="trainer_7")


def test_values_that_differ_between_nodes_are_named_as_left_out(tmp_path):
    """Formats of tensors leave values out anyway: an export of all says which, and needs no node."""
    nodes = [[parameter("model.w", SMALL), value("seen", rank)] for rank in range(2)]
    with Writing(tmp_path / "run/checkpoints") as writing:
        writing.save(1, nodes, 2, scopes={"seen": "rank"})
    assert export_checkpoint(tmp_path / "run", tmp_path / "m.pt", to="torch").left_out == ("seen",)
    done = export_checkpoint(tmp_path / "run", tmp_path / "n.pt", to="torch", nodes={"seen": "trainer_1"})
    assert (done.left_out, done.nodes) == ((), {"seen": "trainer_1"})


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_an_optimizer_without_state_goes_out(tmp_path, form):
    """The settings of an optimizer that has no file of its own (SGD without momentum) are exported, too."""
    with Writing(tmp_path / "run/checkpoints") as writing:
        writing.save(1, [parameter("model.w", torch.ones(2)), value("optimizer.lr", 0.1, "optim")])
    exported = export_checkpoint(tmp_path / "run", tmp_path / "out", to=form)
    assert (exported.values, list(exported.left_out)) == (1, [])


def test_dcp_reads_exports_and_epochs(run, tmp_path):
    """dcp.load gives the same from an exported directory and, by DcpReader, from the epoch itself."""
    export_checkpoint(run, tmp_path / "dcp", to="dcp", blobs=["model", "total"])
    for reader in (dcp.FileSystemReader(tmp_path / "dcp"), DcpReader(run, 3)):
        state = {"model": {"wide": torch.zeros_like(WIDE), "small": torch.zeros_like(SMALL)}, "total": 0}
        load_dcp(state, reader)
        assert torch.equal(state["model"]["wide"], WIDE)
        assert torch.equal(state["model"]["small"], SMALL)
        assert state["total"] == 7


def test_dcp_loads_into_a_model(tmp_path):
    """A model's state dict is filled in place; rename changes names, a node's own are addressed."""
    model, other = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    leaves = [parameter(f"model.{name}", one.detach()) for name, one in model.named_parameters()]
    with Writing(tmp_path / "run") as writing:
        nodes = [[*leaves, tensor("own", torch.full((2,), float(rank)))] for rank in range(2)]
        writing.save(1, nodes, 2, scopes={"own": "rank"})
    state = {"net": other.state_dict(), "trainer_1:own": torch.zeros(2)}
    load_dcp(state, DcpReader(tmp_path / "run", rename={"model": "net"}))
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)
    assert state["trainer_1:own"].tolist() == [1, 1]


def test_dcp_wraps_our_errors(run):
    """A name that is not there, and damage, are errors of dcp.load that name the thing."""
    with pytest.raises(CheckpointException, match="nothing"):
        load_dcp({"nothing": torch.zeros(1)}, DcpReader(run))
    reader = DcpReader(run)
    for path in (run / "checkpoints/data").glob("*/*.main.safetensors"):
        data = bytearray(path.read_bytes())
        data[-3000] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointException, match="is damaged"):
        load_dcp({"model": {"wide": torch.zeros_like(WIDE), "small": torch.zeros_like(SMALL)}}, reader)


def test_a_training_script_comes_in(tmp_path):
    """Model, optimizer and numbers of a usual torch.save: the model loads, the rest is as it was."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "name": "x"},
        tmp_path / "ckpt.pt",
    )
    import_checkpoint(tmp_path / "ckpt.pt", tmp_path / "in", format="torch")
    ckpt = open_checkpoint(tmp_path / "in")
    other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    ckpt.load({"model": other})
    same(other.state_dict(), model.state_dict())
    again = torch.optim.Adam(other.parameters())
    again.load_state_dict(ckpt.value("optimizer"))
    moments = again.state_dict()["state"][0], optimizer.state_dict()["state"][0]
    assert all(torch.equal(moments[0][key], moments[1][key]) for key in moments[1])
    assert (ckpt.value("epoch"), ckpt.value("name")) == (3, "x")


def test_a_bare_state_dict_comes_in(tmp_path):
    """A flat state dict becomes the blob that was named, views and shared weights included."""
    weight = torch.randn(4, 4)
    torch.save(OrderedDict(a=weight, b=weight, c=weight.t(), d=weight[:2]), tmp_path / "w.pt")
    import_checkpoint(tmp_path / "w.pt", tmp_path / "in", format="torch", blob="net")
    found = open_checkpoint(tmp_path / "in").load_tensors("net")
    same(found, {"net.a": weight, "net.b": weight, "net.c": weight.t(), "net.d": weight[:2]})


def test_files_of_the_safetensors_library_come_in(tmp_path):
    """What the reference writer wrote, aligned or not, is read."""
    content = {"a": torch.randn(3).to(torch.float16), "b": torch.arange(5), "c.d": torch.tensor(True)}
    save_file(content, tmp_path / "x.safetensors", metadata={"format": "pt"})
    import_checkpoint(tmp_path / "x.safetensors", tmp_path / "in", format="safetensors", blob="net")
    same(
        open_checkpoint(tmp_path / "in").load_tensors("net"),
        {f"net.{name}": one for name, one in content.items()},
    )


@pytest.mark.parametrize("form", FORMATS)
def test_a_taken_name_is_never_replaced(run, tmp_path, form):
    """An existing file is replaced only where that was said, a directory never."""
    taken = tmp_path / "taken"
    if form in ("hf", "dcp"):
        taken.mkdir()
        (taken / "precious").write_text("x")
        with pytest.raises(UsageError, match="exists already"):
            export_checkpoint(run, taken, to=form, overwrite=True)
        return
    taken.write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        export_checkpoint(run, taken, to=form)
    assert taken.read_text() == "precious"
    export_checkpoint(run, taken, to=form, overwrite=True, nodes="trainer_0")
    assert taken.stat().st_size > WIDE.nbytes


@pytest.mark.parametrize("form", FORMATS)
def test_damage_leaves_nothing_behind(run, tmp_path, form):
    """A block that is damaged ends the export by one error, and no file is there."""
    (path,) = (run / "checkpoints/data").glob("*/trainer_1*.main.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="epoch 3"):
        export_checkpoint(run, tmp_path / "out", to=form, blobs=["model", "trainer_1:own"])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run"]


class Evil:
    """What a hostile pickle would call."""

    def __reduce__(self):
        return (Path.touch, (Path("pwned"),))


def hostile_torch(path):
    torch.save({"a": torch.ones(3), "evil": Evil()}, path)


def cut_torch(path):
    torch.save({"a": torch.ones(3000)}, path)
    path.write_bytes(path.read_bytes()[:5000])


def header(path, said, data=b""):
    text = json.dumps(said).encode() if not isinstance(said, bytes) else said
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


HOSTILE = {
    "torch": [
        hostile_torch,
        cut_torch,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"PK\x03\x04nonsense"),
        lambda path: torch.save([1, 2], path),
        lambda path: torch.save({}, path),
        lambda path: torch.save({1: torch.ones(1)}, path),
        lambda path: torch.save({"a": torch.ones(2).to_sparse()}, path),
        lambda path: torch.save({"": torch.ones(2)}, path),
        lambda path: torch.save({"f": Fraction(1, 2), "a": torch.ones(2)}, path),
    ],
    "safetensors": [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff" * 100),
        lambda path: header(path, []),
        lambda path: header(path, {}),
        lambda path: header(path, b"{nonsense"),
        lambda path: header(path, b'{"a":1,"a":2}'),
        lambda path: header(path, {"a": 1}),
        lambda path: header(path, {"a": entry()}, b"1234"),
        lambda path: header(path, {"a": entry(dtype="Q9")}, bytes(8)),
        lambda path: header(path, {"a": entry(shape=[-2])}, bytes(8)),
        lambda path: header(path, {"a": entry(shape=[1 << 40, 1 << 40])}, bytes(8)),
        lambda path: header(path, {"a": entry(data_offsets=[-8, 0])}, bytes(8)),
        lambda path: header(path, {"a": entry(data_offsets="ab")}, bytes(8)),
        lambda path: header(path, {"a": entry(shape=None)}, bytes(8)),
    ],
    "hf": [
        lambda path: path.mkdir(),
        lambda path: (path.mkdir(), (path / "model.safetensors.index.json").write_text("nonsense")),
        lambda path: (path.mkdir(), (path / "model.safetensors.index.json").write_text("[]")),
        lambda path: (path.mkdir(), (path / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../../x.safetensors"}}')),
        lambda path: (path.mkdir(), (path / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "missing.safetensors"}}')),
    ],
    "dcp": [
        lambda path: path.mkdir(),
        lambda path: (path.mkdir(), (path / ".metadata").write_bytes(b"nonsense")),
        lambda path: path.write_text("a file"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "number"), [(form, number) for form, makers in HOSTILE.items() for number in range(len(makers))]
)
def test_a_hostile_source_is_one_clear_error(tmp_path, monkeypatch, form, number):
    """Whatever lies there: one error of the family, nothing made, nothing run."""
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    HOSTILE[form][number](source)
    with pytest.raises((UsageError, FormatError, DamagedError)) as caught:
        import_checkpoint(source, tmp_path / "in", format=form, trust=True)
    assert isinstance(caught.value, RelayError)
    assert str(caught.value)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["source"]


def test_dcp_is_read_only_with_trust(run, tmp_path):
    """DCP's metadata is a pickle: without trust it is not touched."""
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/.metadata").write_bytes(b"nonsense")
    with pytest.raises(UsageError, match="trust"):
        import_checkpoint(tmp_path / "evil", tmp_path / "in", format="dcp")


def test_odd_arguments_are_refused(run, tmp_path):
    """Formats, names, prefixes, sizes and places that cannot be, before anything is written."""
    out = tmp_path / "out"
    for options in (
        {"to": "pickle"},
        {"blobs": "nothing"},
        {"shard_bytes": 0},
        {"dtype": torch.int8},
        {"blobs": "total"},
        {"blobs": ["trainer_0:own", "trainer_1:own"]},
        {"blobs": "model", "prefix": "model.wide"},
        {"blobs": "model", "prefix": "modle."},
        {"blobs": 3},
        {"dtype": {"modle.*": torch.bfloat16}},
    ):
        with pytest.raises(UsageError):
            export_checkpoint(run, out, **options)
    with pytest.raises(UsageError, match="onnx"):
        import_checkpoint(run, out, format="onnx")
    with pytest.raises(UsageError, match="does not exist"):
        import_checkpoint(tmp_path / "absent", out, format="torch")
    with pytest.raises(UsageError, match="exists already"):
        import_checkpoint(run, run, format="torch")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run"]


def test_a_full_disk_leaves_nothing(run, tmp_path, monkeypatch):
    """Space that cannot be reserved is a StorageError that names the place."""
    import os

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StorageError, match="No space left"):
        export_checkpoint(run, tmp_path / "out", to="torch", nodes="trainer_0")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("form", ["safetensors", "hf"])
def test_exports_take_constant_memory(tmp_path, form, tell):
    """Tensors go out as ranges of bytes: 192 MiB of them need a tenth of that in memory at most."""
    wide = torch.zeros(48 << 20)
    with Writing(tmp_path / "run/checkpoints") as writing:
        writing.save(1, [parameter("model.wide", wide)])
    nbytes = wide.nbytes
    del wide
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmHWM")
    export_checkpoint(tmp_path / "run", tmp_path / "out", to=form)
    grown = resident("VmHWM") - before
    tell(f"export of {nbytes >> 20} MiB to {form}: {grown >> 20} MiB more memory at most")
    assert grown < nbytes // 10


def resident(kind):
    """Bytes of memory of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))
