"""SNG-1 to SNG-7: named states, and the archive that carries them."""

from __future__ import annotations

import errno
import io
import json
import os
import struct
import subprocess
import sys
import threading
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from package_models import Tied, inputs, trained
from torch import nn

import torchrelay
from torchrelay.errors import (
    BlobError,
    DamagedError,
    FormatError,
    PartiallyLoadedError,
    RelayError,
    StorageError,
    UsageError,
)
from torchrelay.models.archive import manifest
from torchrelay.models.archive.manifest import StoredTensors
from torchrelay.models.archive.singa import read_singa_states

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Alike in type, shape and every bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bytes(_raw(one)) == bytes(_raw(other))


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_states(one: nn.Module, other: nn.Module) -> bool:
    here, there = one.state_dict(), other.state_dict()
    return list(here) == list(there) and all(same(here[name], there[name]) for name in here)


def one_step(model: Tied, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(*inputs(6, seed))["sum"].square().mean().backward()
    optimizer.step()


def test_sng_1_parameters_are_among_states_and_tied_ones_stand_once() -> None:
    """get_params and get_states give dotted names; batch norm's statistics are states and no parameters."""
    model = trained()
    params, states = torchrelay.get_params(model), torchrelay.get_states(model)
    assert list(params) == ["first.weight", "first.bias", "norm.weight", "norm.bias", "second.bias"]
    assert params.items() <= states.items()
    assert set(states) - set(params) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert params["first.weight"] is model.first.weight
    assert list(torchrelay.get_states(nn.DataParallel(model))) == list(states)
    with pytest.raises(UsageError, match="Module"):
        torchrelay.get_states({})  # type: ignore[arg-type]


def test_sng_2_an_archive_is_read_by_zipfile_and_json_alone(tmp_path: Path) -> None:
    """Without torch and torchrelay a reader lists keys, kinds, shapes, dtypes and plain values; no pickle."""
    model, path = trained(), tmp_path / "a.zip"
    optimizer = torch.optim.Adam(model.parameters())
    one_step(model, optimizer, 1)
    aux = {"epoch": 3, "lr": 0.1, "opt": optimizer.state_dict(), "t": torch.ones(2, 3)}
    torchrelay.save_states(path, model, aux_states=aux)
    code = (
        "import json, sys, zipfile\n"
        "z = zipfile.ZipFile(sys.argv[1]); assert z.testzip() is None\n"
        "m = json.loads(z.read('manifest.json'))\n"
        "print(json.dumps([z.namelist(), [i.compress_type for i in z.infolist()], m['tensors'], m['aux']]))\n"
        "assert not {'torch', 'torchrelay', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, path], capture_output=True, text=True, check=True, timeout=60
    )
    names, kinds, tensors, plain = json.loads(done.stdout)
    assert names == ["model.safetensors", "aux.safetensors", "manifest.json"]
    assert set(kinds) == {zipfile.ZIP_STORED}
    weight = tensors["model"]["first.weight"]
    assert (weight["dtype"], weight["shape"], weight["role"]) == ("float32", [4, 3], "parameter")
    assert tensors["model"]["norm.running_mean"]["role"] == "buffer"
    assert tensors["aux"]["t"]["shape"] == [2, 3]
    assert "opt.state[0].exp_avg" in tensors["aux"]
    assert plain["names"] == ["epoch", "lr", "opt", "t"]
    assert (plain["values"]["epoch"], plain["values"]["lr"]) == (3, 0.1)
    whole = path.read_bytes()
    assert b"\x80\x02" not in whole[-4000:] and b"pickle" not in whole


def test_sng_2_members_open_with_safetensors(tmp_path: Path) -> None:
    """The reference reader of safetensors reads a member as it lies in the archive."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = trained()
    torchrelay.save_states(tmp_path / "a.zip", model)
    found = safetensors.load(zipfile.ZipFile(tmp_path / "a.zip").read("model.safetensors"))
    assert all(same(found[name], one) for name, one in torchrelay.get_states(model).items())


def test_sng_3_a_fresh_process_goes_on_identically(tmp_path: Path) -> None:
    """Constructed and loaded elsewhere, model and optimizer take the same next step, bit for bit."""
    model, path = trained(), tmp_path / "a.zip"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    one_step(model, optimizer, 1)
    torchrelay.save_states(path, model, {"opt": optimizer.state_dict()})
    one_step(model, optimizer, 2)
    torchrelay.save_states(tmp_path / "next.zip", model, {"opt": optimizer.state_dict()})
    code = (
        "import sys, torch, torchrelay\n"
        "from package_models import Tied, inputs\n"
        "torch.manual_seed(99); model = Tied(); optimizer = torch.optim.Adam(model.parameters(), lr=0.01)\n"
        "optimizer.load_state_dict(torchrelay.load_states(sys.argv[1], model)['opt'])\n"
        "model(*inputs(6, 2))['sum'].square().mean().backward(); optimizer.step()\n"
        "torchrelay.save_states(sys.argv[2], model, {'opt': optimizer.state_dict()})"
    )
    helpers = str(Path(__file__).parents[1] / "helpers")
    paths = os.pathsep.join([helpers, os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", code, path, tmp_path / "there.zip"],
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
        timeout=100,
    )
    assert (tmp_path / "there.zip").read_bytes() == (tmp_path / "next.zip").read_bytes()


def test_sng_3_aux_values_come_back_as_what_they_were(tmp_path: Path) -> None:
    """Nested dicts, ints and floats, tuples, sets, bytes and tensors keep types, order and sharing."""
    shared = torch.arange(6).reshape(2, 3).t()
    aux = {
        "z": {"b": 1, "a": 1.0, 3: (1, [2, (3,)]), None: {True, False}},
        "a": [b"\x00\xff", "text\ud800", 2**70, float("nan"), -0.0, 1 + 2j, None, True],
        "counts": Counter(x=2),
        "ordered": OrderedDict(b=1, a=2),
        "tensors": [shared, {"again": shared}, torch.tensor(1.5, dtype=torch.bfloat16)],
        "types": (torch.float16, torch.Size([1, 2]), torch.device("cpu")),
        "empty": {},
    }
    model = nn.Linear(1, 1)
    torchrelay.save_states(tmp_path / "a.zip", model, aux)
    found = torchrelay.load_states(tmp_path / "a.zip", model)
    assert list(found) == list(aux)
    tensors = found.pop("tensors")
    assert tensors[0] is tensors[1]["again"]
    assert same(tensors[0], shared) and same(tensors[2], aux.pop("tensors")[2])  # type: ignore[index]
    assert repr(found) == repr(aux)  # types, order, signs of zeros, nan
    assert _kinds(found) == _kinds(aux)


def _kinds(value: Any) -> Any:
    if isinstance(value, dict):
        return (type(value), [(key, _kinds(one)) for key, one in value.items()])
    return (type(value), [_kinds(one) for one in value]) if isinstance(value, (list, tuple)) else type(value)


def test_sng_4_a_target_is_refused_or_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing file needs overwrite=True, and stays intact where the new one cannot be written whole."""
    model, path = trained(), tmp_path / "no suffix ~"
    torchrelay.save_states(path, model, {"epoch": 1})
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        torchrelay.save_states(path, model, {"epoch": 2})
    written, real = [], manifest.add_member

    def full_disk(archive: Any, name: str, *rest: Any) -> None:
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(name)
        real(archive, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "add_member", full_disk)
        with pytest.raises(StorageError, match="No space left"):
            torchrelay.save_states(path, model, {"epoch": 2}, overwrite=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]
    torchrelay.save_states(path, model, {"epoch": 2}, overwrite=True)
    assert torchrelay.load_states(path, trained()) == {"epoch": 2}
    assert os.listdir(tmp_path) == [path.name]
    with pytest.raises(UsageError, match="never replaced"):
        torchrelay.save_states(tmp_path, model, overwrite=True)


def test_sng_4_writers_do_not_interfere(tmp_path: Path) -> None:
    """Many at once write many files, and of many that want one name exactly one gets it, whole."""
    model, outcomes = trained(), list[str]()

    def save(number: int) -> None:
        torchrelay.save_states(tmp_path / f"{number}.zip", model, {"n": number})
        try:
            torchrelay.save_states(tmp_path / "one.zip", model, {"n": number})
            outcomes.append("saved")
        except UsageError:
            outcomes.append("refused")

    threads = [threading.Thread(target=save, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torchrelay.load_states(tmp_path / f"{n}.zip", model)["n"] for n in range(8)] == list(range(8))
    assert sorted(outcomes) == ["refused"] * 7 + ["saved"]
    assert len(os.listdir(tmp_path)) == 9
    assert torchrelay.load_states(tmp_path / "one.zip", model)["n"] in range(8)


def test_sng_4_urls_of_fsspec() -> None:
    """An archive in an object store is written, refused, replaced and read as a file is."""
    model, url = trained(), "memory://singa-archives/deep/a.zip"
    torchrelay.save_states(url, model, {"epoch": 1})
    with pytest.raises(UsageError, match="exists already"):
        torchrelay.save_states(url, model)
    torchrelay.save_states(url, model, {"epoch": 2}, overwrite=True)
    other = Tied()
    assert torchrelay.load_states(url, other) == {"epoch": 2}
    assert same_states(model, other)
    with pytest.raises(UsageError, match="does not exist"):
        torchrelay.load_states("memory://singa-archives/b.zip", model)


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(4).double()
        self.added = nn.Linear(1, 1, bias=False)


def test_sng_5_all_differences_are_one_error(tmp_path: Path) -> None:
    """Missing, unexpected, mis-shaped and mis-typed states are listed together, and nothing changes."""
    path, other = tmp_path / "a.zip", Other()
    torchrelay.save_states(path, trained(), {"epoch": 1})
    before = {name: one.clone() for name, one in other.state_dict().items()}
    with pytest.raises(BlobError) as caught:
        torchrelay.load_states(path, other)
    text = str(caught.value)
    for part in (
        "added.weight",
        "second.bias",
        "first.weight: the model has float32[5, 3], the archive float32[4, 3]",
        "norm.running_var: the model has float64[4], the archive float32[4]",
    ):
        assert part in text
    assert all(same(before[name], one) for name, one in other.state_dict().items())
    aux, report = torchrelay.load_states(path, other, strict=False)
    assert aux == {"epoch": 1}
    assert report.loaded == ("norm.num_batches_tracked",)
    assert report.missing == ("added.weight",)
    assert report.unexpected == ("second.bias", "second.weight")
    assert len(report.unlike) == 6 and not report.complete
    assert int(other.norm.num_batches_tracked) == 3


def test_sng_5_an_aux_name_that_is_a_state_is_refused(tmp_path: Path) -> None:
    """No aux value can take the place of a state."""
    with pytest.raises(UsageError, match=r"first\.weight"):
        torchrelay.save_states(tmp_path / "a.zip", trained(), {"first.weight": 1})
    with pytest.raises(BlobError, match=r"opt\.hook"):
        torchrelay.save_states(tmp_path / "a.zip", trained(), {"opt": {"hook": print}})
    assert os.listdir(tmp_path) == []


def test_sng_5_tied_states_that_the_archive_has_apart(tmp_path: Path) -> None:
    """One tensor cannot take two contents, so that is a difference too."""
    apart = trained()
    apart.second.weight = nn.Parameter(apart.first.weight.detach() + 1)
    torchrelay.save_states(tmp_path / "a.zip", apart)
    with pytest.raises(BlobError, match="one tensor in the model"):
        torchrelay.load_states(tmp_path / "a.zip", trained())


def test_sng_5_damage_anywhere_is_found_and_changes_nothing(tmp_path: Path) -> None:
    """A flipped byte, a cut, a removed end: one typed error, which names the member for flipped content."""
    path, bad = tmp_path / "a.zip", tmp_path / "bad.zip"
    torchrelay.save_states(path, trained(), {"t": torch.ones(300), "epoch": 1})
    whole = path.read_bytes()
    model = Tied()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    for at in range(0, len(whole), 37):
        changed = bytearray(whole)
        changed[at] ^= 0x5A
        bad.write_bytes(changed)
        try:
            torchrelay.load_states(bad, model)
        except (DamagedError, FormatError):
            assert all(same(before[name], one) for name, one in model.state_dict().items())
        else:  # dates, padding: bytes that mean nothing
            assert same_states(model, trained())
            model.load_state_dict(before)
    for length in range(0, len(whole), 173):
        bad.write_bytes(whole[:length])
        with pytest.raises((DamagedError, FormatError)):
            torchrelay.load_states(bad, model)
    at = whole.index(_raw(trained().norm.running_mean))
    bad.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    with pytest.raises(DamagedError, match=r"norm\.running_mean.*model\.safetensors"):
        torchrelay.load_states(bad, model)


def _zip(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_sng_5_foreign_and_hostile_archives_are_one_clear_error(tmp_path: Path) -> None:
    """Foreign zips, names that lead elsewhere, newer versions, odd manifests: named, nothing unpacked."""
    model = trained()
    torchrelay.save_states(tmp_path / "good.zip", model, {"t": torch.ones(2)})
    with zipfile.ZipFile(tmp_path / "good.zip") as good:
        members = {name: good.read(name) for name in good.namelist()}
    manifest = json.loads(members["manifest.json"])

    def other(**changes: Any) -> dict[str, bytes]:
        return {**members, "manifest.json": json.dumps({**manifest, **changes}).encode()}

    lying = struct.pack("<Q", 2**60) + members["model.safetensors"][8:]
    weight = {**manifest["tensors"]["model"]["first.weight"], "shape": [2**40, 2**40], "digests": ""}
    huge = {**manifest["tensors"], "model": {**manifest["tensors"]["model"], "first.weight": weight}}
    cases: list[tuple[dict[str, bytes], int, str]] = [
        ({"a.txt": b"x"}, zipfile.ZIP_STORED, "another kind"),
        ({**members, "../evil": b"x"}, zipfile.ZIP_STORED, "leads outside"),
        ({**members, "/evil": b"x"}, zipfile.ZIP_STORED, "name"),
        (members, zipfile.ZIP_DEFLATED, "compressed"),
        ({"manifest.json": members["manifest.json"]}, zipfile.ZIP_STORED, "no member"),
        ({**members, "manifest.json": b"[" * 5000}, zipfile.ZIP_STORED, "manifest"),
        (other(about="theirs"), zipfile.ZIP_STORED, "another kind"),
        (other(format={"major": 9, "minor": 0, "features": []}), zipfile.ZIP_STORED, "version 9.0"),
        (other(ties={"x": "nowhere"}), zipfile.ZIP_STORED, "tied"),
        (other(tensors=huge), zipfile.ZIP_STORED, "damaged"),
        (other(aux={"names": ["t"], "values": {"t": {"$": "tensor", "v": "gone"}}}), 0, "gone"),
        (other(aux={"names": ["t"], "values": {"t": {"$": "call", "v": "os.system"}}}), 0, "kind 'call'"),
        ({**members, "model.safetensors": lying}, zipfile.ZIP_STORED, "header"),
    ]
    for number, (content, method, message) in enumerate(cases):
        path = _zip(tmp_path / f"{number}.zip", content, method)
        with pytest.raises(RelayError, match=message) as caught:
            torchrelay.load_states(path, model)
        assert type(caught.value) in (DamagedError, FormatError), number
    assert not (tmp_path.parent / "evil").exists()
    with pytest.raises(UsageError, match="not there"):
        torchrelay.load_states(tmp_path / "nothing.zip", model)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def test_sng_6_lazy_modules_get_their_shapes(tmp_path: Path) -> None:
    """Saving before `compile` is refused; compile on meta tensors, or a load, gives lazy modules content."""
    path, model = tmp_path / "a.zip", Lazy()
    with pytest.raises(UsageError, match=r"no content yet: body\.0\.weight.*compile"):
        torchrelay.save_states(path, model)
    signature = torchrelay.compile(model, torch.empty(2, 3, 8, 8, device="meta"))
    (given,), (gives,) = signature.inputs, signature.outputs
    assert (given.name, given.shape, given.dtype) == ("x", ("batch", 3, 8, 8), "float32")
    assert (gives.name, gives.shape) == ("output", ("batch", 2))
    assert model.training and int(model.body[1].num_batches_tracked) == 0
    torchrelay.save_states(path, model)
    other = Lazy()
    assert torchrelay.load_states(path, other) == {}
    x = torch.randn(3, 3, 8, 8)
    assert same(model.eval()(x), other.eval()(x))


def test_sng_6_modules_on_the_meta_device(tmp_path: Path) -> None:
    """`compile` makes and initialises them, a load fills them; ties stay ties."""
    torch.manual_seed(3)
    with torch.device("meta"):
        compiled = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(3, 4))
        compiled[2].weight = compiled[0].weight
        loaded = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(3, 4))
        loaded[2].weight = loaded[0].weight
    with pytest.raises(UsageError, match="does not run"):
        torchrelay.compile(compiled, torch.zeros(2, 3))  # its parts do not follow each other
    assert not compiled[0].weight.is_meta and compiled[2].weight is compiled[0].weight
    assert torch.equal(compiled[1].running_var, torch.ones(4))
    torchrelay.save_states(tmp_path / "a.zip", compiled)
    torchrelay.load_states(tmp_path / "a.zip", loaded)
    assert same_states(compiled, loaded)
    assert loaded[2].weight is loaded[0].weight

    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(2, device="meta"))

    with pytest.raises(UsageError, match="reset_parameters"):
        torchrelay.compile(Unknown(), torch.zeros(2))


def test_sng_6_a_dry_run_leaves_no_trace() -> None:
    """Modes, buffers, gradients and random streams are as before; several names of sizes are told apart."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.part = nn.Dropout()

        def forward(self, a: torch.Tensor, *, b: dict[str, torch.Tensor]) -> Any:
            self.calls += 1
            noise = torch.rand(1)
            return torch.cat([a, a], 1) + noise, (b["c"].mean(0), len(a))

    model = Counting()
    model.part.eval()
    before = torch.get_rng_state()
    given = {"a": torch.zeros(2, 3), "b": {"c": torch.zeros(5, 2, dtype=torch.bfloat16)}}
    signature = torchrelay.compile(
        model, given, dynamic={"a": {0: "batch", 1: "length"}, "b_c": {0: "words"}}
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert int(model.calls) == 0 and model.training and not model.part.training
    assert [(one.name, one.shape) for one in signature.inputs] == [
        ("a", ("batch", "length")),
        ("b_c", ("words", 2)),
    ]
    assert [(one.name, one.shape, one.dtype) for one in signature.outputs] == [
        ("output_0", ("batch", "2*length"), "float32"),
        ("output_1_0", (2,), "bfloat16"),
        ("output_1_1", (), "int64"),
    ]
    assert (
        torchrelay.jobs.runtime.Signature.from_json(json.loads(json.dumps(signature.to_json()))) == signature
    )
    for wrong in (torch.zeros(2, 3), (torch.zeros(2, 3), 1, 2), {"a": torch.zeros(2), "b": given["b"]}):
        with pytest.raises(UsageError):
            torchrelay.compile(model, wrong)


class Holder(nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def test_sng_7_every_type_and_form_round_trips(tmp_path: Path) -> None:
    """All element types, 0-d, empty, strided, expanded, conjugated and tied tensors keep every bit."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for dtype in DTYPES:
        name = str(dtype).replace("torch.", "of_")
        raw = torch.randint(0, 256, (6, dtype.itemsize), dtype=torch.uint8, generator=generator)
        if dtype is torch.bool:
            raw %= 2
        tensors[name] = raw.view(dtype).reshape(2, 3)
    tensors["zero_d"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(3, 0, 2)
    tensors["strided"] = torch.randn(7, 5, generator=generator)[::2, 1:4].t()
    tensors["conjugated"] = torch.randn(2, 3, dtype=torch.complex64, generator=generator).t().conj()
    tensors["large"] = torch.randn(3 * 2**19 + 1, generator=generator)
    tensors["tied"] = tensors["of_float32"]
    model = Holder(tensors)
    other = Holder({name: torch.zeros(one.shape, dtype=one.dtype) for name, one in tensors.items()})
    tensors["expanded"] = torch.randn(1, 3, generator=generator).expand(4, 3)
    torchrelay.save_states(tmp_path / "a.zip", model, {"aux": dict(tensors)})
    found = torchrelay.load_states(tmp_path / "a.zip", other)["aux"]
    for name, tensor in tensors.items():
        assert name == "expanded" or same(getattr(other, name), tensor), name
        assert same(found[name], tensor), name
    assert found["tied"] is found["of_float32"]
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.testzip() is None
        assert json.loads(archive.read("manifest.json"))["ties"] == {"tied": "of_float32"}


def test_sng_7_extra_state_of_modules(tmp_path: Path) -> None:
    """What `get_extra_state` gives goes along as a typed value."""

    class Extra(nn.Linear):
        seen: Any = None

        def get_extra_state(self) -> Any:
            return self.seen

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    model, other = Extra(1, 1), Extra(1, 1)
    model.seen = {"steps": (1, 2.0)}
    torchrelay.save_states(tmp_path / "a.zip", model)
    torchrelay.load_states(tmp_path / "a.zip", other)
    assert other.seen == {"steps": (1, 2.0)}


def test_sng_16_archives_of_singa_are_read(tmp_path: Path) -> None:
    """States and aux tensors of a SINGA 3 archive come by name; objects and other files are refused."""
    numpy = pytest.importorskip("numpy")
    arrays = {
        "fc.W": numpy.arange(6, dtype="float32").reshape(3, 2),
        "fc.b": numpy.ones(2),
        "step": numpy.array(4),
    }

    def archive(name: str, **changes: Any) -> Path:
        buffer = io.BytesIO()
        numpy.savez(buffer, **{**arrays, **changes})
        index = {key: {"state_type": int(key == "step"), "shape": [], "dtype": 0} for key in arrays}
        members = {"tensor_dict.npz": buffer.getvalue(), "states_attr.json": json.dumps(index).encode()}
        return _zip(tmp_path / name, members, zipfile.ZIP_DEFLATED)

    model, aux = read_singa_states(archive("a.zip"))
    linear = nn.Linear(3, 2)
    linear.load_state_dict({"weight": model["fc.W"].t(), "bias": model["fc.b"]})
    assert linear.weight[1, 2] == 5 and aux["step"] == 4
    for bad in (
        archive("b.zip", step=numpy.array([print], dtype=object)),
        archive("c.zip", more=numpy.ones(1)),
    ):
        with pytest.raises(DamagedError):
            read_singa_states(bad)
    with pytest.raises(FormatError, match="not an archive of SINGA"):
        read_singa_states(_zip(tmp_path / "d.zip", {"x": b""}))


def test_sng_5_states_are_read_in_place_and_a_file_that_changes_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor is made beside the model's own; hooks see what comes; damage after the proof is told."""
    saved, other = nn.Linear(64, 64), nn.Linear(64, 64)
    torchrelay.save_states(tmp_path / "a.zip", saved)
    with monkeypatch.context() as patch:
        patch.setattr(StoredTensors, "read", lambda *given: pytest.fail("a tensor was made"))
        torchrelay.load_states(tmp_path / "a.zip", other)
    assert torch.equal(saved.weight, other.weight)
    assert torch.equal(saved.bias, other.bias)

    seen: list[str] = []
    hooked = nn.Linear(64, 64)
    hooked.register_load_state_dict_pre_hook(lambda module, state, *rest: seen.extend(state))
    torchrelay.load_states(tmp_path / "a.zip", hooked)
    assert sorted(seen) == ["bias", "weight"] and torch.equal(saved.weight, hooked.weight)

    check = StoredTensors.check

    def checked(stored: StoredTensors, names: Sequence[str]) -> None:
        check(stored, names)
        data = (tmp_path / "a.zip").read_bytes()
        at = data.index(saved.weight.detach().numpy().tobytes())
        with (tmp_path / "a.zip").open("r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ 1]))

    monkeypatch.setattr(StoredTensors, "check", checked)
    with pytest.raises(PartiallyLoadedError, match=r"'weight' in model\.safetensors is damaged"):
        torchrelay.load_states(tmp_path / "a.zip", other)
