"""Runs the cases of `side_cases` in fresh processes and prints a table."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from side_cases import CASES, Case

PATIENCE_SECS = 120
ENGINES = ("dcp", "ours")
_SAYS = "OUTCOME "


def outcome(case: Case, engine: str, python: Sequence[str] = (sys.executable,)) -> str:
    """What a case came to, in its own processes and an empty directory."""
    with tempfile.TemporaryDirectory(prefix="torchrelay-side-") as folder:
        launcher = [*python]
        if case.ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
        done = subprocess.run(
            [*launcher, __file__, "--one", case.name, engine, folder],
            check=False,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECS,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    said = [line.partition(_SAYS)[2] for line in done.stdout.splitlines() if _SAYS in line]
    if not said:
        raise RuntimeError(
            f"{case.name} with {engine} said nothing:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return said[0]


def table() -> str:
    """All cases, as a table in Markdown."""
    rows = ["| what happens | torch.distributed.checkpoint | torchrelay |", "|---|---|---|"]
    for case in CASES:
        rows.append(f"| {case.what} | {outcome(case, 'dcp')} | {outcome(case, 'ours')} |")
    return "\n".join(rows)


def main() -> int:
    """Print the table; with `--one` run one side of one case here."""
    parser = argparse.ArgumentParser(prog="scripts/side-by-side", description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("CASE", "ENGINE", "DIRECTORY"))
    options = parser.parse_args()
    if options.one:
        name, engine, folder = options.one
        (case,) = (case for case in CASES if case.name == name)
        said = getattr(case, engine)(Path(folder))
        if os.environ.get("RANK", "0") == "0":
            print(f"{_SAYS}{said}", flush=True)
        return 0
    import torch

    import torchrelay

    versions = f"torch {torch.__version__}, torchrelay {torchrelay.__version__}"
    print(f"{date.today()}, {versions}, Python {platform.python_version()}, {platform.system()}\n\n{table()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
