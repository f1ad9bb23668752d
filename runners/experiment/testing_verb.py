"""`test`: measure a committed epoch, store the result in its run, show it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrelay.jobs.random import seed as set_seed
from torchrelay.jobs.session import Peers, decide
from torchrelay.metadata.experiments import read_result, write_result
from torchrelay.runners.experiment.base_scene import say
from torchrelay.runners.experiment.scene import Scene
from torchrelay.runners.experiment.using import Used, use
from torchrelay.runners.session.local import current_or_new_session


def test(scene: Scene) -> int:
    """Measure, unless this epoch was measured by this code; returns the exit code."""
    with current_or_new_session() as session:
        used = Used(**decide(session.peers, "run to test", lambda: use(scene)))
        if used.said and not scene.request.json:
            say(used.said)
        stored = decide(session.peers, "stored result", lambda: _stored(scene, used))
        if stored is not None:
            _show(scene, stored, "tested before; --retest measures again")
            return 0
        result = _measured(scene, used, session.peers)
        decide(session.peers, "store the result", lambda: _store(used, result))
        _show(scene, result, "")
    return 0


def _stored(scene: Scene, used: Used) -> dict[str, Any] | None:
    if scene.request.retest:
        return None
    return read_result(Path(used.path), used.epoch, used.code_id, used.config_id, own=used.own)


def _measured(scene: Scene, used: Used, peers: Peers) -> dict[str, Any]:
    program = scene.made()
    set_seed(program.seed)
    program.load_weights(used.path, used.name)
    found = program.test()
    return {
        "run": used.run,
        "epoch": used.epoch,
        "branch": used.branch,
        "code_id": used.code_id,
        "config_id": used.config_id,
        "own": used.own,
        "time": round(time.time(), 3),
        "ranks": peers.size,
        "metrics": {name: _told(one) for name, one in found.items() if not isinstance(one, list)},
        "values": {name: [_told(v) for v in one] for name, one in found.items() if isinstance(one, list)},
    }


def _store(used: Used, result: Mapping[str, Any]) -> None:
    write_result(Path(used.path), used.epoch, used.code_id, result)


def _show(scene: Scene, result: Mapping[str, Any], remark: str) -> None:
    if scene.request.json:
        say(json.dumps(result, indent=1, sort_keys=True))
        return
    told = [f"{name} {_short(value)}" for name, value in result["metrics"].items()]
    told += [f"{name} ({len(values)} values)" for name, values in result["values"].items()]
    end = f" ({remark})" if remark else ""
    say(f"epoch {result['epoch']} of {result['run']}: {', '.join(told) or 'nothing measured'}{end}")


def _told(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
