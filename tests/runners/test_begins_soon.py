"""A local run begins soon: little is imported, and what its start was is recorded while it trains."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import clean_environment

import torchrelay
from torchrelay.metadata.code.capture import captures

ROOT = Path(__file__).resolve().parent.parent.parent
HELLO = (ROOT / "README.md").read_text().split("`hello.py`:\n\n```python\n", 1)[1].split("```", 1)[0]
MOST_MODULES = 325
NOT_FOR_A_LOCAL_RUN = (
    *(
        "checkpoint.save.background",
        "checkpoint.save.staging",
        "checkpoint.files.dcp",
        "checkpoint.files.interop",
        "checkpoint.files.tensor_files",
        "models.onnx.exporter",
        "checkpoint.storage.object_store",
    ),
    *("checkpoint.log.tiered_storage", "jobs.config.", "jobs.data.loader", "metadata.sinks.trackers"),
    *(
        "metadata.sql",
        "runners.distributed.world",
        "runners.session.distributed",
        "runners.programs.program",
    ),
    *(
        "runners.training.extras.onnx_export",
        "runners.training.extras.replay",
        "runners.training.extras.upstream",
        "runners.training.extras.remote_run",
    ),
)
NOT_OF_OTHERS = ("yaml", "numpy.testing", "torch.onnx", "torch.distributed.checkpoint", "fsspec", "rich")
LISTED = "\nimport json, sys\njson.dump(sorted(sys.modules), open('modules.json', 'w'))\n"


def run(program: str, folder: Path, *, code: int = 0) -> str:
    """Run a program as a user does; returns what it printed."""
    folder.mkdir(exist_ok=True)
    (folder / "hello.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "hello.py"],
        cwd=folder,
        env=clean_environment({"PYTHONPATH": str(ROOT / "src")}),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_a_local_run_imports_what_it_uses(tmp_path: Path) -> None:
    """Fresh and resumed, README's program imports at most so many modules, and none for other runs."""
    run("import torch\ntorch.optim.SGD([torch.zeros(1)], 1.0)" + LISTED, tmp_path / "bare")
    bare = set(json.loads((tmp_path / "bare/modules.json").read_text()))
    for epochs in (3, 5):
        run(HELLO.replace("max_epochs(5)", f"max_epochs({epochs})") + LISTED, tmp_path / "own")
        loaded = set(json.loads((tmp_path / "own/modules.json").read_text()))
        ours = [name for name in loaded if name.startswith("torchrelay.")]
        assert len(ours) <= MOST_MODULES, len(ours)
        unused = tuple(f"torchrelay.{name}" for name in NOT_FOR_A_LOCAL_RUN)
        assert not [name for name in ours if name.startswith(unused)]
        assert not [name for name in loaded - bare if name.startswith(NOT_OF_OTHERS)]


def test_a_start_is_recorded_as_it_was_when_its_first_epoch_began(tmp_path: Path) -> None:
    """What a program makes of its arguments, directory and source while it trains is not recorded."""
    edits = (
        "    import os, sys; sys.argv.append('later'); os.chdir('/')\n"
        "    if ctx.epoch == 2: open(__file__, 'a').write('# later')\n"
    )
    program = HELLO.replace("def train(ctx):\n", "def train(ctx):\n" + edits)
    run(program.replace('"runs/hello"', f'"{tmp_path}/run"'), tmp_path)
    (captured,) = captures(tmp_path / "run")
    assert captured["argv"] == ["hello.py"]
    assert captured["directory"] == str(tmp_path)
    assert "torch" in captured["packages"]
    assert captured["code"]["files"] == 1
    assert b"# later" in (tmp_path / "hello.py").read_bytes()
    assert not torchrelay.load_code(tmp_path / "run").read("hello.py").endswith(b"# later")


@pytest.mark.parametrize("where", ["setup", "first epoch"])
def test_a_start_that_fails_is_recorded(tmp_path: Path, where: str) -> None:
    """A start that fails before its first epoch, or in it, has left what it was."""
    failing = "@job.setup\ndef fail(ctx):\n    raise OSError('no data')\n\n@job.epoch\n"
    program = HELLO.replace("@job.epoch\n", failing)
    if where == "first epoch":
        program = HELLO.replace("def train(ctx):\n", "def train(ctx):\n    raise OSError('no data')\n")
    assert "no data" in run(program, tmp_path, code=1)
    (captured,) = captures(tmp_path / "runs/hello")
    assert captured["code"]["files"] == 1


def test_a_start_killed_in_its_first_epoch_resumes_and_records_the_next(tmp_path: Path) -> None:
    """After SIGKILL in the first step what is recorded is whole or absent, and the next start goes on."""
    strike = "    import os; os.path.exists('struck') or (open('struck', 'w'), os.kill(os.getpid(), 9))\n"
    program = HELLO.replace("def train(ctx):\n", "def train(ctx):\n" + strike)
    run(program, tmp_path, code=-9)
    assert all("packages" in one for one in captures(tmp_path / "runs/hello"))
    run(program, tmp_path)
    assert captures(tmp_path / "runs/hello")[-1]["attempt"] == 1
    assert json.loads((tmp_path / "runs/hello/status.json").read_text())["epoch"] == 5


def test_workers_forked_in_the_first_step_do_not_disturb_the_record(tmp_path: Path) -> None:
    """Loader workers that are forked while git is asked, and stay, keep nobody waiting."""
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"],
    ):
        tmp_path.mkdir(exist_ok=True)
        subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=60)
    workers = (
        "    global kept\n"
        "    kept = torch.utils.data.DataLoader(x, 64, num_workers=3, persistent_workers=True)\n"
        "    first = next(iter(kept))\n"
    )
    run(HELLO.replace("def train(ctx):\n", "def train(ctx):\n" + workers), tmp_path)
    (captured,) = captures(tmp_path / "runs/hello")
    assert captured["code"]["git"][""]["commit"]


def test_a_save_and_a_resume_enter_few_files() -> None:
    """The path of a save, and that of a resume, have as few files as the design says."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/entered.py")], capture_output=True, text=True, timeout=110,
        env=clean_environment({"PYTHONPATH": str(ROOT / "src")}), check=True,
    )  # fmt: skip
    entered = {
        kind: int(number) for kind, number in re.findall(r"^(save|resume): (\d+) files", done.stdout, re.M)
    }
    assert 0 < entered["save"] <= 45
    assert entered["save"] < entered["resume"] <= 110
