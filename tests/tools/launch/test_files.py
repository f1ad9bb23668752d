"""What `torchrelay launch` makes of what was typed: requests, commands, files. Nothing is started here."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay.errors import UsageError
from torchrelay.tools.cli.main import main
from torchrelay.tools.launch import local, slurm
from torchrelay.tools.launch.request import (
    LaunchRequest,
    Layout,
    command_of,
    layout_of,
    make_directory,
    next_directory,
)

EVIL = "a 'b\" $(touch pwned) `touch pwned`; touch pwned\n#, \\ * ~"


def request(folder: Path, **more: object) -> LaunchRequest:
    given = {"layout": Layout(2, 8), "command": ("train.py", "--lr", "0.1"), "workdir": folder} | more
    return LaunchRequest(**given)  # type: ignore[arg-type]


def test_a_layout_is_nodes_times_ranks_and_nothing_else() -> None:
    """2x8 and 8 are layouts; what is none is refused with an example."""
    assert layout_of("2x8") == Layout(2, 8) and layout_of("8") == Layout(1, 8)
    for text in ("", "0", "2x", "x8", "2x0", "-1", "2X8", "1e3", "2x8x2"):
        with pytest.raises(UsageError, match="2x8"):
            layout_of(text)


def test_what_stands_behind_the_dashes_is_a_script_a_module_or_a_configuration(tmp_path: Path) -> None:
    """-m config.yaml becomes `torchrelay run`, which is told of --run; a module stays one."""
    assert command_of(["--", "train.py", "--", "-j"], None) == ("train.py", "--", "-j")
    assert command_of(["-m", "pkg.train", "x"], "runs/a") == ("-m", "pkg.train", "x")
    run = ("-m", "torchrelay", "run", "-m")
    assert command_of(["--", "-m", "a.yaml", "-o", "k=v"], None) == (*run, "a.yaml", "-o", "k=v")
    assert command_of(["-m", "a.yaml"], "runs/a") == (*run, "a.yaml", "--run-dir", "runs/a")
    (tmp_path / "config.yaml").write_text("")
    assert command_of(["-m", str(tmp_path)], None) == (*run, str(tmp_path))
    for words in ([], ["--"], ["-m"], ["--lr", "3"]):
        with pytest.raises(UsageError, match="script"):
            command_of(words, None)


@pytest.mark.parametrize("where", ["local", "slurm"])
def test_the_shell_runs_nothing_of_a_users_words(where: str, tmp_path: Path) -> None:
    """Arguments, values of the environment and paths arrive as they were typed, whatever they hold."""
    folder = tmp_path / "it's $(touch pwned)"
    folder.mkdir()
    told = tmp_path / "python"
    words = "import json,os,sys; e=os.environ; " + (
        "outer = [name for name in e if name in ('TORCHRELAY_LAUNCHER_PID', 'TORCHRELAY_LAUNCH_NODE')];"
        "json.dump([sys.argv[1:],e['GIVEN'],os.getcwd(),e['step'],e['port'],outer], open('told','w'))"
    )
    told.write_text(f"#!{sys.executable}\n{words}\n")
    told.chmod(0o755)
    made = request(
        folder, layout=Layout(1, 1), command=("train.py", EVIL), logs=folder,
        environment=(("GIVEN", EVIL), ("step", "s"), ("port", "p")),
        python=str(told), options=(("comment", "a 'b\" $(touch pwned) `touch pwned`"),) * (where == "slurm"),
    )  # fmt: skip
    (script,) = (local if where == "local" else slurm).files(made)
    for name in ("srun", "squeue", "scontrol"):  # what Slurm's own programs get as words is what they run
        (tmp_path / name).write_text('#!/bin/sh\n[ "$1" != --kill-on-bad-exit=1 ] || { shift; exec "$@"; }\n')
        (tmp_path / name).chmod(0o755)
    text = script.text if where == "local" else script.text.replace("\nexec ", "\ntrue ")  # not the last act
    done = subprocess.run(
        ["bash" if where == "slurm" else "sh", "-c", text], cwd=folder, check=False, timeout=60,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "TORCHRELAY_LAUNCH_NODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0
    arguments, given, where_it_ran, *more = json.loads((folder / "told").read_text())
    assert arguments[-2:] == ["train.py", EVIL] and given == EVIL and where_it_ran == str(folder)
    inherited = ["TORCHRELAY_LAUNCH_NODE"] if where == "local" else []
    assert more == [
        "s",
        "p",
        inherited,
    ]  # the script has variables, too; a job of Slurm is a launch of its own
    assert not list(tmp_path.rglob("pwned"))


def test_the_sbatch_file_says_what_a_requeued_job_needs(tmp_path: Path) -> None:
    """Requeue, one log, notice for the batch script alone; limits and options in Slurm's own words."""
    made = request(
        tmp_path, time_limit=93_784, notice=600, name="big", options=(("partition", "gpu"), ("exclusive", ""))
    )
    lines = slurm.files(made)[0].text.splitlines()
    head = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    for line in (
        "--job-name=big", "--nodes=2", "--ntasks-per-node=1", "--time=1-02:03:04", "--requeue",
        "--open-mode=append", "--signal=B:USR1@600", "--partition=gpu", "--exclusive",
    ):  # fmt: skip
        assert line in head
    assert "--signal=B:USR1@300" in slurm.files(request(tmp_path))[0].text
    for name, value in (
        ("nodes", "3"),
        ("mem", "1\n#SBATCH --x"),
        ("Mem", "1"),
        ("output", "x"),
        ("outp", "x"),
    ):
        with pytest.raises(UsageError, match=r"--set|#SBATCH"):
            slurm.files(request(tmp_path, options=((name, value),)))


def test_slurm_refuses_what_a_batch_script_would_change_or_repeat_for_ever(tmp_path: Path) -> None:
    """A notice as long as the limit ends every start at once; a shell's own variables arrive otherwise."""
    slurm.files(request(tmp_path, time_limit=121, notice=120, environment=(("port", "8080"), ("step", "x"))))
    with pytest.raises(UsageError, match="not longer than --notice"):
        slurm.files(request(tmp_path, time_limit=120, notice=120))
    for name in ("UID", "RANDOM", "IFS", "BASH_ENV", "relay_step"):
        with pytest.raises(UsageError, match=f"--env {name}"):
            slurm.files(request(tmp_path, environment=((name, "1"),)))


def test_local_refuses_options_of_clusters(tmp_path: Path) -> None:
    """--set means something to clusters only."""
    with pytest.raises(UsageError, match="partition"):
        local.files(request(tmp_path, options=(("partition", "gpu"),)))


def test_no_two_launches_share_a_directory(tmp_path: Path) -> None:
    """Each launch of a name gets the next number; a dry run makes nothing."""
    assert next_directory(tmp_path / "logs", "a").name == "a.0" and not (tmp_path / "logs").exists()
    assert [make_directory(tmp_path / "logs", "a").name for _ in range(3)] == ["a.0", "a.1", "a.2"]


def test_a_dry_run_prints_the_files_and_makes_nothing_without_torch(tmp_path: Path) -> None:
    """The printed text is what would be written; torch is not imported for it."""
    (tmp_path / "train.py").touch()
    code = (
        "import sys; from torchrelay.tools.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit('torch was imported' if 'torch' in sys.modules else code)"
    )
    words = ["launch", "-j", "2x8", "--slurm", "--dry-run", "--json", "--name", "n", "--", "train.py", "x y"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["target"] == "slurm" and shown["files"][0]["name"] == "job.sbatch"
    assert shlex.split(shown["files"][0]["text"].partition("train.py")[2].splitlines()[0])[0] == "x y"
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_module_needs_no_dashes_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchrun takes it: `-m MODULE` and all that follows is the command, whatever it looks like."""
    monkeypatch.chdir(tmp_path)
    for dashes in ([], ["--"]):
        assert main(["launch", "-j", "2", "--dry-run", *dashes, "-m", "a.b", "--run", "-j", "x y"]) == 0
        assert capsys.readouterr().out.endswith("\n  -m a.b --run -j 'x y'\n")
    assert main(["launch", "-j", "2", "--dry-run", "--", "-m", "a.b", "--", "-x"]) == 0
    assert capsys.readouterr().out.endswith("\n  -m a.b -- -x\n")
    for more in (["--", "x"], ["y", "--"]):
        assert main(["launch", "-j", "2", "--dry-run", "-m", "a.b", *more]) in (0, 2)
        said = capsys.readouterr()
        assert "needs another -- before it" in said.err or said.out.endswith(f" -m a.b {' '.join(more)}\n")


def test_mistakes_are_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 and one line for each of them; no directory is left."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for words, told in (
        (["-j", "x", "train.py"], "2x8"),
        (["-j", "2", "tarin.py"], "script tarin.py does not exist"),
        (["-j", "2"], "launch needs a script"),
        (["-j", "2", "-m"], "launch needs a script"),
        (["-j", "2", "-m", "a.yaml", "-o", "k=v"], "a.yaml does not exist"),
        (["-j", "2", "--slurm", "--", "-m", "a.yaml"], "a.yaml does not exist"),
        (["train.py", "-j", "2"], "before the script"),
        (["-j", "2", "--env", "TORCHRELAY_LAUNCH_DIR=x", "train.py"], "the launcher sets"),
        (["-j", "2", "--name", "a/b", "train.py"], "--name"),
        (["-j", "2", "--env", "1A=b", "train.py"], "--env"),
        (["-j", "2", "--set", "mem", "train.py"], "--set"),
        (["-j", "2", "--time-limit", "soon", "train.py"], "invalid duration"),
        (["-j", "2", "--local", "--slurm", "train.py"], "not allowed with"),
        (["-j", "2", "--slurm", "--set", "nodes=3", "train.py"], "-j"),
    ):
        assert main(["launch", *words]) == 2
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1, said
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
