"""Packages, archives and ONNX files of people who mean harm, and exports that meet each other."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay
from torchrelay import load_states, save_states
from torchrelay.errors import DamagedError, FormatError, UsageError
from torchrelay.models.onnx.exporter import to_onnx
from torchrelay.models.onnx.importer import tensors
from torchrelay.models.package.program import operator_of

Json = Any


def rewritten(path: Path, edit: Callable[[Json, dict[str, bytes]], None]) -> None:
    """An archive again, with another manifest and other members."""
    with zipfile.ZipFile(path) as archive:
        members = {one.filename: archive.read(one) for one in archive.infolist()}
    manifest = json.loads(members["manifest.json"])
    edit(manifest, members)
    members["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)


def with_header(data: bytes, edit: Callable[[Json], None]) -> bytes:
    """A safetensors member with another header."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    edit(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[end:]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "a.zip"
    save_states(path, torch.nn.Linear(2, 2), {"big": torch.ones(64), "none": torch.ones(0)})
    return path


def test_no_byte_of_an_archive_is_two_tensors(archive: Path) -> None:
    """A file of a megabyte cannot promise terabytes: tensors that share bytes are refused."""

    def share(manifest: Json, members: dict[str, bytes]) -> None:
        known = manifest["tensors"]["aux"]
        known["again"] = known["big"]
        members["aux.safetensors"] = with_header(
            members["aux.safetensors"], lambda header: header.update(again=header["big"])
        )

    rewritten(archive, share)
    with pytest.raises(DamagedError, match="of another tensor"):
        load_states(archive, torch.nn.Linear(2, 2))


@pytest.mark.parametrize("shape", [[0, 2**30, 2**30], [0] + [1] * 100])
def test_empty_tensors_have_shapes_that_tensors_have(shape: list[int], archive: Path) -> None:
    """What torch cannot make although it has no bytes is damage, and no traceback."""

    def stretch(manifest: Json, members: dict[str, bytes]) -> None:
        manifest["tensors"]["aux"]["none"]["shape"] = shape
        members["aux.safetensors"] = with_header(
            members["aux.safetensors"], lambda header: header["none"].update(shape=shape)
        )

    rewritten(archive, stretch)
    with pytest.raises(DamagedError, match="shape"):
        load_states(archive, torch.nn.Linear(2, 2))


class Flat(torch.nn.Module):
    """Parts that are called as things of the class that runs packages."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.signature = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.device = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("_held", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.signature(self.flat(x)) * self.device + self._held


def test_packages_hold_parts_of_any_name(tmp_path: Path) -> None:
    """A model whose parts have names of our own class comes back, also when it is moved, or metadata lies."""
    model, x = Flat().eval(), torch.randn(3, 2)
    torchrelay.save(tmp_path / "p.zip", model, inputs=x)
    found = torchrelay.load(tmp_path / "p.zip")
    assert torch.equal(found(x), model(x))
    assert found.state_dict().keys() == model.state_dict().keys()
    assert found.double().state_dict()["flat.weight"].dtype == torch.float64
    found.load_state_dict({name: torch.zeros_like(one) for name, one in found.state_dict().items()})

    def lie(manifest: Json, members: dict[str, bytes]) -> None:
        manifest["package"]["metadata"] = {"$": "int", "v": "99999999999999999999"}

    rewritten(tmp_path / "p.zip", lie)
    with pytest.raises(DamagedError, match="metadata"):
        torchrelay.open_package(tmp_path / "p.zip")


@pytest.mark.parametrize(
    "name",
    [
        "_sparse_coo_tensor_with_dims_and_tensors.default",
        "_convert_indices_from_csr_to_coo.default",
        "_ctc_loss.default",
        "max_pool2d_with_indices_backward.default",
        "_embedding_bag_dense_backward.default",
        "_indices.default",
        "sparse_resize_and_clear_.default",
    ],
)
def test_programs_have_no_operator_that_writes_where_numbers_say(name: str) -> None:
    """Operators that trust indices, and so read and write memory of others, are no part of programs."""
    with pytest.raises(FormatError, match="which programs do not support"):
        operator_of(f"aten.{name}")


def test_exports_at_one_time_leave_the_weights_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export does not take another's weights away, which lie there before the file that names them."""
    pytest.importorskip("onnx")
    monkeypatch.setattr(to_onnx, "EXTERNAL_FROM_BYTES", 1)
    real, late = to_onnx._weights_beside, torch.nn.Linear(40, 3)

    def export(model: torch.nn.Module) -> None:
        torchrelay.to_onnx(model, torch.ones(1, 40), tmp_path / "m.onnx", compare=False, overwrite=True)

    def between(path: Path) -> list[Path]:
        monkeypatch.setattr(to_onnx, "_weights_beside", real)
        for weights in tmp_path.glob(".tmp-*/*.data"):
            shutil.copy(weights, tmp_path)  # as in the middle of publish
        export(torch.nn.Linear(40, 3))
        return real(path)

    export(torch.nn.Linear(40, 3))
    monkeypatch.setattr(to_onnx, "_weights_beside", between)
    export(late)
    (weights,) = tmp_path.glob("*.data")
    assert weights.name.encode() in (tmp_path / "m.onnx").read_bytes()
    assert torchrelay.from_onnx(tmp_path / "m.onnx")(torch.ones(1, 40)).equal(late(torch.ones(1, 40)))


def unfolding(levels: int) -> Any:
    """A model of functions that each call the next ten times, or, with no level, one that calls itself."""
    from onnx import helper

    def function(name: str, kind: str, domain: str) -> Any:
        nodes = [helper.make_node(kind, [f"v{at}"], [f"v{at + 1}"], domain=domain) for at in range(10)]
        sets = [helper.make_opsetid("", 20), helper.make_opsetid("d", 1)]
        return helper.make_function("d", name, ["v0"], ["v10"], nodes, sets)

    functions = [function("f0", "Relu", "")]
    functions += [function(f"f{at}", f"f{at - 1}", "d") for at in range(1, levels)]
    sizes = (helper.make_tensor_value_info(name, 1, [2]) for name in "xy")
    x, y = sizes
    graph = helper.make_graph([helper.make_node(f"f{levels - 1}", ["x"], ["y"], domain="d")], "g", [x], [y])
    sets = [helper.make_opsetid("", 20), helper.make_opsetid("d", 1)]
    return helper.make_model(graph, functions=functions, opset_imports=sets, ir_version=10)


def test_functions_do_not_unfold_beyond_bounds() -> None:
    """Some thousand bytes that would be ten to the twelfth operators are refused before they are unfolded."""
    pytest.importorskip("onnx")
    with pytest.raises(UsageError, match="expand to 1000000000000 operators"):
        torchrelay.from_onnx(unfolding(12))
    assert torchrelay.from_onnx(unfolding(2))(torch.ones(2)).tolist() == [1, 1]


def test_a_program_can_change_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assigning the variable that the message names has an effect in all modules of the importer."""
    pytest.importorskip("onnx")
    from torchrelay.models.onnx.importer import tensors

    monkeypatch.setattr(tensors, "MAX_NODES", 50)
    with pytest.raises(UsageError, match=r"raise torchrelay\.models\.onnx\.importer\.tensors\.MAX_NODES"):
        torchrelay.from_onnx(unfolding(2))
    monkeypatch.setattr(tensors, "MAX_NODES", 100)
    assert torchrelay.from_onnx(unfolding(2))(torch.ones(2)).tolist() == [1, 1]
    monkeypatch.setattr(tensors, "MAX_DEPTH", 0)
    with pytest.raises(UsageError, match="nests calls more than 0 deep"):
        torchrelay.from_onnx(unfolding(2))


def test_functions_that_call_themselves_in_a_branch_are_refused() -> None:
    """A circle through the graph of an If is one, too."""
    pytest.importorskip("onnx")
    from onnx import helper

    model = unfolding(1)
    inner = helper.make_graph([helper.make_node("f0", ["v0"], ["b"], domain="d")], "inner", [], [])
    inner.output.append(helper.make_tensor_value_info("b", 1, [2]))
    branch = helper.make_node("If", ["v1"], ["c"], then_branch=inner, else_branch=inner)
    model.functions[0].node.append(branch)
    with pytest.raises(UsageError, match="in a cycle"):
        torchrelay.from_onnx(model)


def test_loops_in_loops_share_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that each stay below their limit do not multiply to a call without end."""
    pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    monkeypatch.setattr(tensors, "MAX_ENTERED", 1000)
    info = helper.make_tensor_value_info

    def loop(body: list[Any], level: int, count: str) -> Any:
        go, v = f"g{level}", f"v{level}"
        graph = helper.make_graph(
            [helper.make_node("Identity", [go], [f"{go}o"]), *body],
            f"body{level}",
            [info(f"i{level}", TensorProto.INT64, []), info(go, TensorProto.BOOL, []), info(v, 1, [2])],
            [info(f"{go}o", TensorProto.BOOL, []), info(f"{v}o", 1, [2])],
        )
        outside, out = (f"v{level - 1}", f"v{level - 1}o") if level else ("x", "y")
        return helper.make_node("Loop", [count, "yes", outside], [out], body=graph)

    most = helper.make_tensor("n", TensorProto.INT64, [], [100])
    yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    nodes = [loop([loop([helper.make_node("Relu", ["v1"], ["v1o"])], 1, "n")], 0, "n")]
    graph = helper.make_graph(nodes, "g", [info("x", 1, [2])], [info("y", 1, [2])], [most, yes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    with pytest.raises(UsageError, match="the limit of 1000"):
        torchrelay.from_onnx(model)(torch.ones(2))


@pytest.mark.parametrize("name", ["my net (1)", "netz\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_scripts_of_any_name_give_packages_that_open(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source whose name no archive holds is left out, with the reason: the package can be opened again."""
    script = tmp_path / f"{name}.py"
    script.write_text("import torch\n\n\nclass Net(torch.nn.Linear):\n    pass\n")
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    model = module.Net(2, 2)
    torchrelay.save(tmp_path / "p.zip", model, inputs=torch.zeros(3, 2))
    assert any(name in reason for reason in torchrelay.open_package(tmp_path / "p.zip").without)
    load_states(tmp_path / "p.zip", torch.nn.Linear(2, 2))
    x = torch.randn(3, 2)
    assert torch.equal(torchrelay.load(tmp_path / "p.zip")(x), model(x))


@pytest.mark.parametrize("name", ["training", "_modules", "forward", "a..b"])
def test_initializers_have_any_name(name: str) -> None:
    """Names of things that every module has are kept as the keys of the state dict, like any other."""
    pytest.importorskip("onnx")
    from onnx import helper

    info = helper.make_tensor_value_info
    weight = helper.make_tensor(name, 1, [2], [1.0, 2.0])
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", name], ["y"])], "g", [info("x", 1, [2])], [info("y", 1, [2])], [weight]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    found = torchrelay.from_onnx(model)
    assert found(torch.ones(2)).tolist() == [2, 3]
    assert list(found.state_dict()) == [name]
