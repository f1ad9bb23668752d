"""A release, tried before it is one: built from a clean clone, installed where the tree is out of sight.

Python 3.11 wholly: a job of 2 epochs, `verify`, a type check of a user's program. Python 3.10 and 3.13
without torch, which is large: installation, import, `--help`, and the verbs that look at that job's run.
What is not found or not installed is reported as not tried, never as good.
The first steps of README.md are followed, too: its install line, and its own loop, killed and resumed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import first_run
import interpreters
import wheels
from launching import REPOSITORY, clean_environment

WHOLE, LIGHT = "3.11", ("3.10", "3.13")
LIGHT_NEEDS = ("pathspec", "fsspec", "PyYAML", "xxhash", "rich", "jinja2")
"""The dependencies but torch."""
TOOLS = ("twine", "readme_renderer[md]")
"""What a package index looks at before it takes a file, in an environment of its own; pinned as all is."""
LOOKING = (
    ["--version"], ["--help"], ["ls", "{run}"], ["show", "{run}"], ["ckpt", "stats", "{run}"],
    ["ckpt", "show", "{run}@last"], ["ckpt", "du", "{run}"], ["ckpt", "why", "{run}", "1"],
    ["ls", "{run}", "--json"], ["verify", "{run}"],
)  # fmt: skip
JOB = """
import torch
from torchrelay import Job, JobRunner, LocalSession, max_epochs, seed

seed(0)
model = torch.nn.Linear(2, 1)
job = Job("release", blobs=dict(model=model))

@job.epoch
def train(ctx):
    ctx.log("loss", model(torch.ones(2)).sum())

job.stop_when(max_epochs(2))
with LocalSession() as session:
    print("epoch", int(JobRunner(job, "run").train(session)))
"""
TYPED = """
import torchrelay
from torchrelay import Job, JobRunner, RunResult

def trained(job: Job) -> RunResult:
    return JobRunner(job, "runs/typed").train()

reveal_type(torchrelay.open_checkpoint("runs/typed").epoch)
wrong: str = trained(Job("typed"))
"""


@dataclass
class Told:
    """What was tried and how it ended."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)

    def note(self, what: str, where: str, outcome: str) -> None:
        """One row with the seconds since the one before, printed at once."""
        now = time.monotonic()
        self.rows.append((what, where, outcome))
        print(f"{outcome:<10} {where:<6} {now - self.since:6.1f} s  {what}", flush=True)
        self.since = now

    @property
    def failed(self) -> bool:
        """Whether anything was wrong."""
        return any(outcome.startswith("FAILED") for _, _, outcome in self.rows)


class FailedError(Exception):
    """A command ended otherwise than it should."""


def run(*command: str | Path, cwd: Path, secs: float = 1200) -> str:
    """The output of a command that must succeed, without what this process inherited from the tree."""
    env = {name: value for name, value in clean_environment().items() if not name.startswith("PYTHONPATH")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=secs, check=False
    )
    if done.returncode:
        told = f"{' '.join(map(str, command))} ended with {done.returncode}"
        raise FailedError(f"{told}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def clone(where: Path) -> Path:
    """A clean clone of the last commit."""
    run("git", "clone", "--quiet", "--no-local", REPOSITORY, where / "clone", cwd=where)
    return where / "clone"


def build(clean: Path, where: Path) -> Path:
    """The wheel made from the sdist, equal to the one made from the clone."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", where / "dist", cwd=clean)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", where / "direct", cwd=clean)
    (wheel,), (direct,) = (where / "dist").glob("*.whl"), (where / "direct").glob("*.whl")
    if wheels.contents(wheel) != wheels.contents(direct):
        raise FailedError("the wheel made from the sdist is not the one made from the clone")
    if wrong := list(wheels.complaints(wheel)):
        raise FailedError(f"{wheel.name}: {'; '.join(wrong)}")
    return wheel


def described(python: Path, where: Path, clean: Path) -> None:
    """What an index would refuse, or show as plain text, of the files that `build` made."""
    fresh = environment(python, where / "tools", TOOLS, clean)
    run(fresh, "-m", "twine", "check", "--strict", *sorted((where / "dist").iterdir()), cwd=where)


def environment(python: Path, where: Path, needs: Sequence[str | Path], clean: Path) -> Path:
    """The python of a fresh environment in which `needs` are installed."""
    run(python, "-m", "venv", where, cwd=where.parent)
    pip = (where / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "-c", clean / "constraints.txt", *needs, cwd=where)
    return where / "bin/python"


def wholly(python: Path, wheel: Path, where: Path, clean: Path, told: Told) -> Path:
    """All that a user does, in an environment with torch; returns the run that the job left."""
    home = where / "whole"
    fresh = environment(python, home, [wheel, "mypy"], clean)
    told.note("installed with torch and the pins", WHOLE, "ok")
    (home / "job.py").write_text(JOB)
    if run(fresh, "job.py", cwd=home).splitlines()[-1] != "epoch 2":
        raise FailedError("the job of two epochs did not end at epoch 2")
    told.note("a job of 2 epochs", WHOLE, "ok")
    _look(fresh, home / "run", WHOLE, told)
    (home / "typed.py").write_text(TYPED)
    # A program that is wrong, to see that types are seen at all.
    done = subprocess.run(
        [fresh, "-m", "mypy", "--strict", "--no-incremental", "typed.py"],
        cwd=home, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if "typed.py" in line]
    if len(lines) != 2 or 'type is "int"' not in lines[0] or '"RunResult"' not in lines[1]:
        raise FailedError(f"a type checker sees other types than it should:\n{done.stdout}{done.stderr}")
    told.note("types of the installed package as mypy --strict sees them", WHOLE, "ok")
    return home / "run"


def lightly(
    version: str, python: Path, wheel: Path, made: Path, where: Path, clean: Path, told: Told
) -> None:
    """Installation without torch, and the verbs that need none, on a run that another version made."""
    home = where / f"light-{version}"
    fresh = environment(python, home, LIGHT_NEEDS, clean)
    run(fresh, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", wheel, cwd=home)
    told.note("installed without torch", version, "ok")
    asked = "import sys, torchrelay; print('torch' in sys.modules, torchrelay.__version__)"
    if not run(fresh, "-c", asked, cwd=home).startswith("False "):
        raise FailedError("import torchrelay imported torch")
    told.note("import torchrelay", version, "ok")
    _look(fresh, made, version, told)


def _look(fresh: Path, made: Path, version: str, told: Told) -> None:
    for verb in LOOKING:
        words = [word.format(run=made) for word in verb]
        run(fresh.with_name("torchrelay"), *words, cwd=fresh.parent)
        told.note(f"torchrelay {' '.join(verb).format(run='RUN')}", version, "ok")


def as_a_new_user(python: Path, where: Path, clean: Path, told: Told) -> None:
    """What README.md has a new user do first, with its own lines, from an environment to a resumed run."""
    home, version = where / "first", interpreters.version_of(python)
    run(python, "-m", "venv", home, cwd=where)
    told.note("README: a new environment", version, "ok")
    # Lines of the page go to a shell as they are: pins come by the environment, the address as URL.
    env = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    env |= {"PIP_CONSTRAINT": str(clean / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env["PATH"] = f"{home / 'bin'}{os.pathsep}{env['PATH']}"
    lines = first_run.install_lines(f"file://localhost{clean}", clean / "README.md")
    done = subprocess.run(
        ["bash", "-ec", lines], cwd=home, env=env, capture_output=True, text=True, timeout=1200, check=False
    )
    if done.returncode:
        raise FailedError(f"README's lines failed:\n{lines}{done.stdout[-2000:]}{done.stderr[-2000:]}")
    told.note(f"README: {lines.splitlines()[-1].partition('#')[0].strip()}", version, "ok")
    program, shown = first_run.own_loop(clean / "README.md")
    epoch = first_run.killed(home / "bin/python", home, program, env)
    told.note(f"README: mine.py, killed after epoch {epoch}", version, "ok")
    epoch = first_run.resumed(home / "bin/python", home, shown, env)
    told.note(f"README: mine.py again, resumed from epoch {epoch}", version, "ok")


def check(asked: argparse.Namespace, where: Path, told: Told) -> None:
    """Everything, in the order in which it fails fastest."""
    if asked.readme:
        clean = clone(where)
        told.note("a clean clone", "-", "ok")
        as_a_new_user(Path(sys.executable), where, clean, told)
        return
    named = {version: Path(path) for version, _, path in (one.partition("=") for one in asked.python)}
    found = {version: interpreters.find(version, named) for version in (WHOLE, *LIGHT)}
    missing = [version for version in asked.require.split(",") if version and not found.get(version)]
    if missing:
        raise FailedError(
            f"python {', '.join(missing)} is not on this machine: name it with --python VERSION=PATH"
        )
    clean = clone(where)
    commit = run("git", "rev-parse", "--short", "HEAD", cwd=clean).strip()
    told.note(f"a clean clone of {commit}", "-", "ok")
    wheel = build(clean, where)
    told.note(f"sdist and {wheel.name}; the wheel of the sdist is that of the clone", "-", "ok")
    whole = found[WHOLE]
    if whole is None:
        raise FailedError(f"python {WHOLE} is not on this machine: name it with --python {WHOLE}=PATH")
    described(whole, where, clean)
    told.note("twine check --strict of sdist and wheel", WHOLE, "ok")
    told.note(f"{wheel.name} has {wheel.stat().st_size / 1e6:.1f} MB", "-", "ok")
    as_a_new_user(whole, where, clean, told)
    made = wholly(whole, wheel, where, clean, told)
    for version in LIGHT:
        python = found[version]
        if python is None:
            told.note("no such interpreter here", version, "not tried")
        else:
            lightly(version, python, wheel, made, where, clean, told)


def main() -> int:
    """Try, and say what was tried; 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/release-check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=PATH")
    parser.add_argument("--require", default="", metavar="VERSIONS", help="fail where one of these is absent")
    parser.add_argument("--readme", action="store_true", help="only the first steps of README.md")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave everything in this new folder")
    asked = parser.parse_args()
    told, begin = Told(), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        where = asked.keep or Path(scratch)
        where.mkdir(exist_ok=asked.keep is None)
        try:
            check(asked, where.resolve(), told)
        except (FailedError, first_run.FirstRunError, subprocess.TimeoutExpired) as error:
            told.note(str(error), "-", "FAILED")
        print(f"{len(told.rows)} steps in {time.monotonic() - begin:.0f} s", flush=True)
    return 1 if told.failed else 0


if __name__ == "__main__":
    sys.exit(main())
