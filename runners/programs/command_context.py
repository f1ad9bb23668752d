"""Common context of all subcommands: the request, its runs, and changes (`status`). Without torch.

Runs of a configuration are at `runs/<name>/<runner>/<id>` or below `save_checkpoint_path`. A run is
identified by the source in the workspace and the part of the configuration that its profile uses. The config
file itself, data and outputs are not part of the source.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TextIO

from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import is_url
from torchrelay.errors import DamagedError, RelayError, StorageError, UsageError
from torchrelay.jobs.config.config import Config, load_config
from torchrelay.jobs.config.interpolation import RunPlace
from torchrelay.jobs.config.schema import RunnerSection
from torchrelay.jobs.session import Peers, Solo
from torchrelay.metadata.code.archive import NO_CHANGES, SHORT, SourceChanges, changes, open_archive
from torchrelay.metadata.code.snapshot import (
    LARGEST_UNKNOWN_BYTES,
    Root,
    Snapshot,
    digest_in,
    of_manifest,
    place_of,
)
from torchrelay.metadata.experiments import (
    Evaluated,
    Identity,
    ProgramRecord,
    ProgramRun,
    RunStore,
    evaluated,
    newest_test,
)
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.selection import (
    config_file,
    device_of,
    phases_of,
    run_directory_of,
    source_of,
)
from torchrelay.runners.distributed.launcher import read_launch_env
from torchrelay.runners.monitoring.console import print_line
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.programs.request import VerbRequest
from torchrelay.runners.programs.run_selection import (
    RUNS,
    ProgramOrigin,
    RunInfo,
    TrainRequest,
    captured_code,
    choose_to_train,
    newest_of,
)
from torchrelay.runners.remote_runs.names import refuse_remote


class BaseCommand:
    """A request and its runs; `archived` is the run whose archived code this process runs."""

    request: VerbRequest
    archived: str | None
    program: Any
    """The class; None for a configuration only."""
    with_archived_code: ClassVar[tuple[str, ...]]
    """Subcommands that `--run` executes with the code archived in the run."""
    rename: ClassVar[str]
    """How to rename it, so that its runs are stored elsewhere."""

    @cached_property
    def origin(self) -> ProgramOrigin:
        """Location of its source and its runs."""
        raise NotImplementedError

    @cached_property
    def store(self) -> RunStore:
        """The directory of its runs."""
        return self.origin.store(self.request.runs)

    @cached_property
    def snapshot(self) -> Snapshot | None:
        """The source at the time of the first access."""
        return self.origin.snapshot()

    @cached_property
    def config_id(self) -> str | None:
        """The id of the configuration; None without one."""
        raise NotImplementedError

    def limits(self) -> dict[str, Any]:
        """Return the limits of a training by name; None means unlimited."""
        raise NotImplementedError

    @cached_property
    def identity(self) -> Identity:
        """Identity of the current code and configuration."""
        code = self.snapshot.manifest.code_id if self.snapshot is not None else None
        return Identity(code, self.config_id)

    def runs(self) -> list[ProgramRun]:
        """Return the runs, without damaged ones. UsageError if they belong to another program."""
        there = self.store.look()
        for path, error in there.unread.items():
            if path not in self._reported:
                self._reported.add(path)
                say(f"{path.name} is skipped: {error}", to=sys.stderr)
        found = list(there.runs)
        for run in found[-1:]:
            other = run.note.origin
            if other != str(self.origin.file) and Path(other).exists():
                raise UsageError(
                    f"the runs in {self.store.directory} belong to {other}, not to {self.origin.file}: "
                    f"rename one of them ({self.rename})"
                )
        return found

    @cached_property
    def _reported(self) -> set[Path]:
        return set()

    def known(self) -> list[RunInfo]:
        """Return the runs as a choice among them needs them."""
        return [
            RunInfo(
                run.id,
                self.identity_of(run),
                standing(run.path),
                run.note.launch,
                run.note.limits,
                run.note.created,
                run.note.code_id == self.identity.code_id,
            )
            for run in self.runs()
        ]

    def identity_of(self, run: ProgramRun) -> Identity:
        """Return a run's identity; if only files of `eval` differ, with the current code id."""
        found = run.note.identity
        if self.evaluated and found.code_id != self.identity.code_id and self.changed(run) == NO_CHANGES:
            return Identity(self.identity.code_id, found.config_id)
        return found

    def changed(self, run: ProgramRun) -> SourceChanges | None:
        """Compare the source with that of a run, except files of `eval`; None if that is impossible."""
        old = self.archived_source(run)
        if self.snapshot is None or old is None:
            return None
        new, noted = of_manifest(self.snapshot.manifest), {}
        for path, digests in self.evaluated.items():
            with suppress(OSError, RuntimeError, ValueError):  # an invalid name in the file
                result = self.snapshot.name_of(path)
                if result and path.suffix != ".py":
                    noted[result] = digests
        found = changes(old, new)
        if not (found and noted):
            return found

        def is_result(name: str, digest: str) -> bool:
            return noted.get(name, {}).get(digest, False)

        return SourceChanges(
            tuple(name for name in found.added if new[name] not in noted.get(name, {})),
            tuple(n for n in found.changed if not (is_result(n, old[n]) and is_result(n, new[n]))),
            tuple(name for name in found.removed if not is_result(name, old[name])),
        )

    def archived_source(self, run: ProgramRun) -> dict[str, str] | None:
        """Return names and digests of a run's source; None if it cannot be read."""
        try:
            with open_archive(run.path / "code" / f"{run.note.code_id}.zip") as archive:
                return of_manifest(archive.manifest)
        except (DamagedError, StorageError):
            return None

    def contents_of(self, paths: Iterable[Path], *, written: bool) -> Evaluated:
        """Return files of an `eval` among the source, with digests; large files are not source."""
        roots = list(self.snapshot.roots) if self.snapshot is not None else []
        if self.archived is not None:
            roots += archived_roots(self.store.find(self.archived))
        found: Evaluated = {}
        for path in {place for one in paths for place in (place_of(one), one.resolve())}:
            root = next((one for one in roots if path.is_relative_to(one.path)), None)
            if root is not None and path.suffix != ".py":
                with suppress(OSError):
                    if path.lstat().st_size <= LARGEST_UNKNOWN_BYTES:
                        digest = digest_in(root, path.relative_to(root.path).as_posix())
                        found |= {path: {digest: written}} if digest else {}
        return found

    def source_name(self, run: ProgramRun, path: Path) -> str | None:
        """Return the name of a path in a run's archive; None if it is not part of the source."""
        if self.archived is None:
            return None if self.snapshot is None else self.snapshot.name_of(path)
        path = place_of(path)
        for root in archived_roots(run):
            if path.is_relative_to(root.path):
                return "/".join(part for part in (root.label, path.relative_to(root.path).as_posix()) if part)
        return None

    @cached_property
    def evaluated(self) -> Evaluated:
        """Files that `eval` read and wrote, from all runs."""
        found: Evaluated = {}
        for run in self.store.runs():
            with suppress(StorageError):
                merge_evaluated(found, evaluated(run.path))
        return found


def merge_evaluated(found: Evaluated, more: Evaluated) -> None:
    """Add files of another evaluation."""
    for path, digests in more.items():
        known = found.setdefault(path, {})
        known |= {digest: one or known.get(digest, False) for digest, one in digests.items()}


def archived_roots(run: ProgramRun) -> list[Root]:
    """Return the original locations of a run's archived source."""
    roots = captured_code(run)["code"].get("roots")
    return [
        Root(label, Path(path).resolve())
        for label, path in (roots.items() if isinstance(roots, dict) else ())
        if isinstance(path, str)
    ]


def say(text: str, *, to: TextIO | None = None) -> None:
    """Print a line for the user, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print_line(text, to=to)


@dataclass(frozen=True)
class ConfigCommand(BaseCommand):
    """A configuration and a request; `source` is the unpacked archive if its code is used."""

    request: VerbRequest
    archived: str | None = None
    source: Path | None = None
    program: None = None
    rename = "`name` in the configuration"
    with_archived_code = ("test", "eval")

    @cached_property
    def file(self) -> str:
        """The file that `-m` refers to."""
        return config_file(self.request.config or "")

    @cached_property
    def config(self) -> Config:
        """The configuration; raises ConfigError with all mistakes."""
        asked = {"epochs": self.request.max_epochs, "time_limit": self.request.time_limit}
        typed = {key: value for key, value in asked.items() if value is not None}
        if not typed:
            return self.with_overrides(())
        runner = _the_one(self.file, self.with_overrides(()))
        if "epochs" in typed and runner.stop is not None and runner.stop.max_epochs is not None:
            typed["stop.max_epochs"] = typed.pop("epochs")
        return self.with_overrides([f"runner.{runner.name}.{key}={value}" for key, value in typed.items()])

    def with_overrides(self, more: Sequence[str]) -> Config:
        """Load the configuration with further overrides."""
        place = RunPlace(runs=self._runs)
        return load_config(self.file, [*self.request.overrides, *more], source=self.source, place=place)

    @cached_property
    def runner(self) -> RunnerSection:
        """The training profile; raises UsageError unless there is exactly one."""
        return _the_one(self.file, self.config)

    @contextmanager
    def processes(self, runner: RunnerSection | None = None) -> Iterator[Peers]:
        """Connect the started processes for an agreement; they stay connected afterwards."""
        env = read_launch_env()
        if not env.launched:
            yield Solo()
            return
        from torchrelay.runners.config_runs.processes import release, session_on

        session = session_on(device_of(runner or self.runner, env.local_rank))
        try:
            yield session.peers
        finally:
            release(session, world_stays=True)

    def inferring(self) -> list[RunnerSection]:
        """Return the profiles of the mode that infer."""
        return [one for one in self.config.settings.runners_of_mode() if one.infers]

    @cached_property
    def origin(self) -> ProgramOrigin:
        """Location of source (the workspace) and runs."""
        place = self._place
        source = source_of(self.config)
        return ProgramOrigin(place.name, Path(self.file).resolve(), source, None, place.parent)

    @cached_property
    def store(self) -> RunStore:
        """The runs of the profile; raises UsageError if `torchrelay run` keeps one run there."""
        said = self._runs
        refuse_remote(said or "", "torchrelay train -m")
        name = self.config.settings.name or self.config.workspace.name
        place = Path(os.path.abspath(said)) / name / self.runner.name if said else self._place  # noqa: PTH100
        if (place / "run.json").exists():
            raise UsageError(
                f"{place} is a single run of `torchrelay run`, but this command keeps several runs: continue "
                f"with `torchrelay run -m {self.file}`, or pass another --runs"
            )
        return RunStore(place)

    @cached_property
    def config_id(self) -> str | None:
        """The id of the part that the profile uses."""
        return self.config.id_of(self.runner.name)

    def limits(self) -> dict[str, Any]:
        """Return limits that may be raised to continue a finished run, and newest growing data."""
        runner = self.runner
        steps = None if runner.stop is None else runner.stop.max_steps
        found: dict[str, Any] = {"max_epochs": runner.max_epochs, "max_steps": steps}
        if runner.epochs_per_partition is not None:
            from torchrelay.runners.config_runs.user_objects import partitions_there

            workspace = self.config.workspace
            datasets = [one for _, one in phases_of(self.config.settings, runner) if one is not None]
            names = [one[0] for two in datasets for one in partitions_there(two.data_path, workspace)]
            found["newest_data"] = max(names, default="")
        return found

    @property
    def _runs(self) -> str | None:
        """The directory of runs that was typed or is set in the environment."""
        return self.request.runs or os.environ.get(RUNS)

    @property
    def _place(self) -> Path:
        """The run directory of the training profile; raises UsageError for a URL."""
        text = run_directory_of(self.config.settings, self.runner)
        if is_url(text):
            raise UsageError(f"runs at a URL ({text}) are not supported here: pass a path with --runs DIR")
        return Path(text)


def _the_one(file: str, config: Config) -> RunnerSection:
    found = config.settings.training()
    if len(found) == 1:
        return found[0]
    names = ", ".join(one.name for one in found) or "none"
    remedy = f"choose one with -o mode=[{found[0].name}]; " if found else ""
    raise UsageError(
        f"{file}: this command needs one runner that trains, but there is {names}: {remedy}"
        f"torchrelay run -m {file} runs all of its mode"
    )


def status(command: BaseCommand) -> int:
    """Print the status; with `--check` the exit code is 1 if `train` would train, else 0."""
    runs = command.runs()
    run = command.store.find(command.request.run_id) if command.request.run_id else runs[-1] if runs else None
    found: dict[str, Any] = {"experiment": command.origin.name, "runs": len(runs), "run": None}
    if run is not None:
        checkpoints = LocalStorage(run.path / "checkpoints")
        facts = run_facts(run.path, str(run.path), run.note, lambda: open_log(checkpoints).newest())
        amended = [one.get("code_id") for one in run.note.amended]
        found["run"] = {**facts, "code_id": run.note.code_id, "amended": amended}
    found["changed"] = None  # without a run
    if run is not None:
        files, code = command.changed(run), command.identity_of(run).code_id
        found["changed"] = {
            "code": code is None or code != command.identity.code_id,
            "config": command.identity.config_id != run.note.config_id,
            "files": None if files is None else vars(files),  # None without its source
        }
    known = command.known()
    try:
        chosen = choose_to_train(TrainRequest(command.identity, command.limits()), known)
        found["train"] = {"trains": True, "what": chosen.action, "run": chosen.run, "why": chosen.reason}
    except RelayError:
        same = newest_of([one for one in known if one.identity.same(command.identity)])
        found["train"] = {"trains": False, "what": "refused", "run": same.id, "why": "trained already"}
    lines = [json.dumps(found, indent=1)] if command.request.json else _lines(command, found)
    say("\n".join(lines))
    return 1 if command.request.check and found["train"]["trains"] else 0


def run_facts(
    run: Path, where: str, note: ProgramRecord | None, newest: Callable[[], CommittedPosition | None]
) -> dict[str, Any]:
    """Return the status of a run; `newest` finds its newest epoch, if there is one."""
    stands, epoch = standing(run), None
    with suppress(RelayError):
        found = newest()
        epoch = None if found is None else found.position.epoch
    return {
        "id": run.name,
        "path": where,
        "state": stands.word,
        "why": stands.why,
        "epoch": epoch,
        "message": "" if note is None else note.message,
        "test": newest_test(run),
    }


def run_line(facts: Mapping[str, Any]) -> str:
    """Format it as one line."""
    why = f" ({facts['why']})" if facts["why"] else ""
    message = f", {facts['message']!r}" if facts["message"] else ""
    epoch = "no epoch saved" if facts["epoch"] is None else f"newest epoch {facts['epoch']}"
    return f"run {facts['id']}: {facts['state']}{why}, {epoch}{message}"


def _lines(command: BaseCommand, found: dict[str, Any]) -> list[str]:
    run, changed, would = found["run"], found["changed"], found["train"]
    runs = f"{found['runs']} run{'' if found['runs'] == 1 else 's'}"
    lines = [f"experiment {found['experiment']}: {runs} in {command.store.directory}"]
    if run is not None:
        lines.append(run_line(run))
        amended = "".join(f", amended from {(one or '?')[:SHORT]}" for one in run["amended"])
        lines.append(f"its code: {(run['code_id'] or 'not archived')[:SHORT]}{amended}")
        if run["test"] is not None:
            measured = ", ".join(f"{name} {value}" for name, value in run["test"].items() if name != "epoch")
            lines.append(f"tested at epoch {run['test']['epoch']}: {measured}")
        files = changed["files"]
        if files is None:
            lines.append("code: changes are unknown, because its source was not archived")
        elif changed["code"]:
            lines += [f"{word}: {name}" for word in ("changed", "added", "removed") for name in files[word]]
        else:
            lines.append("code: unchanged")
        lines += ["configuration: changed"] if changed["config"] else []
    will = {
        "new": f"creates a new run: {would['why']}",
        "continue": f"continues {would['run']}: {would['why']}",
        "refused": f"refused, {would['run']} has already trained this code",
    }
    return [*lines, f"train: {will[would['what']]}"]
