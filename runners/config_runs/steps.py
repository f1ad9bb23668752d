"""The five steps of a profile as classes to derive from, and epochs of a loop of the user's own.

    class Startup(torchrelay.lifecycle.Startup):
        def start(self, context):
            super().start(context)
            context.phases["phase1"].model.reset()

A step takes the context when it is made, or nothing; its method is called once. A step with PaddleRec's name
of the method (`instance build_network startup run terminal`) is called by that.
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
from torchrelay.runners.config_runs.evaluation import agreed_epochs, infer_epochs, load_weights
from torchrelay.runners.config_runs.growing_data import growing_loader
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
    made,
    made_dataset,
    made_model,
    made_optimizer,
    made_scheduler,
    sample_error,
    scheduled_by_epoch,
)
from torchrelay.runners.distributed.environment import read_launch_env
from torchrelay.runners.remote_runs.names import is_remote
from torchrelay.runners.training.job_runner import JobRunner
from torchrelay.runners.training.startup import bind_for_load

_SAVER, _LAST = "saver of an own loop", "last epoch of an own loop"
_WAIT_SECS = 10.0


def save_epoch(context: StepContext, epoch: int) -> None:
    """Commit what the job of a context holds now. Raises UsageError and SaveFailedError."""
    if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
        raise UsageError(f"epoch={epoch!r:.60} is no number of an epoch: give k behind k epochs")
    session, saver = context.session, context.get(_SAVER)
    with _waiting(epoch, session.peers):
        told = session.peers.exchange("epoch of self.save", epoch)
    if saver is None:
        context[_LAST] = decide(session.peers, "epochs before", lambda: _newest(context.run_dir))
    last = context[_LAST]
    if last is not None and last >= min(told):
        raise UsageError(
            f"{context.run_dir} has epoch {last} already, so epoch {min(told)} cannot be saved behind it: "
            "load it and count on from there, or give another save_checkpoint_path"
        )
    if saver is None:
        saver = context[_SAVER] = JobRunner(context.job, context.run_dir, **context.job_options)
        session.place(context.job.nodes())
        bind_for_load(context.job, session, [blob.name for blob in context.job.blobs])
    if not saver.save_checkpoints(epoch, session):
        raise SaveFailedError(f"epoch {epoch} was not saved in {context.run_dir}: the warning says why")
    context[_LAST] = epoch


@contextmanager
def _waiting(epoch: int, peers: Peers) -> Iterator[None]:
    """Say it where other processes do not come: they wait for this one in a collective, or never call it."""
    text = f"torchrelay: rank {peers.rank} waits for the others in self.save({epoch}): all ranks call it\n"
    timer = Timer(_WAIT_SECS, lambda: sys.stderr.write(text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _newest(run_dir: str) -> int | None:
    """The newest epoch of a run on this machine, None where there is none; a store tells when it saves."""
    if is_remote(run_dir) or not (Path(run_dir) / "checkpoints").is_dir():
        return None
    try:
        found = whole_epochs(read_log(place_of(run_dir)), None)
    except UnknownEpochError:  # made, and nothing is committed yet
        return None
    return found[0].position.epoch if found else None


class Step:
    """What all steps are: made with the context of their profile."""

    def __init__(self, context: StepContext | None = None) -> None:
        self.context = context


class Instance(Step):
    """Environment and processes: sets `session` and `device`, and the seed."""

    def setup(self, context: StepContext) -> None:
        """Choose the device, meet the other processes, seed. UsageError for demands that contradict."""
        seed(context.settings.seed)
        device = device_of(context.runner, read_launch_env().local_rank)
        context.session = session_on(device)
        context.device = context.session.device


class Network(Step):
    """Models, data and optimizers: sets `phases`; where a profile trains, `job` too."""

    def build(self, context: StepContext) -> None:
        """Build each phase in order, then the job."""
        pairs = phases_of(context.settings, context.runner)
        if not pairs:
            raise UsageError(f"runner.{context.runner_name} has no phase: there is nothing to run")
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
        """One phase: its model on the device, its data, its optimizer; `prefix` is for its metrics."""
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
        """The model of a phase, by its class alone; `verify --replay` makes it anew by this, too."""
        kind = context.classes.of(phase.model)
        hyper_parameters = context.config.section("hyper_parameters")
        train = not context.is_infer
        return made_model(kind, hyper_parameters, train=train, what=f"phase.{phase.name}.model")

    def build_trained(self, context: StepContext, model: nn.Module) -> nn.Module:
        """The model as training calls it: in DDP on several ranks. Asked before the optimizer is made.

        Here it is compiled, or sharded (`fully_shard`, `parallelize_module`: in place, returned as it is).
        What is done in place holds where it is evaluated, too; `infer` asks as well.
        """
        return model if context.is_infer else data_parallel(model)

    def build_loader(self, context: StepContext, phase: Phase, dataset: Dataset | None) -> EpochLoader:
        """The data of a phase, in the input's order unless `shuffle_filelist` draws another per epoch."""
        path = None if dataset is None else reader_path(dataset)
        if dataset is None or (path is None and not (dataset.sparse_slots or dataset.dense_slots)):
            key = "dataset_name`" if dataset is None else f"data_converter` of dataset `{dataset.name}`"
            slots = (
                "" if dataset is None else " (or `sparse_slots` and `dense_slots`, for lines of `slot:value`)"
            )
            raise UsageError(f"phase.{phase.name}: `{key}{slots} missing, so nobody reads its data")
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
        """The optimizer of the configuration over all of the model's parameters."""
        path = optimizer_path(context.settings)
        own = None if path is None else context.classes.of(path)
        return made_optimizer(model, context.settings.hyper_parameters.optimizer, own)

    def build_scheduler(self, context: StepContext, optimizer: Any) -> Any:
        """The schedule of the configuration, else None. It is saved as `<phase>.scheduler`.

        It is stepped behind every step of the optimizer; one of the configuration with `per: epoch` behind
        every epoch.
        """
        return made_scheduler(optimizer, context.settings.hyper_parameters.optimizer)


class Startup(Step):
    """Initial values; for `infer` it sets `epochs`."""

    def start(self, context: StepContext) -> None:
        """Train: `init_model_path` is loaded when the run is fresh, never on resume. Infer: choose epochs."""
        if context.is_infer:
            context.epochs = agreed_epochs(context)
            return
        where, epoch = weights_place(context.runner)
        if where is None:
            return

        def warm_start() -> None:
            for phase in context.phases.values():
                load_weights(
                    phase, context.settings, context.runner, where, "last" if epoch is None else epoch
                )

        context.job.init(warm_start)


class Runner(Step):
    """The work: sets `result`."""

    def loop(self, context: StepContext) -> None:
        """Train the job to its end, or evaluate each epoch."""
        if context.is_infer:
            context.result = infer_epochs(context)
            return
        for phase in context.phases.values():  # a look at its data, in a step before, is no training
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
        """Commit the phases as an epoch of the run, from a loop of your own; all processes call it.

        `infer`, and every command that looks at runs, finds it. What thins epochs (`keep_last` and its like)
        applies. The third argument of PaddleRec's `save` is taken, and changes nothing.

        Args:
            epoch: Its number, k behind k epochs; each is higher than the one before.
            context: That of the steps.

        Raises:
            UsageError: The profile infers, or the run has this epoch, or a later one, already.
            SaveFailedError: It could not be saved; a warning has said why.
        """
        if context.is_infer:
            raise UsageError(f"runner.{context.runner_name} infers: there is no run to save an epoch in")
        save_epoch(context, epoch)


class Terminal(Step):
    """What comes after the work; by default nothing. Processes and groups are let go of behind it."""

    def finish(self, context: StepContext) -> None:
        """Do nothing: here is the place to upload or to tell somebody. Called in every process."""
