"""How a training loop saves with each engine; each reports when a save was durable."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.caches import sync_tree
from bench.models import State

Steps = list[tuple[float, float]]


def NoHook() -> None:  # noqa: N802 - stands where a function is expected
    """Do nothing."""


@dataclass
class Loop:
    """What was seen of a loop: seconds of each call and until each save was durable, steps by save."""

    blocked: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    steps: list[Steps] = field(default_factory=list)
    secs: float = 0.0


class Saving:
    """An engine that is called by the loop."""

    def save(self, path: Path, state: State, done: Callable[[], None]) -> None:
        """Begin a save; `done` is called, from any thread, once it is durable. Waits for the one before."""
        raise NotImplementedError

    def gate(self) -> None:
        """Before the optimizer changes anything."""

    def finish(self) -> None:
        """Nothing is in flight afterwards."""

    def loop(
        self,
        state: State,
        folder: Path,
        saves: int,
        quiet: Callable[[], None],
        steps: Callable[[Callable[[], None]], Steps],
    ) -> Loop:
        """Steps without saves, then so many saves with steps behind each."""
        found, ends = Loop(), [0.0] * saves
        begins = []
        quiet()
        start = time.perf_counter()
        for number in range(saves):
            path = folder / str(number)
            path.mkdir(parents=True)
            begins.append(time.perf_counter())
            self.save(path, state, lambda number=number, path=path: _ended(ends, number, path))
            found.blocked.append(time.perf_counter() - begins[-1])
            found.steps.append(list(steps(self.gate)))
        found.secs = time.perf_counter() - start
        self.finish()
        if not all(ends):
            raise RuntimeError("a save never became durable")
        found.durable = [end - begin for begin, end in zip(begins, ends, strict=True)]
        return found


def _ended(ends: list[float], number: int, path: Path) -> None:
    sync_tree(path)
    ends[number] = time.perf_counter()


class Synchronous(Saving):
    """The loop waits for `torch.save` or safetensors."""

    def __init__(self, library: str) -> None:
        self.library = library

    def save(self, path: Path, state: State, done: Callable[[], None]) -> None:
        if self.library == "torch":
            torch.serialization.set_crc32_options(False)
            torch.save(state.tensors, path / "state.pt")
        else:
            from safetensors.torch import save_file

            save_file(state.tensors, path / "state.safetensors")
        done()


class DcpAsync(Saving):
    """`async_save`, alone, or with a DefaultStager whose staging the optimizer waits for."""

    def __init__(self, *, stager: bool, caching: bool = False) -> None:
        from torch.distributed.checkpoint import DefaultSavePlanner
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._started = False
        self.pending: Future[Any] | None = None
        self.staged: Future[Any] | None = None
        self.planner = DefaultSavePlanner(enable_plan_caching=caching)
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self.stager = DefaultStager(options) if stager else None

    def save(self, path: Path, state: State, done: Callable[[], None]) -> None:
        import torch.distributed.checkpoint as dcp

        self.finish()
        writer = dcp.FileSystemWriter(path, thread_count=2)
        options: dict[str, Any] = {"async_stager": self.stager} if self.stager else {}
        answer = dcp.async_save(
            dict(state.tensors), storage_writer=writer, planner=self.planner, no_dist=True, **options
        )
        if isinstance(answer, Future):
            self.pending = answer
        else:
            self.pending, self.staged = answer.upload_completion, answer.staging_completion
        self.pending = _then(self.pending, done)

    def gate(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def finish(self) -> None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None


def _then(future: Future[Any], done: Callable[[], None]) -> Future[Any]:
    """A future that ends once `done` has been called after the first one."""
    after: Future[Any] = Future()

    def work(ended: Future[Any]) -> None:
        try:
            ended.result()
            done()
        except BaseException as error:
            after.set_exception(error)
        else:
            after.set_result(None)

    future.add_done_callback(work)
    return after


class OrbaxAsync(Saving):
    """`AsyncCheckpointer` of NumPy views; it copies before it returns."""

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        self.checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self.watcher: Any = None

    def save(self, path: Path, state: State, done: Callable[[], None]) -> None:
        import threading

        import orbax.checkpoint as ocp

        self.finish()
        tree = {name: tensor.numpy() for name, tensor in state.tensors.items()}
        self.checkpointer.save(path.resolve() / "tree", args=ocp.args.PyTreeSave(tree))

        def watch() -> None:
            self.checkpointer.wait_until_finished()
            done()

        self.watcher = threading.Thread(target=watch)
        self.watcher.start()

    def finish(self) -> None:
        if self.watcher is not None:
            self.watcher.join()
            self.watcher = None
        self.checkpointer.wait_until_finished()


class TorchSnapshotAsync(Saving):
    """`Snapshot.async_take`; it copies before it returns."""

    def __init__(self) -> None:
        self.watcher: Any = None
        self.error: BaseException | None = None

    def save(self, path: Path, state: State, done: Callable[[], None]) -> None:
        import threading

        from torchsnapshot import Snapshot, StateDict

        self.finish()
        pending = Snapshot.async_take(str(path / "snapshot"), {"state": StateDict(**state.tensors)})

        def watch() -> None:
            try:
                pending.wait()
                done()
            except BaseException as error:
                self.error = error

        self.watcher = threading.Thread(target=watch)
        self.watcher.start()

    def finish(self) -> None:
        if self.watcher is not None:
            self.watcher.join()
            self.watcher = None
        if self.error is not None:
            raise self.error


class Relay(Saving):
    """A job whose epochs are the steps between two saves; the gate stands before the optimizer by itself.

    A save is durable when its record is linked into the log: the time that the file system gives it.
    """

    def __init__(self, *, asynchronous: bool) -> None:
        self.asynchronous = asynchronous

    def loop(
        self,
        state: State,
        folder: Path,
        saves: int,
        quiet: Callable[[], None],
        steps: Callable[[Callable[[], None]], Steps],
    ) -> Loop:
        """Epoch 1 has no save before it; the save after the last epoch is not looked at."""
        from torchrelay import Context, Job, JobRunner, max_epochs

        found = Loop()
        ended: list[tuple[float, float]] = []
        job = Job("bench", blobs=state.objects)

        @job.epoch
        def epoch(ctx: Context) -> None:
            if ctx.epoch == 1:
                quiet()
            else:
                found.blocked.append(time.perf_counter() - ended[-1][0])
                found.steps.append(list(steps(NoHook)))
            ended.append((time.perf_counter(), time.time()))

        job.stop_when(max_epochs(saves + 1))
        run = folder / "run"
        folder.mkdir(parents=True)
        JobRunner(
            job, run, save_initial=False, best=None, keep_last=2, asynchronous=self.asynchronous
        ).train()
        found.secs = ended[-1][0] - ended[0][0]
        commits = commit_times(run)
        found.durable = [commits[number + 1] - ended[number][1] for number in range(saves)]
        return found


def commit_times(run: Path) -> dict[int, float]:
    """When each epoch's record appeared in the log, in seconds since 1970."""
    import json

    found: dict[int, float] = {}
    for record in sorted((run / "checkpoints" / "log").glob("0*.json")):
        told = json.loads(record.read_text())["record"]
        if told["kind"] == "commit":  # the link is what the change time remembers
            found[told["payload"]["entry"]["epoch"]] = record.stat().st_ctime
    return found
