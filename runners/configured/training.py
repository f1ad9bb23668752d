"""`train -m config.yaml`: choose the run, on rank 0 and for all, then run the profile that trains in it."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.config.runner_schema import LOCAL_TRAIN
from torchrelay.jobs.session import Peers, decide
from torchrelay.metadata.experiments import Note
from torchrelay.runners.config_runs.profiles import run_config
from torchrelay.runners.configured.scene import ConfiguredScene, processes
from torchrelay.runners.distributed.environment import read_launch_env
from torchrelay.runners.experiment.base_scene import say
from torchrelay.runners.experiment.choosing_runs import Chosen, Start, choose_to_train
from torchrelay.runners.experiment.launched import is_restart, launch_of
from torchrelay.runners.experiment.making_runs import made_run
from torchrelay.runners.experiment.request import rewind_of
from torchrelay.runners.experiment.training_verb import check_alike
from torchrelay.runners.monitoring.status import standing


def train(scene: ConfiguredScene) -> int:
    """Train, and return the exit code. Raises what choosing and training raise."""
    runner, epoch = scene.runner, rewind_of(scene.request)
    if epoch is not None and runner.kind == LOCAL_TRAIN and not read_launch_env().launched:
        raise UsageError(f"--epoch does not reach the processes of {LOCAL_TRAIN}: start them by torchrun")
    with processes(runner) as peers:
        check_alike(scene.identity, peers)
        start = start_of(scene)
        chosen = Chosen(**decide(peers, "run", lambda: asdict(choose_to_train(start, scene.known()))))
    if chosen.action == "over":
        say(f"run {chosen.run}: finished already ({chosen.reason})")
        return 0
    place = _Place(scene, start, chosen)
    options: dict[str, Any] = {} if epoch is None else {"resume_from_epoch": epoch}
    try:
        done = run_config(
            scene.config,
            [runner.name],
            run_dir=place.make,
            job_options=options,
            strict=scene.request.strict_config,
        )
    except BaseException:
        place.unmake()
        raise
    return done.exit_code


def start_of(scene: ConfiguredScene) -> Start:
    """What this start is, as choices need it."""
    request = scene.request
    rewinds = request.epoch is not None and request.verb == "train"
    run = request.run_id if request.verb == "train" else None
    return Start(
        scene.identity,
        scene.limits(),
        request.force,
        request.retrain,
        rewinds,
        run,
        launch_of(),
        is_restart(),
    )


class _Place:
    """Where the run lies, made when everything that can be wrong beforehand was looked at."""

    def __init__(self, scene: ConfiguredScene, start: Start, chosen: Chosen) -> None:
        self._scene, self._start, self._chosen = scene, start, chosen
        self._new: Path | None = None

    def make(self) -> str:
        """Make the run, on rank 0, and tell all where it is."""
        with processes(self._scene.runner) as peers:
            made = decide(peers, "make the run", lambda: self._made(peers))
        say(made["said"])
        return str(made["path"])

    def unmake(self) -> None:
        """Take a new run away again in which nothing has begun; rank 0 alone has made one."""
        if self._new is not None and standing(self._new).word == "created":
            shutil.rmtree(self._new, ignore_errors=True)
            with suppress(OSError):
                self._new.parent.rmdir()

    def _made(self, peers: Peers) -> dict[str, str]:
        scene, start = self._scene, self._start
        keys = scene.runner.keep_best
        note = Note(
            program=scene.runner.name,
            origin=str(scene.origin.file),
            code_id=start.identity.code_id,
            config_id=start.identity.config_id,
            created=round(time.time(), 3),
            message=scene.request.message,
            launch=start.launch,
            limits=start.limits,
        )
        best = None if keys is None else (keys.metric, keys.mode)
        made = made_run(scene.store, note, self._chosen, best, peers.size)
        if self._chosen.action == "new":
            self._new = Path(made["path"])
        return made
