"""The epoch in which training went bad: found with few loads, named with blob, count and place."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from epochs import Writing, moment, parameter, value
from meshes import Saved

from torchrelay.checkpoint.format.dtypes import BLOCK
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Sharded
from torchrelay.checkpoint.format.position import Key, Position
from torchrelay.checkpoint.inspect.anomalies import BadElementSearch
from torchrelay.checkpoint.inspect.contents import Epoch, open_epoch
from torchrelay.checkpoint.storage.open import CountingStorage
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.tools.cli.main import main

NAN, INF = float("nan"), float("inf")


def made(root: Path, epochs: int, bad_from: int | None) -> Path:
    """A run whose weights have NaN from an epoch on; its loss leaps three epochs before."""
    directory = RunDirectory(root / "hello")
    directory.create("hello", None, 1)
    with Writing(directory.checkpoints, "hello") as writing:
        for epoch in range(epochs):
            weight = torch.full((3, 4), float(epoch))
            if bad_from is not None and epoch >= bad_from:
                weight[1, 2], weight[2] = NAN, INF
            writing.save(
                epoch, [parameter("model.w", weight), moment("o.m", weight * 0), value("n", epoch)], 2
            )
            loss = 1 / (epoch + 1) if epoch != 17 else 9.0
            directory.log_metrics(0, {"epoch": epoch, "metrics": {"loss": loss, "odd": "nan"}})
    return directory.path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 epochs, bad from 20 on."""
    return made(tmp_path_factory.mktemp("bad"), 32, 20)


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["ckpt", "find-bad", *(str(one) for one in arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def found(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    _, out, _ = told(capsys, *arguments, "--json")
    return json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


def test_the_planted_epoch_is_found_in_few_loads(run: Path, capsys):
    """Of 32 epochs at most 6 are read; leaf, counts, first index and last good epoch are named."""
    said = found(capsys, run)
    assert (said["found"], said["epoch"], said["last_good"], said["epochs"]) == (True, 20, 19, 32)
    assert len(said["read"]) <= math.ceil(math.log2(32)) + 1
    assert {19, 20, 31} <= set(said["read"])
    first, second = said["leaves"]
    assert (first["leaf"], first["nan"], first["inf"], first["first"]) == ("model.w", 1, 4, [1, 2])
    assert (second["leaf"], second["nan"]) == ("o.m", 5)
    assert said["resume"] == {"epoch": 19, "arguments": ["--resume-from-epoch", "19"]}


def test_find_bad_for_people(run: Path, capsys):
    """The epoch, what was presumed and read, the leaves, the command that goes on before it; code 1."""
    code, out, err = told(capsys, run)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[0].startswith(
        "epoch 20 is the first with NaN or Inf (6 of 32 epochs read, epoch 19 was read"
    )
    assert "assumes that bad values stay" in lines[0]
    assert lines[2].split() == ["model.w", "float32", "1", "4", "[1,2]"]
    assert "--resume-from-epoch 19, or train(resume_from_epoch=19)" in lines[-1]


def test_all_reads_every_epoch(run: Path, capsys):
    """--all presumes nothing."""
    said = found(capsys, run, "--all")
    assert (said["epoch"], said["read"]) == (20, list(range(32)))


def test_a_part_of_the_run_and_of_the_blobs(run: Path, capsys):
    """Up to an epoch, in some blobs, of NaN alone; where nothing is found the code is 0."""
    code, out, _ = told(capsys, f"{run}@19")
    assert (code, out.startswith("no NaN or Inf in epoch 19")) == (0, True)
    assert found(capsys, run, "--only", "o")["leaves"][0]["leaf"] == "o.m"
    assert found(capsys, run, "--nan-only")["leaves"][0]["inf"] == 0
    code, _, err = told(capsys, run, "--only", "modle.w")
    assert (code, err.count("\n"), "did you mean 'model.w'" in err) == (2, 1, True)


def test_bad_from_the_first_epoch(tmp_path: Path, capsys):
    """Where the oldest epoch is bad there is none to go on from, and it is said how to look past it."""
    code, out, _ = told(capsys, made(tmp_path, 3, 0))
    assert (code, "--nan-only" in out.splitlines()[-1]) == (1, True)


def test_epochs_that_the_log_calls_damaged_are_left_out(tmp_path: Path, capsys):
    """A quarantined epoch is not read, and that is said."""
    run = made(tmp_path, 4, 3)
    with Writing(run / "checkpoints", "hello") as writing:
        writing.log.quarantine(Key(0, Position(1)), "rot")
    code, out, err = told(capsys, run)
    assert (code, "epoch 1 is skipped" in err, "epoch 3 is the first" in out) == (1, True, True)


def test_damage_is_named(tmp_path: Path, capsys):
    """A block that is not what was saved ends the search with 5 and names epoch, file, leaf and block."""
    run = made(tmp_path, 2, None)
    for file in (run / "checkpoints").glob("data/e00000001-*/*.main.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    code, out, err = told(capsys, run)
    assert (code, out, err.count("\n")) == (5, "", 1)
    assert "cannot read epoch 1: data/e00000001" in err and "block 0 of model.w" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["RUN@99"], "no epoch 99"),
        (["RUN/checkpoints/data"], "is not a run and has no checkpoints"),
        (["RUN", "--metric", "los"], "no epoch has a metric 'los'; known are loss, odd"),
        (["RUN", "--metric", "loss", "--nan-only"], "cannot be combined with --metric"),
        (["RUN", "--jump", "3"], "--jump needs --metric"),
        (["RUN/checkpoints", "--metric", "loss"], "has checkpoints but no run"),
    ],
)
def test_mistakes_are_one_line(run: Path, capsys, arguments, said):
    """Unknown runs, epochs and metrics: one line, code 2."""
    code, out, err = told(capsys, *(one.replace("RUN", str(run)) for one in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_the_jump_of_a_metric(run: Path, capsys):
    """The loss that leaps at epoch 17 is found among the metrics, with the epoch before it to go on from."""
    code, out, _ = told(capsys, run, "--metric", "loss")
    assert code == 1
    assert out.startswith("epoch 17: loss jumps from 0.058824 to 9;")
    assert "--resume-from-epoch 16" in out
    said = found(capsys, run, "--metric", "loss")
    assert (said["epoch"], said["value"], said["resume"]["epoch"]) == (17, 9.0, 16)
    assert found(capsys, f"{run}@16", "--metric", "loss")["found"] is False
    assert found(capsys, run, "--metric", "loss", "--jump", "100000")["found"] is False
    odd = found(capsys, run, "--metric", "odd")
    assert (odd["epoch"], odd["value"], odd["resume"]) == (0, "nan", None)


def test_blocks_that_are_known_to_be_good_are_read_once(tmp_path: Path):
    """What did not change since another epoch is not read again; what cannot be bad never is."""
    frozen, trained = torch.randn(3 << 18), torch.randn(1 << 18)
    with Writing(tmp_path) as run:
        counts = torch.arange(9)
        for epoch in (1, 2):
            leaves = [parameter("m.f", frozen), parameter("m.t", trained * epoch), parameter("m.n", counts)]
            run.save(epoch, leaves, 1)
        storage = CountingStorage(run.storage)
        epochs = [open_epoch(storage, entry) for entry in run.log.view.entries]
        looker, read = BadElementSearch(), []
        for one in epochs:
            before = storage.bytes_read
            assert looker.bad_leaves(one) == []
            headers = sum(row.header_bytes for row in one.manifest.shards)
            read.append(storage.bytes_read - before - headers)
        assert (read, looker.loads) == ([4 * BLOCK, BLOCK], 2)


def test_the_first_index_in_a_sharded_tensor():
    """In columns of several nodes the first is the first of the tensor, not of a file."""
    whole = torch.zeros(6, 8)
    whole[1, 7], whole[2, 0], whole[5, 3] = NAN, INF, NAN
    epoch = Epoch(Saved({"m": whole}, {"m": Mesh((0, 1), (2,), (Sharded(1),))}, 2).run())
    (bad,) = BadElementSearch().bad_leaves(epoch)
    assert (bad.nan, bad.inf, bad.index) == (2, 1, (1, 7))


def test_a_bad_element_behind_many_good_ones(tmp_path: Path):
    """Far into a tensor that is split between nodes and read in pieces the index is right."""
    whole = torch.zeros(1025, 4099)
    whole[1024, 4000] = -INF
    with Writing(tmp_path) as run:
        entry = run.save(1, [parameter("m.w", whole.to(torch.bfloat16))], 3)
        (bad,) = BadElementSearch().bad_leaves(open_epoch(run.storage, entry))
    assert (bad.inf, bad.index) == (1, (1024, 4000))
