"""`server`: the newest epoch of a run, or another, answers over HTTP until it is told to leave."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.checkpoint.load.checkpoint import Checkpoint
from torchrelay.errors import UsageError
from torchrelay.jobs.random import seed as set_seed
from torchrelay.runners.programs.command_context import say
from torchrelay.runners.programs.epoch_selection import Used, use
from torchrelay.runners.programs.program import Scene
from torchrelay.runners.programs.request import Request
from torchrelay.runners.programs.serve_options import ServeOptions
from torchrelay.runners.serving.serve import check_installed, serve

if TYPE_CHECKING:
    from torchrelay.runners.serving.epochs import EpochSource
    from torchrelay.runners.serving.running import Running
    from torchrelay.runners.serving.served import Served

_LOOK_SECS = 1.0


def server(scene: Scene) -> int:
    """Serve, and return the exit code. Refuses what `eval` refuses, before anything listens."""
    check_installed()
    used = Used(**use(scene))
    if used.said:
        say(used.said)

    def began(running: Running) -> None:
        if scene.archived is not None:
            leave_with_parent(running.stop)

    return serve(scene.request.serve or ServeOptions(), lambda: _source(scene, used), began=began)


def _source(scene: Scene, used: Used) -> EpochSource:
    from torchrelay.runners.serving.epochs import EpochSource

    where = followed(scene.request, used)
    return EpochSource(used.path, where, lambda opened: served_of(scene, used, opened), say)


def followed(request: Request, used: Used) -> str:
    """The epoch to serve: with `--watch` what is newest or best, else the very one that was found."""
    wish = request.epoch or "last"
    if request.serve is None or not request.serve.watch:
        return used.name
    if wish not in ("last", "best"):
        raise UsageError(f"--watch follows last or best: leave --epoch {wish:.40} out")
    return wish


def served_of(scene: Scene, used: Used, opened: Checkpoint) -> Served:
    """An epoch in a new object of the program: one that is served is never written to."""
    from torchrelay.runners.serving.models import noted_signature
    from torchrelay.runners.serving.program_handler import ProgramHandler
    from torchrelay.runners.serving.served import Served

    program = scene.made()
    set_seed(program.seed)
    opened.load_saved({"model": program.model})
    return Served(
        used.run,
        ProgramHandler(program),
        opened.epoch,
        opened.branch,
        used.code_id,
        noted_signature(Path(used.path)),
        opened.entry.try_name,
        {"metrics": dict(opened.metrics)},
    )


def leave_with_parent(stop: Callable[[], None]) -> None:
    """Have this process leave when the one that started it is gone: nobody else knows of it."""
    parent = os.getppid()

    def look() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(_LOOK_SECS)
        stop()

    threading.Thread(target=look, name="torchrelay serve parent", daemon=True).start()
