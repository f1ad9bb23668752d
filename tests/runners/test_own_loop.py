"""A loop of the program's own is saved, resumed and ended as the same tasks of a job are."""

from __future__ import annotations

import dataclasses
import difflib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from own_loops import EPOCHS, FACES, Event, Training, at, nothing, stored
from torchrun import Job, clean_environment, torchrun

import torchrelay
from torchrelay import Checkpointer, LocalSession, MultiNodeCheckpointManager, Run
from torchrelay.errors import (
    MissingMetricError,
    NotAllowedNowError,
    PartiallyLoadedError,
    TaskFailedError,
    UnknownEpochError,
    UsageError,
)

PROGRAM = Path(__file__).parents[1] / "programs" / "own_loop.py"
LOOPS = ("job", "run")


def train(face: str, where: Path, event: Event = nothing, **options: Any) -> tuple[Any, str]:
    """Train in this process; the result and the digest of what is left."""
    training = Training()
    return FACES[face](training, where, event, **options), training.digest


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, dict[str, str]]]:
    """What an undisturbed job leaves, in memory and on the disk."""
    where = tmp_path_factory.mktemp("whole")
    _, digest = train("job", where)
    return digest, dict(stored(where))


def test_a_loop_saves_what_the_job_saves(tmp_path: Path, whole: Any) -> None:
    """Every epoch of a Run holds, bit by bit, what the epoch of the same job holds."""
    result, digest = train("run", tmp_path)
    assert (result.status, int(result), digest) == ("FINISHED", EPOCHS, whole[0])
    assert dict(stored(tmp_path)) == whole[1]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("face", FACES)
def test_a_killed_process_is_resumed_exactly(
    face: str, asynchronous: bool, tmp_path: Path, whole: Any
) -> None:
    """Killed within an epoch and started again, each face ends with the bits of an undisturbed run."""
    command = [sys.executable, str(PROGRAM), face, str(tmp_path / "run")]
    environment = clean_environment({"PYTHONPATH": str(PROGRAM.parents[1] / "helpers")})
    killed = subprocess.run(
        [*command, "killed"], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    result, digest = train(face, tmp_path / "run", asynchronous=asynchronous)
    assert int(result) == EPOCHS
    if face != "checkpointer":
        assert digest == whole[0]
    else:
        assert digest == train(face, tmp_path / "undisturbed")[1]


@pytest.mark.parametrize("face", LOOPS)
def test_a_signal_ends_it_at_a_step(face: str, tmp_path: Path, whole: Any) -> None:
    """SIGTERM leaves within the epoch, saved; the next start resumes at that very step."""
    result, _ = train(face, tmp_path, at(2, 3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert result.status == "PREEMPTED"
    result, digest = train(face, tmp_path)
    assert (result.status, digest, result.resumed_from) == ("FINISHED", whole[0], 1)


@pytest.mark.parametrize("face", LOOPS)
def test_an_exception_fails_the_run(face: str, tmp_path: Path, whole: Any) -> None:
    """It is raised as a TaskFailedError, also caught as what it is; nothing of that epoch is saved."""

    def fail() -> None:
        raise ValueError("planned")

    with pytest.raises(ValueError, match="planned") as caught:
        train(face, tmp_path, at(3, 2, fail))
    assert isinstance(caught.value, TaskFailedError)
    assert torchrelay.open_checkpoint(tmp_path).epochs == (0, 1, 2)
    assert train(face, tmp_path)[1] == whole[0]


@pytest.mark.parametrize("face", LOOPS)
def test_a_rewind_begins_a_branch(face: str, tmp_path: Path, whole: Any) -> None:
    """`resume_from_epoch` resumes there, and gives the same epochs again."""
    train(face, tmp_path)
    result, digest = train(face, tmp_path, resume_from_epoch=1)
    assert (result.resumed_from, digest) == (1, whole[0])


@pytest.mark.parametrize("face", LOOPS)
def test_a_run_that_has_ended_is_loaded(face: str, tmp_path: Path, whole: Any) -> None:
    """Started again it trains nothing, and its objects are those of the last epoch."""
    train(face, tmp_path)
    seen: list[int] = []
    result, digest = train(face, tmp_path, lambda epoch, _: seen.append(epoch))
    assert (seen, result.status, int(result), digest) == ([], "FINISHED", EPOCHS, whole[0])


@pytest.mark.parametrize("events", [[], ["killed"], ["raises"]], ids=str)
@pytest.mark.parametrize("face", FACES)
def test_two_ranks(face: str, events: list[str], tmp_path: Path) -> None:
    """Two ranks end with the bits of an undisturbed run, after a kill and after a failure of one of them."""
    helpers = {"PYTHONPATH": str(PROGRAM.parents[1] / "helpers")}
    run = tmp_path / "run"
    if events:
        broken = torchrun(PROGRAM, face, str(run), *events, ranks=2, cwd=tmp_path, env=helpers, warm=True)
        assert broken.rc != 0
        assert "digest" not in broken.out
    digests = []
    for where in (tmp_path / "whole", run):
        done = torchrun(PROGRAM, face, str(where), ranks=2, cwd=tmp_path, env=helpers, warm=True)
        assert done.rc == 0, done
        digests.append([done.of_rank(rank).split("digest ")[1].split()[0] for rank in (0, 1)])
    assert digests[0] == digests[1]


# The loop


def test_break_ends_this_start(tmp_path: Path, whole: Any) -> None:
    """An epoch that is left by break is saved as it is, and the next start resumes behind it."""
    training = Training()
    with Run(tmp_path, training.blobs) as run:
        for epoch in run.epochs(EPOCHS):
            for batch in run.steps(training.loader):
                training.step(batch)
            if epoch == 2:
                break
    assert (run.result.status, int(run.result)) == ("STOPPED", 2)
    result, digest = train("run", tmp_path)
    assert (result.status, digest) == ("FINISHED", whole[0])


@pytest.mark.parametrize("caught", [False, True])
def test_an_epoch_that_is_left_within_its_steps_is_not_saved(
    caught: bool, tmp_path: Path, whole: Any
) -> None:
    """By break, or by an exception that the program catches: the next start repeats that epoch."""
    training = Training()
    with Run(tmp_path, training.blobs) as run, suppress(ValueError):
        for epoch in run.epochs(EPOCHS):
            for batch in run.steps(training.loader):
                training.step(batch)
                if epoch == 2 and run.ctx.step == 3:
                    if caught:
                        raise ValueError
                    break
            if epoch == 2:
                break
    assert (run.result.status, int(run.result)) == ("PREEMPTED", 1)
    assert torchrelay.open_checkpoint(tmp_path).epochs == (0, 1)
    result, digest = train("run", tmp_path)
    assert (result.status, digest) == ("FINISHED", whole[0])


def test_stop_finishes_the_run(tmp_path: Path) -> None:
    """`run.stop` makes the epoch the last one, with its reason; a later start has nothing to do."""
    training = Training()
    with Run(tmp_path, training.blobs) as run:
        for epoch in run.epochs():
            run.log("acc", epoch)
            if run.metric("acc") >= 2:
                run.stop("good enough")
    assert (run.result.status, int(run.result)) == ("FINISHED", 2)
    assert "good enough" in run.result.stop[0]
    with Run(tmp_path, training.blobs) as again:
        assert list(again.epochs()) == []
    assert int(again.result) == 2


def test_metric_is_of_this_epoch(tmp_path: Path) -> None:
    """What was logged in the running epoch counts, then what the last one had; a name of none is an error."""
    with Run(tmp_path, Training().blobs) as run:
        for epoch in run.epochs(2):
            if epoch == 2:
                assert run.metric("loss") == 3
            run.log("loss", 2 * epoch)
            run.log("loss", 4)
            assert run.metric("loss") == (2 * epoch + 4) / 2
            with pytest.raises(MissingMetricError):
                run.metric("nothing")
    assert run.result.metrics["loss"] == 4


def test_init_and_exit_groups(tmp_path: Path) -> None:
    """`run.init` runs for a new run alone, before epoch 1; `run.exit` when all epochs are over."""
    ran: list[str] = []
    for epochs in (1, 2):
        with Run(tmp_path, Training().blobs) as run:
            run.init(lambda: ran.append("init"))
            run.exit(lambda: ran.append("exit"))
            for epoch in run.epochs(epochs):
                ran.append(f"epoch {epoch}")
    assert ran == ["init", "epoch 1", "exit", "epoch 2", "exit"]


def test_a_failure_behind_the_loop_is_none_of_the_run(tmp_path: Path) -> None:
    """An exception in the block, when all epochs are over, is raised as it is; the run has finished."""
    with pytest.raises(KeyError), Run(tmp_path, Training().blobs) as run:
        list(run.epochs(1))
        raise KeyError("of the program")
    assert run.result.status == "FINISHED"


def test_misuse_is_said(tmp_path: Path) -> None:
    """A loop outside of the block, a second loop, a result that is not there yet: each names the remedy."""
    run = Run(tmp_path, Training().blobs)
    with pytest.raises(UsageError, match="put the loop into"):
        run.epochs(1)
    with pytest.raises(KeyError), Run(tmp_path / "failed", Training().blobs) as failed:
        raise KeyError
    with pytest.warns(UserWarning, match="no loop"), Run(tmp_path / "unused", Training().blobs) as unused:
        pass
    for one in (failed, unused):
        with pytest.raises(NotAllowedNowError, match="or has failed"):
            _ = one.result
    with run:
        with pytest.raises(NotAllowedNowError, match="has not ended"):
            _ = run.result
        list(run.epochs(1))
        with pytest.raises(NotAllowedNowError, match="one loop"):
            run.epochs(1)
    with pytest.raises(NotAllowedNowError, match="make a new one"):
        run.__enter__()
    with (
        pytest.raises(UsageError, match="has 2 nodes"),
        Run(tmp_path / "two", {"n": lambda ctx: [1]}, session=LocalSession(["a", "b"])) as two,
    ):
        list(two.epochs(1))


# Only the checkpoints


def test_a_checkpointer_needs_blobs(tmp_path: Path) -> None:
    """Without blobs, and by a manager whose session holds nothing, no save is acknowledged."""
    with pytest.raises(UsageError, match="by name"):
        Checkpointer(tmp_path, {})
    manager = MultiNodeCheckpointManager(tmp_path / "manager")
    with LocalSession() as session, pytest.raises(UsageError, match="nothing is registered"):
        session.run(manager.init(["trainer_0"]))
        session.run(manager.save(1))
    assert not list((tmp_path / "manager").glob("data/*"))


def test_a_checkpointer_rewinds_and_lists(tmp_path: Path) -> None:
    """`resume(epoch=)` loads exactly that epoch, and later ones are on an abandoned branch."""
    training = Training()
    with Checkpointer(tmp_path, training.blobs) as ckpt:
        assert ckpt.resume() is None
        for epoch in (1, 2, 3):
            training.step(next(iter(training.loader)))
            ckpt.save(epoch, metrics={"loss": epoch})
            if epoch == 1:
                first = training.model[0].weight.clone()
        position = ckpt.resume(epoch=1)
        assert position is not None
        assert (position.epoch, position.step, ckpt.epochs) == (1, 0, (1,))
        assert training.model[0].weight.equal(first)
        ckpt.save(2)
        with pytest.raises(UnknownEpochError, match="1, 2"):
            ckpt.resume(epoch=7)
    best = torchrelay.open_checkpoint(tmp_path, epoch=1)
    assert best.metrics["loss"] == 1


def test_a_checkpointer_resumes_within_an_epoch(tmp_path: Path) -> None:
    """A save with a step is found by `resume`, with its step."""
    training = Training()
    with Checkpointer(tmp_path, training.blobs) as ckpt:
        ckpt.save(1)
        ckpt.save(1, 2)
    again = Training()
    with Checkpointer(tmp_path, again.blobs) as ckpt:
        position = ckpt.resume()
        assert position is not None
        assert (position.epoch, position.step) == (1, 2)
        ckpt.save(2)


def test_a_checkpointer_does_not_write_over_what_it_has_not_seen(tmp_path: Path) -> None:
    """A first save into a directory with epochs is refused before anything changes."""
    with Checkpointer(tmp_path, Training().blobs) as ckpt:
        ckpt.save(1)
    with Checkpointer(tmp_path, Training().blobs) as ckpt, pytest.raises(NotAllowedNowError, match="resume"):
        ckpt.save(2)


def test_a_checkpointer_takes_an_older_epoch_for_a_damaged_one(tmp_path: Path) -> None:
    """The newest one is damaged: `resume` warns and takes the one before, an explicit one is refused."""
    training = Training()
    with Checkpointer(tmp_path, training.blobs) as ckpt:
        for epoch in (1, 2):
            training.step(next(iter(training.loader)))
            ckpt.save(epoch)
    shard = next(tmp_path.glob("data/e00000002*/*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    with Checkpointer(tmp_path, Training().blobs) as ckpt, pytest.raises(PartiallyLoadedError):
        ckpt.resume(epoch=2)
    with Checkpointer(tmp_path, Training().blobs) as ckpt, pytest.warns(UserWarning, match="damaged"):
        position = ckpt.resume()
        assert position is not None
        assert position.epoch == 1


# A script as people have it

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop"
SCRIPTS = ("plain.py", "resumable.py")


def test_a_converted_script_is_resumed_exactly(tmp_path: Path) -> None:
    """The converted classifier, a rank of which is killed, ends with the bits of an undisturbed run."""
    script = EXAMPLE / "resumable.py"
    with Job(script, "--folder", str(tmp_path / "killed"), ranks=2, cwd=tmp_path) as job:
        job.wait_for("epoch 4: accuracy")
        os.kill(job.workers()[1], signal.SIGKILL)
        assert job.wait().rc != 0
    for folder in ("killed", "whole"):
        done = torchrun(script, "--folder", str(tmp_path / folder), ranks=2, cwd=tmp_path)
        assert done.rc == 0, done
    killed, whole = (dict(stored(tmp_path / folder))[8] for folder in ("killed", "whole"))
    del killed["rng"], whole["rng"]  # the script does not seed Python's own stream
    assert killed == whole


def test_converting_it_changes_few_lines() -> None:
    """Of the plain script at most 15 lines change, indentation aside."""
    plain, resumable = (
        [line.strip() for line in (EXAMPLE / name).read_text().splitlines()] for name in SCRIPTS
    )
    changes = [one for one in difflib.ndiff(plain, resumable) if one[:2] in ("+ ", "- ") and one[2:].strip()]
    gone, new = (sum(one.startswith(mark) for one in changes) for mark in "-+")
    assert max(gone, new) <= 15


# What people do wrong


def test_two_checkpointers_hold_their_own_objects(tmp_path: Path) -> None:
    """Equal names in one process, also within a Run, mean different objects: nobody saves another's."""
    held = {name: {"v": torch.full((2,), float(place))} for place, name in enumerate("abc")}
    first, second = (Checkpointer(tmp_path / name, held[name]) for name in "ab")
    with Run(tmp_path / "c", held["c"]) as run:
        for epoch in run.epochs(1):
            for one in (first, second):
                assert one.resume() is None
            for one in (first, second):
                one.save(epoch, asynchronous=True)
    first.close()
    second.save(2)
    second.close()
    for name, blobs in held.items():
        found = {"v": torch.full((2,), 9.0)}
        torchrelay.open_checkpoint(tmp_path / name, epoch=1).load(found)
        assert found["v"].equal(blobs["v"])


def test_a_checkpointer_refuses_what_it_could_not_give_back(tmp_path: Path) -> None:
    """Values that cannot change in place, functions, run directories, steps and metrics that are none."""
    with pytest.raises(UsageError, match="is a function"):
        Checkpointer(tmp_path / "values", {"best": lambda: [1]})
    with Checkpointer(tmp_path / "values", {"state": {"best": 1}}) as ckpt:
        for step in (-1, "1", 1.5, None, True):
            with pytest.raises(UsageError, match="step"):
                ckpt.save(1, step)  # type: ignore[arg-type]
        for metric in ("x", None, torch.ones(3)):
            with pytest.raises(UsageError, match=r"'acc'.*numbers by name"):
                ckpt.save(1, metrics={"acc": metric})  # type: ignore[dict-item]
        ckpt.save(1, metrics={"acc": torch.tensor(0.5)})  # type: ignore[dict-item]
    assert torchrelay.open_checkpoint(tmp_path / "values").metrics == {"acc": 0.5}
    with Run(tmp_path / "run", Training().blobs) as run:
        list(run.epochs(1))
    with pytest.raises(UsageError, match="is a run directory"):
        Checkpointer(tmp_path / "run", {"state": {}})


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A record whose fields cannot be set."""

    best: float = 0.5


FIXED = (3, 0.5, "x", None, (1,), torch.float32, torch.Size([1]), numpy.float64(1), numpy.int64(1), Frozen())


@pytest.mark.parametrize("value", FIXED, ids=repr)
@pytest.mark.parametrize("face", [Run, Checkpointer])
def test_values_that_cannot_change_are_refused(face: Any, value: object, tmp_path: Path) -> None:
    """A save would see the first value for ever: the message says what to do."""
    with pytest.raises(UsageError, match=r"'best'.*put it into a dict, state=dict\(best=\.\.\.\)"):
        face(tmp_path, {"best": value})


def test_an_object_that_replaces_a_registered_one_is_not_lost(tmp_path: Path) -> None:
    """A new object under a registered name would not be saved: the save is refused."""
    held = {"state": {"n": 1}}
    with Checkpointer(tmp_path / "own", held) as ckpt:
        ckpt.save(1)
        held["state"] = {"n": 2}
        with pytest.raises(UsageError, match=r"blobs\['state'\] was replaced"):
            ckpt.save(2)
    held = {"state": {"n": 1}}
    with pytest.raises(UsageError, match="was replaced"), Run(tmp_path / "run", held) as run:
        for epoch in run.epochs(2):
            if epoch == 2:
                held["state"] = {"n": 2}
    assert torchrelay.open_checkpoint(tmp_path / "run").epochs == (0, 1)


@pytest.mark.parametrize("face", [Run, Checkpointer])
def test_an_unknown_option_names_the_one_that_is_meant(face: Any, tmp_path: Path) -> None:
    """As Python refuses it, with the name of what was called."""
    with pytest.raises(TypeError, match=rf"{face.__name__}\(\).*'keep_lst'; did you mean keep_last"):
        face(tmp_path, {"state": {}}, keep_lst=3)


def test_what_belongs_to_an_epoch_ends_with_it(tmp_path: Path) -> None:
    """Behind the block, and in a later epoch, what was of one raises and says so."""
    kept: list[Any] = []
    with Run(tmp_path, Training().blobs) as run:
        for epoch in run.epochs(2):
            kept.append(iter(run.steps([1, 2], count=False)))
            next(kept[-1])
            if epoch == 2:
                with pytest.raises(NotAllowedNowError, match="an epoch that is over"):
                    next(kept[0])
    for late in (
        lambda: next(kept[-1]),
        lambda: run.steps([1]),
        lambda: run.log("x", 1),
        lambda: run.metric("x"),
        lambda: run.stop("x"),
        lambda: run.window_end,
        lambda: run.ctx,
    ):
        with pytest.raises(NotAllowedNowError, match=r"epoch that is over|within its `with` block"):
            late()


def test_a_run_within_a_run_is_refused(tmp_path: Path) -> None:
    """One process trains one run at a time."""
    with Run(tmp_path / "a", {"state": {}}) as run:
        for _ in run.epochs(1):
            with pytest.raises(NotAllowedNowError, match="another train"), Run(tmp_path / "b", {"state": {}}):
                pass
    assert run.result.status == "FINISHED"


def test_a_signal_handler_that_saves_within_a_save_is_refused(tmp_path: Path) -> None:
    """It would wait for what it interrupts; the save goes on."""

    class Interrupting:
        def state_dict(self) -> dict[str, int]:
            with pytest.raises(NotAllowedNowError, match="within another call"):
                ckpt.save(2)
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    with Checkpointer(tmp_path, {"it": Interrupting()}) as ckpt:
        ckpt.resume()
        ckpt.save(1)
        assert ckpt.epochs == (1,)


def test_a_forked_process_saves_nothing(tmp_path: Path) -> None:
    """A child that goes on within the block, or ends there, leaves the run to its parent."""
    held = {"state": {"n": 0}}
    with Run(tmp_path / "run", held) as run, Checkpointer(tmp_path / "own", held) as ckpt:
        for epoch in run.epochs(2):
            ckpt.save(epoch)
            if (child := os.fork()) == 0:
                code = 1
                try:
                    with pytest.raises(NotAllowedNowError, match="forked"):
                        ckpt.save(epoch + 1)
                    run.__exit__(None, None, None)
                    ckpt.close()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
    assert run.result.status == "FINISHED"
    assert torchrelay.open_checkpoint(tmp_path / "own").epochs == (1, 2)


def test_a_program_that_never_leaves_the_block_ends(tmp_path: Path) -> None:
    """A loop in a generator that is kept: the program ends, and says nothing of our internals."""
    program = (
        "import sys, torchrelay\n"
        "def epochs():\n"
        "    with torchrelay.Run(sys.argv[1], {'state': {}}) as run:\n"
        "        yield from run.epochs(3)\n"
        "kept = epochs()\n"
        "next(kept), next(kept)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=clean_environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert torchrelay.open_checkpoint(tmp_path).epochs == (0, 1)


@pytest.mark.parametrize(
    ("what", "said"), [("metric", "rank 0 called run.metric('loss')"), ("saves", "save(epoch=2")]
)
def test_ranks_that_ask_for_different_things_are_told(what: str, said: str, tmp_path: Path) -> None:
    """`run.metric` in a step of one rank, and saves of different epochs, end within seconds."""
    helpers = {"PYTHONPATH": str(PROGRAM.parents[1] / "helpers")}
    program, where = PROGRAM.with_name("own_loop_astray.py"), str(tmp_path / "run")
    done = torchrun(program, what, where, ranks=2, cwd=tmp_path, env=helpers, timeout_secs=60)
    assert done.rc != 0
    assert said in done.out + done.err, str(done)
