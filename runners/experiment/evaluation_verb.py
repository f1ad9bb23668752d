"""`eval IN... OUT`: results for files, each in its place when it is whole."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrelay.errors import RelayError, StorageError, UsageError
from torchrelay.jobs.random import seed as set_seed
from torchrelay.jobs.session import decide, together
from torchrelay.metadata.code.snapshot import place_of
from torchrelay.metadata.experiments import Evaluated, note_evaluated
from torchrelay.metadata.fs import sync_directory
from torchrelay.runners.experiment.base_scene import BaseScene, say
from torchrelay.runners.experiment.program import Program
from torchrelay.runners.experiment.scene import Scene
from torchrelay.runners.experiment.using import Used, use
from torchrelay.runners.session.local import current_or_new_session

Work = Sequence[tuple[Path, Path]]
"""Files to read, and where their results go."""


def evaluate(scene: Scene) -> int:
    """Evaluate, having looked at all paths before the model is loaded; ranks share the files."""
    with current_or_new_session() as session:
        peers = session.peers
        work = planned(scene.request.paths, scene.program.result_suffix)
        refuse_to_replace(work, [scene.origin.file], ())
        together(peers, "paths", lambda: check_writable([out for _, out in work]))
        used = Used(**decide(peers, "run to evaluate", lambda: used_for(scene, work)))
        if used.said:
            say(used.said)
        program = scene.made()
        set_seed(program.seed)
        program.load_weights(used.path, used.name)
        own = work[peers.rank :: peers.size]
        together(peers, "evaluation", lambda: _all(program, own))
        note_results(scene, used, (out for _, out in own))
        say(f"{len(work)} evaluated with epoch {used.epoch} of {used.run}: {scene.request.paths[-1]}")
    return 0


def used_for(scene: BaseScene, work: Work) -> dict[str, Any]:
    """Rank 0: what `use` chooses where the files to read are no source, and a note of them in the run.

    Raises UsageError for a result in place of the run's source.
    """
    read = scene.contents_of((path for path, _ in work), written=False)
    scene.take_evaluated(read)
    used = use(scene)
    run = scene.store.find(used["path"])
    source = scene.archived_source(run) or {}
    for out in sorted({out for _, out in work}):
        name = scene.source_name(run, out)
        if name in source and not scene.evaluated.get(place_of(out), {}).get(source[str(name)], False):
            raise _refused(out, f"is among the source of {used['run']}")
    _note(used["path"], read)
    return used


def note_results(scene: BaseScene, used: Used, outs: Iterable[Path]) -> None:
    """Note what was written where source lies, by the process that wrote it."""
    _note(used.path, scene.contents_of(outs, written=True))


def _note(run: str, files: Evaluated) -> None:
    with suppress(StorageError):  # where nobody may write, such files go on looking like source
        note_evaluated(Path(run), files)


def planned(paths: Sequence[str], suffix: str) -> list[tuple[Path, Path]]:
    """What is read, and where its result goes; raises UsageError for what is not there.

    One file goes into the file OUT; of several, or a directory, the results go into the directory OUT,
    under the names of the inputs with `suffix` added.
    """
    *given, last = [Path(path) for path in paths]
    inputs: list[Path] = []
    for path in given:
        if path.is_dir():
            inputs += sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
        elif path.exists():
            inputs.append(path)
        else:
            raise UsageError(f"there is no {path} to evaluate")
    if not inputs:
        raise UsageError(f"there is no file to evaluate in {', '.join(map(str, given))}")
    if len(given) == 1 and not given[0].is_dir() and not last.is_dir():
        return [(inputs[0], last)]
    outs = [last / f"{path.name}{suffix}" for path in inputs]
    twice = {out for out in outs if outs.count(out) > 1}
    if twice:
        raise UsageError(f"two files would have their result in {min(twice)}: evaluate them one by one")
    return list(zip(inputs, outs, strict=True))


def refuse_to_replace(work: Work, kept: Iterable[Path], data: Iterable[Path]) -> None:
    """Raise UsageError for a result in place of an input, of a file of `kept` or of source, or among `data`.

    `data` are files and directories that are read in training, where a result would be a sample. Results of
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
            raise _refused(out, "is source")
        if folders & {place, place.parent}:
            raise _refused(out, "is, or lies beside, data of the configuration")


def _refused(out: Path, why: str) -> UsageError:
    return UsageError(f"{out} {why}: give, as the last of the names, another place for results")


def check_writable(outs: Sequence[Path]) -> None:
    """Make the directory of several results, and refuse places that cannot be written; raises UsageError."""
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


def _all(program: Program, work: Sequence[tuple[Path, Path]]) -> None:
    for path, out in work:
        _one(program, path, out)


def _one(program: Program, path: Path, out: Path) -> None:
    """Evaluate a file; its result is written beside its place and put there whole."""
    result = program.eval(path)
    temporary = out.with_name(f".tmp-{secrets.token_hex(6)}-{out.name}")
    try:
        program.store_result(result, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(out)
        sync_directory(out.parent)
    except OSError as error:
        if isinstance(error, RelayError):
            raise
        raise StorageError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
