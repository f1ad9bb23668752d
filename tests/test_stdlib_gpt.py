"""examples/stdlib_gpt in a few seconds: every command of its page, kills, other meshes, what comes after."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torchrun import REPOSITORY, Finished, Job, clean_environment
from warm import PLACE, server, warmed

import torchrelay
from torchrelay import open_checkpoint

EXAMPLE = REPOSITORY / "examples/stdlib_gpt"
PAGE = (EXAMPLE / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
TINY = {
    "max_bytes: 1000000": "max_bytes: 5000", "max_bytes: 200000": "max_bytes: 3000",
    "context: 128": "context: 16", "width: 128": "width: 16", "layers: 3": "layers: 2",
    "epochs: 4": "epochs: 2", "sample_bytes: 120": "sample_bytes: 8",
    "{warm_up_steps: 50, steps: 976}": "{warm_up_steps: 4, steps: 40}", "batch_size: 32": "batch_size: 30",
}  # fmt: skip
ASKS = 3
"""As in gpt_watched.py."""
WATCH = ("-o", "runner.train.network_class_path=watched.py:Network")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]
Told = dict[tuple[int, int], list[Any]]
"""By epoch and step: the windows of the step, in order; the digest of the state that it began with."""


class Tiny:
    """The example, small, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "gpt"
        shutil.copytree(EXAMPLE, self.folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
        shutil.copy(REPOSITORY / "tests/programs/gpt_watched.py", self.folder / "watched.py")
        for path in self.folder.glob("*.yaml"):
            text = path.read_text()
            for real, tiny in TINY.items():
                assert real in text, (path.name, real)
                text = text.replace(real, tiny)
            path.write_text(text)
        self.runs = self.folder / "runs"

    def torchrun(
        self, command: str, name: str, *more: str, killed: Path | None = None, restarts: int = 0
    ) -> Finished:
        """A command of the page that begins with torchrun, watched; its ranks are forks."""
        words = shlex.split(tiny_form(command))
        assert words[:2] == ["torchrun", "--standalone"] and words[3:5] == ["-m", "torchrelay"]
        ranks = int(words[2].removeprefix("--nproc-per-node="))
        env = self.watching(name, killed)
        args = [*words[4:], *WATCH, *more]
        with Job("-m", *args, ranks=ranks, cwd=self.folder, max_restarts=restarts, env=env, warm=True) as job:
            return job.wait(200)

    def torchrelay(self, command: str, name: str, *more: str) -> str:
        """A command of the page in a process of its own; what it printed."""
        program = ["-m", *shlex.split(tiny_form(command)), *more]
        env = clean_environment({**self.watching(name), PLACE: server()})
        done = subprocess.run(
            warmed(program), cwd=self.folder, env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def watching(self, name: str, killed: Path | None = None) -> dict[str, str]:
        found = {"WATCHED": str(self.folder / f"{name}.told")}
        return found if killed is None else {**found, "KILLED": str(killed)}

    def told(self, name: str) -> list[list[Any]]:
        return [json.loads(line) for line in (self.folder / f"{name}.told").read_text().splitlines()]


def tiny_form(command: str) -> str:
    return command.replace("epochs=5", "epochs=2")


def by_step(rows: list[list[Any]]) -> Told:
    return {(epoch, step): rest for epoch, step, *rest in rows}


def blobs_of(run: Path) -> dict[str, Any]:
    opened = open_checkpoint(run)
    tensors = opened.load_tensors("gpt.model") | opened.load_tensors("gpt.optimizer")
    return {name: one for name, one in tensors.items() if torch.is_tensor(one)}


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of the epochs."""
    return [dict(open_checkpoint(run, epoch).metrics) for epoch in (1, 2)]


def test_the_story_of_the_page_in_small(tmp_path: Path, tell: Callable[[str], None]) -> None:
    """Trained, killed, resumed on this and on other meshes, evaluated, exported, served, by its commands."""
    tiny, commands = Tiny(tmp_path), iter(COMMANDS)
    train, half = next(commands), tiny.folder / "half"
    done = tiny.torchrun(train, "whole")
    assert done.rc == 0, str(done)
    killed = tiny.torchrun(train, "killed", "--run-dir", "runs/killed", killed=half, restarts=1)
    assert killed.rc == 0 and "resuming from epoch 1+" in killed.out + killed.err, str(killed)
    check_same_bits(tiny)
    assert next(commands) == "cp -r runs/fsdp runs/alone"
    half.rename(tiny.runs / "alone")
    tiny.torchrelay(next(commands), "alone", *WATCH)
    check_goes_on(tiny, "alone", "killed", tell)
    lost = tiny.torchrun(next(commands), "tensor", killed=half)
    assert lost.rc != 0 and half.exists(), str(lost)
    shutil.rmtree(tiny.runs / "tensor_parallel")
    half.rename(tiny.runs / "tensor_parallel")
    done = tiny.torchrun(next(commands), "two")
    assert done.rc == 0 and "resuming from epoch 1+" in done.out + done.err, str(done)
    check_goes_on(tiny, "two", "tensor", tell)
    check_corpus(tiny)
    check_evaluated(tiny, next(commands), tell)
    check_exported(tiny, [next(commands) for _ in range(4)])
    check_served(tiny, *commands)


def check_same_bits(tiny: Tiny) -> None:
    """The run that was killed inside of an epoch ends as the one that was not, metrics and text included."""
    whole, killed = blobs_of(tiny.runs / "fsdp"), blobs_of(tiny.runs / "killed")
    assert whole.keys() == killed.keys()
    assert all(map(torch.equal, whole.values(), killed.values()))
    assert rows_of(tiny.runs / "fsdp") == rows_of(tiny.runs / "killed")
    for epoch in (1, 2):
        texts = [(tiny.runs / run / f"samples/epoch_{epoch}.txt").read_bytes() for run in ("fsdp", "killed")]
        assert texts[0] == texts[1] and len(texts[0]) == len(b"def ") + 8
    assert by_step(tiny.told("whole")) == by_step(tiny.told("killed"))


def check_goes_on(tiny: Tiny, name: str, before: str, tell: Callable[[str], None]) -> None:
    """Another mesh begins with the very state that was saved, has the same data, about the same losses."""
    whole, old, new = (by_step(tiny.told(one)) for one in ("whole", before, name))
    first, last = min(new), max(whole)
    assert first[0] == 1 and first[1] > ASKS and last in new
    assert new[first][1] == old[first][1] is not None
    assert {at: windows for at, (windows, _) in new.items()} == {
        at: windows for at, (windows, _) in whole.items() if at >= first
    }
    run = tiny.runs / {"two": "tensor_parallel"}.get(name, name)
    ours, theirs = rows_of(run), rows_of(tiny.runs / "fsdp")
    for epoch, (mine, other) in enumerate(zip(ours, theirs, strict=True), 1):
        for metric in ("loss", "val/loss"):
            tell(f"{name}, epoch {epoch}: {metric} {mine[metric]:.5f}, undisturbed {other[metric]:.5f}")
            assert mine[metric] == pytest.approx(other[metric], abs=0.02)


def check_corpus(tiny: Tiny) -> None:
    """Every checkpoint knows the text; a run refuses another one, by name."""
    told = json.loads((tiny.runs / "fsdp/corpus.json").read_text())
    parts = {part: told[part] for part in ("train", "validation")}
    corpus = example(tiny, "corpus")["Corpus"]
    run = open_checkpoint(tiny.runs / "fsdp")
    run.load({"corpus": corpus(parts)})
    with pytest.raises(Exception, match="resume with the Python that began it"):
        run.load({"corpus": corpus({**parts, "train": parts["train"][1:]})})


def check_evaluated(tiny: Tiny, command: str, tell: Callable[[str], None]) -> None:
    """The evaluation of the model alone says what the run has said."""
    said = tiny.torchrelay(command, "evaluated")
    found = re.search(r"evaluate epoch 2: bits_per_byte ([0-9.]+)", said)
    own = rows_of(tiny.runs / "fsdp")[-1]["val/bits_per_byte"]
    assert found is not None, said
    tell(f"bits per byte: {own:.6f} of the run, {found[1]} of its model alone")
    assert float(found[1]) == pytest.approx(own, abs=2e-3)


def check_exported(tiny: Tiny, commands: list[str]) -> None:
    """Each form has the model's own names; ONNX is compared with torch as it is written."""
    model = open_checkpoint(tiny.runs / "fsdp", "best").load_tensors("gpt.model")
    for command in commands:
        tiny.torchrelay(command, "exported")
    taken = load_file(tiny.folder / "gpt.safetensors")
    assert ("head.weight" in taken) != ("tokens.weight" in taken)  # the tied weight, stored once
    for name, one in taken.items():
        assert torch.equal(one, model[f"gpt.model.{name}"])
    assert (tiny.folder / "gpt.onnx").exists() and list((tiny.folder / "gpt-hf").glob("*.safetensors"))
    module = torchrelay.load(tiny.folder / "gpt.pkg")
    assert module((torch.zeros(3, 16, dtype=torch.int64),)).shape == (3, 16, 256)


def check_served(tiny: Tiny, serve: str, ask: str) -> None:
    """The server continues a prompt with the bytes that the model itself continues it with."""
    program = ["-m", *shlex.split(serve.replace("--port 8331", "--port 0"))]
    env = clean_environment({PLACE: server()})
    with (tiny.folder / "serve.out").open("w") as out:
        process = subprocess.Popen(warmed(program), cwd=tiny.folder, env=env, stdout=out, stderr=out)
    try:
        url = address(process, tiny.folder / "serve.out")
        words = shlex.split(ask)
        sent = json.loads(words[words.index("-d") + 1])
        answer = httpx.post(f"{url}/predict", json=sent, timeout=60)
        refused = httpx.post(f"{url}/predict", json={"sample": {"prompt": "a", "bytes": -1}}, timeout=60)
    finally:
        process.terminate()
        process.wait(60)
    assert answer.status_code == 200 and refused.status_code == 422, answer.text
    assert bytes(answer.json()["result"]["bytes"]) == continued(tiny, **sent["sample"])


def address(process: subprocess.Popen[bytes], said: Path) -> str:
    """Where it listens, once it says so."""
    end = time.monotonic() + 100
    while not (found := re.search(r"serving .* at (http://\S+)", said.read_text())):
        assert process.poll() is None and time.monotonic() < end, said.read_text()
        time.sleep(0.05)
    return found[1].rstrip("/")


def continued(tiny: Tiny, prompt: str, bytes: int) -> bytes:
    """What a plain model with the weights of the best epoch says, without any server."""
    model = example(tiny, "model")["Model"]({"width": 16, "heads": 4, "layers": 2, "context": 16})
    open_checkpoint(tiny.runs / "fsdp", "best").load({"gpt.model": model})
    return model.eval().continued(prompt.encode(), bytes, temperature=0)


def example(tiny: Tiny, name: str) -> dict[str, Any]:
    """What a file of the example defines."""
    return runpy.run_path(str(tiny.folder / f"{name}.py"))
