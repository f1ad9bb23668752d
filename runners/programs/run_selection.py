"""Select the run of a subcommand: the directory of a program's runs, the choice among them, and new runs.

- `train` takes the newest run of the same code and configuration. It resumes it if it is unfinished or a
limit
  was raised, and refuses a finished one. Without such a run it creates a new one.
- `test` takes the newest run of the same code and configuration, and refuses others.

A launch is identified by the id of `torchrelay launch`, which is the same in every attempt; else by
torchrun's `--rdzv-id` (generated with `--standalone`), a Slurm job step, or the launcher's process. A plain
`python script.py` has no launch id.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

from torchrelay.checkpoint.log.lease import process_start
from torchrelay.errors import DirectoryInUseError, NotAllowedNowError, UsageError
from torchrelay.metadata.code.capture import captures, code_id_of
from torchrelay.metadata.code.snapshot import Root, Snapshot, Sources, main_script, sources_of, take
from torchrelay.metadata.experiments import Identity, ProgramRecord, ProgramRun, RunStore, update_note
from torchrelay.records import dataclass
from torchrelay.runners.distributed.launcher import ATTEMPT, LAUNCH_ID, read_launch_env
from torchrelay.runners.monitoring.status import Standing, standing
from torchrelay.runners.remote_runs.names import refuse_remote

Action = Literal["new", "continue", "again", "over"]


@dataclass(frozen=True)
class RunInfo:
    """A run as a choice needs it."""

    id: str
    identity: Identity
    standing: Standing
    launch: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)
    created: float = 0.0
    exact: bool = True
    """True if its code is exactly the current code; False if only files of `eval` differ."""


@dataclass(frozen=True)
class TrainRequest:
    """The request of `train` and its launch; `rewind`: an epoch was named."""

    identity: Identity
    limits: Mapping[str, Any] = field(default_factory=dict)
    force: bool = False
    retrain: bool = False
    rewind: bool = False
    run: str | None = None
    """The run that was named."""
    launch: str = ""
    restarted: bool = False


@dataclass(frozen=True)
class Chosen:
    """`run` is the id of an existing run; `again` restarts it from the beginning, `over` leaves it unchanged.

    `created` distinguishes the run to restart from one that another process restarted meanwhile.
    """

    action: Action
    run: str | None = None
    reason: str = ""
    created: float = 0.0


def choose_to_train(start: TrainRequest, runs: Sequence[RunInfo]) -> Chosen:
    """Choose among runs, oldest first. Raises NotAllowedNowError, UsageError, DirectoryInUseError."""
    ours = _of_this_launch(start, runs)
    if ours is not None:
        return Chosen("over" if ours.standing.over else "continue", ours.id, "the run of this launch")
    if start.force:
        return Chosen("new", None, "--force")
    same = [one for one in runs if one.identity.same(start.identity)]
    if start.run is not None:
        if (named := next((one for one in same if one.id == start.run), None)) is not None:
            return _of_same(start, named)
        if any(one.id == start.run for one in runs):
            raise NotAllowedNowError(
                f"code or configuration changed since {start.run}, so it cannot be resumed: train without "
                "--run to create a new run"
            )
        known = ", ".join(one.id for one in runs[-5:]) or "none"
        raise UsageError(f"unknown run {start.run:.80}; the newest are: {known}")
    if not same:
        if start.retrain or start.rewind:
            option = "--retrain" if start.retrain else "--epoch"
            raise UsageError(
                f"{option} needs a run of the current code and configuration, and there is none: "
                "train without it to create a new run"
            )
        return Chosen("new", None, "no run yet" if not runs else "code or configuration changed")
    return _of_same(start, newest_of(same))


def newest_of(same: Sequence[RunInfo]) -> RunInfo:
    """Return the newest run of exactly this code, else of code that differs only in files of `eval`."""
    return next((one for one in reversed(same) if one.exact), same[-1])


def _of_this_launch(start: TrainRequest, runs: Sequence[RunInfo]) -> RunInfo | None:
    """Return the run that an earlier attempt of this launch created or continued.

    A first attempt may be another launch with the same id: then the code must be the same, and a finished run
    does not count.
    """
    found = [one for one in runs if start.launch and one.launch == start.launch]
    if not found:
        return None
    ours = found[-1]
    if start.restarted:
        return ours
    return ours if ours.identity.same(start.identity) and not ours.standing.over else None


def _of_same(start: TrainRequest, run: RunInfo) -> Chosen:
    if start.retrain:
        if run.standing.word == "running":
            raise DirectoryInUseError(f"{run.id} is running: stop it first")
        return Chosen("again", run.id, "--retrain", run.created)
    if start.rewind:
        return Chosen("continue", run.id, "--epoch")
    if not run.standing.over:
        return Chosen("continue", run.id, str(run.standing))
    raised = [  # limits that leave more room than before; None is no limit
        name
        for name, now in start.limits.items()
        if (before := run.limits.get(name)) is not None and (now is None or now > before)
    ]
    if raised:
        return Chosen("continue", run.id, f"{', '.join(raised)} raised")
    raise NotAllowedNowError(
        f"{run.id} has finished with the current code and configuration: raise --max-epochs to continue it, "
        "or train again with --force (new run) or --retrain (same run)"
    )


def choose_to_use(identity: Identity, runs: Sequence[RunInfo], *, ignore: bool) -> RunInfo:
    """Choose the run that `test` and `eval` use; raises UsageError, NotAllowedNowError."""
    if not runs:
        raise UsageError("no run exists yet: train first")
    same = [one for one in runs if one.identity.same(identity)]
    if same:
        return newest_of(same)
    if ignore:
        return runs[-1]
    raise NotAllowedNowError(
        f"code or configuration changed since {runs[-1].id}: train a new run, use --ignore for the changed "
        f"code with the weights of {runs[-1].id}, or --run {runs[-1].id} for its archived code"
    )


_WORDS = {"new": "new", "again": "from the beginning", "continue": "continued"}


def made_run(
    store: RunStore, note: ProgramRecord, chosen: Chosen, best: tuple[str, str] | None, ranks: int
) -> dict[str, str]:
    """On rank 0: create the run, or record that this launch continues it; returns path and message."""
    more = ""
    if chosen.run is None:
        run = store.create(note, best, ranks)
    elif chosen.action == "again":
        found = store.find(chosen.run)  # read again: building the program took a while
        if found.note.created != chosen.created or standing(found.path).word == "running":
            raise DirectoryInUseError(f"{found.id} was started by another process meanwhile: see `status`")
        note = replace(note, message=note.message or found.note.message)
        run, aside = store.begin_again(found, note, best, ranks)
        more = f"; its old content is in {aside}"
    else:
        run = store.find(chosen.run)
        if (
            standing(run.path).word != "running"
        ):  # otherwise the run's log refuses this launch, which changes nothing
            message = note.message or run.note.message
            run = update_note(run, launch=note.launch, limits=note.limits, message=message)
    said = f"run {run.id} in {run.path.parent}: {_WORDS[chosen.action]} ({chosen.reason}){more}"
    return {"path": str(run.path), "said": said}


def launch_of(environ: Mapping[str, str] | None = None) -> str:
    """Return an id that is the same in every attempt of one launch; empty if there is none."""
    env = os.environ if environ is None else environ
    found = read_launch_env(env)
    if env.get(LAUNCH_ID) and found.launched:
        return f"launch {env[LAUNCH_ID]}"
    if found.run_id:
        return f"torchrun {found.run_id}"
    if env.get("SLURM_JOB_ID"):
        return f"slurm {env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}"
    if found.elastic:
        pid = os.getppid()  # with its start time in clock ticks, because pids are reused
        return f"process {socket.gethostname()} {pid} {process_start(pid) or ''}"
    return ""


def is_restart(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if the launcher restarted its processes."""
    env = os.environ if environ is None else environ
    return read_launch_env(env).restart_count > 0 or env.get(ATTEMPT, "0") not in ("", "0")


RUNS = "TORCHRELAY_RUNS"
"""Variable with the directory of all runs; `--runs` takes precedence."""


@dataclass(frozen=True)
class ProgramOrigin:
    """Location of a program; `roots` are those of the script that Python was started with."""

    name: str
    file: Path
    sources: Sources | None
    roots: tuple[Root, ...] | None
    runs: Path

    def snapshot(self) -> Snapshot | None:
        """Return the current source; None if the program has `code = False`. Raises UsageError."""
        return None if self.sources is None else take(self.sources, roots=self.roots, with_git=False)

    @property
    def code_option(self) -> Any:
        """The same source as JobRunner's `code` option."""
        if self.sources is None:
            return False
        return None if self.roots is not None else self.sources

    def store(self, runs: str | None) -> RunStore:
        """Return the directory of runs: as typed, else from the environment, else the program's."""
        said = runs or os.environ.get(RUNS)
        refuse_remote(said or "", f"the program {self.name}")
        return RunStore(Path(os.path.abspath(said or self.runs)) / self.name)  # noqa: PTH100 - without `..`


def captured_code(run: ProgramRun) -> dict[str, Any]:
    """Return the record of the run's current code."""
    found = [one for one in captures(run.path) if code_id_of(one) == run.note.code_id]
    if run.note.code_id is None or not found:
        raise UsageError(f"the source of {run.id} was not archived, so it cannot be run")
    return found[-1]


def imported(module: str, name: str, what: str) -> Any:
    """Import a name from a module, also from the working directory; None if the module does not have it.

    `what` is for messages. The working directory stays on `sys.path` for imports in functions. Raises
    UsageError if the module does not exist.
    """
    here = os.getcwd()  # noqa: PTH109 - the text
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise UsageError(f"{what}: module {error.name} not found from the working directory") from None
        raise


def origin_of(program: type[Any]) -> ProgramOrigin:
    """Find the source of a class; raises UsageError for one that is not defined in a file."""
    script = main_script() if program.__module__ == "__main__" else None
    roots: tuple[Root, ...] | None = None
    if script is not None:
        file, folder, roots = script.root.path / script.name, script.root.path, (script.root,)
    else:
        file, folder = _of_module(program)
    sources: Sources | None = Sources([folder])
    if program.code is not None:
        sources, roots = (None if program.code is False else sources_of(program.code)), None
    name = program.name or (file.stem if script is not None else program.__name__)
    if not isinstance(name, str) or name.startswith(".") or "/" in name or "\0" in name:
        raise UsageError(f"invalid experiment name {name!r:.80}: expected a valid directory name")
    runs = file.parent / program.runs_dir if program.runs_dir is not None else folder / "runs"
    return ProgramOrigin(name, file, sources, roots, runs)


def _of_module(program: type[Any]) -> tuple[Path, Path]:
    """Return the file of a class and the root of its package."""
    module = sys.modules.get(program.__module__)
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        raise UsageError(
            f"{program.__name__} is not defined in a file, which subcommands need: use "
            f"{program.__name__}().train()"
        )
    path = Path(file).resolve()
    depth = program.__module__.count(".") + (path.name == "__init__.py")
    return path, path.parents[depth]
