"""The runner of jobs: `JobRunner.train` runs a job to its end and returns the result."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.log.view import wanted
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
from torchrelay.metadata.code.snapshot import Code
from torchrelay.metadata.handlers import FileMetadataHandler, MetadataHandler
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.metadata.sinks.text import MetricSink
from torchrelay.runners.monitoring.text import interval_secs
from torchrelay.runners.remote_runs.names import canonical, is_remote
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.local import current_or_new_session
from torchrelay.runners.session.stop import DEFAULT_BEST, StopVerdict
from torchrelay.runners.session.stop_requests import TimeLimit, save_signal_of, seconds_of
from torchrelay.runners.training.capture import Capturing
from torchrelay.runners.training.exit import refuse_before_main
from torchrelay.runners.training.plan import OnCrash, Plan, Recipe, Resume, RunResult, check_epoch, recipes_of
from torchrelay.runners.training.run_loop import Life
from torchrelay.runners.training.saver import report_stats
from torchrelay.runners.training.startup import bind_for_load

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from torchrelay.runners.training.extras.onnx_export import OnnxExport
    from torchrelay.runners.training.extras.upstream import InitFrom, Upstream, UpstreamRuns

_training: dict[int, threading.Lock] = {}
"""Locks by process, because a process forked from a task must not use its parent's."""
RUN_DIRECTORY_FAILED_SAVES = 3
MAX_ATTEMPTS = 3  # a launch may die, be restarted automatically and die at the same position, for days


class JobRunner:
    """Run a job and keep its history in a run directory, or through a manager of the user.

    Jobs, managers and sessions may be reused; only one train call runs at a time in a process. A run
    directory also takes the options of its manager, `ManagerOptions`: `keep_last`, `keep_every`, `keep_best`,
    `keep_optimizer_last`, `asynchronous`, `staging_limit`, `verify_staging`, `reuse`, `include`, `exclude`,
    `share_reads`, `compare_every`, `single_writer`, `tier`, `rename`, `resume_exclude`, `resume_strict`.
    `asynchronous=True` writes and commits epochs in the background; the outcome is known, and reported to the
    metadata handler, at the next epoch boundary.

    Args:
        job: The job to run.
        where: Run directory (created if missing) or its URL (`s3://bucket/runs/hello`), a manager, or None to
            save nothing. Also named `checkpoint_manager`, as in Caffe2.
        resume_from_epoch: Epoch to rewind to, which begins a new branch.
        upload_task_group_builder: Builds the group that uploads the last epoch.
        resume: `auto` resumes from the newest epoch that verifies, `must` fails without one, `never` starts
            again (older epochs are kept as an abandoned branch).
        best: Metric and direction (`"max"` or `"min"`) that select the epoch `"best"`.
        save_initial: False omits epoch 0, the state after `init`.
        max_failed_saves: Failed saves in a row that end the run (default 3; a manager of the user only
            warns).
        agree_every: Steps between two checks of stop requests of all ranks (EpochLoader only).
        time_limit: Longest time of this launch (seconds, "1h30m", a timedelta). All ranks stop at the same
            step in time for one more save, with status PREEMPTED, and the same command resumes there. The
            same happens after SIGTERM, SIGUSR1, and before the end of a Slurm job.
        max_attempts: Launches in a row without progress after which NoProgressError is raised (default 3; 0:
            no limit).
        metadata_handler: Also notified of epochs; decides about the start only with `decides = True`.
        trackers: Sinks of metrics: "csv", "jsonl", "tensorboard", "mlflow:sqlite:///runs.db", "wandb", or
            `MetricSink` objects.
        log_every_n_secs: Interval of progress lines (default 10; 0: one per epoch);
            TORCHRELAY_LOG_EVERY_N_SECS takes precedence.
        save_signal: Signal to any rank that requests a save at the next possible step; None for none. A
            handler of the program is kept.
        on_crash: `"save"` writes the state of a process in which a task failed to `crash/`, for inspection
            only.
        from_program: What a resume takes from the program if it changed since the save: a schedule by its
            blob ("scheduler"), or an entry of an optimizer's groups ("optimizer.lr").
        replay: Functions that build modules, by blob: a call of each is recorded in every epoch, for
            `torchrelay verify RUN --replay`.
        upstream: Runs that this one is built on, by alias: `{"expert": "runs/expert@best"}`. Their records go
            to `lineage/` when the run begins; a resume does not open them.
        init_from: Initial weights from upstream runs: aliases, or `InitFrom` objects.
        code: Source to archive: None is the script's directory, False nothing, else directories or `Sources`.
        configuration: The parsed configuration, to be recorded.
        params: Hyper-parameters to be recorded and shown in reports: a mapping, a Namespace of argparse, or a
            dataclass. They do not change the run.
        exports: ONNX files to write during the training, see `OnnxExport`.
        checkpoint_manager: Another name of `where`.
        of_manager: Options of the manager.

    Raises:
        UsageError: An argument is invalid.

    Example:
        runner = JobRunner(job, "runs/hello", keep_last=3)
        result = runner.train()
    """

    def __init__(
        self,
        job: Job,
        where: str | Path | Manager | None = None,
        resume_from_epoch: int | None = None,
        upload_task_group_builder: UploadTaskGroupBuilder | None = None,
        *,
        resume: Resume = "auto",
        best: tuple[str, str] | None = DEFAULT_BEST,
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
            raise UsageError("checkpoint_manager and where are the same argument: remove one of them")
        where = checkpoint_manager if where is None else where
        if not isinstance(job, Job):
            raise UsageError(f"invalid job={job!r:.80}: expected a torchrelay.Job")
        self.job, self.upload_task_group_builder = job, upload_task_group_builder
        self.resume_from_epoch, self.run_directory = check_epoch(resume_from_epoch), _run_directory(where)
        check_options("JobRunner", of_manager, inspect.signature(JobRunner).parameters)
        options = {**of_manager, "metadata_handler": check_handler(metadata_handler)}
        self.manager = self._manager(where, options)
        self.trackers = self._sinks(trackers)
        self.exports = self._exports(exports, best)
        self.capturing = Capturing(self.run_directory, code, configuration, params)
        self.replay = recipes_of(replay)
        self.built_on = self._upstream_runs(upstream, init_from)
        default = RUN_DIRECTORY_FAILED_SAVES if self.run_directory else None
        self._plan = Plan(
            resume=resume,
            best=best,
            save_initial=save_initial,
            max_failed_saves=default if max_failed_saves is None else max_failed_saves,
            agree_every=agree_every,
            time_limit_secs=None if time_limit is None else seconds_of(time_limit),
            max_attempts=MAX_ATTEMPTS if max_attempts is None else max_attempts,
            log_every_n_secs=interval_secs(log_every_n_secs),
            save_signal=save_signal_of(save_signal),
            on_crash=on_crash,
            from_program=(from_program,) if isinstance(from_program, str) else tuple(from_program),
        ).checked()

    def _manager(self, where: str | Path | Manager | None, options: dict[str, Any]) -> Manager | None:
        """Return the user's manager, or create that of the run directory with these options."""
        options = {name: value for name, value in options.items() if value is not None}
        if self.run_directory is None:
            for name in options:
                raise UsageError(f"{name} needs a run directory: pass it to the manager as {name}=...")
            if where is not None and not isinstance(where, Manager):
                raise UsageError(f"invalid where={where!r}: expected a run directory or a checkpoint manager")
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
            raise UsageError("trackers need a run directory: pass JobRunner the path of one")
        return sinks

    def _exports(self, exports: Sequence[OnnxExport], best: Any) -> tuple[OnnxExport, ...]:
        found = tuple(exports) if isinstance(exports, Sequence) else (exports,)
        if not found:
            return ()
        from torchrelay.runners.training.extras.onnx_export import checked_exports

        return checked_exports(found, best, self.run_directory)

    def _upstream_runs(self, upstream: Any, init_from: Any) -> UpstreamRuns | None:
        if upstream is None and init_from == ():
            return None
        from torchrelay.runners.training.extras.upstream import given_of

        given = given_of(upstream, init_from)
        if given[0] and self.run_directory is None:
            raise UsageError("upstream needs a run directory: pass JobRunner the path of one")
        return given

    def train(
        self, session: SessionBase | None = None, resume_from_epoch: int | None = None, *, again: bool = False
    ) -> RunResult:
        """Run the job to its end.

        A preempted run returns too, with the status PREEMPTED. During the call SIGTERM, SIGUSR1 and Ctrl-C
        have handlers (in the main thread): Ctrl-C stops at the next step of `ctx.steps` after a save and then
        raises KeyboardInterrupt; a second one raises at once. Failed saves only warn (see
        `max_failed_saves`).

        Args:
            session: The session; default: the current one, else torchrun's, else a local one.
            resume_from_epoch: Epoch to rewind to, which begins a new branch. If an earlier process began the
                current branch by the same request, that branch is continued.
            again: Rewind also in that case.

        Returns:
            The last epoch, with status and metrics as attributes.

        Raises:
            RelayError: An error of `torchrelay.errors`.

        Example:
            result = JobRunner(job, "runs/hello").train()
            print(int(result), result.status, result.metrics)
        """
        if not (session is None or isinstance(session, SessionBase)):
            raise UsageError(
                f"invalid session={session!r:.80}: expected a LocalSession or DistributedSession"
            )
        with self.life(session, resume_from_epoch, again=again) as life:
            for _ in life.epochs():
                life.session.run(self.job.epoch_group)
        return life.result

    @contextmanager
    def life(
        self, session: SessionBase | None = None, resume_from_epoch: int | None = None, *, again: bool = False
    ) -> Iterator[Life]:
        """Run the job in a loop of the caller. After the block only `result` of the yielded object remains.

        Args:
            session: As for `train`.
            resume_from_epoch: As for `train`.
            again: As for `train`.

        Yields:
            The object whose `epochs()` gives the number of each epoch, and saves it after its body.

        Example:
            with runner.life() as life:
                for _ in life.epochs():
                    life.session.run(job.epoch_group)
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
                    life.__dict__.clear()  # its parts refer to it: releases what they hold now
                    life.result = result
            if result.status == "PREEMPTED" and signal.SIGINT.name in result.stop:
                raise LeftByInterrupt("stopped by Ctrl-C; the same command resumes") from None

    def load_best(self, session: SessionBase | None = None) -> int:
        """Load the best saved epoch, by `best=`, into the job's objects.

        All registered objects get their state at the end of that epoch, on all ranks, which call this
        together. State that `keep_optimizer_last` deleted, and random states, stay unchanged. The run on disk
        does not change: `train()` resumes from its newest epoch. If the session does not hold the objects,
        `setup` runs first.

        Args:
            session: As for `train`; the session of that call if objects are created in `setup`.

        Returns:
            The number of the epoch.

        Raises:
            UsageError: The runner has no manager, or `best` is None.
            UnknownEpochError: No saved epoch has a value of the metric.

        Example:
            runner = JobRunner(job, "runs/hello", best=("val/acc", "max"))
            runner.train()
            runner.load_best()
            print(accuracy(model))
        """
        from torchrelay.checkpoint.load.open import place_of, verified_entry

        manager, job, best = self._required_manager("load_best"), self.job, self._plan.best
        engine = manager.engine
        if best is None:
            raise UsageError("load_best needs a metric: pass JobRunner best=('val/acc', 'max')")

        def choose() -> int:
            place = place_of(engine.storage)
            result = verified_entry(place, engine.ledger.view(), wanted("best"), best, life.journal.warn)
            return result.entry.position.epoch

        with _one_train(), current_or_new_session(session) as used:
            life = self._bound_life(used, manager)
            engine.ledger.look(used.peers)  # with local logs per host this finds the authoritative one
            epoch = int(decide(used.peers, "best epoch", choose, by=engine.ledger.reader_of(used.peers)))
            target = engine.ledger.verify_epoch(used.peers, epoch, whole=False)
            engine.say = life.journal.say
            used.begin(life.state)
            try:
                names = [place.name for place in used.local_nodes]
                held = all(used.workspace(name).registered(blob) for name in names for blob in job.blobs)
                if not all(used.peers.exchange("load best: objects", held)):
                    life.set_up(target)
                used.run(manager.go_on_at(life.nodes, target))
                engine.take_streams(), engine.take_gradients()
            finally:
                life.recorder.close()
                engine.say = None
                used.end()
            lost = ", ".join(sorted(target.lost_blobs & {blob.name for blob in job.blobs}))
            gone = f"; {lost} is unchanged, because keep_optimizer_last deleted its state" if lost else ""
            life.journal.say(f"loaded epoch {epoch}, the best by {best[0]}{gone}")
        return epoch

    def main(self, argv: list[str] | None = None) -> None:
        """Train as a program and exit with an exit code.

        Parses `--resume-from-epoch N`, `--again`, `--resume auto|must|never`, `--time-limit T`,
        `--max-attempts N` and `--help`, also from TORCHRELAY_ARGS. Other arguments, and those read by a
        parser of the program, are left to the program. A user's mistake prints one line without traceback. A
        preempted run exits with code 75, or 0 if torchrun would restart it at once (`--max-restarts`);
        status.json has the state.
        """
        from torchrelay.runners.training.exit import code_of_result, run_and_leave
        from torchrelay.runners.training.plan import parse_options

        def work() -> int:
            options = parse_options(argv, self.resume_from_epoch is not None)
            plan, attempts = self._plan, options.max_attempts
            self._plan = replace(
                plan,
                resume=options.resume or plan.resume,
                time_limit_secs=options.time_limit_secs or plan.time_limit_secs,  # none is 0
                max_attempts=plan.max_attempts if attempts is None else attempts,
            )
            result = self.train(resume_from_epoch=options.epoch, again=options.again)
            return code_of_result(result)

        run_and_leave(work)

    def save_checkpoints(self, epoch: int, session: SessionBase) -> bool:
        """Save the nodes now as `epoch`; a failed save is a warning.

        Args:
            epoch: The number of the epoch.
            session: The session that holds the objects.

        Returns:
            True if the epoch is saved.

        Raises:
            UsageError: The runner has no manager.

        Example:
            saved = runner.save_checkpoints(3, session)
        """
        manager, peers = self._required_manager("save_checkpoints"), session.peers
        epochs = peers.exchange("epoch to save", epoch)
        if differing := [f"{one} on rank {rank}" for rank, one in enumerate(epochs) if one != epochs[0]]:
            raise UsageError(
                f"the ranks would save different epochs, {epochs[0]} on rank 0 and {differing[0]}: pass the "
                "same number on all"
            )
        ledger = manager.engine.ledger
        within_train = ledger.holding is not None
        life = self._bound_life(session, manager, remote=not within_train)
        life.journal.create(self.job, self._plan.best, session)
        try:
            life.saver.save(Position(epoch), life.facts(StopVerdict()))
            life.saver.settle()
            if not within_train:
                life.stored.finish_by_hand()
        finally:
            if not within_train:
                life.stored.close()
                ledger.close()
        return life.saver.newest_saved == epoch

    def _bound_life(self, session: SessionBase, manager: Manager, *, remote: bool = False) -> Life:
        """Return a life outside of a train call; with `remote` its run is downloaded first."""
        life = Life(self, session, self._plan, None)
        session.place(self.job.nodes())
        if remote:
            life.stored.begin(session.local_nodes[0])
        manager.bind(self.job, default_name=self.run_directory.name if self.run_directory else None)
        return life

    def load_blobs_from_checkpoints(self, blob_names: list[str], epoch: int, session: SessionBase) -> bool:
        """Load some blobs of an epoch, for evaluation. For initial weights of a training use `init_from`.

        Registered modules, tensors, containers and optimizers are filled in place, also in a session that has
        not run yet; factories are called then, `setup` is not. Values, and tensors without an object, are put
        into the workspaces of their nodes.

        Args:
            blob_names: Names as in `open_checkpoint(...).blobs`, of leaves (`model.weight`), or patterns
                (`"model.*"`). A plain name means all nodes that have it, `node:name` one node.
            epoch: The number of a committed epoch.
            session: The session whose workspaces are filled; all its processes call this.

        Returns:
            True if every name was found. False, with a warning and without changes, if the epoch is not
            committed, lacks a name, or lacks a file.

        Raises:
            UsageError: The runner has no manager, or the names are not a list.
            BlobError: The stored content does not fit a registered object.
            DamagedError: Stored bytes differ from the committed ones.

        Example:
            runner.load_blobs_from_checkpoints(["model"], 3, session)
        """
        manager = self._required_manager("load_blobs_from_checkpoints")
        if isinstance(blob_names, str) or not isinstance(blob_names, Iterable):
            raise UsageError(f"invalid blob_names={blob_names!r:.80}: expected a list of blob names")
        blob_names = list(blob_names)
        if odd := [name for name in blob_names if not isinstance(name, str)]:
            raise UsageError(f"invalid entry {odd[0]!r:.80} of blob_names: expected names of blobs or leaves")
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
                f"{verb} needs a checkpoint manager: pass JobRunner a run directory or a manager"
            )
        return self.manager


@contextmanager
def _one_train() -> Iterator[None]:
    """Allow one training at a time in this process."""
    training = _training.setdefault(os.getpid(), threading.Lock())
    if not training.acquire(blocking=False):
        raise NotAllowedNowError("another train() or Run is active in this process: end it first")
    try:
        yield
    except TaskFailedError as error:
        raise error.also_of_its_cause() from error.__cause__
    finally:
        training.release()


def _run_directory(where: Any) -> RunDirectory | None:
    """Return the run directory of a path or URL; None for a manager and for None."""
    if not isinstance(where, (str, Path)):
        return None
    if isinstance(where, str) and is_remote(where):
        from torchrelay.runners.remote_runs.local_copies import workspace_of

        url = canonical(where, "the run directory")
        return RunDirectory(workspace_of(url), url)
    path = where.removeprefix(FILE) if isinstance(where, str) else where
    return RunDirectory(local_directory(path, "the run directory"))
