"""Plants bugs in copies of the repository and runs the tests that must notice each of them."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planted import Bug
from screen import Screen
from seeded_bugs import bugs

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECS = 600
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """What the tests made of a bug: `by` is the test that failed; without one the bug was `missed`."""

    bug: Bug
    by: str
    secs: float
    output: str

    @property
    def caught(self) -> bool:
        """Whether a test failed."""
        return bool(self.by)


def plant(bug: Bug, where: Path) -> None:
    """Replace the code in a copy. Raises ValueError where it does not stand there exactly once."""
    path = where / bug.path
    text = path.read_text()
    if text.count(bug.old) != 1:
        raise ValueError(f"{bug.name}: its code stands {text.count(bug.old)} times in {bug.path}")
    path.write_text(text.replace(bug.old, bug.new))


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of what git knows or would know, links as links."""
    with tempfile.TemporaryDirectory(prefix="torchrelay-seeded-") as folder:
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout.split("\0")  # fmt: skip
        for name in filter(None, names):
            source, target = ROOT / name, Path(folder) / name
            if source.is_symlink() or source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        yield Path(folder)


def try_out(bug: Bug) -> Verdict:
    """Plant a bug and run its tests until the first failure."""
    began = time.monotonic()
    with copied() as where:
        plant(bug, where)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--no-header",
            *bug.tests,
        ]
        environment = {**os.environ, "PYTHONPATH": str(where / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            cwd=where,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECS,
        )
    found = _FAILED.search(done.stdout) if done.returncode == 1 else None
    return Verdict(bug, found[1] if found else "", time.monotonic() - began, done.stdout[-2000:])


def main() -> int:
    """Plant and try; the exit code is 1 where a bug was missed."""
    parser = argparse.ArgumentParser(prog="scripts/seeded-bugs", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only bugs whose name has one of these")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time")
    options = parser.parse_args()
    chosen = [bug for bug in bugs() if not options.words or any(word in bug.name for word in options.words)]
    screen, verdicts = Screen(), []
    with ThreadPoolExecutor(options.jobs) as pool:
        for one in pool.map(try_out, chosen):
            verdicts.append(one)
            screen.line(f"{'caught' if one.caught else 'MISSED'} {one.secs:4.0f} s  {one.bug.name}  {one.by}")
            if not one.caught:
                screen.line(one.output)
    missed = sum(not one.caught for one in verdicts)
    screen.line(f"{len(verdicts)} bugs, {len(verdicts) - missed} caught, {missed} missed")
    return int(missed > 0 or not verdicts)


if __name__ == "__main__":
    sys.exit(main())
