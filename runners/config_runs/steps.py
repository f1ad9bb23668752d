"""The five steps of a profile as base classes, and saves from user-written training loops.

    class Startup(torchrelay.lifecycle.Startup):
        def start(self, context):
            super().start(context)
            context.phases["phase1"].model.reset()

The class of a step is created with the context or without arguments, and its method is called once.
PaddleRec's method names (`instance build_network startup run terminal`) work too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

from torch import nn

from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.load.open import place_of, read_log
from torchrelay.checkpoint.log.view import whole_epochs
from torchrelay.errors import SaveFailedError, UnknownEpochError, UsageError
from torchrelay.jobs.config.schema import Dataset, Phase
from torchrelay.jobs.data.data_parallel import data_parallel
from torchrelay.jobs.data.loader import EpochLoader
from torchrelay.jobs.random import seed
from torchrelay.jobs.session import Peers, decide
from torchrelay.metadata.handlers import SeveralHandlers
from torchrelay.runners.config_runs.context import PhaseScope, PhaseState, StepContext
from torchrelay.runners.config_runs.evaluation import chosen_epochs, infer_epochs, load_weights
from torchrelay.runners.config_runs.processes import session_on
from torchrelay.runners.config_runs.selection import (
    device_of,
    optimizer_path,
    phases_of,
    reader_path,
    validation_dataset,
    weights_place,
)
from torchrelay.runners.config_runs.training import inference_export, train_job, with_onnx
from torchrelay.runners.config_runs.user_objects import (
    SlotReader,
    growing_loader,
    made,
    made_dataset,
    made_model,
    made_optimizer,
    made_scheduler,
    sample_error,
    scheduled_by_epoch,
)
from torchrelay.runners.distributed.launcher import read_launch_env
from torchrelay.runners.monitoring.console import print_line
from torchrelay.runners.remote_runs.names import is_remote
from torchrelay.runners.training.job_runner import JobRunner
from torchrelay.runners.training.startup import bind_for_load

_SAVER, _LAST = "saver of an own loop", "last epoch of an own loop"
_WAIT_SECS = 10.0


def save_epoch(context: StepContext, epoch: int) -> None:
    """Commit the current state of the context's job as an epoch. Raises UsageError, SaveFailedError."""
    if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
        raise UsageError(f"invalid epoch={epoch!r:.60}: expected the number of finished epochs")
    session, saver = context.session, context.get(_SAVER)
    with _waiting(epoch, session.peers):
        epochs = session.peers.exchange("epoch of self.save", epoch)
    if saver is None:
        context[_LAST] = decide(session.peers, "epochs before", lambda: _newest(context.run_dir))
    last = context[_LAST]
    if last is not None and last >= min(epochs):
        raise UsageError(
            f"{context.run_dir} already has epoch {last}, so epoch {min(epochs)} cannot be saved: load that "
            "epoch and count from there"
        )
    if saver is None:
        saver = context[_SAVER] = JobRunner(context.job, context.run_dir, **context.job_options)
        session.place(context.job.nodes())
        bind_for_load(context.job, session, [blob.name for blob in context.job.blobs])
    if not saver.save_checkpoints(epoch, session):
        raise SaveFailedError(f"epoch {epoch} was not saved in {context.run_dir}; see the warning above")
    context[_LAST] = epoch


@contextmanager
def _waiting(epoch: int, peers: Peers) -> Iterator[None]:
    """Warn after a while that other processes have not arrived at the same call."""
    text = f"torchrelay: rank {peers.rank} waits in self.save({epoch}): all ranks must call it\n"
    timer = Timer(_WAIT_SECS, lambda: sys.stderr.write(text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _newest(run_dir: str) -> int | None:
    """Return the newest epoch of a local run, None if there is none; a remote run checks when it saves."""
    if is_remote(run_dir) or not (Path(run_dir) / "checkpoints").is_dir():
        return None
    try:
        found = whole_epochs(read_log(place_of(run_dir)), None)
    except UnknownEpochError:  # created, but nothing is committed yet
        return None
    return found[0].position.epoch if found else None


class Step:
    """Base class of all steps, created with the context of their profile."""

    def __init__(self, context: StepContext | None = None) -> None:
        self.context = context


class Instance(Step):
    """Environment and processes: sets `session`, `device` and the seed."""

    def setup(self, context: StepContext) -> None:
        """Choose the device, connect the processes, seed. Raises UsageError for contradicting options."""
        seed(context.settings.seed)
        device = device_of(context.runner, read_launch_env().local_rank)
        context.session = session_on(device)
        context.device = context.session.device


class Network(Step):
    """Models, data and optimizers: sets `phases`, and `job` if the profile trains."""

    def build(self, context: StepContext) -> None:
        """Build each phase in order, then the job."""
        pairs = phases_of(context.settings, context.runner)
        if not pairs:
            raise UsageError(f"runner.{context.runner_name} has no phase, so there is nothing to run")
        prefixed = len(pairs) > 1
        context.phases = {
            phase.name: self.build_phase(context, phase, dataset, f"{phase.name}/" if prefixed else "")
            for phase, dataset in pairs
        }
        if not context.is_infer:
            context.job = train_job(context)

    def build_phase(
        self, context: StepContext, phase: Phase, dataset: Dataset | None, prefix: str
    ) -> PhaseState:
        """Build one phase: model on the device, data, optimizer; `prefix` precedes metric names."""
        train = not context.is_infer
        model = self.build_model(context, phase)
        model.to(context.device)
        trained = self.build_trained(context, model)
        loader = self.build_loader(context, phase, dataset)
        optimizer = self.build_optimizer(context, model) if train else None
        state = PhaseState(
            name=phase.name,
            keys=phase,
            model=model,
            trained=trained,
            loader=loader,
            scope=PhaseScope(context.session.workspace(), phase.name),
            prefix=prefix,
            optimizer=optimizer,
            scheduler=None if optimizer is None else self.build_scheduler(context, optimizer),
            scheduled_by_epoch=scheduled_by_epoch(context.settings.hyper_parameters.optimizer),
        )
        held_out = validation_dataset(context.settings, phase) if train else None
        if held_out is not None:
            measured = self.build_loader(context, replace(phase, shuffle_filelist=False), held_out)
            only = phase.validation.metrics if phase.validation is not None else None
            state.validation = replace(state, loader=measured, prefix=f"{prefix}val/", metrics=only)
        return state

    def build_model(self, context: StepContext, phase: Phase) -> nn.Module:
        """Build the model of a phase by its class; `verify --replay` uses this method too."""
        kind = context.classes.of(phase.model)
        hyper_parameters = context.config.section("hyper_parameters")
        train = not context.is_infer
        return made_model(kind, hyper_parameters, train=train, what=f"phase.{phase.name}.model")

    def build_trained(self, context: StepContext, model: nn.Module) -> nn.Module:
        """Return the model as training calls it; by default DDP on several ranks. The optimizer comes later.

        Override it to compile or shard the model (`fully_shard`, `parallelize_module`). Changes in place also
        apply when the model is evaluated; `infer` calls this method as well.
        """
        return model if context.is_infer else data_parallel(model)

    def build_loader(self, context: StepContext, phase: Phase, dataset: Dataset | None) -> EpochLoader:
        """Return the data of a phase, in input order or shuffled per epoch by `shuffle_filelist`."""
        path = None if dataset is None else reader_path(dataset)
        if dataset is None or (path is None and not (dataset.sparse_slots or dataset.dense_slots)):
            key = "dataset_name`" if dataset is None else f"data_converter` of dataset `{dataset.name}`"
            slots = (
                "" if dataset is None else " (or `sparse_slots` and `dense_slots`, for lines of `slot:value`)"
            )
            raise UsageError(f"phase.{phase.name}: `{key}{slots} is missing, so its data cannot be read")
        kind = SlotReader if path is None else context.classes.of(path)
        reader = made(kind, dataset)
        options: dict[str, Any] = {
            "seed": context.settings.seed,
            "shuffle": phase.shuffle_filelist and not context.is_infer,
            "collate": getattr(reader, "collate", None),
            "num_workers": phase.thread_num if phase.thread_num > 1 else 0,
            "sample_error": partial(sample_error, dataset),
        }
        grows = dataset.grows or context.runner.epochs_per_partition is not None
        if grows and not context.is_infer:
            return growing_loader(kind, dataset, context.workspace, context.runner, options)
        return EpochLoader(made_dataset(reader, dataset), dataset.batch_size, **options)

    def build_optimizer(self, context: StepContext, model: Any) -> Any:
        """Return the configured optimizer over all parameters of the model."""
        path = optimizer_path(context.settings)
        own = None if path is None else context.classes.of(path)
        return made_optimizer(model, context.settings.hyper_parameters.optimizer, own)

    def build_scheduler(self, context: StepContext, optimizer: Any) -> Any:
        """Return the configured schedule, else None. It is saved as `<phase>.scheduler`.

        It steps after every optimizer step; with `per: epoch` in the configuration after every epoch.
        """
        return made_scheduler(optimizer, context.settings.hyper_parameters.optimizer)


class Startup(Step):
    """Initial values; sets `epochs` for `infer`."""

    def start(self, context: StepContext) -> None:
        """Train: load `init_model_path` if the run is new, never on resume. Infer: choose epochs."""
        if context.is_infer:
            peers = context.session.peers
            found, said = decide(
                peers, "epochs", lambda: list(chosen_epochs(context.runner, context.run_dir))
            )
            if said and peers.rank == 0:
                print_line(f"{context.runner_name}: {said}")
            context.epochs = tuple(found)
            return
        where, epoch = weights_place(context.runner)
        if where is None:
            return

        def exact_epoch() -> str:
            if Path(where).is_file():
                return "last"
            opened = open_checkpoint(where, epoch="last" if epoch is None else epoch)
            return f"{opened.epoch},branch={opened.branch}"

        def warm_start() -> None:
            peers = context.session.peers
            chosen = decide(peers, "warm start", exact_epoch)  # the run there may be training
            for phase in context.phases.values():
                found = load_weights(phase, context.settings, context.runner, where, chosen)
                if peers.rank == 0:
                    said = f"warm start: {len(found.loaded)} leaves of {found.upstream}"
                    print_line(f"{context.runner_name} {phase.name}: {said}", required=False)

        context.job.init(warm_start)


class Runner(Step):
    """The main work; sets `result`."""

    def loop(self, context: StepContext) -> None:
        """Train the job to its end, or evaluate each epoch."""
        if context.is_infer:
            context.result = infer_epochs(context)
            return
        for phase in context.phases.values():  # reading its data in an earlier step is not training
            phase.loader.load_state_dict({**phase.loader.state_dict(), "samples_done": 0})
        export = inference_export(context.runner, context.run_dir, list(context.phases))
        options = with_onnx(context.job_options, context)
        if export is not None:
            there = options.get("metadata_handler")
            options["metadata_handler"] = export if there is None else SeveralHandlers([there, export])
        runner = JobRunner(context.job, context.run_dir, **options)
        context.result = result = runner.train(context.session)
        if export is not None and result.status == "FINISHED":
            decide(context.session.peers, "inference export", lambda: export.finish(int(result)))

    def save(self, epoch: int, context: StepContext, _is_fleet: bool = False) -> None:
        """Commit the phases as an epoch of the run, from your own training loop; all processes call it.

        `infer` and all inspection commands find the epoch. Retention (`keep_last`, ...) applies. PaddleRec's
        third argument is accepted and ignored.

        Args:
            epoch: Number of finished epochs; higher than in the previous call.
            context: The context of the steps.

        Raises:
            UsageError: The profile infers, or the run already has this epoch or a later one.
            SaveFailedError: The save failed; a warning gives the reason.
        """
        if context.is_infer:
            raise UsageError(f"runner.{context.runner_name} infers, so it has no run to save an epoch in")
        save_epoch(context, epoch)


class Terminal(Step):
    """Final work; by default nothing. Processes and groups are released afterwards."""

    def finish(self, context: StepContext) -> None:
        """Do nothing; override it to upload or notify. Called in every process."""
