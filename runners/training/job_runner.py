"""The runner: takes a job through its life, once per `train`, and tells what came of it."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.manager.base import Manager, check_handler
from torchrelay.checkpoint.manager.checkpoint_manager import (
    ManagerOptions,
    MultiNodeCheckpointManager,
    UploadTaskGroupBuilder,
    check_options,
)
from torchrelay.checkpoint.storage.open import FILE
from torchrelay.errors import LeftByInterrupt, NotAllowedNowError, TaskFailedError, UsageError
from torchrelay.jobs.job import Job
from torchrelay.jobs.runtime import local_directory
from torchrelay.jobs.session import decide
from torchrelay.metadata.code.capture import Given
from torchrelay.metadata.code.selection import Code
from torchrelay.metadata.handlers import FileMetadataHandler, MetadataHandler
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.metadata.sinks.text import MetricSink
from torchrelay.runners.monitoring.text import interval_secs
from torchrelay.runners.remote_runs.names import canonical, is_remote
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.local import current_or_new_session
from torchrelay.runners.session.stop_requests import TimeLimit, save_signal_of, seconds_of
from torchrelay.runners.training.capture import Capturing
from torchrelay.runners.training.exit import refuse_before_main
from torchrelay.runners.training.extras.upstream import InitFrom, Upstream, given_of
from torchrelay.runners.training.plan import OnCrash, Plan, Recipe, Resume, RunResult, check_epoch, recipes_of
from torchrelay.runners.training.preemption import check_on_crash
from torchrelay.runners.training.run_loop import Life
from torchrelay.runners.training.saver import report_stats
from torchrelay.runners.training.startup import MAX_ATTEMPTS, bind_for_load

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from torchrelay.runners.training.extras.onnx_export import OnnxExport

_training: dict[int, threading.Lock] = {}
"""By process: nobody trains in one that was forked out of a task."""
RUN_DIRECTORY_FAILED_SAVES = 3


class JobRunner:
    """Runs a job and keeps its history in a run directory, or through a manager of the user's.

    `where` is a run directory (made if missing, with its own manager and handler), or the URL of one
    (`s3://bucket/runs/hello`), a manager, or None: then nothing is saved. `resume` is for run
    directories: `auto` continues the newest provable epoch, `must` refuses to start without one, `never`
    begins anew (older epochs are kept as an abandoned branch). `best=(metric, "max" or "min")` says which
    epoch `"best"` names.
    `max_failed_saves` saves that fail in a row end the run (3 for run directories; a bare manager
    only warns). `save_initial=False` leaves epoch 0, the state after `init`, out.
    A run directory also takes the options of its manager, `ManagerOptions`: `keep_last`, `keep_every`,
    `keep_best`, `keep_optimizer_last`, `asynchronous`, `staging_limit`, `verify_staging`, `reuse`,
    `include`, `exclude`, `share_reads`, `compare_every`, `single_writer`, `tier`, `rename`, `resume_exclude`,
    `resume_strict`.
    `metadata_handler` hears of epochs beside the run directory's own handler, and decides where a run starts
    only where it says so (`decides = True`); a manager is given its handler itself.
    `upload_task_group_builder` builds the group that sends the last epoch elsewhere; `agree_every` is
    the number of steps between two looks at whether a rank wants to end the epoch (EpochLoader only).

    `time_limit` (seconds, "1h30m", a timedelta) is for how long this start may run: in time for one more save
    all ranks leave at one step, PREEMPTED, and the same command goes on from there; so they do after SIGTERM,
    SIGUSR1, and before the end that Slurm tells. `max_attempts` starts in a row that got no further end in
    NoProgressError (3 for run directories; 0 for no limit).

    `save_signal`, sent to any rank, asks for a save at the next step that can be saved, on all ranks; then
    training goes on. None for no signal; where the program handles it, it stays the program's.

    `on_crash="save"`: a process in which a task of an epoch fails writes what it holds to `crash/` in the run
    directory, to be looked at; the next start goes on from the newest saved position all the same.

    `from_program` names what a resume takes from the program where that has changed since the epoch was
    saved: a schedule by its blob ("scheduler"), which is stepped to where the run is, or an entry of an
    optimizer's groups ("optimizer.lr"). All else is as it was saved.

    `replay={"model": make_model}` records a call of that module at every epoch, which `torchrelay verify RUN
    --replay` plays again on what `make_model()` of the archived source makes.

    `asynchronous=True` writes and commits epochs behind the training; whether one was saved is known, and
    the metadata handler told, at the next boundary.

    `trackers` get the metrics of every epoch: "csv", "jsonl", "tensorboard", "mlflow:sqlite:///runs.db",
    "wandb", or your own `MetricSink` objects. `log_every_n_secs` is the time between two lines about the
    progress (10; 0: a line per epoch); the variable TORCHRELAY_LOG_EVERY_N_SECS comes before it.

    `upstream={"expert": "runs/expert@best"}` names runs that this one is built on, by alias: what is known of
    them goes into `lineage/` when the run begins. `init_from` takes weights from them then, once: an alias,
    or `InitFrom` objects. A run that resumes opens none of them; all comes from its own checkpoints.

    Each start notes in the run directory what it was: arguments, packages, hosts, and its source as an
    archive. `code` says where that lies: None is the script's directory (a warning where it cannot be
    archived, nothing in a notebook), False nothing, else directories or `Sources`. `configuration` is what
    was read of one. `params` are the hyper-parameters, which are recorded and shown in reports: a mapping,
    the Namespace of argparse, or a dataclass. They change nothing in the run.

    `exports` are ONNX files that the run makes of epochs in its `exports/`, see `OnnxExport`.

    `checkpoint_manager` is another name of `where`, as in Caffe2.

    Jobs, managers and sessions may be used again; one train runs at a time in a process.
    """

    def __init__(
        self,
        job: Job,
        where: str | Path | Manager | None = None,
        resume_from_epoch: int | None = None,
        upload_task_group_builder: UploadTaskGroupBuilder | None = None,
        *,
        resume: Resume = "auto",
        best: tuple[str, str] | None = ("val/acc", "max"),
        save_initial: bool = True,
        max_failed_saves: int | None = None,
        agree_every: int = 1,
        time_limit: TimeLimit | None = None,
        max_attempts: int | None = None,
        metadata_handler: MetadataHandler | None = None,
        trackers: Sequence[str | MetricSink] = (),
        log_every_n_secs: float | None = None,
        save_signal: str | None = "SIGUSR2",
        on_crash: OnCrash = "none",
        from_program: str | Sequence[str] = (),
        replay: Mapping[str, Recipe | Callable[[], Any]] | None = None,
        upstream: Mapping[str, str | Path | Upstream] | None = None,
        init_from: str | InitFrom | Sequence[str | InitFrom] = (),
        code: Code | None = None,
        configuration: Given | None = None,
        params: Any = None,
        exports: Sequence[OnnxExport] = (),
        checkpoint_manager: Manager | None = None,
        **of_manager: Unpack[ManagerOptions],
    ) -> None:
        if where is not None and checkpoint_manager is not None:
            raise UsageError("checkpoint_manager is given and where as well: they are one argument")
        where = checkpoint_manager if where is None else where
        self.job = _check_job(job, resume)
        self.resume_from_epoch = check_epoch(resume_from_epoch)
        self.upload_task_group_builder = upload_task_group_builder
        self.run_directory = _run_directory(where)
        check_options("JobRunner", of_manager, inspect.signature(JobRunner).parameters)
        given = {**of_manager, "metadata_handler": check_handler(metadata_handler)}
        self.manager = self._manager(where, given)
        self.trackers = self._sinks(trackers)
        self.exports = self._exports(exports, best)
        self.capturing = Capturing(self.run_directory, code, configuration, params)
        self.replay = recipes_of(replay)
        self.built_on = given_of(upstream, init_from)
        if self.built_on and self.run_directory is None:
            raise UsageError("upstream belongs to a run directory: give JobRunner the path of one")
        self._plan = Plan(
            resume=resume,
            best=_check_best(best),
            save_initial=save_initial,
            max_failed_saves=self._max_failed_saves(max_failed_saves),
            agree_every=_check_count(agree_every, "agree_every"),
            time_limit_secs=None if time_limit is None else seconds_of(time_limit),
            max_attempts=_check_attempts(max_attempts),
            log_every_n_secs=interval_secs(log_every_n_secs),
            save_signal=save_signal_of(save_signal),
            on_crash=check_on_crash(on_crash),
            from_program=(from_program,) if isinstance(from_program, str) else tuple(from_program),
        )

    def _manager(self, where: str | Path | Manager | None, options: dict[str, Any]) -> Manager | None:
        """The user's manager, or that of the run directory, which alone takes options from here."""
        options = {name: value for name, value in options.items() if value is not None}
        if self.run_directory is None:
            for name in options:
                raise UsageError(f"{name} belongs to a run directory; give it to the manager as {name}=...")
            if where is not None and not isinstance(where, Manager):
                raise UsageError(f"where is a run directory (path) or a checkpoint manager, not {where!r}")
            return where
        own: MetadataHandler = FileMetadataHandler(self.run_directory.path)
        beside = options.pop("metadata_handler", None)
        if beside is not None:
            from torchrelay.metadata.handlers import SeveralHandlers

            own = SeveralHandlers([own, beside])
        return MultiNodeCheckpointManager(self.run_directory.checkpoints, metadata_handler=own, **options)

    def _sinks(self, trackers: Sequence[str | MetricSink]) -> tuple[MetricSink, ...]:
        if isinstance(trackers, (list, tuple)) and not trackers:
            return ()
        from torchrelay.metadata.sinks.trackers import sinks_of

        sinks = sinks_of(trackers)
        if sinks and self.run_directory is None:
            raise UsageError("trackers belong to a run directory: give JobRunner the path of one")
        return sinks

    def _exports(self, exports: Sequence[OnnxExport], best: Any) -> tuple[OnnxExport, ...]:
        found = tuple(exports) if isinstance(exports, Sequence) else (exports,)
        if not found:
            return ()
        from torchrelay.runners.training.extras.onnx_export import OnnxExport

        for one in found:
            if not isinstance(one, OnnxExport):
                raise UsageError(f"exports has {one!r:.80}; give torchrelay.OnnxExport objects")
            if one.best and best is None:
                raise UsageError("OnnxExport(best=True) needs JobRunner(best=(metric, 'max' or 'min'))")
        if self.run_directory is None:
            raise UsageError("exports belong to a run directory: give JobRunner the path of one")
        if len({one.name for one in found}) < len(found):
            raise UsageError("two exports would write the same files: give each a name=")
        return found

    def _max_failed_saves(self, wanted: int | None) -> int | None:
        if wanted is None:
            return RUN_DIRECTORY_FAILED_SAVES if self.run_directory else None
        return _check_count(wanted, "max_failed_saves")

    def train(
        self,
        session: SessionBase | None = None,
        resume_from_epoch: int | None = None,
        *,
        again: bool = False,
    ) -> RunResult:
        """Run the job to its end and return the last epoch.

        `resume_from_epoch` rewinds to that epoch and begins a new branch, unless an earlier process
        began the current branch by the same request: then it continues (`again=True` rewinds).
        Without a session: the current one, else torchrun's, else a local one.

        A run that left early to be continued returns too, with the status PREEMPTED; SIGTERM and SIGUSR1 have
        our handlers until then (in the main thread). So has Ctrl-C: from the first step of
        `ctx.steps` on it leaves at the next one, saved like that, and raises KeyboardInterrupt then; a second
        one raises at once.

        Raises the errors of `torchrelay.errors`; a failed save only warns (see `max_failed_saves`).
        """
        if not (session is None or isinstance(session, SessionBase)):
            raise UsageError(f"session is {session!r:.80}; give a LocalSession or a DistributedSession")
        with self.life(session, resume_from_epoch, again=again) as life:
            for _ in life.epochs():
                life.session.run(self.job.epoch_group)
        return life.result

    @contextmanager
    def life(
        self, session: SessionBase | None = None, resume_from_epoch: int | None = None, *, again: bool = False
    ) -> Iterator[Life]:
        """One run of the job, for a loop over its `epochs`; the arguments are those of `train`.

        Behind the block nothing is left of it but its `result`.
        """
        refuse_before_main()
        with _one_train():
            epoch = check_epoch(resume_from_epoch)
            epoch = self.resume_from_epoch if epoch is None else epoch
            with current_or_new_session(session) as used:
                life = Life(self, used, self._plan, epoch, again=again)
                try:
                    with life.held():
                        yield life
                finally:
                    result = life.result
                    life.__dict__.clear()  # its parts refer to it: what they hold is let go of now
                    life.result = result
            if result.status == "PREEMPTED" and signal.SIGINT.name in result.stop:
                raise LeftByInterrupt

    def load_best(self, session: SessionBase | None = None) -> int:
        """Load the best saved epoch, by `best=`, into the job's objects; return its number.

        Everything that is registered becomes as it was when that epoch ended, on all ranks, which call this
        together. What `keep_optimizer_last` let go stays as it is, and one line says so; random states
        stay, too. The run on the disk does not change: `train()` resumes from its newest epoch. In a session
        that does not hold the objects, `setup` runs first.

        Args:
            session: as for `train`; the session of that call, where objects are made in `setup`.

        Returns:
            The number of the epoch.

        Raises:
            UsageError: there is no manager, or nothing says what is best.
            UnknownEpochError: no saved epoch has a value of the metric.

        Example:
            runner = JobRunner(job, "runs/hello", best=("val/acc", "max"))
            runner.train()
            runner.load_best()
            print(accuracy(model))
        """
        from torchrelay.runners.training.saver import load_best

        manager = self._required_manager("load_best")
        with _one_train(), current_or_new_session(session) as used:
            return load_best(Life(self, used, self._plan, None), manager)

    def main(self, argv: list[str] | None = None) -> None:
        """Train as a program and leave with an exit code.

        Reads `--resume-from-epoch N`, `--again`, `--resume auto|must|never`, `--time-limit T`,
        `--max-attempts N` and `--help`, also from TORCHRELAY_ARGS; other arguments, and what a parser of the
        program has read, are left to the program. A user's mistake prints one line, no traceback. The code
        of a preempted run is 75, but 0 where torchrun would start it again at
        once (`--max-restarts`): status.json is the truth.
        """
        from torchrelay.runners.training.exit import code_of_result, run_and_leave
        from torchrelay.runners.training.plan import parse_options

        def work() -> int:
            options = parse_options(argv, self.resume_from_epoch is not None)
            self._plan = self._plan.with_options(options)
            result = self.train(resume_from_epoch=options.epoch, again=options.again)
            return code_of_result(result)

        run_and_leave(work)

    def save_checkpoints(self, epoch: int, session: SessionBase) -> bool:
        """Save the nodes now as `epoch`; returns whether it is saved, for a failure is a warning.

        Raises UsageError without a manager.
        """
        from torchrelay.runners.training.saver import save_by_hand

        manager = self._required_manager("save_checkpoints")
        return save_by_hand(Life(self, session, self._plan, None), manager, epoch)

    def load_blobs_from_checkpoints(self, blob_names: list[str], epoch: int, session: SessionBase) -> bool:
        """Load some blobs of an epoch, for evaluation. A training begins with them by `init_from`.

        Registered modules, tensors, containers and optimizers are filled in place, also in a session that has
        run nothing; factories are called then, and `setup` is not. Values, and tensors without an object,
        arrive in the workspaces of nodes that have them.

        Args:
            blob_names: Names as `open_checkpoint(...).blobs` has them, of leaves (`model.weight`), or
                patterns (`"model.*"`). A bare name means all nodes that have it, `node:name` that of one.
            epoch: The number of a committed epoch.
            session: The session whose workspaces are filled; all its processes call this.

        Returns:
            Whether every name was found. False, with nothing changed and a warning that says why, where the
            epoch is not committed, has nothing of a name, or lacks a file that holds it.

        Raises:
            UsageError: There is no manager, or the names are no list.
            BlobError: What is stored does not fit into a registered object.
            DamagedError: Stored bytes are not those that were committed.
        """
        manager = self._required_manager("load_blobs_from_checkpoints")
        if isinstance(blob_names, str) or not isinstance(blob_names, Iterable):
            raise UsageError(f"blob_names={blob_names!r:.80} is no list: give a list of blob names")
        blob_names = list(blob_names)
        if odd := [name for name in blob_names if not isinstance(name, str)]:
            raise UsageError(f"blob_names has {odd[0]!r:.80}: give the names of blobs or leaves as text")
        session.place(self.job.nodes())
        nodes = self.job.saved_among(place.name for place in session.nodes)
        manager.bind(self.job)
        decide(session.peers, "set_params", lambda: manager.set_params(nodes))
        bind_for_load(self.job, session, blob_names)
        loaded = manager.load_blobs_locally(nodes, blob_names, check_epoch(epoch, "epoch"), session)
        report_stats(session, manager, "checkpoint_partial_load", partial(warnings.warn, stacklevel=2))
        return loaded

    def _required_manager(self, verb: str) -> Manager:
        if self.manager is None:
            raise UsageError(
                f"{verb} needs a checkpoint manager: give JobRunner a run directory or a manager"
            )
        return self.manager


@contextmanager
def _one_train() -> Iterator[None]:
    training = _training.setdefault(os.getpid(), threading.Lock())
    if not training.acquire(blocking=False):
        raise NotAllowedNowError(
            "another train() or Run is active in this process: end it first, or use a second process"
        )
    try:
        yield
    except TaskFailedError as error:
        raise error.also_of_its_cause() from error.__cause__
    finally:
        training.release()


def _run_directory(where: Any) -> RunDirectory | None:
    """That of a path or URL; None for a manager, and for nothing."""
    if not isinstance(where, (str, Path)):
        return None
    if isinstance(where, str) and is_remote(where):
        from torchrelay.runners.remote_runs.local_copies import workspace_of

        url = canonical(where, "the run directory")
        return RunDirectory(workspace_of(url), url)
    path = where.removeprefix(FILE) if isinstance(where, str) else where
    return RunDirectory(local_directory(path, "the run directory"))


def _check_job(job: Any, resume: str) -> Job:
    if not isinstance(job, Job):
        raise UsageError(f"job is {job!r:.80}; give a torchrelay.Job")
    if resume not in ("auto", "must", "never"):
        raise UsageError(f"resume is {resume!r}; it is 'auto', 'must' or 'never'")
    return job


def _check_best(best: Any) -> tuple[str, str] | None:
    if best is None:
        return None
    if isinstance(best, tuple) and len(best) == 2 and isinstance(best[0], str) and best[1] in ("min", "max"):
        return best
    raise UsageError(f"best is {best!r}; it is a metric and a direction, for example ('val/acc', 'max')")


def _check_attempts(count: Any) -> int | None:
    if count is None:
        return MAX_ATTEMPTS
    if type(count) is int and count >= 0:
        return count or None
    raise UsageError(f"max_attempts is {count!r:.80}; it is a whole number, 0 for no limit")


def _check_count(count: Any, name: str) -> int:
    if type(count) is int and count >= 1:
        return count
    raise UsageError(f"{name} is {count!r:.80}; it is a whole number from 1")
