"""Statements of ALF that are about what a run keeps of its source and start: ALF-5, 6, 10 and 19."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from source_trees import fill, git, held, small_job, train
from torchrun import REPOSITORY, clean_environment

import torchrelay
from torchrelay import JobRunner, LocalSession
from torchrelay.errors import UsageError
from torchrelay.metadata.code.capture import Given, captures
from torchrelay.tools.cli.main import main

KILLED = """
import os, signal, sys, time
import torch
from pathlib import Path
from torchrelay import Job, JobRunner, max_epochs
from torchrelay.metadata.code.capture import Given

job = Job("alf", blobs={"w": torch.zeros(2)})

@job.epoch
def first(ctx):
    Path(sys.argv[1] + ".here").touch()
    while sys.argv[3:] and not Path(sys.argv[3] + ".here").exists():
        time.sleep(0.01)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)

job.stop_when(max_epochs(1))
JobRunner(job, sys.argv[1], configuration=Given({"resolved.yaml": b"lr: 0.5"}, "id-1", ("lr=0.5",))).main([])
"""


def start(source: Path, cwd: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start the program above as a user does."""
    env = clean_environment({"PYTHONPATH": str(REPOSITORY / "src"), "PYTHONDONTWRITEBYTECODE": "1"})
    return subprocess.Popen(
        [sys.executable, str(source / "train.py"), *words], cwd=cwd, env=env, stderr=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def two_starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `lives` and run `dies`, which is killed in its first step, from one checkout at the same time."""
    home = tmp_path_factory.mktemp("alf")
    source = fill(home / "source", {"train.py": KILLED, "pkg/net.py": "X = 1"})
    git(source, "init", "-q")
    git(source, "add", "train.py")
    before = held(source)
    running = [start(source, home, "lives", "live", "dies"), start(source, home, "dies", "die", "lives")]
    assert [one.wait(110) for one in running] == [0, -signal.SIGKILL]
    assert held(source) == before, "the source has changed"
    return home


def test_alf_6_a_crash_in_the_very_first_step_leaves_code_and_config(two_starts: Path) -> None:
    """A process that is killed in its first step has left its configuration, code and surroundings."""
    run = two_starts / "dies"
    (captured,) = captures(run)
    assert (run / "config/resolved.yaml").read_bytes() == b"lr: 0.5"
    assert (captured["config_id"], captured["overrides"]) == ("id-1", ["lr=0.5"])
    assert captured["argv"] == [str(two_starts / "source/train.py"), "dies", "die", "lives"]
    assert {"torch", "PyYAML"} <= captured["packages"].keys()
    code = torchrelay.load_code(run)
    assert (code.script, code.files) == ("train.py", ("pkg/net.py", "train.py"))


def test_alf_10_two_runs_of_one_checkout_at_the_same_time(two_starts: Path) -> None:
    """Two processes train from the same source at once; each has its archive, the source has not changed."""
    found = [captures(two_starts / name)[0]["code"] for name in ("lives", "dies")]
    assert found[0]["id"] == found[1]["id"]
    archives = [(two_starts / name / f"code/{found[0]['id']}.zip").read_bytes() for name in ("lives", "dies")]
    assert archives[0] == archives[1]


def test_alf_5_a_file_edited_after_the_start_is_archived_as_it_was_read(tmp_path: Path) -> None:
    """Archive and stored configuration are of the start, whatever the user saves while the job runs."""
    source = fill(tmp_path / "source", {"a.py": "X = 'at the start'"})
    job = small_job()
    job.epoch(lambda: fill(source, {"a.py": "X = 'later'"}) and None)
    train(tmp_path / "run", [source], job, configuration=Given({"a.yaml": b"at the start"}))
    assert torchrelay.load_code(tmp_path / "run").read("a.py") == b"X = 'at the start'"
    assert (source / "a.py").read_text() == "X = 'later'"
    assert (tmp_path / "run/config/a.yaml").read_bytes() == b"at the start"


def test_alf_19_several_roots_excludes_and_the_size_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roots lie side by side in one archive, .gitignore counts in each, too much is refused by name."""
    app = fill(
        tmp_path / "app",
        {"train.py": "import lib_a\nX = lib_a.X", ".gitignore": "data.json", "data.json": "[]"},
    )
    library = fill(tmp_path / "library", {"lib_a.py": "X = 7", "old/x.py": ""})
    git(library, "init", "-q")
    monkeypatch.syspath_prepend(library)
    run = tmp_path / "run"
    train(run, torchrelay.Sources({"app": app, "lib": library}, exclude=["old/"]))
    code = torchrelay.load_code(run)
    assert code.files == ("app/train.py", "lib/lib_a.py")
    assert code.import_module("train").X == 7
    fill(app, {"huge.py": "#" * 3000})
    with pytest.raises(UsageError, match=r"the largest are app/huge.py \(0\.0 MB\)"):
        train(tmp_path / "other", torchrelay.Sources([app, library], limit_bytes=2000))
    assert not (tmp_path / "other").exists()


def test_changed_code_is_told_and_each_start_keeps_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run goes on with changed source; one line says what changed, and both versions can be had."""
    source = fill(tmp_path / "source", {"a.py": "1", "b.py": "2", "c.py": "3"})
    run = tmp_path / "run"
    train(run, source, configuration=Given({"a.yaml": b"epochs: 1"}))
    (source / "c.py").unlink()
    fill(source, {"a.py": "changed", "d.py": "4"})
    capsys.readouterr()
    train(run, source, small_job(epochs=2), configuration=Given({"a.yaml": b"epochs: 2"}))
    assert "code changed since attempt 0: a.py, +d.py, -c.py" in capsys.readouterr().err
    train(run, source, small_job(epochs=3), configuration=Given({"a.yaml": b"epochs: 2"}))
    assert "code changed" not in capsys.readouterr().err
    assert [torchrelay.load_code(run, n).read("a.py") for n in (0, 1, 2)] == [b"1", b"changed", b"changed"]
    assert len(list((run / "code").iterdir())) == 2
    assert main(["runs", "diff", f"{run}#0", f"{run}#2"]) == 0
    told = capsys.readouterr().out
    assert "-epochs: 1" in told
    assert "+epochs: 2" in told
    assert main(["runs", "code", str(run), "--attempt", "7"]) == 2
    assert "known are 0, 1, 2" in capsys.readouterr().err


def test_source_that_cannot_be_archived_never_fails_a_run_by_itself(tmp_path: Path) -> None:
    """The default only warns, and says in the record why; source that was named must be archived."""
    main_module = sys.modules["__main__"]
    script = fill(tmp_path / "source", {"train.py": "", "huge.py": b"#" * (1 << 20)})
    for number in range(33):
        fill(script, {f"huge{number}.py": b"#" * (1 << 20)})
    before = getattr(main_module, "__file__", None), getattr(main_module, "__spec__", None)
    main_module.__file__, main_module.__spec__ = str(script / "train.py"), None
    try:
        with pytest.warns(UserWarning, match="the source is not archived.*: the source has 35 files"):
            train(tmp_path / "run", None)
        with pytest.raises(UsageError, match="more than the limit"):
            train(tmp_path / "other", script)
    finally:
        main_module.__file__, main_module.__spec__ = before
    (captured,) = captures(tmp_path / "run")
    assert captured["code"]["id"] is None
    with pytest.raises(UsageError, match="was not archived: the source has 35 files"):
        torchrelay.load_code(tmp_path / "run")


def test_tests_and_notebooks_have_no_source_by_default(tmp_path: Path) -> None:
    """A program that came with an installation, such as this test runner, is not what a run ran."""
    train(tmp_path / "run", None)
    (captured,) = captures(tmp_path / "run")
    assert captured["code"] == {
        "id": None,
        "why": "no user script was found, as in a notebook; name the source with code=",
    }
    train(tmp_path / "off", False)
    assert json.loads((tmp_path / "off/captured.0.json").read_text())["code"]["why"] == "code=False"
    with pytest.raises(UsageError, match="belong to a run directory"):
        JobRunner(small_job(), None, code=[tmp_path]).train(LocalSession())
