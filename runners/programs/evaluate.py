"""Subcommands that use the model of an epoch: `test`, `eval IN... OUT`, and `package`.

`test` measures epochs, stores the results in their run and prints them; `eval` writes results for files.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.files.publish import publish
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.log.record import has_job
from torchrelay.checkpoint.storage.open import is_url
from torchrelay.errors import (
    NoProvableEpochError,
    NotAllowedNowError,
    StorageError,
    UnknownEpochError,
    UsageError,
)
from torchrelay.jobs.config.schema import Dataset, RunnerSection
from torchrelay.jobs.random import seed as set_seed
from torchrelay.jobs.session import Peers, decide, together
from torchrelay.metadata.code.archive import SHORT
from torchrelay.metadata.code.snapshot import place_of
from torchrelay.metadata.experiments import (
    Evaluated,
    ProgramRun,
    note_evaluated,
    read_result,
    write_result,
)
from torchrelay.metadata.fs import finite
from torchrelay.models.package.reader import Package
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.evaluation import (
    PredictionFile,
    format_of,
    load_weights,
    moved_batch,
    write_rows,
)
from torchrelay.runners.config_runs.processes import apart
from torchrelay.runners.config_runs.profiles import NO_WARM_START, ConfigResult, built, run_config
from torchrelay.runners.config_runs.selection import phases_of, weights_place
from torchrelay.runners.config_runs.steps import Network
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.programs.command_context import BaseCommand, ConfigCommand, merge_evaluated, say
from torchrelay.runners.programs.program import Program, ProgramCommand
from torchrelay.runners.programs.run_selection import choose_to_use
from torchrelay.runners.session.local import current_or_new_session
from torchrelay.runners.session.steps import naming


@dataclass(frozen=True)
class Used:
    """An epoch of a run, and the id of the code that uses it."""

    run: str
    path: str
    epoch: int
    branch: int
    code_id: str | None
    config_id: str | None
    own: bool
    """True if code and configuration are those of the run."""
    said: str = ""

    @property
    def name(self) -> str:
        """A name of exactly this epoch, also after later commits and rewinds."""
        return f"{self.epoch},branch={self.branch}"


def use(command: BaseCommand) -> Used:
    """Choose run and epoch on rank 0. Raises errors of choosing and opening."""
    named = command.archived or command.request.run_id
    if named is not None:
        run = command.store.find(named)
    else:
        runs = command.known()
        try:
            run = command.store.find(choose_to_use(command.identity, runs, ignore=command.request.ignore).id)
        except NotAllowedNowError as error:
            raise NotAllowedNowError(f"{error}{_what(command, command.store.find(runs[-1].id))}") from None
    said, code, config = "", run.note.code_id, run.note.config_id
    own = command.archived is not None or command.identity_of(run).same(command.identity)
    if command.archived is not None:
        said = f"runs the archived code {(code or '')[:SHORT]} of {run.id}"
    elif not own:
        code, config = command.identity.code_id, command.identity.config_id
        said = f"--ignore: runs the current code instead of that of {run.id}{_what(command, run)}"
    untrained = f"{run.id} has no trained epoch yet ({standing(run.path)}): train it first"
    wanted = command.request.epoch
    if wanted is None and not has_job(run.path / "checkpoints"):
        raise UsageError(untrained)
    number = int(wanted) if wanted is not None and wanted.isascii() and wanted.isdigit() else None
    try:
        opened = open_checkpoint(run.path, number if number is not None else wanted or "last")
    except (UnknownEpochError, NoProvableEpochError) as error:
        if wanted is None and isinstance(error, UnknownEpochError):
            raise UsageError(untrained) from error
        raise
    if wanted is None and opened.epoch == 0 and opened.position.boundary:
        raise UsageError(untrained)
    return Used(run.id, str(run.path), opened.epoch, opened.branch, code, config, own, said)


def _loaded(command: ProgramCommand, used: Used) -> Program:
    program = command.made()
    set_seed(program.seed)
    program.load_weights(used.path, used.name)
    return program


def _what(command: BaseCommand, run: ProgramRun) -> str:
    """Describe what changed since a run, in brackets."""
    found = command.changed(run)
    return f" (changed: {found})" if found else ""


def test(command: ProgramCommand) -> int:
    """Measure an epoch unless this code already did; returns the exit code."""
    request = command.request
    with current_or_new_session() as session:
        peers = session.peers
        used = Used(**decide(peers, "run to test", lambda: vars(use(command))))
        if used.said and not request.json:
            say(used.said)
        result = decide(peers, "stored result", lambda: _stored(command, used, used.config_id))
        remark = f" {_TESTED_BEFORE}"
        if result is None:
            found, remark = _loaded(command, used).test(), ""
            values = {name: [finite(v) for v in one] for name, one in found.items() if isinstance(one, list)}
            metrics = {name: finite(one) for name, one in found.items() if name not in values}
            more = {"config_id": used.config_id, "ranks": peers.size, "values": values}
            result = _result(used, used.epoch, metrics, **more)
            decide(peers, "store the result", lambda: _store(used, [result]))
        shown = {name: f"{v:.4g}" if isinstance(v, float) else v for name, v in result["metrics"].items()}
        parts = [f"{name} {value}" for name, value in shown.items()]
        parts += [f"{name} ({len(values)} values)" for name, values in result["values"].items()]
        text = f"epoch {result['epoch']} of {result['run']}: {', '.join(parts) or 'nothing measured'}{remark}"
        say(json.dumps(result, indent=1, sort_keys=True) if request.json else text)
    return 0


_TESTED_BEFORE = "(tested before; --retest measures again)"


def _stored(command: BaseCommand, used: Used, config_id: str | None) -> dict[str, Any] | None:
    """Return the earlier result of this code, unless it is to be measured again."""
    if command.request.retest:
        return None
    return read_result(Path(used.path), used.epoch, used.code_id, config_id, own=used.own)


def _result(used: Used, epoch: int, metrics: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "run": used.run,
        "epoch": epoch,
        "branch": used.branch,
        "code_id": used.code_id,
        "own": used.own,
        "time": round(time.time(), 3),
        "metrics": dict(metrics),
        "values": {},
        **more,
    }


def _store(used: Used, results: Sequence[Mapping[str, Any]]) -> None:
    for one in results:
        write_result(Path(used.path), one["epoch"], used.code_id, one)


def test_configuration(command: ConfigCommand) -> int:
    """Measure the epochs unless this code already did; returns the exit code.

    Epochs are those of `--epoch`, else of the profile's `epoch`, else the newest. A profile that writes files
    always runs.
    """
    profiles, request = command.inferring(), command.request
    if not profiles:
        raise UsageError(f"{command.file}: no runner of its mode infers, so there is nothing to test with")
    # Identity of each profile with its data, which are not part of the tested run.
    ids = {one.name: command.config.id_of(one.name) for one in profiles}
    writes = any(one.predictions_path or one.metrics_path for one in profiles)
    several = request.epoch is None and any(map(_chooses, profiles))

    def find_stored() -> dict[str, Any] | None:
        found = None if writes or several else _stored(command, used, command.config.id)
        same = found and found.get("profiles") == ids and found.get("branch") == used.branch
        return found if same else None

    with command.processes() as peers:
        used = Used(**decide(peers, "run to test", lambda: vars(use(command))))
        stored = decide(peers, "stored result", find_stored)
    if used.said:
        say(used.said, to=sys.stderr)

    def show(results: Sequence[Mapping[str, Any]], text: str) -> None:
        say(json.dumps({"results": list(results)}, indent=1, sort_keys=True) if request.json else text)

    if stored is not None:
        measured = ", ".join(f"{name} {value}" for name, value in stored["metrics"].items())
        show([stored], f"epoch {stored['epoch']} of {stored['run']}: {measured} {_TESTED_BEFORE}")
        return 0
    config = command.with_overrides(list(_epochs(command, used, profiles)))
    with redirect_stdout(sys.stderr) if request.json else nullcontext():
        done = run_config(config, list(ids), run_dir=used.path, strict=request.strict_config)
    more = {"config_id": command.config.id, "profiles": ids}
    results = [_result(used, epoch, row, **more) for epoch, row in sorted(_rows(done, profiles).items())]
    with command.processes() as peers:
        decide(peers, "store the results", lambda: _store(used, results))
    show(results, f"stored in {used.path}")
    return done.exit_code


def _epochs(command: ConfigCommand, used: Used, profiles: Sequence[RunnerSection]) -> list[str]:
    """Return overrides that select the epochs of each profile."""
    asked = command.request.epoch is not None
    fixed = [one for one in profiles if asked or not _chooses(one)]
    cleared = [
        f"runner.{one.name}.{key}=null"
        for one in fixed
        for key in ("infer_start_epoch", "infer_end_epoch")
        if getattr(one, key) is not None
    ]
    cleared += [
        f"runner.{one.name}.init_model_path={weights_place(one)[0]!r}"
        for one in fixed
        if weights_place(one)[1] is not None
    ]
    return [*cleared, *(f"runner.{one.name}.epoch={used.epoch}" for one in fixed)]


def _chooses(runner: RunnerSection) -> bool:
    of_path = weights_place(runner)[1]
    return runner.epoch is not None or runner.infer_start_epoch is not None or of_path is not None


def _rows(done: ConfigResult, profiles: Sequence[RunnerSection]) -> dict[int, dict[str, Any]]:
    """Return metrics by epoch, prefixed with the profile's name if there are several."""
    found: dict[int, dict[str, Any]] = {}
    for one in profiles:
        before = f"{one.name}/" if len(profiles) > 1 else ""
        for row in done[one.name] or ():
            named = {
                f"{before}{name}": finite(value) if isinstance(value, float) else value
                for name, value in row.items()
                if name not in ("runner", "epoch")
            }
            found[row["epoch"]] = {**found.get(row["epoch"], {}), **named}
    return found


Work = Sequence[tuple[Path, Path]]
"""Files to read, each with the path of its result."""


def evaluate(command: ProgramCommand) -> int:
    """Check all paths, then load the model and evaluate; ranks share the files."""
    with current_or_new_session() as session:
        peers = session.peers
        work = _planned(command.request.paths, command.program.result_suffix)
        _refuse_to_replace(work, [command.origin.file], ())
        used = _chosen(command, work, peers)
        program = _loaded(command, used)

        def evaluate_one(path: Path, out: Path) -> None:
            with naming(f"evaluation of {path}", f"rank {peers.rank}"):
                result = program.eval(path)
            publish(out, partial(program.store_result, result), overwrite=True)

        _evaluate_all(command, used, work, peers, evaluate_one)
    return 0


def _chosen(command: BaseCommand, work: Work, peers: Peers) -> Used:
    """Choose the epoch, identical on all ranks, after checking that results can be written.

    Input files are not source, and no result may replace the source of the run.
    """

    def choose() -> Used:
        read = command.contents_of((path for path, _ in work), written=False)
        merge_evaluated(command.evaluated, read)
        used = use(command)
        run = command.store.find(used.path)
        source = command.archived_source(run) or {}
        for out in sorted({out for _, out in work}):
            name = command.source_name(run, out)
            if name in source and not command.evaluated.get(place_of(out), {}).get(source[str(name)], False):
                raise _refused(out, f"is part of the source of {used.run}")
        _note(used.path, read)
        return used

    together(peers, "paths", lambda: _check_writable([out for _, out in work]))
    used = Used(**decide(peers, "run to evaluate", lambda: vars(choose())))
    if used.said:
        say(used.said)
    return used


def _evaluate_all(
    command: BaseCommand, used: Used, work: Work, peers: Peers, evaluate_one: Callable[[Path, Path], None]
) -> None:
    """Evaluate this rank's share of the files; results do not count as source, even if a later file fails."""
    done: list[Path] = []

    def evaluate_own() -> None:
        for path, out in work[peers.rank :: peers.size]:
            evaluate_one(path, out)
            done.append(out)

    try:
        together(peers, "evaluation", evaluate_own)
    finally:
        _note(used.path, command.contents_of(done, written=True))
    say(f"{len(work)} evaluated with epoch {used.epoch} of {used.run}: {command.request.paths[-1]}")


def _note(run: str, files: Evaluated) -> None:
    with suppress(StorageError):  # in a read-only run such files keep counting as source
        note_evaluated(Path(run), files)


def _planned(paths: Sequence[str], suffix: str) -> list[tuple[Path, Path]]:
    """Return the files to read with the paths of their results; raises UsageError for missing files.

    One file goes to the file OUT. Several files, or a directory, go to the directory OUT with the names of
    the inputs and `suffix` appended.
    """
    *given, last = [Path(path) for path in paths]
    inputs: list[Path] = []
    for path in given:
        if path.is_dir():
            inputs += sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
        elif path.exists():
            inputs.append(path)
        else:
            raise UsageError(f"{path} does not exist, so it cannot be evaluated")
    if not inputs:
        raise UsageError(f"no file to evaluate in {', '.join(map(str, given))}")
    if len(given) == 1 and not given[0].is_dir() and not last.is_dir():
        return [(inputs[0], last)]
    outs = [last / f"{path.name}{suffix}" for path in inputs]
    twice = {out for out in outs if outs.count(out) > 1}
    if twice:
        raise UsageError(f"two files would have the same result {min(twice)}: evaluate them one by one")
    return list(zip(inputs, outs, strict=True))


def _refuse_to_replace(work: Work, kept: Iterable[Path], data: Iterable[Path]) -> None:
    """Raise UsageError for a result that replaces an input, source or a file of `kept`, or is among `data`.

    `data` are files and directories of training data, in which a result would become a sample. Results of
    earlier calls elsewhere are replaced.
    """
    read = {path.resolve() for path, _ in work}
    known = {path.resolve() for path in kept}
    folders = {path.resolve() for path in data}
    for out in sorted({out for _, out in work}):
        place = out.resolve()
        if place in read:
            raise _refused(out, "is one of the files to evaluate")
        if place in known or (out.suffix in (".py", ".yaml", ".yml") and out.exists()):
            raise _refused(out, "is source code of the program")
        if folders & {place, place.parent}:
            raise _refused(out, "is among the data of the configuration")


def _refused(out: Path, why: str) -> UsageError:
    return UsageError(f"{out} {why}: pass another path for the results as the last argument")


def _check_writable(outs: Sequence[Path]) -> None:
    """Create the directory of several results; raises UsageError if results cannot be written."""
    for folder in {out.parent for out in outs}:
        try:
            folder.mkdir(exist_ok=True)
            probe = folder / f".tmp-{secrets.token_hex(6)}"
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise UsageError(f"results cannot be written to {folder}: {error.strerror}") from error
    for out in outs:
        if out.is_dir():
            raise UsageError(f"the result cannot be written to {out}: it is a directory")


SUFFIX = ".jsonl"


def evaluate_configuration(command: ConfigCommand) -> int:
    """Check all paths, then build the model and evaluate; ranks share the files.

    The profile is the first one of the mode that infers, else the training one.
    """
    found = command.inferring()
    runner = found[0] if found else replace(command.runner, kind="infer", **NO_WARM_START)
    settings = command.config.settings
    pairs = phases_of(settings, runner)
    if len(pairs) != 1:
        names = ", ".join(phase.name for phase, _ in pairs) or "none"
        raise UsageError(
            f"eval needs one phase, but runner.{runner.name} has {names}: choose one with "
            f"-o runner.{runner.name}.phases=[NAME]"
        )
    ((section, dataset),) = pairs
    if dataset is None:
        raise UsageError(f"phase.{section.name} has no dataset that could read the files")
    work = _planned(command.request.paths, SUFFIX)
    data = [Path(path) for one in settings.dataset for path in one.data_path if not is_url(path)]
    _refuse_to_replace(work, [Path(command.file)], data)
    with command.processes(runner) as peers:
        used = _chosen(command, work, peers)
    with apart(), ExitStack() as stack:
        first = _of(dataset, work[0][0])
        datasets = tuple(first if one.name == dataset.name else one for one in settings.dataset)
        context = built(command.config, replace(settings, dataset=datasets), runner, used.path, stack)
        (phase,) = context.phases.values()
        peers = context.session.peers

        def load() -> None:
            load_weights(phase, context.settings, runner, used.path, used.name)

        together(peers, "load", load)
        phase.model.eval()

        def evaluate_one(path: Path, out: Path) -> None:  # one row per sample, in order
            loader: Any = Network().build_loader(context, phase.keys, _of(dataset, path))
            result = PredictionFile(str(out.absolute()), format_of(out.name, None), 0, 1)
            with torch.no_grad(), result.part() as part:
                for batch in loader.placed(0, 1):
                    write_rows(phase, batch, phase.model(moved_batch(batch, context.device)), part)
            result.merge({})
            result.close()

        _evaluate_all(command, used, work, peers, evaluate_one)
    return 0


def _of(dataset: Dataset, file: Path) -> Dataset:
    return replace(dataset, data_path=(str(file.absolute()),))


def package(command: ProgramCommand) -> int:
    """Load the weights of the selected epoch, write the package, and report what it lacks."""
    request = command.request
    if request.out is None:
        raise UsageError("package needs an output file: pass --out FILE")
    with current_or_new_session():
        used = use(command)
        if used.said:
            say(used.said)
        metadata: dict[str, Any] = {"run": used.run, "epoch": used.epoch, "program": command.origin.name}
        metadata |= {} if used.code_id is None else {"code_id": used.code_id}
        made = _loaded(command, used).package(request.out, metadata=metadata, overwrite=request.overwrite)
        say(f"epoch {used.epoch} of {used.run}: {made.where}{lacking(made)}")
    return 0


def lacking(made: Package) -> str:
    """List what a package could not include, one line each."""
    return "".join(f"\n  {reason}" for reason in made.without)
