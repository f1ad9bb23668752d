"""Statements of Flammable that are about the history of code: FLM-2, 8, 13, 16, 18 and 19."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from source_trees import IDENTITY, fill, git, held, small_job, train
from torchrun import torchrun

import torchrelay
from torchrelay.errors import UsageError
from torchrelay.metadata.code.archive import open_archive
from torchrelay.metadata.code.capture import captures
from torchrelay.metadata.experiments import ProgramRecord, write_note, write_result
from torchrelay.tools.cli.main import main

MODEL = """
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, {width})

    def told(self):
        import colorsys
        from helper import NAME

        return NAME, colorsys.__name__
"""


def project(directory: Path, width: int) -> Path:
    """A project whose modules have the same names as those of every other."""
    return fill(
        directory, {"model.py": MODEL.format(width=width), "helper.py": f"NAME = 'helper of {width}'"}
    )


def repository(directory: Path, kind: str) -> Path:
    """A repository of this kind; returns the directory of the source in it."""
    source = project(directory / "deep/project", 1)
    fill(directory, {"elsewhere/big.py": "no part of it"})
    if kind == "no git":
        return source
    git(directory, "init", "-q", "-b", "trunk")
    if kind == "no commits":
        git(directory, "add", "deep/project/model.py")
        return source
    git(directory, "add", ".")
    git(directory, "commit", "-qm", "first")
    fill(source, {"helper.py": "NAME = 'stashed'"})
    git(directory, "stash", "-q")
    if kind == "detached":
        git(directory, "checkout", "-q", "--detach")
    fill(source, {"staged.py": "1", "helper.py": "NAME = 'changed'", "untracked.py": "2"})
    git(directory, "add", "deep/project/staged.py")
    os.utime(source / "model.py", (1, 1))  # what git knows of it is out of date
    return source


@pytest.mark.parametrize("kind", ["sub-directory", "detached", "no commits", "no git"])
def test_flm_2_a_run_records_the_code_and_touches_nothing_of_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A start has an id, a time and a code id; every byte and time below .git and of the source stays.

    So it is in a sub-directory of a large repository, with a detached HEAD, before the first commit and
    without git; nobody has told git a name.
    """
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in IDENTITY:
        monkeypatch.delenv(name, raising=False)
    source = repository(tmp_path / "repo", kind)
    before = held(tmp_path / "repo")
    train(tmp_path / "run", [source])
    assert held(tmp_path / "repo") == before
    identity = json.loads((tmp_path / "run/run.json").read_text())
    (captured,) = captures(tmp_path / "run")
    code = captured["code"]
    assert identity["uuid"]
    assert captured["time"] >= identity["created"]
    with open_archive(tmp_path / f"run/code/{code['id']}.zip") as archive:
        assert archive.read_all() == {
            str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*.py")
        }
    found = code["git"].get("", {})
    assert found.get("branch") == {"detached": None, "no git": None}.get(kind, "trunk")
    assert found.get("dirty") is (None if kind == "no git" else True)
    assert bool(found.get("commit")) is (kind in ("sub-directory", "detached"))
    if found.get("commit"):
        diff = (tmp_path / "run" / found["diff"]).read_text()
        assert "+NAME = 'changed'" in diff
        assert "elsewhere" not in diff


def test_flm_8_two_past_runs_with_the_same_module_names_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own code, also in imports of later, and its weights; this process stays as it is."""
    fill(tmp_path / "mine", {"model.py": "MINE = True", "helper.py": "NAME = 'mine'"})
    monkeypatch.syspath_prepend(tmp_path / "mine")
    weights = {}
    for width in (1, 3):
        source = project(tmp_path / f"source{width}", width)
        weights[width] = torch.full((width, 2), float(width))
        train(tmp_path / f"run{width}", [source], small_job(blobs={"model": net(width)}))
        for path in source.iterdir():
            path.unlink()  # the archives are all that is left
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    import model as mine

    before = (list(sys.path), Path.cwd(), held(tmp_path), dict(sys.modules))
    loaded = {width: torchrelay.load_code(tmp_path / f"run{width}") for width in (1, 3)}
    models = {width: code.import_module("model").Net() for width, code in loaded.items()}
    for width, module in models.items():
        torchrelay.open_checkpoint(tmp_path / f"run{width}").load({"model": module})
        assert torch.equal(module.weight, weights[width])
    for width, module in [*models.items()] * 2:
        assert module.told() == (f"helper of {width}", "colorsys")
    assert (list(sys.path), Path.cwd(), held(tmp_path)) == before[:3]
    assert {name: sys.modules[name] for name in before[3]} == before[3]
    assert sys.modules["model"] is mine
    assert "helper" not in sys.modules


def net(width: int) -> torch.nn.Module:
    module = torch.nn.Linear(2, width)
    torch.nn.init.constant_(module.weight, float(width))
    return module


PROGRAM = """
import os, sys
import torch
import torchrelay
from torchrelay import Job, JobRunner, max_epochs

session = torchrelay.init()

def job():
    made = Job("ranks", blobs={"w": torch.zeros(2)})
    made.epoch(lambda: None)
    made.stop_when(max_epochs(1))
    return made

JobRunner(job(), "alike").train()
JobRunner(job(), "unlike", code="source" + os.environ["RANK"]).main()
"""


@pytest.mark.ranks
def test_flm_13_ranks_with_other_code_are_named_and_refused(tmp_path: Path) -> None:
    """Ranks with the same source make one archive and one record between them.

    A rank whose source is another than rank 0's is named on all, with what differs, and nothing is made.
    """
    fill(tmp_path, {"train.py": PROGRAM})
    for rank in (0, 1):
        fill(tmp_path / f"source{rank}", {"a.py": "1", "helper.py": f"NAME = {rank}", "only.py": "1"})
    (tmp_path / "source1/only.py").unlink()
    done = torchrun(tmp_path / "train.py", warm=True, ranks=2, cwd=tmp_path)
    for rank in (0, 1):
        assert "differ from rank 0 (rank 1: helper.py differs, only.py is missing)" in done.of_rank(rank), (
            done
        )
        assert "Traceback" not in done.of_rank(rank)
    assert not (tmp_path / "unlike").exists()
    (captured,) = captures(tmp_path / "alike")
    assert [path.name for path in (tmp_path / "alike/code").iterdir()] == [f"{captured['code']['id']}.zip"]
    assert captured["code"]["script"] == "train.py"
    assert captured["world"]["processes"] == 2
    assert captured["torch"]["version"] == torch.__version__


def test_flm_16_code_of_a_run_is_extracted_and_two_runs_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`runs code` gives the archived source back, `runs diff` what another run ran otherwise."""
    monkeypatch.chdir(tmp_path)
    source = project(tmp_path / "source", 1)
    fill(source, {"run.sh": "#!/bin/sh\n\techo\n"})
    (source / "alias.py").symlink_to("model.py")
    train(tmp_path / "a", [source])
    fill(source, {"helper.py": "NAME = 'new'\n", "added.py": "x = 1\n", "run.sh": "#!/bin/sh\n\ttrue\n"})
    train(tmp_path / "b", [source])
    assert main(["runs", "code", "b", "-o", "out"]) == 0
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    assert os.access("out/run.sh", os.X_OK)
    assert not os.access("out/model.py", os.X_OK)
    assert Path("out/alias.py").readlink() == Path("model.py")
    capsys.readouterr()
    assert main(["runs", "diff", "a", "b"]) == 0
    told = capsys.readouterr().out
    assert "+NAME = 'new'" in told
    assert "+\ttrue" in told, "tabs stay, so that patch can read it"
    assert main(["runs", "diff", "a", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["code"] == {"added": ["added.py"], "changed": ["helper.py", "run.sh"], "removed": []}
    assert main(["runs", "diff", "a", "b", "--stat"]) == 0
    assert "added.py  +1 -0" in capsys.readouterr().out


def test_flm_16_runs_of_all_experiments_are_listed_and_one_is_shown_beside_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`runs ls` has id, state, comment and key metric of every run; `runs show ID` the differences, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHRELAY_RUNS", raising=False)
    source = project(tmp_path / "source", 1)
    for at, name in enumerate(("a/20250101-000000-aaaaa", "a/20250102-000000-bbbbb", "b/c/d")):
        run = tmp_path / "runs" / name
        fill(source, {"helper.py": f"NAME = {at}\n"})
        train(run, [source])
        code_id = captures(run)[0]["code"]["id"]
        write_note(run, ProgramRecord("small", "nowhere", code_id, f"c{at}", float(at), f"no. {at}"))
    write_result(tmp_path / "runs/b/c/d", 1, None, {"epoch": 1, "metrics": {"acc": 0.5}})
    fill(tmp_path / "runs", {".retrained/x/run.json": "{}", "a/broken/run.json": "{"})
    assert main(["runs", "ls", "--json"]) == 0
    rows = {one["id"]: one for one in json.loads(capsys.readouterr().out)["runs"]}
    assert list(rows) == ["broken", "20250101-000000-aaaaa", "20250102-000000-bbbbb", "d"]
    assert [one["experiment"] for one in rows.values()] == ["a", "a", "a", "b/c"]
    assert rows["d"]["message"] == "no. 2" and rows["d"]["test"] == {"epoch": 1, "acc": 0.5}
    assert rows["broken"]["problem"] and rows["d"]["state"] == "tested"
    assert main(["runs", "ls", "runs", "--state", "finished"]) == 0
    table = capsys.readouterr().out
    assert "20250101-000000-aaaaa" in table and "no. 0" in table and "b/c" not in table
    assert main(["runs", "show", "bbbbb"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"against +\S+/runs/a/20250101-000000-aaaaa", told)
    assert "+NAME = 1" in told and "no. 1" in told
    assert main(["runs", "show", "bbbbb", "--against", "runs/b/c/d", "--stat", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["difference"]["code"]["changed"] == ["helper.py"] and found["run"]["config_id"] == "c1"
    assert main(["runs", "diff", "aaaaa", "bbbbb#0", "--stat"]) == 0
    assert "helper.py  +1 -1" in capsys.readouterr().out
    assert main(["runs", "show", "2025"]) == 2
    assert "2 runs in runs have '2025' in their ids" in capsys.readouterr().err


def test_flm_18_the_same_directory_name_in_two_places_is_two_experiments(tmp_path: Path) -> None:
    """Runs are told apart by their directories and ids, never by the name of the script's directory."""
    ids = []
    for place in ("one", "two"):
        source = project(tmp_path / place / "project", 1)
        train(tmp_path / place / "runs/a", [source])
        (captured,) = captures(tmp_path / place / "runs/a")
        assert captured["code"]["roots"] == {"": str(source)}
        ids.append(json.loads((tmp_path / place / "runs/a/run.json").read_text())["uuid"])
    assert ids[0] != ids[1]
    with pytest.raises(UsageError, match="holds a run of job 'small', not 'another'"):
        train(tmp_path / "one/runs/a", False, small_job("another"))


def test_flm_19_the_source_as_a_hidden_ref(tmp_path: Path) -> None:
    """Git compares what two runs ran, uncommitted and untracked files included; no branch knows."""
    source = repository(tmp_path / "repo", "sub-directory")
    looks = [
        ["status", "--porcelain"],
        ["branch", "-a"],
        ["stash", "list"],
        ["rev-parse", "HEAD"],
        ["log", "--oneline"],
    ]

    def seen() -> Iterator[object]:
        yield (tmp_path / "repo/.git/index").read_bytes()
        for words in looks:
            yield git(tmp_path / "repo", *words)

    git(tmp_path / "repo", "status")  # writes what it sees of times into the index
    before = list(seen())
    for number in (1, 2):
        fill(source, {"untracked.py": f"run = {number}\n"})
        train(tmp_path / f"run{number}", torchrelay.Sources([source], git_ref=True))
    refs = [captures(tmp_path / f"run{number}")[0]["code"]["refs"][0] for number in (1, 2)]
    assert list(seen()) == before
    told = git(tmp_path / "repo", "diff", *refs)
    assert "-run = 1" in told
    assert "+run = 2" in told
    assert git(tmp_path / "repo", "show", f"{refs[0]}:deep/project/helper.py") == "NAME = 'changed'"
