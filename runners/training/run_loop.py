"""The course of a run, from the choice of a position to the exit group; `Life.epochs` is the sequence.

A finished run is set up, loaded and ended again. Every process of the session runs the same course; decisions
are made once and sent to all. Between the phases all processes exchange stop requests
(`saver.agree_on_requests`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.names import LINEAGE
from torchrelay.checkpoint.format.position import Facts, Position
from torchrelay.checkpoint.load.verify import Target
from torchrelay.checkpoint.log.view import Look
from torchrelay.checkpoint.state.checkpoint_set import members_of
from torchrelay.checkpoint.storage.work import progress
from torchrelay.errors import DamagedError, PartiallyLoadedError
from torchrelay.jobs.data.data_parallel import drop as drop_wrappers
from torchrelay.jobs.random import current_seed
from torchrelay.jobs.runtime import undivided
from torchrelay.jobs.session import decide, together
from torchrelay.runners.session import stop
from torchrelay.runners.session.base import SessionBase, check_process, is_forked
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.stop import StopVerdict
from torchrelay.runners.session.stop_requests import (
    ASKED,
    GRACE_SECS,
    PREEMPT,
    Interrupted,
    Requests,
    deadlines_of,
    notice_of,
    signals_ask,
)
from torchrelay.runners.training.exit import workers_stay
from torchrelay.runners.training.journal import Journal
from torchrelay.runners.training.observers import Onlookers
from torchrelay.runners.training.plan import Choice, Plan, ResumeRequest, RunResult, Status, WarmStart
from torchrelay.runners.training.resume import FromProgram, ResumedState
from torchrelay.runners.training.saver import FenceGuard, Saver, agree_on_requests, save_at_crash
from torchrelay.runners.training.startup import (
    bind_blobs,
    ended_result,
    look_and_choose,
    this_process,
    warn_of_bare_ddp,
)

if TYPE_CHECKING:
    from torchrelay.checkpoint.manager.checkpoint_manager import UploadTaskGroupBuilder
    from torchrelay.runners.training.extras.onnx_export import Exporting
    from torchrelay.runners.training.extras.remote_run import StoredRun
    from torchrelay.runners.training.extras.replay import Recorder
    from torchrelay.runners.training.extras.upstream import Stages, UpstreamRuns
    from torchrelay.runners.training.job_runner import JobRunner


class _Absent:
    """A part that this run does not use: all its methods do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


_ABSENT: Any = _Absent()


class Life:
    """One train call, around a loop that runs the tasks of its epochs.

    with life.held():
        for epoch in life.epochs():
            session.run(job.epoch_group)
    return life.result
    """

    def __init__(
        self, runner: JobRunner, session: SessionBase, plan: Plan, epoch: int | None, *, again: bool = False
    ) -> None:
        self.job, self.plan = runner.job, plan
        self.manager, self.capturing = runner.manager, runner.capturing
        self.upload_builder = runner.upload_task_group_builder
        self.run_directory = run = runner.run_directory
        self.session, self.peers = session, session.peers
        self.request = ResumeRequest(epoch, resume=plan.resume, again=again)
        self.onlookers = Onlookers(run, session.peers, runner.trackers, plan.log_every_n_secs)
        background = None if self.manager is None else self.manager.engine.background
        aside = None if background is None else background.aside
        self.journal = Journal(run, session.peers, self.onlookers.progress, aside)
        self.state = RunState(
            seed=current_seed(),
            run_dir=str(run.path) if run else None,
            agree_every=plan.agree_every,
            **stop.limits_of(runner.job.stop_conditions),
        )
        self.guard = FenceGuard(self.state)
        saves = (self.manager, session, self.state, self.journal, plan.max_failed_saves)
        self.saver = Saver(*saves, facts=lambda: self.facts(self._verdict))
        self.look = Look()  # state of the log when the position was chosen
        self._add_extras(runner)
        self.from_program = FromProgram(plan.from_program)
        self.resumed = ResumedState(session, self.state, self.from_program)
        self.status: Status = "FINISHED"
        self.result = RunResult(0)  # the result, after `epochs`
        self.requests = Requests(
            deadlines_of(plan.time_limit_secs, os.environ),
            run.stop_file if run is not None and session.peers.rank == 0 else None,
            lambda: self.saver.longest_secs,
            notice_secs=notice_of(os.environ, GRACE_SECS),
            stop_name=None if run is None else f"{run.where}/STOP",
        )
        self._verdict = StopVerdict()  # verdict of the newest finished epoch
        self.resumed_from: int | None = None
        self._untried: Choice | None = None
        """The position that this launch resumes from, until it has done so."""
        self._warmed: tuple[WarmStart, ...] = ()
        self._began = self._has_failed = False

    def _add_extras(self, runner: JobRunner) -> None:
        """Create optional parts; modules of unused ones are not imported, so that runs start faster."""
        run, common = self.run_directory, (self.session, self.state, self.journal)
        self.stages: Stages = _ABSENT
        self.recorder: Recorder = _ABSENT
        self.exporting: list[Exporting] = []
        self.stored: StoredRun = _ABSENT
        if runner.built_on or self.peers.size > 1:  # to check that all ranks have the same arguments
            self.stages = self._stages_of(runner.built_on)
        if runner.replay:
            from torchrelay.runners.training.extras.replay import Recorder

            self.recorder = Recorder(runner.replay, run, self.journal)
        if runner.exports:
            from torchrelay.runners.training.extras.onnx_export import Exporting

            self.exporting = [Exporting(one, *common, self.plan.best) for one in runner.exports]
        if run is not None and run.url is not None and self.manager is not None:
            from torchrelay.runners.training.extras.remote_run import StoredRun

            self.stored = StoredRun(run, *common, self.manager)

    def _stages_of(self, given: UpstreamRuns | None) -> Stages:
        from torchrelay.runners.training.extras.upstream import Stages

        return Stages(given, self.run_directory, self.peers)

    # The whole

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the session, the signals and the log for this run; a preemption ends it without an error."""
        self.session.begin(self.state)
        self.state.requests = self.requests
        self.onlookers.begin()
        with signals_ask(self.requests, self.plan.save_signal), workers_stay(self.plan.save_signal):
            try:
                try:
                    yield
                except Interrupted:
                    self.capturing.finish(self.journal)
                    self.result = self._leave()
            except BaseException as error:
                if not is_forked(self.session):
                    self._failed(error)
                raise
            finally:
                if not is_forked(self.session):
                    self._close()

    def epochs(self) -> Iterator[int]:
        """Yield the remaining epochs; their tasks run while one is yielded.

        check -> choose the position -> setup -> fresh: init, warm start, save epoch 0; resumed: load
        -> restore random state -> loop { YIELD; metrics; stop conditions; save; stop? }
        -> upload -> download -> exit
        """
        self.stored.begin(self.session.local_nodes[0])
        choice, self.look = look_and_choose(self.request, self.job, self.session, self.manager, self.journal)
        self._untried = choice
        if self._has_ended(choice):
            return
        if choice.start == "fresh":
            self.stages.look()
        if self.manager is not None:
            self.journal.say_choice(choice, self.look)
        if not self._open(choice):
            self.result = self._leave()
            return
        target = self._target(choice)
        if self.run_directory is not None:
            start, most = None if target is None else target.position, self.plan.max_attempts
            self.state.attempt = self.journal.check_attempts(choice, self.look.branch, start, most)
        self.stored.started(target)
        self.onlookers.watch(self.state, self.job, self.journal)
        self.set_up(target)
        agree_on_requests(self.peers, self.requests)
        verdict = self._resume(choice, target) if target else self._start_fresh(choice)
        self._untried = None
        self.onlookers.started(self.state.epoch, self.state.total_steps)
        for one in self.exporting:
            one.begin()
        self.resumed.restore()
        if not verdict.stop:
            while not verdict.stop:
                level, reason = agree_on_requests(self.peers, self.requests)
                if level == ASKED and not self.resumed.places:  # otherwise the epoch ends early
                    self.status, verdict = "STOPPED", replace(verdict, asked=reason)
                    break
                self.capturing.begin()
                self._begin_epoch()
                yield self.state.epoch
                check_process(self.session)
                self.state.leave_epoch()
                self.capturing.finish(self.journal)
                self._verdict = verdict = self._end_epoch()
            if verdict.asked is None and stop.only_time_is_up(self.job, verdict):
                self.status = "STOPPED"
            self.requests.steps = False
            self.saver.settle()
            if self.run_directory is not None:
                self.saver.secure(Position(self.state.epoch), self.facts(verdict))
        self.saver.finish()  # including uploads left by an earlier launch
        self._finalize()
        saved, epoch = self.saver.newest_saved, self.state.epoch
        self.result = self._result(epoch, self.status, verdict.reasons, saved, warm_starts=self._warmed)
        self.journal.finished(self.result, self.job, verdict.by_condition)

    def _has_ended(self, choice: Choice) -> bool:
        """Return True if the run has ended; then its objects are loaded, and nothing is written.

        False if work is left: the end is not recorded, or the last epoch is damaged.
        """
        result, manager = ended_result(choice, self.look, self.job, self.session, self.journal), self.manager
        if result is None or manager is None:
            return False
        try:
            target = manager.engine.ledger.verify_epoch(self.peers, int(result))
            self.set_up(target)
            manager.engine.say = self.journal.say
            self.session.run(manager.go_on_at(self.nodes, target))
        except (DamagedError, PartiallyLoadedError) as error:
            self.journal.warn(f"the run had ended, but resumes from an older epoch: {error}")
            return False
        self.resumed.take(manager, target)
        self.resumed.restore()
        self.stored.finish_over()
        early = stop.early_reasons(self.job, {} if self.look.facts is None else self.look.facts.stop)
        why = f" ({early})" if early else ""
        self.journal.say(f"already finished at epoch {int(result)}{why}: its state is loaded, nothing to do")
        self.result = result
        return True

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes that are saved."""
        return self.job.saved_among(place.name for place in self.session.nodes)

    # Starting

    def _open(self, choice: Choice) -> bool:
        """Take the log, or continue without it if allowed; False if not all is uploaded."""
        if self.manager is None:
            return True
        self.capturing.agree(self.peers)
        ledger = self.manager.engine.ledger
        facts = self.look.facts
        self.journal.create(self.job, self.plan.best, self.session, facts.run_id if facts else None)
        ledger.in_run, ledger.when_fenced = True, self.guard.fenced
        ledger.hurried, ledger.secs_left = lambda: self.requests.level() == PREEMPT, self.requests.secs_left
        tolerant = self.run_directory is None and choice.start != "newest"
        complete = ledger.open(self.peers, tolerant=tolerant)
        self.journal.opened(ledger.holding, self.look, choice)
        self.capturing.prepare(self.journal, self.session)
        self.stages.capture()
        self.stored.opened()
        return complete

    def _begin_branch(self, choice: Choice) -> None:
        """Rewind the log, only after loading: a launch that fails before must not abandon any epoch."""
        if self.manager is not None and choice.rewind:
            base = None if choice.epoch is None else Position(choice.epoch)
            request = {"epoch": choice.epoch, "process": this_process()}
            by_user = {"by": "user"} if self.request.epoch is not None else {}
            self.manager.engine.ledger.rewind(self.peers, base, {**request, **by_user})

    def _target(self, choice: Choice) -> Target | None:
        """Return the verified position to load: the explicit one, or the newest that verifies."""
        if self.manager is None or choice.start == "fresh":
            return None
        if choice.start == "explicit" and choice.epoch is not None:
            return self.manager.engine.ledger.verify_epoch(self.peers, choice.epoch)
        return self.manager.engine.ledger.newest(self.peers, self.journal.warn)

    def set_up(self, target: Target | None) -> None:
        """Run the setup group and bind the blobs, for a target to load or a fresh start."""
        self._began = True
        bind_blobs(self.job, self.session, before_setup=True)
        manifest = None if target is None else target.manifest
        if (
            manifest is not None
            and self.stages is _ABSENT
            and LINEAGE in {one.name for one in manifest.blobs}
        ):
            self.stages = self._stages_of(None)
        self.stages.declare(self.job, manifest)
        self.session.run(self.job.setup_group)
        bind_blobs(self.job, self.session, before_setup=False)
        self.session.after_setup()
        self.from_program.note(self.session, self.journal.warn)
        self.recorder.watch(self.session.workspace(), self.session.local_nodes[0].rank)
        if self.manager is not None:
            self.manager.engine.prepare(self.session)
        warn_of_bare_ddp(self.session, self.journal.warn)

    def _start_fresh(self, choice: Choice) -> StopVerdict:
        """Run init and warm start, and save epoch 0."""
        self.session.run(self.job.init_group)
        self._warmed = self.stages.warm(self.session, self.journal) or ()
        self.resumed.derive_streams()
        if self.manager is not None:
            self.session.run(self.manager.init(self.nodes))
            self._begin_branch(choice)
            spaces = [self.session.workspace(place.name) for place in self.session.local_nodes]
            self.journal.say_new_run({name for space in spaces for name in members_of(space)})
            if self.plan.save_initial:
                self.saver.save(Position(0), self.facts(StopVerdict()))
        return StopVerdict()

    def _resume(self, choice: Choice, target: Target) -> StopVerdict:
        """Load the target and begin the branch; returns the stored verdict."""
        manager = self.manager
        if manager is None:
            raise NotImplementedError  # a target comes from a manager
        nodes = {place.name for place in self.session.nodes}
        if unsaved := nodes.difference(self.nodes):
            # they start as in a new run; their tasks may communicate
            self.session.run_on(self.job.init_group, unsaved if self.peers.size == 1 else nodes)
        older = choice.start == "newest"
        target = self.resumed.load(manager, self.nodes, target, self.journal, older=older)
        if older and target.position != self.look.position:
            self.journal.say(f"resuming from epoch {target.position} instead")
        self.stages.resumed(self.session, self.journal, target.position)
        self._begin_branch(choice)
        facts, epoch, inside = target.facts, target.position.epoch, not target.position.boundary
        self.resumed_from = epoch
        self.saver.report_loaded(target, self.look)
        self.resumed.take(manager, target)
        asked_for = choice.start == "explicit" and self.request.epoch is not None
        rewound = asked_for or (self.look.rewound and target.position == self.look.position)
        self._verdict = stop.over_there(self.session, self.job, facts, epoch, inside=inside, rewound=rewound)
        if facts.over and not self._verdict.stop:
            for said in stop.ended_before(self.job, facts):
                self.journal.say(said)
        return self._verdict

    # An epoch

    def _begin_epoch(self) -> None:
        """Prepare the epoch's tasks, or the rest of them: only here positions inside tasks are known."""
        if self.resumed.places:
            self.resumed.continue_epoch(self.saver.newest.step if self.saver.newest else 0)
        else:
            self.state.begin_epoch(self.state.epoch + 1)
        self.state.check()
        self.state.tracked = self.job.epoch_group
        if self.run_directory is None:
            return
        if len(self.session.local_nodes) == 1:  # emulated nodes take their steps one after another
            self.state.save_now = partial(self.saver.save_now, self.requests)
        if self.plan.on_crash == "save":
            selection = None if self.manager is None else self.manager.engine.selection
            run = self.run_directory.path
            self.state.crashed = partial(save_at_crash, run, self.session, self.state, selection)

    @undivided(beyond=True)
    def _end_epoch(self) -> StopVerdict:
        """Return the verdict after an epoch; raises errors that no later save can survive (`Saver`)."""
        metrics = self.session.reduce_metrics()
        self.onlookers.reduced(self.state, metrics)
        verdict = stop.ask_all(self.job, self.session)
        stop.warn_of_waiting(self.state, verdict, self.plan.best, self.journal.warn)
        self.recorder.record(self.state.epoch)
        saved = None
        if self.manager is not None:
            self.requests.take_save()
            saved = self.saver.save(Position(self.state.epoch), self.facts(verdict))
        self.journal.epoch_done(self.state, metrics, saved, verdict)
        self.onlookers.progress.epoch(metrics)
        self.stored.look()
        for one in self.exporting:
            one.epoch_done(metrics, saved)
        return verdict

    def facts(self, verdict: StopVerdict) -> Facts:
        """Return the facts of the run that a checkpoint stores."""
        measured = dict(self.state.measured)
        return Facts(
            metrics=measured,
            carried={name: one for name, one in self.state.metrics.items() if name not in measured},
            stop=verdict.by_condition,
            total_steps=self.state.total_steps,
            elapsed_secs=self.state.elapsed_secs,
            seed=self.state.seed,
            run_id=self.journal.run_id,
            over=verdict.stop,
            built=self.from_program.built,
        )

    # Ending

    def _leave(self) -> RunResult:
        """End a preempted run, with its step saved if possible; raises errors of a save that fail the run."""
        self.saver.settle()
        leave = self.saver.agree_to_leave(self.requests)
        if leave.inside and leave.why_not is None:
            self.saver.save_inside(leave.position)  # a failure has warned
            self.saver.settle()
            done = self.saver.newest == leave.position
            leave = replace(leave, why_not=None if done else "the save failed")
        self.saver.finish()
        writer = self.manager.engine.ledger.writer if self.manager is not None else None
        # FencedError if another job has the directory: then its status must not be written
        decide(self.peers, "leave for now: the log", (lambda: None) if writer is None else writer.check)
        resumes = self._untried is not None and self._untried.start == "newest"
        saved = self.look.position if resumes else self.saver.newest
        committed = self.look.whole if resumes else self.saver.newest_saved
        epoch = saved.epoch if saved is not None else 0
        result = self._result(epoch, "PREEMPTED", (leave.reason,), committed, elsewhere=leave.elsewhere)
        self.journal.preempted(result, saved, leave.lost)
        return result

    def _finalize(self) -> None:
        """Run upload, download and exit; the next launch begins at the first that is not recorded."""
        holding = self.manager.engine.ledger.holding if self.manager is not None else None
        branch, epoch = holding.branch if holding else 0, self.state.epoch
        groups = {"download": self.job.download_group, "exit": self.job.exit_group}
        for part in self.journal.final_parts_left(branch, epoch):
            agree_on_requests(self.peers, self.requests)
            if part in groups:
                self.session.run(groups[part])
            elif self.upload_builder is not None:
                saved = self.saver.newest_saved
                self._upload(self.upload_builder, epoch if saved is None else saved)
            self.journal.final_part_done(branch, epoch, part)

    def _upload(self, builder: UploadTaskGroupBuilder, epoch: int) -> None:
        built: list[Any] = []
        together(self.peers, "upload", lambda: built.append(builder.build(epoch, self.manager)))
        with progress(f"uploading epoch {epoch}"):
            self.session.run(built[0])

    def _result(
        self, epoch: int, status: Status, reasons: tuple[str, ...], committed: int | None, **more: Any
    ) -> RunResult:
        more |= {"metrics": self.state.metrics, "run_dir": self.journal.where, "committed": committed}
        return RunResult(epoch, status=status, stop=reasons, resumed_from=self.resumed_from, **more)

    def _failed(self, error: BaseException) -> None:
        """Record the failure; tasks for failures run only if the run had begun."""
        from torchrelay.runners.distributed.world import why_of

        self._has_failed = True
        with suppress(Exception):  # the original failure must be reported
            self.capturing.finish(self.journal)
        self.saver.settle(failing=True)
        code = self.session.code_of(error)
        self.journal.failed(error, self.state, why_of(error), code)
        if self._began:
            self.session.run_on_failure(self.job.exit_group, code)

    def _close(self) -> None:
        with ExitStack() as stack:  # last to first, even if one fails
            stack.callback(self.session.end)
            stack.callback(self.stored.close)
            stack.callback(self._release_log)
            stack.callback(self.state.leave_epoch)
            stack.callback(drop_wrappers)
            for part in (self.onlookers, self.recorder, self.guard):
                stack.callback(part.close)
            self.capturing.finish(self.journal)  # if no epoch was finished

    def _release_log(self) -> None:
        if self.manager is not None:
            self.manager.engine.wait(unguarded=True)
            self.manager.engine.say = None
            self.stored.finish(failed=self._has_failed)
            self.manager.engine.ledger.close()
