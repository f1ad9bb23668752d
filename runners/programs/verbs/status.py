"""`status`: what changed since the last run, and how it stands. Writes nothing."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import RelayError
from torchrelay.metadata.code.archive import SHORT
from torchrelay.metadata.experiments import ProgramRun, newest_result
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.programs.command_context import BaseScene, say
from torchrelay.runners.programs.run_selection import Start, choose_to_train, newest_of


def status(scene: BaseScene) -> int:
    """Print it; with `--check` the exit code is 1 where `train` would train, else 0."""
    runs = scene.runs()
    run = scene.store.find(scene.request.run_id) if scene.request.run_id else runs[-1] if runs else None
    found: dict[str, Any] = {
        "experiment": scene.origin.name,
        "runs": len(runs),
        "run": None if run is None else _run(run),
    }
    found |= {"changed": _changed(scene, run), "train": _would(scene)}
    if scene.request.json:
        say(json.dumps(found, indent=1))
    else:
        for line in _lines(scene, found):
            say(line)
    return 1 if scene.request.check and found["train"]["trains"] else 0


def _run(run: ProgramRun) -> dict[str, Any]:
    stands, result = standing(run.path), newest_result(run.path)
    epoch = None
    with suppress(RelayError):
        newest = open_log(LocalStorage(run.path / "checkpoints")).newest()
        epoch = None if newest is None else newest.position.epoch
    return {
        "id": run.id,
        "path": str(run.path),
        "state": stands.word,
        "why": stands.why,
        "epoch": epoch,
        "message": run.note.message,
        "code_id": run.note.code_id,
        "amended": [one.get("code_id") for one in run.note.amended],
        "test": None if result is None else {"epoch": result.get("epoch"), **(result.get("metrics") or {})},
    }


def _changed(scene: BaseScene, run: ProgramRun | None) -> dict[str, Any] | None:
    """None without a run; `files` is None where the archived source cannot be looked at."""
    if run is None:
        return None
    files, code = scene.changed(run), scene.identity_of(run).code_id
    told = None
    if files is not None:
        told = {"added": files.added, "changed": files.changed, "removed": files.removed}
    return {
        "code": code is None or code != scene.identity.code_id,
        "config": scene.identity.config_id != run.note.config_id,
        "files": told,
    }


def _would(scene: BaseScene) -> dict[str, Any]:
    """What `train` would do now."""
    known = scene.known()
    same = [one for one in known if one.identity.same(scene.identity)]
    limits = scene.limits()
    with suppress(RelayError):
        chosen = choose_to_train(Start(scene.identity, limits), known)
        return {"trains": True, "what": chosen.action, "run": chosen.run, "why": chosen.reason}
    return {"trains": False, "what": "refused", "run": newest_of(same).id, "why": "trained already"}


def _lines(scene: BaseScene, found: dict[str, Any]) -> list[str]:
    run, changed, would = found["run"], found["changed"], found["train"]
    runs = f"{found['runs']} run{'' if found['runs'] == 1 else 's'}"
    lines = [f"experiment {found['experiment']}: {runs} in {scene.store.directory}"]
    if run is not None:
        why = f" ({run['why']})" if run["why"] else ""
        message = f", {run['message']!r}" if run["message"] else ""
        epoch = "no epoch saved" if run["epoch"] is None else f"newest epoch {run['epoch']}"
        lines.append(f"run {run['id']}: {run['state']}{why}, {epoch}{message}")
        amended = "".join(f", amended from {(one or '?')[:SHORT]}" for one in run["amended"])
        lines.append(f"its code: {(run['code_id'] or 'not archived')[:SHORT]}{amended}")
        if run["test"] is not None:
            told = ", ".join(f"{name} {value}" for name, value in run["test"].items() if name != "epoch")
            lines.append(f"tested at epoch {run['test']['epoch']}: {told}")
        lines += _changes(changed)
    goes_on = f"goes on with {would['run']}: {would['why']}"
    lines.append(
        "train: "
        + {
            "new": f"makes a new run: {would['why']}",
            "continue": goes_on,
            "refused": f"refused, {would['run']} has trained this code already",
        }[would["what"]]
    )
    return lines


def _changes(changed: dict[str, Any]) -> list[str]:
    lines = []
    files = changed["files"]
    if files is None:
        lines.append("code: what changed cannot be told, its source was not archived")
    elif changed["code"]:
        for word in ("changed", "added", "removed"):
            lines += [f"{word}: {name}" for name in files[word]]
    else:
        lines.append("code: unchanged")
    return [*lines, *(["configuration: changed"] if changed["config"] else [])]
