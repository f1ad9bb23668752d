"""The first steps of README.md as a new user takes them: its install line, its own loop, a kill and a resume.

Everything is taken from the page itself, so a page that does not work fails here.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from launching import REPOSITORY
from page_blocks import blocks_of
from page_compare import missing

KILLED_AFTER = 8
"""The epoch whose line in the output is answered with SIGKILL."""


class FirstRunError(Exception):
    """The page promises something that did not happen."""


def install_lines(url: str, page: Path = REPOSITORY / "README.md") -> str:
    """Return the page's lines that install torchrelay, for a shell, from the repository at `url`."""
    block = next(one for one in blocks_of(page) if one.language == "console" and "pip install" in one.text)
    lines = re.sub(r"(?m)^\$ ", "", block.text)
    filled, count = re.subn(r"(?m)^URL=\S+", f"URL={url}", lines)
    if count != 1 or '@ git+$URL"' not in filled:
        raise FirstRunError(f"{block.place}: these lines do not install from $URL:\n{block.text}")
    return filled


def own_loop(page: Path = REPOSITORY / "README.md") -> tuple[str, str]:
    """Return the page's own loop, and what the page shows of its resume."""
    blocks = blocks_of(page)
    at = next(number for number, one in enumerate(blocks) if "torchrelay.Run(" in one.text)
    return blocks[at].text, blocks[at + 1].text


def epochs_of(program: str) -> int:
    """Return how many epochs the program trains."""
    found = re.search(r"run\.epochs\((\d+)\)", program)
    if found is None:
        raise FirstRunError("the own loop of the page names no number of epochs")
    return int(found[1])


def killed(python: Path | str, folder: Path, program: str, env: Mapping[str, str]) -> int:
    """Save the program as `mine.py`, run it, and send SIGKILL once epoch 8 is reported; return that epoch."""
    (folder / "mine.py").write_text(program)
    mark = f"epoch {KILLED_AFTER}/{epochs_of(program)} done"
    with subprocess.Popen(
        [python, "mine.py"], cwd=folder, env=dict(env), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if mark in line:
                process.kill()
                break
        process.communicate()
    if process.returncode != -9:
        raise FirstRunError(f"mine.py ended before {mark!r}:\n{''.join(printed)}")
    return KILLED_AFTER


def resumed(python: Path | str, folder: Path, shown: str, env: Mapping[str, str]) -> int:
    """Run `mine.py` again, and compare with what the page shows; return the epoch from which it resumed."""
    done = subprocess.run(
        [python, "mine.py"],
        cwd=folder,
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    printed = done.stdout + done.stderr
    if done.returncode != 0:
        raise FirstRunError(f"mine.py failed with exit code {done.returncode}:\n{printed}")
    found = re.search(r"resuming from epoch (\d+)", printed)
    if found is None or int(found[1]) < KILLED_AFTER:
        raise FirstRunError(f"mine.py did not resume after epoch {KILLED_AFTER}:\n{printed}")
    wanted = shown.rpartition("$ python mine.py")[2].splitlines()[1:]
    for line in wanted:
        # Where the kill struck and how fast the machine is differ from one run to the next.
        known = re.sub(r"resuming from epoch \d+|[\d.]+(?= epochs/s)", "...", line)
        if missing(known, printed) is not None:
            raise FirstRunError(f"the page shows {line!r}, but this was printed:\n{printed}")
    return int(found[1])
