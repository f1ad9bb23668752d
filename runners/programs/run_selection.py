"""Which run a verb means: where the runs of a program lie, how one is chosen, and how a new one is made.

train    the newest run of the very code and configuration: goes on if it is not over or a limit was
raised, is refused if it is over; without one a new run
test     the newest run of the very code and configuration; without one refused

`torchrelay launch` gives an id that is the same in every attempt. Else a launch with an id is that id:
torchrun's (`--rdzv-id`, and of its own making with `--standalone`), or a job step of Slurm. Without one it is
the launcher's process. A plain `python script.py` has none.
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

from torchrelay.errors import DirectoryInUseError, NotAllowedNowError, UsageError
from torchrelay.metadata.code.capture import captures, code_id_of
from torchrelay.metadata.code.selection import Root, Sources, sources_of
from torchrelay.metadata.code.snapshot import Snapshot, main_script, take
from torchrelay.metadata.experiments import Identity, ProgramRecord, ProgramRun, RunStore, update_note
from torchrelay.records import dataclass
from torchrelay.runners.distributed.environment import read_launch_env
from torchrelay.runners.distributed.launcher_status import ATTEMPT, LAUNCH_ID
from torchrelay.runners.monitoring.status import Standing, standing
from torchrelay.runners.remote_runs.names import refuse_remote

Action = Literal["new", "continue", "again", "over"]


@dataclass(frozen=True)
class RunInfo:
    """A run, as a choice needs it."""

    id: str
    identity: Identity
    standing: Standing
    launch: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)
    created: float = 0.0
    exact: bool = True
    """Whether its code is the very code of now, and not only but for files of `eval`."""


@dataclass(frozen=True)
class TrainRequest:
    """What `train` was asked for, by which launch; `rewind`: an epoch was named."""

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
    """`run` is the id of a run that there is; `again` begins it anew, `over` leaves it as it is.

    `created` tells the run that is to begin anew from one that somebody else began anew meanwhile.
    """

    action: Action
    run: str | None = None
    reason: str = ""
    created: float = 0.0


def choose_to_train(start: TrainRequest, runs: Sequence[RunInfo]) -> Chosen:
    """Choose among runs, the oldest first. Raises NotAllowedNowError, UsageError, DirectoryInUseError."""
    ours = _of_this_launch(start, runs)
    if ours is not None:
        return Chosen("over" if ours.standing.over else "continue", ours.id, "the run of this launch")
    if start.force:
        return Chosen("new", None, "--force")
    same = [one for one in runs if one.identity.same(start.identity)]
    if start.run is not None:
        return _of_same(start, _named(start.run, same, runs))
    if not same:
        if start.retrain or start.rewind:
            option = "--retrain" if start.retrain else "--epoch"
            raise UsageError(
                f"{option} needs a run of this very code and configuration, and there is none: "
                "train without it makes a new run"
            )
        return Chosen("new", None, "no run yet" if not runs else "code or configuration changed")
    return _of_same(start, newest_of(same))


def newest_of(same: Sequence[RunInfo]) -> RunInfo:
    """The newest run of the very code, else of the same but for files of `eval`."""
    return next((one for one in reversed(same) if one.exact), same[-1])


def _named(run: str, same: Sequence[RunInfo], runs: Sequence[RunInfo]) -> RunInfo:
    for one in same:
        if one.id == run:
            return one
    if any(one.id == run for one in runs):
        raise NotAllowedNowError(
            f"code or configuration changed since {run}, so it cannot go on: train without --run makes a new "
            "run"
        )
    known = ", ".join(one.id for one in runs[-5:]) or "none"
    raise UsageError(f"there is no run {run:.80}; the newest are: {known}")


def _of_this_launch(start: TrainRequest, runs: Sequence[RunInfo]) -> RunInfo | None:
    """The run that an earlier attempt of this launch made or went on with.

    A launch that begins from the front may be another one under the same id: it has to be the same code,
    and what is over is not taken for its own.
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
            raise DirectoryInUseError(f"{run.id} is running: stop it first, or use --force for another run")
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
        f"{run.id} has trained this very code and configuration to its end: --force trains it again as a new "
        "run, --retrain trains that run again from the beginning, a higher --max-epochs goes on with it, "
        "--run ID with an older one"
    )


def choose_to_use(identity: Identity, runs: Sequence[RunInfo], *, ignore: bool) -> RunInfo:
    """The run that `test` and `eval` use; raises UsageError, NotAllowedNowError."""
    if not runs:
        raise UsageError("there is no run yet: train first")
    same = [one for one in runs if one.identity.same(identity)]
    if same:
        return newest_of(same)
    if ignore:
        return runs[-1]
    raise NotAllowedNowError(
        f"code or configuration changed since {runs[-1].id}: train makes a new run, --ignore uses the "
        f"changed code with the weights of {runs[-1].id}, --run {runs[-1].id} runs the code archived with it"
    )


_WORDS = {"new": "new", "again": "from the beginning", "continue": "goes on"}


def made_run(
    store: RunStore, note: ProgramRecord, chosen: Chosen, best: tuple[str, str] | None, ranks: int
) -> dict[str, str]:
    """On rank 0: make the run, or note that this start goes on with it; its path, and what to say."""
    more = ""
    if chosen.run is None:
        run = store.create(note, best, ranks)
    elif chosen.action == "again":
        found = store.find(chosen.run)  # looked at again: building the program took a while
        if found.note.created != chosen.created or standing(found.path).word == "running":
            raise DirectoryInUseError(
                f"{found.id} was begun by another process meanwhile: look at it by `status`"
            )
        note = replace(note, message=note.message or found.note.message)
        run, aside = store.begin_again(found, note, best, ranks)
        more = f"; what it had lies in {aside}"
    else:
        run = store.find(chosen.run)
        if (
            standing(run.path).word != "running"
        ):  # else the run's log refuses this start, which changes nothing
            message = note.message or run.note.message
            run = update_note(run, launch=note.launch, limits=note.limits, message=message)
    said = f"run {run.id} in {run.path.parent}: {_WORDS[chosen.action]} ({chosen.reason}){more}"
    return {"path": str(run.path), "said": said}


def launch_of(environ: Mapping[str, str] | None = None) -> str:
    """A text that is the same in every attempt of one launch; empty where there is none."""
    env = os.environ if environ is None else environ
    found = read_launch_env(env)
    if env.get(LAUNCH_ID) and found.launched:
        return f"launch {env[LAUNCH_ID]}"
    if found.run_id:
        return f"torchrun {found.run_id}"
    if env.get("SLURM_JOB_ID"):
        return f"slurm {env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}"
    if found.elastic:
        return f"process {socket.gethostname()} {os.getppid()} {_began(os.getppid())}"
    return ""


def is_restart(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher started its processes before."""
    env = os.environ if environ is None else environ
    return read_launch_env(env).restart_count > 0 or env.get(ATTEMPT, "0") not in ("", "0")


def _began(pid: int) -> str:
    """When a process was started, in ticks of its machine: numbers of processes come again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


RUNS = "TORCHRELAY_RUNS"
"""The variable that says where runs lie; `--runs` comes before it."""


@dataclass(frozen=True)
class ProgramOrigin:
    """`file` is the program's; `roots` are those of the script that Python was started with."""

    name: str
    file: Path
    sources: Sources | None
    roots: tuple[Root, ...] | None
    runs: Path

    def snapshot(self) -> Snapshot | None:
        """The source as it is now; None where the program says `code = False`. Raises UsageError."""
        return None if self.sources is None else take(self.sources, roots=self.roots, with_git=False)

    @property
    def code_option(self) -> Any:
        """The same source, as JobRunner is told of it."""
        if self.sources is None:
            return False
        return None if self.roots is not None else self.sources

    def store(self, runs: str | None, environ: Mapping[str, str] | None = None) -> RunStore:
        """Where the runs lie: as asked for, else as the environment says, else as the program says."""
        said = runs or (os.environ if environ is None else environ).get(RUNS)
        refuse_remote(said or "", f"the program {self.name}")
        return RunStore(Path(os.path.abspath(said or self.runs)) / self.name)  # noqa: PTH100 - without `..`


def captured_code(run: ProgramRun) -> dict[str, Any]:
    """The record of the code that the run is of now."""
    found = [one for one in captures(run.path) if code_id_of(one) == run.note.code_id]
    if run.note.code_id is None or not found:
        raise UsageError(f"the source of {run.id} was not archived, so it cannot be run")
    return found[-1]


def imported(module: str, name: str, what: str) -> Any:
    """What a module, looked for from here too, calls so; None where it has no such name.

    `what` is for messages. The working directory stays on `sys.path`: functions import, too. Raises
    UsageError where there is no such module.
    """
    here = os.getcwd()  # noqa: PTH109 - the text
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise UsageError(f"{what}: there is no module {error.name}, seen from here") from None
        raise


def origin_of(program: type[Any]) -> ProgramOrigin:
    """Look where a class comes from; raises UsageError for one that was typed in."""
    script = main_script() if program.__module__ == "__main__" else None
    roots: tuple[Root, ...] | None = None
    if script is not None:
        file, folder, roots = script.root.path / script.name, script.root.path, (script.root,)
    else:
        file, folder = _of_module(program)
    sources: Sources | None = Sources([folder])
    if program.code is not None:
        sources, roots = (None if program.code is False else sources_of(program.code)), None
    name = _checked(program.name or (file.stem if script is not None else program.__name__))
    runs = file.parent / program.runs_dir if program.runs_dir is not None else folder / "runs"
    return ProgramOrigin(name, file, sources, roots, runs)


def _of_module(program: type[Any]) -> tuple[Path, Path]:
    module = sys.modules.get(program.__module__)
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        raise UsageError(
            f"{program.__name__} comes from no file: the verbs need a script or a module; without them use "
            f"{program.__name__}().train()"
        )
    path = Path(file).resolve()
    depth = program.__module__.count(".") + (path.name == "__init__.py")
    return path, path.parents[depth]


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not name or name.startswith(".") or "/" in name or "\0" in name:
        raise UsageError(f"{name!r:.80} cannot name an experiment: its runs lie in a directory of this name")
    return name
