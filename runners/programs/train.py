"""Subcommands `train` (choose the run on rank 0, then train it) and `amend` (record changed code in it).

`amend` is for changes that do not affect the training: a comment, a plot, another test. It works in every
state but running, for code that can load the run's newest epoch.
"""

from __future__ import annotations

import inspect
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.format.position import Selection
from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.errors import DamagedError, DirectoryInUseError, RelayError, StorageError, UsageError
from torchrelay.jobs.blobs import is_stateful
from torchrelay.jobs.config.schema import LOCAL_TRAIN
from torchrelay.jobs.job import Job
from torchrelay.jobs.random import seed as set_seed
from torchrelay.jobs.session import Peers, decide
from torchrelay.metadata.code.archive import SHORT
from torchrelay.metadata.code.capture import captures, surroundings, write_capture
from torchrelay.metadata.code.capture import command as command_line
from torchrelay.metadata.experiments import Identity, ProgramRecord, ProgramRun, update_note
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.config_runs.class_loading import Unread
from torchrelay.runners.config_runs.processes import apart
from torchrelay.runners.config_runs.profiles import NO_WARM_START, built, run_config
from torchrelay.runners.config_runs.selection import recorded
from torchrelay.runners.distributed.launcher import PLACE, read_launch_env
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.programs.command_context import BaseCommand, ConfigCommand, say
from torchrelay.runners.programs.program import Program, ProgramCommand
from torchrelay.runners.programs.request import rewind_of
from torchrelay.runners.programs.run_selection import (
    Chosen,
    TrainRequest,
    choose_to_train,
    is_restart,
    launch_of,
    made_run,
)
from torchrelay.runners.session.local import current_or_new_session
from torchrelay.runners.training.capture import Capturing
from torchrelay.runners.training.exit import code_of_result
from torchrelay.runners.training.plan import RunResult

_NAMED_RANKS = 8


def train(command: ProgramCommand) -> int:
    """Train and return the exit code. Raises errors of the choice and of the training."""
    epoch = rewind_of(command.request)
    with current_or_new_session() as session:
        program = command.made()
        choice = _choose(command, command.limits(program), session.peers)
        if choice is None:
            return 0

        def make() -> str:
            name = program.name or command.origin.name
            return _make(command, choice, name, program.best, session.peers, len(session.nodes))

        limit = command.limits(program)["max_epochs"]
        if type(program).train is not Program.train:
            given: dict[str, Any] = {"where": make(), "resume_from_epoch": epoch}
            program.name, program.max_epochs = program.name or command.origin.name, limit
            program.options_of_verb = _options(command)
            taken = inspect.signature(program.train).parameters.values()
            if not any(one.kind is one.VAR_KEYWORD for one in taken):  # it may accept none of them
                given = {one.name: given[one.name] for one in taken if one.name in given}
            result = program.train(**given)
            return code_of_result(result) if isinstance(result, RunResult) else 0
        set_seed(program.seed)
        job = program.job(epochs=limit)
        job.name = program.name or command.origin.name
        if command.config is not None:
            Unread(command.config, command.request.strict_config).report_all(session.peers)
        # Only now: a program that cannot be built leaves no run behind.
        runner = program.runner(job, make(), **_options(command))
        return code_of_result(runner.train(session, epoch))


def train_configuration(command: ConfigCommand) -> int:
    """Train and return the exit code. Raises errors of the choice and of the training."""
    runner, epoch = command.runner, rewind_of(command.request)
    if epoch is not None and runner.kind == LOCAL_TRAIN and not read_launch_env().launched:
        raise UsageError(f"--epoch is not supported with {LOCAL_TRAIN}: start the processes with torchrun")
    with command.processes() as peers:
        choice = _choose(command, command.limits(), peers)
    if choice is None:
        return 0
    new: list[Path] = []

    def make() -> str:
        best = None if runner.keep_best is None else (runner.keep_best.metric, runner.keep_best.mode)
        with command.processes() as peers:
            path = _make(command, choice, runner.name, best, peers, peers.size)
            new.extend([Path(path)] if choice[1].action == "new" and peers.rank == 0 else [])
        return path

    options: dict[str, Any] = {} if epoch is None else {"resume_from_epoch": epoch}
    strict = command.request.strict_config
    try:
        done = run_config(command.config, [runner.name], run_dir=make, job_options=options, strict=strict)
    except BaseException:
        for run in new:  # delete a new run in which nothing has begun
            if standing(run).word == "created":
                shutil.rmtree(run, ignore_errors=True)
                with suppress(OSError):
                    run.parent.rmdir()
        raise
    return done.exit_code


_Choice = tuple[TrainRequest, Chosen]


def _choose(command: BaseCommand, limits: Mapping[str, Any], peers: Peers) -> _Choice | None:
    """Choose the run on rank 0 for all ranks; None, after a message, if it is finished."""
    check_alike(command.identity, peers)
    request = command.request
    start = TrainRequest(
        command.identity,
        limits,
        request.force,
        request.retrain,
        request.epoch is not None,
        request.run_id,
        launch_of(),
        is_restart(),
    )
    chosen = Chosen(**decide(peers, "run", lambda: asdict(choose_to_train(start, command.known()))))
    if chosen.action == "over":
        say(f"run {chosen.run}: already finished ({chosen.reason})")
        return None
    return start, chosen


def _make(
    command: BaseCommand, choice: _Choice, name: str, best: tuple[str, str] | None, peers: Peers, ranks: int
) -> str:
    """On rank 0: create the run, or record that this launch continues it; returns its path on all ranks."""
    start, chosen = choice
    note = ProgramRecord(
        program=name,
        origin=str(command.origin.file),
        code_id=command.identity.code_id,
        config_id=command.identity.config_id,
        created=round(time.time(), 3),
        message=command.request.message,
        launch=start.launch,
        limits=start.limits,
    )
    made = decide(peers, "make the run", lambda: made_run(command.store, note, chosen, best, ranks))
    say(made["said"])
    return str(made["path"])


def check_alike(identity: Identity, peers: Peers) -> None:
    """Raise UsageError on all ranks if they have different code or configuration."""
    ids = peers.exchange("code and configuration of the program", asdict(identity))
    words = {"code_id": "other code", "config_id": "another configuration"}
    differing = [
        f"rank {rank} has {' and '.join(text for name, text in words.items() if one[name] != ids[0][name])}"
        for rank, one in enumerate(ids)
        if one != ids[0]
    ]
    if differing:
        more = f"; {len(differing) - _NAMED_RANKS} more" if len(differing) > _NAMED_RANKS else ""
        raise UsageError(
            f"ranks differ: {'; '.join(differing[:_NAMED_RANKS])}{more} than rank 0: "
            "start all ranks with the same source and configuration"
        )


def _options(command: ProgramCommand) -> dict[str, Any]:
    """Return options of JobRunner besides those of the class."""
    options: dict[str, Any] = {"code": command.origin.code_option}
    limit = command.request.time_limit
    if limit is None and command.profile is not None:
        limit = command.profile.time_limit
    if limit is not None:
        options["time_limit"] = limit
    if command.config is not None:
        options["configuration"] = recorded(command.config)
    return options


_OF_THE_CONFIGURATION = ("config", "config_files", "config_id", "overrides")


def amend(command: ProgramCommand | ConfigCommand) -> int:
    """Record the changed code in the run and print both ids. Raises errors if it must not be changed."""
    runs = command.runs()
    if not runs:
        raise UsageError("no run exists yet to amend: train first")
    run = command.store.find(command.request.run_id) if command.request.run_id else runs[-1]
    stands = standing(run.path)
    if stands.word == "running":
        raise DirectoryInUseError(f"{run.id} is running: amend its code after it has ended")
    old, new = run.note.code_id, command.identity.code_id
    snapshot = command.snapshot
    if snapshot is None or new is None:
        title = command.request.config if command.program is None else command.program.__name__
        raise UsageError(f"{title} has no source to record (code = False)")
    if command.identity.config_id != run.note.config_id:
        raise UsageError(
            f"the configuration differs from that of {run.id}, and only code can be amended: train a new run"
        )
    if command.identity_of(run).code_id == new:
        raise UsageError(f"nothing to amend: the code is that of {run.id}, {new[:SHORT]}")
    _check_fit(run, command)
    before = captures(run.path)
    capturing = Capturing(RunDirectory(run.path), command.origin.code_option, None)
    content = {  # of another attempt, which trained nothing
        **command_line(),
        **surroundings(),
        **({name: before[-1].get(name) for name in _OF_THE_CONFIGURATION} if before else {}),
        "code": capturing.record_code(run.path, snapshot, say),
        "amended": True,
        "message": command.request.message,
    }
    written = write_capture(run.path, before[-1]["number"] + 1 if before else 0, content)
    past = {"code_id": old, "time": round(time.time(), 3), "message": command.request.message}
    update_note(run, code_id=new, amended=(*run.note.amended, past))
    say(
        f"{run.id} ({stands.word}): code {(old or 'none')[:SHORT]} amended to {new[:SHORT]}; "
        f"`torchrelay runs code {run.path}` has the new one, with --attempt the others "
        f"(this is {int(written.name.split('.')[1])})"
    )
    return 0


def _check_fit(run: ProgramRun, command: ProgramCommand | ConfigCommand) -> None:
    """Raise UsageError for code that cannot load the newest epoch; a run without epochs takes any code."""
    try:
        opened = open_checkpoint(run.path)
    except RelayError:
        return
    with ExitStack() as stack:
        building = isinstance(command, ConfigCommand)  # what a program builds is the changed code alone
        try:
            if isinstance(command, ConfigCommand):
                runner, keys = replace(command.runner, **NO_WARM_START), command.runner.checkpoint
                left_out = [(), ()] if keys is None else [keys.resume_exclude or (), keys.exclude or ()]
                stack.enter_context(apart())  # of the processes of a launch: only this one loads
                for name in PLACE:
                    os.environ.pop(name, None)
                job = built(command.config, command.config.settings, runner, str(run.path), stack).job
            else:
                program = command.made()
                given = [program.runner_options().get(key) or () for key in ("resume_exclude", "exclude")]
                left_out = [(one,) if isinstance(one, str) else one for one in given]
                job = program.job()
            building = False
            _load_what_is_there(job, opened, *left_out)
        except (DamagedError, StorageError):
            raise
        except Exception as error:
            why, remedy = f"the changed code cannot load its epoch {opened.epoch}", "train a new run"
            if building:
                why, remedy = "its model and data cannot be built here", "amend it where its data is"
            text = f"{type(error).__name__}: {' '.join(str(error).split()):.500}"
            raise UsageError(f"{run.id} cannot be amended: {why} ({text}): {remedy}") from error


def _load_what_is_there(
    job: Job, opened: Checkpoint, resume_exclude: Sequence[str], exclude: Sequence[str]
) -> None:
    """Load an epoch into those objects of a job that it contains; raises BlobError if one does not fit.

    As in a resume, leaves of `resume_exclude` are not loaded, nor those of `exclude` that it does not have.
    New and removed blobs are not errors.
    """
    known = {
        blob.name: blob.source
        for blob in job.blobs
        if is_stateful(blob.source) or isinstance(blob.source, torch.Tensor)
    }
    wanted = {name: one for name, one in known.items() if name in opened.blobs and name not in resume_exclude}
    meant = [
        one for one in resume_exclude if any(one.startswith(f"{name}.") or one[0] == "*" for name in wanted)
    ]
    absent = opened.absent(wanted, Selection(None, tuple(exclude)))
    opened.load(wanted, exclude=[*meant, *absent])
