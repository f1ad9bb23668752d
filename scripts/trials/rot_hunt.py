"""One file of a run is damaged, then every verb and the next start are asked: only true words come out."""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from torchrelay import Job, JobRunner, LocalSession, Sources, max_epochs, open_checkpoint
from torchrelay.checkpoint.format.position import Key, Position
from torchrelay.checkpoint.log.writer import append_as_guest, pin_draft, tag_draft
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import RelayError
from torchrelay.tools.cli.main import main as command

EPOCHS = 3
Harm = Callable[[Path, int], None]


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at // 8 % len(data)] ^= 1 << at % 8
    path.write_bytes(data)


HARMS: dict[str, Harm] = {
    "flip": _flip,
    "cut": lambda path, at: path.write_bytes(path.read_bytes()[: at % path.stat().st_size]),
    "empty": lambda path, _: path.write_bytes(b""),
    "gone": lambda path, _: path.unlink(),
    "zeros": lambda path, _: path.write_bytes(bytes(path.stat().st_size)),
    "junk": lambda path, _: path.write_bytes(b'{"a":[1,2]}\n'),
}
KINDS = (
    "captured.*.json",
    "checkpoints/data/*/*.safetensors",
    "checkpoints/data/*/manifest.json",
    "checkpoints/data/*/stats.json",
    "checkpoints/job.json",
    "checkpoints/log/00000*.json",
    "checkpoints/log/HINT",
    "checkpoints/log/base-*.json",
    "checkpoints/writer.json",
    "code/*.zip",
    "events.*.jsonl",
    "logs/*.log",
    "metadata.jsonl",
    "metrics.*.jsonl",
    "run.json",
    "status.json",
)
QUICK = ("show", "ckpt ls", "ckpt verify", "runs ls", "top")
ACKNOWLEDGED = ("checkpoints/data/*/*.safetensors", "checkpoints/data/*/manifest.json")
"""What is saved lies once: damage of it costs the epochs that need it, and nothing else."""


def train(run: Path, epochs: int) -> tuple[int, float]:
    """The next start, which must do `epochs` in all; returns the last epoch and the sum of the weights."""
    weights = torch.zeros(6)
    job = Job("rot", blobs={"w": weights, "note": {"a": 1}})

    @job.epoch
    def add(ctx: Any) -> None:
        weights.add_(1)
        ctx.log("loss", 1.0 / float(weights[0]))

    job.stop_when(max_epochs(epochs))
    source = run.parent / "source"
    source.mkdir(exist_ok=True)
    (source / "program.py").write_text("print('hello')\n")
    runner = JobRunner(job, run, best=("loss", "min"), code=Sources([source]))
    assert runner.manager is not None
    runner.manager.engine.ledger.takeover_secs = 0.1
    with LocalSession() as session:
        return int(runner.train(session)), float(weights.sum())


def make(run: Path) -> Path:
    """A run of two starts with a tag, a pin and a base file of the log, whose second start was lost."""
    from torchrelay.checkpoint.log import chain

    known = chain.INLINE, chain._REBASED_INLINE
    chain.INLINE, chain._REBASED_INLINE = 2, 1
    try:
        train(run, EPOCHS - 1)
        train(run, EPOCHS)
    finally:
        chain.INLINE, chain._REBASED_INLINE = known
    storage = LocalStorage(run / "checkpoints")
    append_as_guest(storage, tag_draft("paper", Key(0, Position(1))))
    append_as_guest(storage, pin_draft("kept", Key(0, Position(1))))
    return run


def files_of(run: Path) -> list[str]:
    """Every file of the run, by its path below it."""
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


def kind_of(name: str) -> str:
    """A file's kind: the same for all epochs, records and starts."""
    parts = name.split("/")
    if name.startswith("checkpoints/data/"):
        return f"checkpoints/data/*/{'*.safetensors' if name.endswith('.safetensors') else parts[-1]}"
    if name.startswith("checkpoints/log/"):
        return "checkpoints/log/" + ("HINT" if parts[-1] == "HINT" else parts[-1][:5] + "*.json")
    if len(parts) > 1 and parts[0] != "checkpoints":
        return f"{parts[0]}/*.{name.rpartition('.')[2]}"
    first, *middle, last = name.split(".")
    return ".".join([first, *("*" for _ in middle), last])


@dataclass
class Answers:
    """What came out, by who was asked: an exit code, or `traceback`; and all that was printed."""

    codes: dict[str, int | str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    newest: int | None = None
    resumed: tuple[int, float] | None = None

    def wrong(self, name: str) -> Iterator[str]:
        """What is not as it must be."""
        lost = any(fnmatch(name, pattern) for pattern in ACKNOWLEDGED)
        for who, code in self.codes.items():
            if code == "traceback":
                yield f"{who}: a traceback: {self.said[who].strip().splitlines()[-1]}"
            elif code not in (0, 5 if who in ("ckpt verify", "ckpt repair") or lost else 0):
                yield f"{who}: ended with {code}: {self.said[who].strip()[-200:]}"
        if self.resumed is not None and self.resumed != (EPOCHS + 1, 6.0 * (EPOCHS + 1)):
            yield f"start: came to {self.resumed}"
        if self.newest is not None and self.newest != EPOCHS and not lost and "/log/0" not in name:
            yield f"open_checkpoint: took epoch {self.newest}"


def ask(run: Path, verbs: tuple[str, ...] = (), *, start: bool = True) -> Answers:
    """Every verb (or some of them), `open_checkpoint`, and where that is wanted repair and the next start."""
    answers = Answers()
    asked = {
        "show": ["show", str(run)],
        "ckpt ls": ["ckpt", "ls", str(run)],
        "ckpt show": ["ckpt", "show", f"{run}@last"],
        "ckpt why": ["ckpt", "why", str(run)],
        "ckpt du": ["ckpt", "du", str(run)],
        "ckpt verify": ["ckpt", "verify", str(run)],
        "stats": ["ckpt", "stats", str(run)],
        "runs ls": ["runs", "ls", str(run.parent)],
        "runs show": ["runs", "show", str(run)],
        "lineage": ["runs", "lineage", str(run)],
        "top": ["top", "--once", str(run)],
        "report": ["report", "-o", str(run.parent / "report.html"), "--no-norms", str(run)],
    }
    for who, words in asked.items():
        if not verbs or who in verbs:
            _asked(answers, who, lambda words=words: command(words))  # type: ignore[misc]

    def opened() -> int:
        checkpoint = open_checkpoint(run)
        answers.newest = checkpoint.epoch
        return 0 if float(checkpoint.load_tensors("w")["w"].sum()) == 6.0 * checkpoint.epoch else 7

    def started() -> int:
        answers.resumed = train(run, EPOCHS + 1)
        return 0

    _asked(answers, "open_checkpoint", opened)
    if not start:
        return answers
    copy = run.parent / "repaired"
    shutil.copytree(run, copy)
    _asked(answers, "ckpt repair", lambda: command(["ckpt", "repair", str(copy)]))
    shutil.rmtree(copy)
    _asked(answers, "start", started)
    return answers


def _asked(answers: Answers, who: str, work: Callable[[], int]) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings():
        warnings.simplefilter("always")
        try:
            answers.codes[who] = work()
        except RelayError as error:
            answers.codes[who] = error.exit_code
            out.write(f"{type(error).__name__}: {error}")
        except BaseException:
            answers.codes[who] = "traceback"
            out.write(traceback.format_exc())
    answers.said[who] = out.getvalue()


def copy_of(made: Path, directory: Path) -> Path:
    """A copy of the run that may be damaged."""
    return Path(shutil.copytree(made, directory / made.name))


def trial(made: Path, name: str, harm: str, at: int, verbs: tuple[str, ...] = ()) -> Answers:
    """Damage one file of a copy, and ask."""
    with tempfile.TemporaryDirectory(prefix="rot-hunt-") as directory:
        run = copy_of(made, Path(directory))
        HARMS[harm](run / name, at)
        return ask(run, verbs)


def main() -> int:
    """Play the trials; 1 if one of them finds something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--file", default="*", help="only files that this pattern matches")
    parser.add_argument("--table", action="store_true", help="each kind of file once with each harm")
    chosen = parser.parse_args()
    draw, found = random.Random(chosen.seed), 0
    with tempfile.TemporaryDirectory(prefix="rot-hunt-") as directory:
        made = make(Path(directory) / "run")
        names = [one for one in files_of(made) if fnmatch(one, f"*{chosen.file}")]
        for number, (name, harm) in enumerate(_chosen(names, chosen, draw), 1):
            answers = trial(made, name, harm, at := draw.randrange(1 << 40))
            wrong = list(answers.wrong(name))
            found += bool(wrong)
            if wrong or chosen.table:
                codes = " ".join(f"{who}={code}" for who, code in answers.codes.items() if code)
                print(f"{number} {name} {harm} {at}: {codes or 'all 0'} {answers.newest} {answers.resumed}")
            for one in wrong:
                print(f"    {one}", flush=True)
    print(f"{number} trials, {found} with findings")
    return 1 if found else 0


def _chosen(names: list[str], chosen: argparse.Namespace, draw: random.Random) -> Iterator[tuple[str, str]]:
    if chosen.table:
        last = {kind_of(name): name for name in names}
        yield from ((name, harm) for name in last.values() for harm in HARMS)
        return
    for _ in range(chosen.trials):
        yield draw.choice(names), draw.choice(list(HARMS))


if __name__ == "__main__":
    sys.exit(main())
