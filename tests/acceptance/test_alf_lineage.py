"""What a run keeps of the stages that it was built on (ALF-2, 3, 4, 5, 6, 10, 14)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from stages import Net, filled, run_stage, values
from torch import nn
from torchrun import clean_environment

from torchrelay import InitFrom, Upstream, export_checkpoint, open_checkpoint
from torchrelay.errors import TaskFailedError
from torchrelay.tools.cli.main import main


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A -> B -> C, each in a folder of its own; A and B are gone."""
    folder = tmp_path_factory.mktemp("chain")
    run_stage(folder / "a", {"model": filled(Net(), 0)}, epochs=1)
    configured(folder / "a", "lr=0.5")
    run_stage(
        folder / "b",
        {"policy": filled(Net(), 10)},
        epochs=1,
        upstream={"low": Upstream(folder / "a", keep="model.encoder")},
        init_from=InitFrom("low", "policy.encoder", "model.encoder"),
    )
    configured(folder / "b", "lr=0.25")
    run_stage(
        folder / "c",
        {"agent": filled(Net(), 20)},
        upstream={"expert": Upstream(f"{folder}/b@best", keep=["policy", "upstream.low"])},
        init_from=InitFrom("expert", "agent", "policy"),
    )
    for name in ("a", "b"):
        shutil.rmtree(folder / name)
    return folder


def configured(run: Path, override: str) -> None:
    """Put the files of a run's configuration where a start puts them."""
    (run / "config/sources/parts").mkdir(parents=True)
    (run / "config/model.yaml").write_text(f"of: {run.name}\n")
    (run / "config/sources/parts/deep.yaml").write_text(f"# {override}\n\tverbatim \u00e4\n")
    (run / "captured.0.json").write_text(json.dumps({"overrides": ["lr=9"]}))
    (run / "captured.1.json").write_text(json.dumps({"overrides": [override]}))


def run_id(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text())["uuid"])


_NO_WAY_OUT = """
import socket, sys
def refuse(*args, **options): raise OSError("no network")
socket.socket.connect = socket.create_connection = refuse
from torchrelay import export_checkpoint, open_checkpoint
import torch
sys.path.insert(0, {helpers!r})
from stages import Net
where = {where!r}
ckpt, agent = open_checkpoint(where, epoch="last"), Net()
ckpt.load({{"agent": agent}})
with torch.no_grad():
    print(agent.head(agent.encoder(torch.ones(1, 4))).tolist())
export_checkpoint(where, {out!r})
print(sorted(ckpt.upstream), ckpt.upstream["expert"].upstream["low"].blobs)
"""


def test_alf_2_the_last_stage_alone_is_enough(
    chain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of C's directory evaluates, exports and tells A, B and C in a process without network."""
    run = shutil.copytree(chain / "c", tmp_path / "only/c")
    program = _NO_WAY_OUT.format(
        helpers=str(Path(__file__).parents[1] / "helpers"),
        where=str(run),
        out=str(tmp_path / "out.safetensors"),
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr
    last = values(run, "agent")
    one = last["agent.encoder.weight"] * 4 + last["agent.encoder.bias"]
    answer = one * 3 * last["agent.head.weight"] + last["agent.head.bias"]
    assert done.stdout == f"{[[answer, answer]]}\n['expert'] ('model',)\n"
    assert (tmp_path / "out.safetensors").stat().st_size > 0
    assert main(["runs", "lineage", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [stage["stage"] for stage in told["stages"]] == ["expert", "expert/low"]
    assert len({told["run"]["uuid"], *(stage["run_id"] for stage in told["stages"])}) == 3
    records = open_checkpoint(run).value("upstream.lineage")
    assert [records[stage["stage"]]["run_id"] for stage in told["stages"]] == [
        stage["run_id"] for stage in told["stages"]
    ]


def test_alf_2_the_last_stage_trains_on_alone(chain: Path, tmp_path: Path) -> None:
    """C goes on where it was, with neither A nor B."""
    run = shutil.copytree(chain / "c", tmp_path / "c")
    before = values(run, "agent")
    assert run_stage(run, {"agent": filled(Net(), 0)}, epochs=3) == 3
    assert values(run, "agent") == {name: one + 1 for name, one in before.items()}


def test_alf_3_configurations_and_overrides_of_all_stages_are_there(
    chain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From C's directory: A's overrides, marked, and its source files verbatim, sub-directories included."""
    assert main(["runs", "lineage", str(chain / "c")]) == 0
    tree = capsys.readouterr().out
    assert "override lr=0.5" in tree and "override lr=0.25" in tree and "lr=9" not in tree
    assert main(["runs", "lineage", str(chain / "c"), "expert/low", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["overrides"] == ["lr=0.5"]
    assert told["config"] == {
        "config/model.yaml": "of: a\n",
        "config/sources/parts/deep.yaml": "# lr=0.5\n\tverbatim \u00e4\n",
    }
    assert main(["runs", "lineage", str(chain / "c"), "expert/low"]) == 0
    shown = capsys.readouterr().out
    assert "override lr=0.5" in shown and "--- config/sources/parts/deep.yaml" in shown


def test_alf_4_files_of_the_same_name_do_not_meet(tmp_path: Path) -> None:
    """Two upstreams with a `model.yaml` each, of which one was built on a third one: all are kept."""
    for name in ("a", "b", "c"):
        above = {"a": tmp_path / "a"} if name == "b" else {}
        run_stage(tmp_path / name, {"model": Net()}, epochs=1, upstream=above)
        configured(tmp_path / name, name)
    run_stage(tmp_path / "d", {"model": Net()}, upstream={"a": tmp_path / "c", "b": tmp_path / "b"})
    kept = {
        path: (tmp_path / "d" / path).read_text()
        for path in (
            "lineage/a/config/model.yaml",
            "lineage/b/config/model.yaml",
            "lineage/b/lineage/a/config/model.yaml",
        )
    }
    assert list(kept.values()) == ["of: c\n", "of: b\n", "of: a\n"]


def test_alf_5_what_was_read_is_kept(tmp_path: Path) -> None:
    """An upstream that is changed or goes on after the start changes nothing of what was kept of it."""
    run_stage(tmp_path / "a", {"model": filled(Net(), 0)}, epochs=1)
    configured(tmp_path / "a", "lr=1")
    options: dict[str, Any] = {"upstream": {"a": tmp_path / "a"}, "init_from": "a"}
    run_stage(tmp_path / "b", {"model": Net()}, epochs=1, **options)
    (tmp_path / "a/config/model.yaml").write_text("edited\n")
    run_stage(tmp_path / "a", {"model": filled(Net(), 0)}, epochs=3)
    run_stage(tmp_path / "b", {"model": Net()}, epochs=2, **options)
    assert (tmp_path / "b/lineage/a/config/model.yaml").read_text() == "of: a\n"
    assert json.loads((tmp_path / "b/lineage/a/stage.json").read_text())["epoch"] == 1
    assert values(tmp_path / "b")["model.head.bias"] == 3.0


def test_alf_6_a_crash_in_the_first_step_leaves_the_lineage(tmp_path: Path) -> None:
    """It is there before the first task runs; a start after the crash makes it anew without a second one."""
    run_stage(tmp_path / "a", {"model": Net()}, epochs=1)
    configured(tmp_path / "a", "lr=1")
    seen: list[bool] = []
    options: dict[str, Any] = {"upstream": {"a": tmp_path / "a"}, "init_from": "a", "save_initial": False}

    def model(ctx: Any) -> nn.Module:
        seen.append((tmp_path / "b/lineage/a/config/model.yaml").is_file())
        return Net()

    for _ in range(2):
        with pytest.raises(TaskFailedError, match="as planned"):
            run_stage(tmp_path / "b", {"model": model}, crash_in=1, **options)
    assert seen == [True, True]
    assert [path.name for path in (tmp_path / "b").glob("*lineage*")] == ["lineage"]


def test_alf_6_lineage_of_a_beginning_that_was_given_up_stays(tmp_path: Path) -> None:
    """`resume="never"` with another upstream: each epoch knows its own stages, and both records are there."""
    for name in ("a", "b"):
        run_stage(tmp_path / name, {"model": Net()}, epochs=1)
        run_stage(
            tmp_path / "c",
            {"model": Net()},
            epochs=1,
            resume="never",
            max_attempts=0,
            upstream={name: tmp_path / name},
        )
    assert (tmp_path / "c/lineage/b/stage.json").is_file()
    assert (tmp_path / "c/lineage.1/a/stage.json").is_file()
    assert list(open_checkpoint(tmp_path / "c").upstream) == ["b"]
    assert list(open_checkpoint(tmp_path / "c", epoch="1,branch=0").upstream) == ["a"]


def test_alf_6_a_kill_while_lineage_is_written_leaves_all_or_none(tmp_path: Path) -> None:
    """Killed at many moments of the copy in turn: the folder is whole or not there, the next start mends."""
    from torchrelay.metadata import lineage as capturing
    from torchrelay.metadata.lineage import StageRecord, stages_of

    run_stage(tmp_path / "a", {"model": Net()}, epochs=1)
    configured(tmp_path / "a", "lr=1")
    stages = [
        capturing.LineageStage(alias, StageRecord("a", "a", "job", None, 1, 0), [], tmp_path / "a")
        for alias in ("x", "y")
    ]
    moments = 0
    while True:
        run = tmp_path / f"run{moments}"
        run.mkdir()
        child = os.fork()
        if child == 0:
            left = [moments]

            def strike(event: str, args: Any, left: list[int] = left) -> None:
                if event in ("open", "os.rename", "os.mkdir"):
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(strike)
            capturing.capture(run, stages)
            os._exit(0)
        ended = os.waitpid(child, 0)[1]
        assert [stage.path for stage in stages_of(run)] in ([], ["x", "y"])
        capturing.capture(run, stages)
        assert len(stages_of(run)) == 2
        assert (run / "lineage/y/config/sources/parts/deep.yaml").is_file()
        assert not list(run.glob(".tmp-*"))
        moments += 4
        if ended == 0:
            break
    assert moments > 20


def test_alf_10_nothing_is_made_beside_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are built on another leave it and the directory of the program as they were."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").write_text("# a program\n")
    monkeypatch.chdir(tmp_path / "src")
    run_stage(tmp_path / "a", {"model": Net()}, epochs=1)

    def look() -> dict[str, tuple[int, int]]:
        roots = (tmp_path / "src", tmp_path / "a")
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_size)
            for root in roots
            for path in [root, *root.rglob("*")]
        }

    before = look()
    for name in ("b", "c"):
        run_stage(tmp_path / name, {"model": Net()}, upstream={"a": Upstream("../a", "model")}, init_from="a")
    assert look() == before


def size(run: Path) -> int:
    return sum(path.stat().st_size for path in (run / "checkpoints").rglob("*") if path.is_file())


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "registered"])
def test_alf_14_a_frozen_part_is_stored_once(tmp_path: Path, kept: bool, tell: Any) -> None:
    """12 epochs take the bytes of one frozen part and 12 small ones; an export has all of it."""
    big, epochs = 2_000_000, 12
    run_stage(tmp_path / "a", {"model": nn.Linear(big // 4, 1, bias=False)}, epochs=1)
    frozen = nn.Linear(big // 4, 1, bias=False).requires_grad_(False)
    blobs: dict[str, Any] = {"small": nn.Linear(100, 10)}
    options: dict[str, Any] = {"upstream": {"a": Upstream(tmp_path / "a", keep="model" if kept else ())}}
    if not kept:
        blobs["frozen"] = frozen
        options["init_from"] = InitFrom("a", "frozen", "model")
    run_stage(tmp_path / "none", {"small": nn.Linear(100, 10)}, epochs=epochs)
    run_stage(tmp_path / "b", blobs, epochs=epochs, **options)
    told = (size(tmp_path / "b") - size(tmp_path / "none")) / big
    tell(f"ALF-14: {epochs} epochs with a frozen part of {big / 1e6} MB hold it {told:.2f} times")
    assert told < 1.2
    name = "upstream.a.model.weight" if kept else "frozen.weight"
    shutil.rmtree(tmp_path / "a")
    export_checkpoint(tmp_path / "b", tmp_path / "out.safetensors")
    from safetensors.torch import load_file

    whole = load_file(tmp_path / "out.safetensors")[name]
    assert torch.equal(whole, open_checkpoint(tmp_path / "b", epoch=0).load_tensors(name)[name])
