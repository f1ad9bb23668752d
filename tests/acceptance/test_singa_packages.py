"""SNG-8 and SNG-14 to SNG-16: packages, which run without the code that trained them."""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
import textwrap
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lifecycle_cases
import pytest
import torch
from package_models import Tied, inputs, trained
from program_cases import Script
from torch import nn

import torchrelay
from torchrelay.errors import BlobError, DamagedError, FormatError, RelayError, UsageError
from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.metadata.experiments import ProgramRecord, read_note, write_note
from torchrelay.tools.cli.main import main

LABELS = ["cat", "dog", "cow", "owl"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of `trained(bias=False)` with everything in it."""
    path = tmp_path_factory.mktemp("package") / "tied.pkg"
    package = torchrelay.save(
        path,
        trained(bias=False),
        inputs(3),
        constructor=((4,), {"bias": False}),
        labels=LABELS,
        preprocessing={"resize": (32, 32), "mean": 0.5},
        metadata={"run": "runs/x", "epoch": 3},
    )
    assert package.without == ()
    return path


def changed(made: Path, path: Path, **members: bytes | None) -> Path:
    """A copy of the package with other members; `__` in a name stands for the dot, None leaves one out."""
    named = {name.replace("__", "."): data for name, data in members.items()}
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = named.pop(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
        for name, data in named.items():
            new.writestr(name, data or b"")
    return path


def program_of(made: Path) -> Any:
    with zipfile.ZipFile(made) as archive:
        return json.loads(archive.read("program.json"))


def manifest_of(made: Path) -> Any:
    with zipfile.ZipFile(made) as archive:
        return json.loads(archive.read("manifest.json"))


def answers(model: nn.Module, batch: int) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return model.eval()(*inputs(batch, 11))  # type: ignore[no-any-return]


def check_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_sng_8_a_package_says_what_it_is(made: Path) -> None:
    """Signature, labels, preprocessing, where it is from and its files are told without torch."""
    package = torchrelay.open_package(made)
    assert package.signature == Signature(
        (
            TensorSpec("x", ("batch", 3), "float32"),
            TensorSpec("parts_0", ("batch",), "float32"),
            TensorSpec("parts_1", ("batch",), "float32"),
        ),
        (
            TensorSpec("output_hidden", ("batch", 4), "float32"),
            TensorSpec("output_sum", ("batch",), "float32"),
        ),
    )
    assert package.labels == tuple(LABELS)
    assert package.preprocessing == {"resize": (32, 32), "mean": 0.5}
    assert package.metadata == {"run": "runs/x", "epoch": 3}
    assert package.class_path == "package_models:Tied"
    assert package.source == ("package_models.py", "package_parts.py")
    text = torchrelay.summary(made)
    for part in (
        "model package",
        "x float32[batch, 3]",
        "cat, dog",
        "second.weight is first.weight",
        "20 par",
    ):
        assert part in text
    assert "norm.weight" in torchrelay.summary(trained())


def test_sng_8_the_program_gives_the_answers_of_the_model(made: Path) -> None:
    """Called as the original, in order or by name, on other batch sizes; states by the same names."""
    model, loaded = trained(bias=False), torchrelay.load(made)
    assert type(loaded) is not Tied and not loaded.training
    for batch in (1, 3, 8):
        check_same(answers(model, batch), answers(loaded, batch))
    x, parts = inputs(2)
    check_same(loaded(x, parts=parts), loaded(parts=parts, x=x))
    flat = loaded.flat([x, *parts])
    assert torch.equal(flat[1], loaded(x, parts)["sum"])
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert loaded.get_parameter("second.weight") is loaded.get_parameter("first.weight")
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in model.named_parameters()]
    loaded(x, parts)["sum"].sum().backward()
    assert loaded.get_parameter("norm.weight").grad is not None
    check_same(answers(copy.deepcopy(loaded).double().float(), 2), answers(model, 2))


def test_sng_8_calls_that_do_not_fit_are_refused(made: Path) -> None:
    """Another type, rank, fixed size, unlike sizes of one name, other arguments: one line that names it."""
    loaded = torchrelay.load(made)
    x, parts = inputs(2)
    for args, message in [
        ((x.double(), parts), r"x is float64\[2, 3\]; the model takes float32\[batch, 3\]"),
        ((x[0], parts), "x is float32"),
        ((x[:, :2], parts), "x is float32"),
        ((x, inputs(3)[1]), "batch is 2 in x and 3 in parts_0"),
        ((x, parts[:1]), "sequence of 2"),
        ((x,), "takes x, parts"),
        ((x, parts, 1), "takes x, parts"),
        ((x.tolist(), parts), "must be a tensor"),
    ]:
        with pytest.raises(UsageError, match=message):
            loaded(*args)
    with pytest.raises(UsageError, match="3 tensors"):
        loaded.flat([x])


def alone(code: str, *words: object, where: Path) -> str:
    """Run code in a process that has torchrelay but nothing of the tests."""
    root = str(Path(torchrelay.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, words)],
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "PYTHONPATH": root},
        cwd=where,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sng_8_and_14_another_process_needs_no_class(made: Path, tmp_path: Path) -> None:
    """Where the training code cannot be imported the program gives the same answers, and trusted source too.

    What the package says is read before torch is imported.
    """
    x, parts = inputs(5, 11)
    torchrelay.save_states(
        tmp_path / "io.zip", nn.Linear(1, 1), {"x": x, "p": parts, **answers(trained(bias=False), 5)}
    )
    code = """
        import importlib.util, sys, torchrelay
        assert importlib.util.find_spec("package_models") is None
        package = torchrelay.open_package(sys.argv[1])
        assert "torch" not in sys.modules and package.labels[0] == "cat"
        import torch
        io = torchrelay.load_states(sys.argv[2], torch.nn.Linear(1, 1))
        for model in (package.module(), torchrelay.load(sys.argv[1], trust_source=True)):
            with torch.no_grad():
                found = model(io["x"], io["p"])
            assert torch.equal(found["hidden"], io["hidden"]) and torch.equal(found["sum"], io["sum"])
            print(type(model).__module__, model.training, model.second.weight is model.first.weight)
    """
    lines = alone(code, made, tmp_path / "io.zip", where=tmp_path).splitlines()
    assert lines[0] == "torchrelay.models.package.program_module False True"
    assert lines[1].startswith("torchrelay_code_") and lines[1].endswith("package_models False True")


def test_sng_8_source_runs_only_where_it_is_trusted(made: Path, tmp_path: Path) -> None:
    """Hostile source stays text in open_package, summary, load and load_states; it runs when trusted."""
    mark = tmp_path / "mark"
    hostile = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n".encode()
    path = changed(made, tmp_path / "evil.pkg", **{"source/package_parts__py": hostile})
    torchrelay.open_package(path)
    torchrelay.summary(path)
    check_same(answers(torchrelay.load(path), 2), answers(trained(bias=False), 2))
    torchrelay.load_states(path, Tied(bias=False))
    assert not mark.exists()
    with pytest.raises(AttributeError, match="doubled"):
        torchrelay.load(path, trust_source=True)(*inputs(2))
    assert mark.exists()
    failing = changed(made, tmp_path / "failing.pkg", **{"source/package_parts__py": b"1 / 0"})
    with pytest.raises(BlobError, match="package_models:Tied: ZeroDivisionError"):
        torchrelay.load(failing, trust_source=True)


def _raise(*_: Any, **__: Any) -> Any:
    raise AssertionError("something was unpickled")


def test_sng_8_nothing_is_unpickled(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pickle nor torch.load nor torch.export.load is called, whatever is loaded."""
    pickle = importlib.import_module("pickle")
    for owner, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, _raise)
    monkeypatch.setattr(torch.export, "load", _raise)
    torchrelay.load(made)
    torchrelay.load(made, trust_source=True)
    with zipfile.ZipFile(made) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".pt", ".pkl", ".pt2", ".bin"))]


HOSTILE: list[tuple[str, Callable[[Any], Any], str]] = [
    ("operator", lambda p: p["steps"][0].update(operator="os.system"), "programs do not support"),
    ("builtin", lambda p: p["steps"][0].update(operator="builtins.eval"), "programs do not support"),
    ("dunder", lambda p: p["steps"][0].update(operator="aten.__class__.default"), "programs do not support"),
    ("of torch", lambda p: p["steps"][0].update(operator="torch.load"), "programs do not support"),
    ("library", lambda p: p["steps"][0].update(operator="c10d.barrier.default"), "programs do not support"),
    ("file", lambda p: p["steps"][0].update(operator="aten.from_file.default"), "programs do not support"),
    (
        "memory",
        lambda p: p["steps"][0].update(operator="aten.set_.source_Storage"),
        "programs do not support",
    ),
    (
        "unchecked",
        lambda p: p["steps"][0].update(operator="aten._index_put_impl_.default"),
        "programs do not support",
    ),
    ("save", lambda p: p["steps"][0].update(operator="aten.save.default"), "programs do not support"),
    ("script", lambda p: p["steps"][0].update(operator="aten.ord.default"), "programs do not support"),
    ("later", lambda p: p["steps"][0].update(args=[{"at": p["steps"][-1]["name"]}]), "no earlier step"),
    ("itself", lambda p: p["steps"][0].update(args=[{"at": p["steps"][0]["name"]}]), "no earlier step"),
    ("twice", lambda p: p["steps"].append(p["steps"][0]), "two steps are called"),
    ("object", lambda p: p["steps"][0].update(args=[{"$": "object", "v": "x"}]), "unknown to this"),
    ("odd", lambda p: p["steps"][0].update(args=[{"code": "1+1"}]), "argument of a step"),
    ("deep", lambda p: p.update(result=_deep(60)), "invalid description"),
    ("outputs", lambda p: p.update(result={"leaf": 99}), "invalid description"),
    ("tensor", lambda p: p["tensors"].update(more=["state", "nowhere"]), "does not have"),
    ("place", lambda p: p["tensors"].update(more=["file", "/etc/passwd"]), "invalid location"),
    ("inputs", lambda p: p["inputs"].pop(), "no earlier step"),
    ("steps", lambda p: p.update(steps=7), "damaged"),
    ("version", lambda p: p.update(format={"major": 2, "minor": 0, "features": []}), "version 2"),
]


def _deep(levels: int) -> Any:
    tree: Any = {"leaf": 0}
    for _ in range(levels):
        tree = {"list": [tree]}
    return tree


@pytest.mark.parametrize(("what", "change", "message"), HOSTILE, ids=[case[0] for case in HOSTILE])
def test_sng_8_hostile_programs_are_one_clear_error(
    made: Path, tmp_path: Path, what: str, change: Callable[[Any], Any], message: str
) -> None:
    """A program that names other functions, or that is not put together as programs are, is refused."""
    program = program_of(made)
    change(program)
    path = changed(made, tmp_path / f"{what}.pkg", program__json=json.dumps(program).encode())
    with pytest.raises((DamagedError, FormatError), match=message):
        torchrelay.load(path)


def test_sng_8_hostile_packages_are_one_clear_error(made: Path, tmp_path: Path) -> None:
    """State names that no module can have, a missing program, bad manifests, damage: named and refused."""
    manifest = manifest_of(made)
    name = manifest["tensors"]["model"].pop("norm.bias")

    def with_package(**changes: Any) -> bytes:
        whole = manifest_of(made)
        return json.dumps({**whole, "package": {**whole["package"], **changes}}).encode()

    cases: list[tuple[dict[str, bytes | None], str]] = [
        ({"program__json": None}, "no member 'program.json'"),
        ({"program__json": b"{}" * 3}, "program.json"),
        ({"constants__safetensors": None}, "constants"),
        ({"manifest__json": json.dumps({**manifest, "name": name}).encode()}, "same tensors"),
        ({"manifest__json": with_package(signature={"inputs": 3})}, "damaged"),
        ({"manifest__json": with_package(labels=[1])}, "labels"),
        ({"manifest__json": with_package(preprocessing={"$": "os", "v": 1})}, "kind 'os'"),
        ({"manifest__json": with_package(signature={"inputs": [], "outputs": []})}, "same inputs"),
    ]
    for number, (members, message) in enumerate(cases):
        path = changed(made, tmp_path / f"{number}.pkg", **members)
        with pytest.raises(RelayError, match=message) as caught:
            torchrelay.load(path)
        assert type(caught.value) in (DamagedError, FormatError), number
    whole = bytearray(made.read_bytes())
    for at in range(1000, len(whole), 997):
        bad = bytearray(whole)
        bad[at] ^= 0xFF
        (tmp_path / "bad.pkg").write_bytes(bad)
        try:
            loaded = torchrelay.load(tmp_path / "bad.pkg")
        except (DamagedError, FormatError):
            continue
        check_same(answers(loaded, 2), answers(trained(bias=False), 2))  # it lay in padding or in the source


def test_sng_8_without_source_or_program_the_states_are_left(tmp_path: Path) -> None:
    """A package that cannot be rebuilt says so when it is made and when it is loaded; its states load."""

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1.0 if x.sum().item() > 0 else 2.0)

    with pytest.warns(UserWarning, match="states only.*no inputs were given.*is a local class"):
        package = torchrelay.save(tmp_path / "a.pkg", Inner(2, 2))
    assert package.signature is None and not package.has_program
    for trust in (False, True):
        with pytest.raises(UsageError, match="no inputs were given"):
            torchrelay.load(tmp_path / "a.pkg", trust_source=trust)
    with pytest.raises(UsageError, match="load_states"):
        torchrelay.load(tmp_path / "a.pkg")
    assert package.states().keys() == {"weight", "bias"}
    torchrelay.load_states(tmp_path / "a.pkg", Inner(2, 2))
    with pytest.warns(UserWarning, match="states only.*torch.export cannot trace Inner"):
        torchrelay.save(tmp_path / "b.pkg", Inner(2, 2), torch.ones(1, 2))
    torchrelay.save_states(tmp_path / "c.zip", Inner(2, 2))
    with pytest.raises(UsageError, match="state archive, not a package"):
        torchrelay.load(tmp_path / "c.zip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UsageError, match="does not accept these inputs"):
            torchrelay.save(tmp_path / "d.pkg", Inner(2, 2), (1, 2))
    assert not (tmp_path / "d.pkg").exists()


def test_sng_8_constructor_arguments_are_needed_for_source(tmp_path: Path) -> None:
    """A class that needs arguments and was given none is told of; one that needs none is rebuilt without."""
    with pytest.warns(UserWarning, match="constructor"):
        torchrelay.save(tmp_path / "a.pkg", nn.Sequential(nn.Linear(1, 1)))
    package = torchrelay.save(tmp_path / "b.pkg", trained())
    assert package.source and not package.has_program
    with pytest.raises(UsageError, match=r"trust_source=True\) runs it"):
        torchrelay.load(tmp_path / "b.pkg")
    check_same(answers(torchrelay.load(tmp_path / "b.pkg", trust_source=True), 2), answers(trained(), 2))
    with pytest.raises(UsageError, match="args, kwargs"):
        torchrelay.save(tmp_path / "c.pkg", trained(), constructor=(4, {}))  # type: ignore[arg-type]


def test_sng_8_a_loaded_package_is_packaged_again(made: Path, tmp_path: Path) -> None:
    """What was loaded without its class can be saved, extended and given on."""
    loaded = torchrelay.load(made)
    again = torchrelay.save(tmp_path / "again.pkg", loaded, inputs(2))
    assert again.signature == torchrelay.open_package(made).signature
    check_same(answers(again.module(), 4), answers(trained(bias=False), 4))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.body = nn.LSTM(6, 5, batch_first=True)
        self.mixed = nn.TransformerEncoderLayer(5, 1, 8, batch_first=True)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: torch.Tensor, scale: float = 2.0) -> tuple[torch.Tensor, int]:
        self.seen += 1
        hidden, _ = self.body(self.words(tokens))
        return self.mixed(hidden).mean(1) * scale, tokens.shape[1]


def test_sng_8_and_6_compile_is_remembered_by_save(tmp_path: Path) -> None:
    """What compile learned is what save packs: an embedding, an LSTM, attention, a counter, a constant.

    A size that torch.export fixes (the length of an LSTM's sequence) is told of.
    """
    torch.manual_seed(1)
    model = Recurrent().eval()
    tokens = torch.randint(0, 11, (1, 4))
    names = {"tokens": {0: "batch", 1: "length"}}
    signature = torchrelay.compile(model, {"tokens": tokens, "scale": 3.0}, dynamic=names)
    assert signature.inputs == (TensorSpec("tokens", ("batch", "length"), "int64"),)
    package = torchrelay.save(tmp_path / "a.pkg", model)
    assert package.signature is not None
    assert package.signature.inputs == (TensorSpec("tokens", ("batch", 4), "int64"),)
    assert package.signature.outputs == signature.outputs
    assert [one for one in package.without if "'length'" in one]
    loaded = package.module()
    for batch in (1, 3):
        tokens = torch.randint(0, 11, (batch, 4))
        with torch.no_grad():
            (here, length), (there, other) = model(tokens, 3.0), loaded(tokens=tokens, scale=3.0)
        assert torch.allclose(here, there, atol=1e-6)
        assert length == other == 4
    assert int(loaded.seen) == 2
    with pytest.raises(UsageError, match=r"scale was 3\.0 when the program was made"):
        loaded(tokens=tokens, scale=1.0)


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_sng_16_compile_switches_torch_compile_on() -> None:
    """`graph=` has torch.compile take the model over in place, with its options."""
    calls: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        calls.append(1)
        return graph.forward

    model = Double()
    torchrelay.compile(model, torch.zeros(3, 2), graph={"backend": backend})
    assert calls == []
    assert torch.equal(model(torch.ones(3, 2)), torch.full((3, 2), 2.0))
    assert calls == [1]


def test_sng_14_a_program_is_packaged_by_its_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`package` writes the epoch that is meant, with labels and preprocessing; so does save(run=...)."""
    script = Script(tmp_path, capsys)
    script.more('labels = ["sum"]\n    preprocessing = "two numbers"')
    assert script("package", "--out", "a.pkg").rc == 2, "there is no run yet"
    assert script("train").rc == 0
    done = script("package", "--out", "a.pkg", "--epoch", "1")
    assert (done.rc, done.err) == (0, "")
    assert f"epoch 1 of {script.run.name}: " in done.out
    assert script("package", "--out", "a.pkg").rc == 2
    assert script("package", "--out", "a.pkg", "--overwrite").rc == 0
    package = torchrelay.open_package(tmp_path / "a.pkg")
    assert (package.labels, package.preprocessing) == (("sum",), "two numbers")
    known = read_note(script.run)
    assert known is not None
    assert package.metadata == {
        "run": script.run.name,
        "epoch": 2,
        "code_id": known.code_id,
        "program": "line",
    }
    model = nn.Linear(2, 1)
    x = torch.rand(3, 2)
    before = model(x)
    other = torchrelay.save(tmp_path / "b.pkg", model, x, run=script.run, epoch=2)
    assert other.metadata == {"run": str(script.run), "epoch": 2, "code_id": known.code_id}
    assert torch.equal(package.module()(x), other.module()(x))
    assert torch.equal(model(x), before)
    torchrelay.open_checkpoint(script.run, 2).load({"model": model})
    assert torch.equal(model(x), other.module()(x))
    assert main(["package", str(tmp_path), "--out", "c.pkg"]) == 2
    assert "is not a run and has no checkpoints" in capsys.readouterr().err
    assert main(["package", str(script.run.parent), "--out", "c.pkg"]) == 2
    assert f"the run {script.run.name}" in capsys.readouterr().err, "a directory of runs says which there are"
    with pytest.raises(UsageError, match=r"it has .*: give blob="):
        torchrelay.save(tmp_path / "c.pkg", model, x, run=script.run, blob="net")


class Sized(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x if x.sum() > 0 else x


def test_constructor_arguments_that_do_not_fit_are_refused_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not when the package is loaded; and what torch prints while it fails to trace stays unsaid."""
    with pytest.raises(UsageError, match="Sized does not accept these: too many"):
        torchrelay.save(tmp_path / "a.pkg", Sized(2), torch.ones(3, 2), constructor=((2, 3), {}))
    assert capfd.readouterr() == ("", "") and not list(tmp_path.iterdir())


def test_sng_14_runs_of_configurations_and_jobs_are_packaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive of a configured run makes its model, without labels; of a job `--model` does."""
    lifecycle_cases.run(tmp_path)
    (tmp_path / "model.py").unlink()
    write_note(
        tmp_path / "run", ProgramRecord("run", str(tmp_path / "config.yaml"), None, None, 0.0)
    )  # as `train -m`
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line_of_a_job.py").write_text("import torch\ndef made(): return torch.nn.Linear(2, 1)\n")
    assert main(["package", "run@1", "--out", "a.pkg"]) == 0
    assert "epoch 1 of run: " in capsys.readouterr().out
    package = torchrelay.open_package("a.pkg")
    assert package.signature is not None
    assert [one.name for one in package.signature.inputs] == ["batch_0"]
    assert (package.metadata["run"], package.metadata["epoch"]) == ("run", 1)
    line, x = nn.Linear(2, 1), torch.rand(5, 2)
    torchrelay.open_checkpoint("run", 1).load({"a.model": line}, rename={"a.model.line": "a.model"})
    assert torch.equal(package.module()([x]), line(x).squeeze(1))

    job = torchrelay.Job("plain", blobs={"net": line})
    job.epoch(lambda ctx: None)
    job.stop_when(torchrelay.max_epochs(1))
    torchrelay.JobRunner(job, "plain", code=False).train(torchrelay.LocalSession())
    typed = ["package", "plain", "--out", "b.pkg"]
    model, example = ["--model", "line_of_a_job:made"], ["--input", "input=float32[batch,2]"]
    for more, text in (
        ([], "--model"),
        ([*model, "--blob", "net"], "--input"),
        ([*model, *example], "has no blob 'model'"),
        ([*model, *example, "--epoch", "7"], "no epoch 7"),
    ):
        assert main([*typed, *more]) == 2
        assert text in capsys.readouterr().err
    assert main([*typed, *model, *example, "--blob", "net"]) == 0
    assert torch.equal(torchrelay.open_package("b.pkg").module()(input=x), line(x))
    assert main(["package", "no_run.py", "--out", "c.pkg", *model]) == 2
    assert "only for a run directory" in capsys.readouterr().err
