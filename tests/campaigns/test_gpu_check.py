"""scripts/gpu-check as far as a machine without a GPU can run it, and the order of work on CUDA streams."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import REPOSITORY, clean_environment
from samples import WHOLE

from torchrelay.checkpoint.save import staging
from torchrelay.checkpoint.save import staging as copying
from torchrelay.checkpoint.save.staging import Block, StagingSlot


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """The check as a person starts it."""
    program = [sys.executable, REPOSITORY / "scripts/trials/gpu_check.py", *options]
    return subprocess.run(program, env=clean_environment(), capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_programme_runs_on_the_cpu(tmp_path):
    """Copies, stalls, rates, and a killed run that ends in the same bits; nothing is left behind."""
    done = run(
        "--device", "cpu", "--mib", "4", "--rounds", "1", "--ranks", "0", "--json",
        "--directory", str(tmp_path), "--secs", "240",
        "--parts", "copies", "saves", "peers", "loads", "waits", "killed",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["bits of the resumed and the uninterrupted run"] == "the same"
    assert told["killed in epoch 3, resumed in"] in (2, 3)
    for figure in ("copy, pinned limit, GB/s", "staged / limit", "save, GB/s", "load, cached, GB/s"):
        assert told[figure] > 0, told
    for way in ("synchronous", "asynchronous"):
        assert told[f"stall per save, {way}, ms"] > 0, told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(
    not WHOLE, reason="scripts/campaigns/whole-tests: the same programme ends in the same bits"
)
@pytest.mark.timeout(200)
def test_a_training_that_is_cut_ends_in_the_same_bits(tmp_path):
    """One of the kinds that are cut by SIGTERM and by SIGKILL, each resumed in a fresh process."""
    import gpu_check

    found = gpu_check.Cases(gpu_check.Check("cpu", 0, 8, 1, 180), tmp_path).same_bits("made")
    assert found.startswith("same bits (SIGTERM in step 8: from step 9"), found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_ends_with_2():
    """Nothing is measured where nothing can be, and the exit code tells it from a failure."""
    done = run()
    assert (done.returncode, done.stdout) == (2, "") and "shows no GPU" in done.stderr
    assert "--device cpu" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_time_for_everything_is_kept(tmp_path, monkeypatch, capsys):
    """A check whose time is over ends with 1 and a table of what it had found."""
    import gpu_check

    monkeypatch.setattr(
        sys, "argv", ["gpu-check", "--device", "cpu", "--secs", "0.000001", "--directory", str(tmp_path)]
    )
    assert gpu_check.main() == 1
    page = capsys.readouterr().out
    assert "| FAILED | CheckError: not finished within" in page and "| torch |" in page


class Told:
    """Stands in for torch.cuda: writes down in which order it is told what."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.current = "compute"

    def current_stream(self, device: Any) -> Any:
        """The stream on which this thread computes."""
        return SimpleNamespace(
            name="compute", wait_event=lambda event: self.order.append(f"compute waits {event.name}")
        )

    def is_initialized(self) -> bool:
        """Nothing is pinned for it."""
        return False

    def current_device(self) -> int:
        """The device of this thread."""
        return 3

    def set_device(self, device: int) -> None:
        """Move this thread."""
        self.order.append(f"thread on {device}")

    def Event(self) -> Any:
        """A mark in a stream."""
        event = SimpleNamespace(name="?")

        def record(on: Any) -> None:
            event.name = f"mark in {on.name}"
            self.order.append(event.name)

        event.record = record
        event.synchronize = lambda: self.order.append(f"host waits {event.name}")
        return event

    def Stream(self, device: Any) -> Any:
        """A side stream."""
        return SimpleNamespace(
            name="side", wait_event=lambda event: self.order.append(f"side waits {event.name}")
        )

    def stream(self, chosen: Any) -> Any:
        """Work goes to a stream meanwhile."""
        told = self

        class Meanwhile:
            def __enter__(self) -> None:
                told.current = chosen.name

            def __exit__(self, *_: object) -> None:
                told.current = "compute"

        return Meanwhile()


class OnDevice:
    """A tensor of a GPU that is not there; a copy from it is written down with the stream it is told to."""

    is_cpu, is_cuda, nbytes, device, _version = False, True, 64, "cuda:3", 0

    def __init__(self, told: Told, *, broken: bool = False) -> None:
        self.told, self.broken = told, broken

    def detach(self) -> Any:
        """Itself, and so are its other views."""
        return self

    def data_ptr(self) -> int:
        """Where it lies."""
        return 0

    def reshape(self, _: int) -> Any:
        """Itself."""
        return self

    def view(self, _: Any) -> Any:
        """What is copied: bytes."""
        self.told.order.append(f"copy in {self.told.current}")
        if self.broken:
            raise RuntimeError("no such copy")
        return torch.ones(64, dtype=torch.uint8)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """The order in which torch.cuda is told what."""
    found = Told()
    monkeypatch.setattr(copying.torch, "cuda", found)
    return found


def late(source: Any, at: int, block: Block) -> staging.LatePiece:
    """A piece that is copied behind the training and has not moved."""
    owner = torch.zeros(64, dtype=torch.uint8)
    room, address = StagingSlot(block, at, 64), owner.data_ptr()
    return staging.LatePiece(
        "w", "m", source, source, room, address, 64, lambda: owner, digest=0, versions=(0, 0), begin=0
    )


def test_late_copies_wait_for_compute_and_everybody_for_them(told: Told):
    """The side stream waits for the boundary's mark, copies, and reads the sources again before the gate."""
    block, copies = Block(128), staging.StagedCopies("samples")
    copies.late = [late(OnDevice(told), 0, block), late(OnDevice(told), 64, block)]
    copies.copier.begin({"cuda:3"})
    copies.copy(lambda: told.order.append("written"))
    copies.copier.let_compute_wait()
    assert told.order == [
        "mark in compute", "thread on 3", "side waits mark in compute", "copy in side", "copy in side",
        "mark in side", "host waits mark in side", "written", "copy in side", "copy in side",
        "compute waits mark in side",
    ]  # fmt: skip
    assert bytes(block.view) == b"\1" * 128


def test_a_failed_copy_waits_for_those_that_are_on_their_way(told: Told):
    """Before the gate opens and the block is used again, the device has sent all that it was told to send."""
    block, copies = Block(128), staging.StagedCopies("samples")
    copies.late = [late(OnDevice(told), 0, block), late(OnDevice(told, broken=True), 64, block)]
    copies.copier.begin({"cuda:3"})
    with pytest.raises(RuntimeError, match="no such copy"):
        copies.copy()
    assert told.order[-2:] == ["mark in side", "host waits mark in side"]
    assert isinstance(copies.failure, RuntimeError)


def test_a_job_on_the_cpu_pins_nothing(monkeypatch: pytest.MonkeyPatch):
    """On a machine whose GPUs the job does not use, staging memory is plain, and CUDA is not begun."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not torch.cuda.is_initialized()
    assert not Block(64).tensor.is_pinned()
    assert not torch.cuda.is_initialized()
