"""The life of a run, from choosing a position to the exit group.

    check -> choose the position -> setup -> fresh: init, warm start, save epoch 0; resumed: load, no init
    -> restore random state -> loop { epoch group; metrics; stop conditions; save; stop? }
    -> upload -> download -> exit

A run that has ended is set up, loaded and left again. Every process of the session runs the same life; what
is decided is decided once and told to all. Between the phases all are asked whether somebody wants to end
early (`ending.boundaries`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.facts import Facts
from torchrelay.checkpoint.ledger_words import Look, Target
from torchrelay.checkpoint.manager_base import Manager
from torchrelay.checkpoint.position import Position
from torchrelay.checkpoint.state.gradients import Gradients
from torchrelay.errors import DamagedError, PartiallyLoadedError, StorageError
from torchrelay.jobs.data_parallel import drop as drop_wrappers
from torchrelay.jobs.random_streams import RandomStreams
from torchrelay.jobs.seeding import current_seed
from torchrelay.runners.attempts import check_attempts
from torchrelay.runners.binding import bind_blobs, warn_of_bare_ddp
from torchrelay.runners.choosing import Choice
from torchrelay.runners.ending.asked_here import requests_of
from torchrelay.runners.ending.boundaries import go_on
from torchrelay.runners.ending.interruption import Interrupted
from torchrelay.runners.ending.on_crash import save_at_crash
from torchrelay.runners.ending.on_demand import save_now
from torchrelay.runners.ending.place import places_for
from torchrelay.runners.ending.preemption import leave_for_now
from torchrelay.runners.ending.put_back import PutBack
from torchrelay.runners.ending.requests import ASKED, PREEMPT
from torchrelay.runners.ending.signals import signals_ask
from torchrelay.runners.ending.workers import workers_stay
from torchrelay.runners.epoch_end import end_epoch
from torchrelay.runners.fence import FenceGuard
from torchrelay.runners.from_program import FromProgram
from torchrelay.runners.journal import Journal, at_once
from torchrelay.runners.onlookers import Onlookers
from torchrelay.runners.optional_parts import exporting_of, recorder_of, stored_run_of
from torchrelay.runners.outset import ended_result, look_and_choose, request_of
from torchrelay.runners.result import RunResult, Status
from torchrelay.runners.run_plan import Plan
from torchrelay.runners.run_state import RunState
from torchrelay.runners.saving import Saver
from torchrelay.runners.session_base import SessionBase
from torchrelay.runners.stages.stages import Stages
from torchrelay.runners.stopping import (
    Verdict,
    ended_before,
    limits_of,
    only_time_is_up,
    over_there,
)
from torchrelay.runners.tail import run_tail

if TYPE_CHECKING:
    from torchrelay.runners.job_runner import JobRunner


class Life:
    """One train call."""

    def __init__(
        self, runner: JobRunner, session: SessionBase, plan: Plan, epoch: int | None, *, again: bool = False
    ) -> None:
        self.job = runner.job
        self.manager = runner.manager
        self.upload_builder = runner.upload_task_group_builder
        self.run_directory = runner.run_directory
        self.capturing = runner.capturing
        self.session = session
        self.plan = plan
        self.wish_epoch = epoch
        self.again = again
        self.onlookers = Onlookers(
            runner.run_directory, session.peers, runner.trackers, plan.log_every_n_secs
        )
        background = None if self.manager is None else self.manager.engine.background
        self.journal = Journal(
            runner.run_directory,
            session.peers,
            self.onlookers.progress,
            at_once if background is None else background.aside,
        )
        self.state = RunState(
            seed=current_seed(),
            run_dir=str(runner.run_directory.path) if runner.run_directory else None,
            agree_every=plan.agree_every,
            **limits_of(runner.job.stop_conditions),
        )
        self.guard = FenceGuard(self.state)
        self.saver = Saver(self.manager, self.journal, plan.max_failed_saves)
        self.look = Look()
        """What the log said when the position was chosen."""
        self.recorder = recorder_of(runner, self)
        self.exporting = exporting_of(runner, self)
        self.stages = Stages(runner.built_on, runner.run_directory, session.peers)
        self.streams: dict[str, RandomStreams] = {}
        self._gradients: dict[str, Gradients] = {}
        self.stored = stored_run_of(self)
        self.from_program = FromProgram(plan.from_program)
        self.status: Status = "FINISHED"
        first = session.peers.rank == 0
        self.requests = requests_of(
            plan.time_limit_secs, runner.run_directory, lambda: self.saver.longest_secs, looks=first
        )
        self._verdict = Verdict()
        """Of the newest epoch that is over."""
        self.resumed_from: int | None = None
        self._target_inside: Target | None = None
        self._places: Mapping[str, Any] = {}
        """Where the nodes were in the epoch to be continued."""
        self._began = self._has_failed = False

    # The whole

    def run(self) -> RunResult:
        """Live; a failure is noted in the run directory, releases the log and is raised."""
        self.session.begin(self.state)
        self.state.requests = self.requests
        self.onlookers.begin()
        save = self.plan.save_signal
        with signals_ask(self.requests, save), workers_stay(save):
            try:
                return self._run()
            except BaseException as error:
                self._failed(error)
                raise
            finally:
                self._close()

    def _run(self) -> RunResult:
        self.stored.begin(self.session.local_nodes[0])
        choice = look_and_choose(self)
        ended = self._ended(choice)
        if ended is not None:
            return ended
        if choice.start == "fresh":
            self.stages.look()
        if self.manager is not None:
            self.journal.say_choice(choice, self.look)
        return self._live(choice) if self._open(choice) else leave_for_now(self, choice)

    def _ended(self, choice: Choice) -> RunResult | None:
        """The result of a run that has ended, with its objects as its last epoch left them.

        Nothing is written, and the log stays as it is. None when work is left: the end is not noted, or the
        last epoch is damaged, so that an older one has to be trained on.
        """
        result, manager = ended_result(self, choice), self.manager
        if result is None or manager is None:
            return None
        try:
            target = manager.engine.ledger.prove(self.session.peers, int(result))
            self.set_up(target)
            manager.engine.say = self.journal.say
            self.session.run(manager.go_on_at(self.nodes, target))
        except (DamagedError, PartiallyLoadedError) as error:
            self.journal.warn(f"the run had ended, but resumes from an older epoch: {error}")
            return None
        self._take_counters(target, manager)
        self._restore_streams()
        self.stored.finish_over()
        self.journal.say(f"finished at epoch {int(result)} already: its state is loaded, nothing to do")
        return result

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes that are saved."""
        return self.job.saved_among(place.name for place in self.session.nodes)

    def _live(self, choice: Choice) -> RunResult:
        try:
            return self._live_to_the_end(choice)
        except Interrupted:
            self.capturing.finish(self.journal)
            return leave_for_now(self)

    def _live_to_the_end(self, choice: Choice) -> RunResult:
        target = self._target(choice)
        check_attempts(self, choice, target)
        self.stored.goes_on(target)
        self.onlookers.watch(self)
        self.set_up(target)
        go_on(self.session.peers, self.requests)
        verdict = self._resume(choice, target) if target else self._start_fresh(choice)
        self.onlookers.goes_on(self.state.epoch, self.state.total_steps)
        self.exporting.begin()
        self._restore_streams()
        if not verdict.stop:
            verdict = self._loop(verdict)
            self.requests.steps = False
            self.saver.settle(self.session)
            if self.run_directory is not None:
                self.saver.secure(self.session, Position(self.state.epoch), self.facts(verdict))
        self.saver.finish(self.session)  # also what an earlier start has not sent
        run_tail(self)
        return self._finish(verdict)

    # Starting

    def _open(self, choice: Choice) -> bool:
        """Become the writer of the log, or do without where that may be; False: leave, not all is sent."""
        if self.manager is None:
            return True
        self.capturing.agree(self.session.peers, self.journal)
        ledger = self.manager.engine.ledger
        facts = self.look.facts
        self.journal.create(self.job, self.plan.best, self.session, facts.run_id if facts else None)
        ledger.in_run, ledger.when_fenced = True, self.guard.fenced
        ledger.hurried, ledger.secs_left = self._is_leaving, self.requests.secs_left
        tolerant = self.run_directory is None and choice.start != "newest"
        complete = ledger.open(self.session.peers, tolerant=tolerant)
        self.journal.opened(ledger.holding, self.look, choice)
        self.capturing.prepare(self.journal, self.session)
        self.stages.capture()
        self.stored.opened()
        return complete

    def _is_leaving(self) -> bool:
        return self.requests.level() == PREEMPT

    def _begin_branch(self, choice: Choice) -> None:
        """Rewind the log where the choice asks for it.

        Only when the state stands: a start that fails before (objects that do not fit, a setup that
        raises) must not have abandoned any epoch.
        """
        if self.manager is not None and choice.rewind:
            base = None if choice.epoch is None else Position(choice.epoch)
            self.manager.engine.ledger.rewind(self.session.peers, base, request_of(self, choice))

    def _target(self, choice: Choice) -> Target | None:
        """The proved position to load: exactly the explicit one, or the newest that can be proved."""
        if self.manager is None or choice.start == "fresh":
            return None
        if choice.start == "explicit" and choice.epoch is not None:
            return self.manager.engine.ledger.prove(self.session.peers, choice.epoch)
        return self.manager.engine.ledger.newest(self.session.peers, self.journal.warn)

    def set_up(self, target: Target | None) -> None:
        """Run the setup group and bind the blobs, for a target that is to be loaded or for a fresh start."""
        self._began = True
        bind_blobs(self.job, self.session, before_setup=True)
        self.stages.declare(self.job, None if target is None else target.manifest)
        self.session.run(self.job.setup_group)
        bind_blobs(self.job, self.session, before_setup=False)
        self.session.after_setup()
        self.from_program.note(self.session)
        first = self.session.local_nodes[0]
        self.recorder.watch(self.session.workspace(first.name), first.rank)
        if self.manager is not None:
            self.manager.engine.prepare(self.session)
        warn_of_bare_ddp(self.session, self.journal.warn)

    def _start_fresh(self, choice: Choice) -> Verdict:
        self.session.run(self.job.init_group)
        self.stages.warm(self.session, self.journal)
        self._derive_streams()
        if self.manager is not None:
            self.session.run(self.manager.init(self.nodes))
            self._begin_branch(choice)
            if not any(self.session.workspace(place.name).entries() for place in self.session.local_nodes):
                self.journal.warn(
                    "nothing is registered, so checkpoints hold random states only: give Job blobs"
                )
            if self.plan.save_initial:
                self.saver.save(self.session, Position(0), self.facts(Verdict()))
        return Verdict()

    def _derive_streams(self) -> None:
        """Give every node its own streams; without a seed they stay as the program left them."""
        for place in self.session.local_nodes:
            if self.state.seed is not None:
                self.session.set_streams(place.name, RandomStreams.derive(self.state.seed, place.rank))
            self.streams[place.name] = self.session.streams(place.name)

    def _load(self, choice: Choice, target: Target, manager: Manager) -> Target:
        """Load the target; where its bytes prove damaged, automatic resume loads an older one over it."""
        manager.engine.say = partial(self.journal.tell, "state changed")
        while True:
            epoch = target.position.epoch
            try:
                if target.position.boundary:
                    self.session.run(manager.init(self.nodes, retrieve_from_epoch=epoch))
                    self.session.run(manager.load(epoch))
                else:
                    self.session.run(manager.go_on_at(self.nodes, target))
                return target
            except (StorageError, PartiallyLoadedError) as error:
                if choice.start != "newest":
                    raise
                target = manager.engine.ledger.instead_of(
                    self.session.peers, target, error, self.journal.warn
                )

    def _resume(self, choice: Choice, target: Target) -> Verdict:
        manager = self.manager
        if manager is None:
            raise NotImplementedError  # a target comes from a manager
        nodes = {place.name for place in self.session.nodes}
        if unsaved := nodes.difference(
            self.nodes
        ):  # they begin as in a new run; tasks of ranks may communicate
            self.session.run_on(self.job.init_group, unsaved if self.session.peers.size == 1 else nodes)
        target = self._load(choice, target, manager)
        self.from_program.apply(self.session, target.facts.built, self.journal.say)
        self.journal.say_fallback(choice, self.look, target.position)
        self.stages.resumed(self.session, self.journal, target.position)
        self._begin_branch(choice)
        epoch = self.resumed_from = target.position.epoch
        self.saver.tell_loaded(self.session, target, self.look)
        self._take_counters(target, manager)
        facts = target.facts
        self._target_inside = None if target.position.boundary else target
        self._places = {} if target.position.boundary else facts.places
        asked_for = choice.start == "explicit" and self.wish_epoch is not None
        rewound = asked_for or (self.look.rewound and target.position == self.look.position)
        inside = not target.position.boundary
        self._verdict = over_there(self.session, self.job, facts, epoch, inside=inside, rewound=rewound)
        if facts.over and not self._verdict.stop:
            for said in ended_before(self.job, facts):
                self.journal.say(said)
        return self._verdict

    def _take_counters(self, target: Target, manager: Manager) -> None:
        """Count on from what was loaded; its random states and gradients wait for `_restore_streams`."""
        self.streams, self._gradients = manager.engine.take_streams(), manager.engine.take_gradients()
        facts = target.facts
        self.state.set_elapsed(facts.elapsed_secs)
        self.state.begin_epoch(target.position.epoch, total_steps=facts.total_steps)
        self.state.recall_metrics(facts.metrics, facts.last_metrics)
        if self.state.seed is None:
            self.state.seed = facts.seed

    def _restore_streams(self) -> None:
        """The last act before the first epoch task, or before the tail of a run whose epochs are over.

        Gradients too, but for nodes that come back to a loop: there, for what comes before it may clear them.
        """
        for name, streams in self.streams.items():
            self.session.set_streams(name, streams)
        if not self._places:
            for gradients in self._gradients.values():
                gradients.install()

    # The loop

    def _loop(self, verdict: Verdict) -> Verdict:
        epoch = self.state.epoch
        while not verdict.stop:
            asked = go_on(self.session.peers, self.requests)
            if asked.level == ASKED and not self._places:  # an epoch that has begun ends as a short one
                self.status, self._verdict = "STOPPED", verdict
                return replace(verdict, asked=asked.reason)
            epoch += 1
            self.capturing.begin()
            self._run_epoch(epoch)
            self.capturing.finish(self.journal)
            self._verdict = verdict = end_epoch(self, epoch)
        if only_time_is_up(self.job, verdict):
            self.status = "STOPPED"
        return verdict

    def _run_epoch(self, epoch: int) -> None:
        """Run the epoch's tasks, or what is left of them; nowhere else a place inside of tasks is known."""
        inside, self._places = self._places, {}
        if inside:
            total = self.state.total_steps
            self.state.begin_epoch(
                epoch, step=self.saver.newest.step if self.saver.newest else 0, total_steps=total
            )
            own = {place.name for place in self.session.local_nodes}
            places = places_for([place.name for place in self.session.nodes], inside)
            self.state.put_back = PutBack(self.session, self._load_again)
            own_places = {n: place for n, place in places.items() if n in own}
            self.state.continue_at(own_places, self.streams, self._gradients)
        else:
            self.state.begin_epoch(epoch)
        self.state.check()
        self.state.tracked = self.job.epoch_group
        self.state.save_now = self._save_now()
        self.state.crashed = partial(save_at_crash, self) if self.plan.on_crash == "save" else None
        self.session.run(self.job.epoch_group)
        self.state.tracked, self.state.put_back = None, None
        self.state.save_now, self.state.crashed = None, None

    def _save_now(self) -> Callable[[], None] | None:
        """How to save at a step; emulated nodes come to their steps one after another, so none is alike."""
        alone = len(self.session.local_nodes) == 1
        return partial(save_now, self) if alone and self.run_directory is not None else None

    def _load_again(self) -> None:
        """Load the position that the run goes on from once more; random states and gradients are known."""
        if self.manager is not None and self._target_inside is not None:
            self.session.run(self.manager.go_on_at(self.nodes, self._target_inside))
            self.manager.engine.take_streams()
            self.manager.engine.take_gradients()
            self.from_program.apply(self.session, self._target_inside.facts.built)

    def facts_now(self) -> Facts:
        """What a checkpoint inside of the running epoch remembers."""
        return self.facts(self._verdict)

    def facts(self, verdict: Verdict) -> Facts:
        """What a checkpoint remembers of the run as it is now."""
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

    def _finish(self, verdict: Verdict) -> RunResult:
        result = RunResult(
            self.state.epoch,
            status=self.status,
            stop=verdict.reasons,
            metrics=self.state.metrics,
            run_dir=self.run_directory.where if self.run_directory else None,
            committed=self.saver.newest_saved,
            warm_starts=self.stages.warmed,
            resumed_from=self.resumed_from,
        )
        self.journal.finished(result)
        return result

    def _failed(self, error: BaseException) -> None:
        """Note the failure; tasks for after a failure run only in a run that began."""
        from torchrelay.runners.distributed.world import why_of

        self._has_failed = True
        with suppress(Exception):  # the failure is what has to be told
            self.capturing.finish(self.journal)
        self.saver.drain(self.session)
        code = self.session.code_of(error)
        self.journal.failed(error, self.state, why_of(error), code)
        if self._began:
            self.session.run_on_failure(self.job.exit_group, code)

    def _close(self) -> None:
        try:
            self.capturing.finish(self.journal)  # where no epoch came to its end
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self.guard.close()
        self.recorder.close()
        self.onlookers.close()
        try:
            drop_wrappers()
            if self.manager is not None:
                self.manager.engine.wait(unguarded=True)
                self.manager.engine.say = None
                self.stored.finish(failed=self._has_failed)
                self.manager.engine.ledger.close()
        finally:
            self.stored.close()
            self.session.end()
