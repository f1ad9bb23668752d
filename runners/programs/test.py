"""Subcommand `test`: measure committed epochs, store the results in their run, and print them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.config.runner_schema import RunnerSection
from torchrelay.jobs.random import seed as set_seed
from torchrelay.jobs.session import decide
from torchrelay.metadata.experiments import read_result, write_result
from torchrelay.metadata.fs import finite
from torchrelay.runners.config_runs.profiles import ConfigResult, run_config
from torchrelay.runners.config_runs.selection import weights_place
from torchrelay.runners.programs.command_context import ConfigCommand, say
from torchrelay.runners.programs.epoch_selection import Used, use
from torchrelay.runners.programs.program import ProgramCommand
from torchrelay.runners.session.local import current_or_new_session


def test(command: ProgramCommand) -> int:
    """Measure an epoch unless this code already did; returns the exit code."""
    request = command.request
    with current_or_new_session() as session:
        peers = session.peers
        used = Used(**decide(peers, "run to test", lambda: use(command)))
        if used.said and not request.json:
            say(used.said)

        def stored() -> dict[str, Any] | None:
            if request.retest:
                return None
            return read_result(Path(used.path), used.epoch, used.code_id, used.config_id, own=used.own)

        result, remark = decide(peers, "stored result", stored), " (tested before; --retest measures again)"
        if result is None:
            program = command.made()
            set_seed(program.seed)
            program.load_weights(used.path, used.name)
            found, remark = program.test(), ""
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


def _result(used: Used, epoch: int, metrics: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the stored form of a result."""
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
    """Write results to their run."""
    for one in results:
        write_result(Path(used.path), one["epoch"], used.code_id, one)


Rows = dict[int, dict[str, Any]]


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
    with command.processes() as peers:
        used = Used(**decide(peers, "run to test", lambda: use(command)))
        stored = decide(peers, "stored result", lambda: _stored(command, used, profiles, ids))
    if used.said:
        say(used.said, to=sys.stderr)

    def show(results: Sequence[Mapping[str, Any]], text: str) -> None:
        say(json.dumps({"results": list(results)}, indent=1, sort_keys=True) if request.json else text)

    if stored is not None:
        measured = ", ".join(f"{name} {value}" for name, value in stored["metrics"].items())
        remark = "(tested before; --retest measures again)"
        text = f"epoch {stored['epoch']} of {stored['run']}: {measured} {remark}"
        show([stored], text)
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
    """Return True if a profile selects epochs itself."""
    of_path = weights_place(runner)[1]
    return runner.epoch is not None or runner.infer_start_epoch is not None or of_path is not None


def _stored(
    command: ConfigCommand, used: Used, profiles: Sequence[RunnerSection], ids: Mapping[str, str]
) -> dict[str, Any] | None:
    """Return earlier results if they cover everything."""
    writes = any(one.predictions_path or one.metrics_path for one in profiles)
    several = command.request.epoch is None and any(map(_chooses, profiles))
    if command.request.retest or writes or several:
        return None
    found = read_result(Path(used.path), used.epoch, used.code_id, command.config.id, own=used.own)
    if found is None or found.get("profiles") != ids or found.get("branch") != used.branch:
        return None
    return found


def _rows(done: ConfigResult, profiles: Sequence[RunnerSection]) -> Rows:
    """Return metrics by epoch, prefixed with the profile's name if there are several."""
    found: Rows = {}
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
