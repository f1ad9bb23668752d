"""The job of a training profile: one task per phase and epoch, step measurements, and exports.

`InferenceExport` writes `<path>/<epoch>/<phase>.safetensors` per phase with the names of the model's
`state_dict`. It exports the committed epoch, never live objects. As a metadata handler of the run it is
called again for epochs that a crash left out. A failed export is a warning; the epoch stays saved.

`debug` profiles the first steps of each launch on rank 0, as PaddleRec does for its queue datasets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.files.blob_files import save_blobs
from torchrelay.checkpoint.files.interop import export_checkpoint
from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.storage.open import Tier, joined
from torchrelay.errors import UsageError
from torchrelay.jobs.config.schema import RunnerSection
from torchrelay.jobs.data.loader import EpochLoader
from torchrelay.jobs.job import Job
from torchrelay.jobs.session import warn
from torchrelay.jobs.stop import early_stopping, max_epochs, max_steps, max_time
from torchrelay.jobs.task import Task
from torchrelay.metadata.fs import append_lines
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.context import PhaseState, StepContext
from torchrelay.runners.config_runs.evaluation import Tally, evaluation, log_tally, metrics_of, moved_batch
from torchrelay.runners.config_runs.selection import MODEL, keeping, phases_of, reader_path
from torchrelay.runners.config_runs.user_objects import GrowingLoader, ends_of_data, made, made_dataset
from torchrelay.runners.monitoring.console import print_line
from torchrelay.runners.remote_runs.names import is_remote
from torchrelay.runners.session.context import Context


@dataclass(frozen=True)
class InferenceExport:
    """Metadata handler that exports the weights of every `every`-th epoch and of the last one."""

    run_dir: str
    path: Path
    phases: Sequence[str]
    every: int

    def set_params(self, *_: Any, **__: Any) -> None:
        """Do nothing: the run directory is known."""

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """Return the user's choice; this handler never decides on a resume."""
        return user_epoch

    def write(self, epoch: int) -> None:
        """Export a saved epoch if it is due. Raises the errors of the export."""
        if epoch and epoch % self.every == 0:
            self.export(epoch)

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Do nothing."""

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Return True: saves do not depend on this handler."""
        return True

    def export(self, epoch: int) -> None:
        """Write the models of an epoch, replacing files of an abandoned branch."""
        for phase in self.phases:
            target = self.path / str(epoch) / f"{phase}.safetensors"
            target.parent.mkdir(parents=True, exist_ok=True)
            model = f"{phase}.{MODEL}"
            export_checkpoint(self.run_dir, target, epoch, blobs=[model], prefix=f"{model}.", overwrite=True)

    def finish(self, epoch: int) -> None:
        """Export the last epoch unless the interval did so."""
        if epoch and epoch % self.every:
            self.export(epoch)


def local_beside(given: str | None, run_dir: str, name: str, key: str) -> Path:
    """Return the directory for more files of a run, by default in it; UsageError for a remote run."""
    if given is None and is_remote(run_dir):
        raise UsageError(
            f"`{key}` is missing: the run is remote ({run_dir}), and these files need a local directory"
        )
    return Path(given or f"{run_dir}/{name}")


def inference_export(runner: RunnerSection, run_dir: str, phases: Sequence[str]) -> InferenceExport | None:
    """Return the configured export, else None. The default interval is every epoch."""
    if runner.save_inference_path is None and runner.save_inference_interval is None:
        return None
    path = local_beside(runner.save_inference_path, run_dir, "inference", "save_inference_path")
    begun = is_remote(run_dir) or Path(run_dir, "checkpoints", "log").exists()
    if runner.save_inference_path is not None and not begun and any(path.glob("*/*.safetensors")):
        warn(
            f"runner.{runner.name}.save_inference_path: this run replaces files of an earlier run in {path}; "
            "remove the key to keep exports in each run"
        )
    return InferenceExport(run_dir, path, phases, runner.save_inference_interval or 1)


def first_batch(context: StepContext, phase: str) -> tuple[Any]:
    """Return the model's call arguments from the first batch; raises UsageError without data."""
    pairs = phases_of(context.settings, context.runner)
    dataset = next(found for one, found in pairs if one.name == phase)
    path = None if dataset is None else reader_path(dataset)
    if dataset is None or path is None:
        raise UsageError(f"phase.{phase} has no data to take example inputs from: pass --input")
    reader = made(context.classes.of(path), dataset)
    collate = getattr(reader, "collate", None)
    batches = EpochLoader(made_dataset(reader, dataset), dataset.batch_size, shuffle=False, collate=collate)
    return (next(iter(batches)).data,)


def with_onnx(options: Mapping[str, Any], context: StepContext) -> dict[str, Any]:
    """Add an `OnnxExport` for each phase to JobRunner's options.

    A file is named `model` if there is one phase, else after the phase. Its inputs are the parts of a batch
    that the outputs depend on. Raises UsageError if the package onnx is missing.
    """
    keys = context.runner.onnx
    if keys is None:
        return dict(options)
    from torchrelay.runners.training.extras.onnx_export import OnnxExport

    alone = len(context.phases) == 1
    made = [
        OnnxExport(
            phase.model,
            partial(first_batch, context, name),
            keys.every,
            keys.best,
            name="model" if alone else name,
            options={"drop_unused": True},
        )
        for name, phase in context.phases.items()
    ]
    return {**options, "exports": [*options.get("exports", ()), *made]}


_MILLI = 1000.0


@dataclass
class Meter:
    """Measure a loop over batches; `step` returns a line every `interval` steps. Seconds of this process.

    Samples are estimated for all ranks: the own number times the number of ranks.
    """

    interval: int
    ranks: int = 1
    steps: int = 0
    _since: float = 0.0
    _data_secs: float = 0.0
    _samples: int = 0

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Iterate over the batches; waiting for them counts as data time."""
        self._begin()
        for secs, batch in _timed(batches):
            self._data_secs += secs
            yield batch

    def step(self, samples: int, values: Mapping[str, Any]) -> str | None:
        """Count a step; return the line if one is due. `values` are read only then."""
        self.steps += 1
        self._samples += samples * self.ranks
        if self.steps % self.interval:
            return None
        shown = [f"{name} {float(value):.6g}" for name, value in values.items()]  # waits for the device
        secs = max(time.perf_counter() - self._since, 1e-9)
        timing = (
            f"{secs / self.interval * _MILLI:.2f} ms/step, "
            f"data {self._data_secs / self.interval * _MILLI:.2f} ms, {self._samples / secs:.0f} samples/s"
        )
        self._begin()
        return ", ".join([*shown, timing])

    def _begin(self) -> None:
        self._since, self._data_secs, self._samples = time.perf_counter(), 0.0, 0


def _timed(batches: Iterable[Any]) -> Iterator[tuple[float, Any]]:
    """Yield the batches, each with the seconds that it was waited for."""
    source = iter(batches)
    while True:
        asked = time.perf_counter()
        try:
            batch = next(source)
        except StopIteration:
            return
        yield time.perf_counter() - asked, batch


_SHOWN = 15
_US_PER_MS = 1e-3
_PERCENT = 100.0


def watched(batches: Iterable[Any], steps: int, tell: Callable[[str], None]) -> Iterator[Any]:
    """Iterate over the batches; profile the first `steps` of them and pass report lines to `tell`."""
    source, data_secs, taken = _timed(batches), 0.0, 0
    known = torch.profiler.ProfilerActivity
    activities = [known.CPU, *([known.CUDA] if torch.cuda.is_available() else [])]
    profiler = torch.profiler.profile(activities=activities, acc_events=True)
    began = time.perf_counter()
    profiler.start()
    try:
        for waited, batch in islice(source, steps):
            data_secs += waited
            taken += 1
            yield batch
    finally:
        profiler.stop()
        secs = time.perf_counter() - began
        for line in _lines(profiler.key_averages(), taken, data_secs / max(secs, 1e-9)):
            tell(line)
    yield from (batch for _, batch in source)


def _lines(rows: Iterable[Any], steps: int, share_of_data: float) -> Iterator[str]:
    """Yield a summary, then one line for each of the most expensive operators (own time in ms)."""
    # Device time if there is any, else CPU time.
    secs = [(row.self_device_time_total or row.self_cpu_time_total, row.key, row.count) for row in rows]
    costs = sorted(((float(us) * _US_PER_MS, name, count) for us, name, count in secs), reverse=True)
    total = max(sum(cost for cost, _, _ in costs), 1e-9)
    yield f"{steps} steps: operators {total:.3f} ms, data {_PERCENT * share_of_data:.1f} % of the time"
    for cost, name, count in costs[:_SHOWN]:
        yield f"  {name}: {cost:.3f} ms, {_PERCENT * cost / total:.1f} %, {count} calls"


def train_job(context: StepContext) -> Job:
    """Build the job of the context's phases: blobs, a task for each, the configured stop conditions."""
    job = Job(context.runner_name)
    for phase in context.phases.values():
        job.blobs.add(phase.blobs())
        Task(phase_task(context, phase), group=job.epoch_group, name=phase.name)
        if phase.validation is not None and (said := phase.keys.validation) is not None:
            measure = evaluation(context, phase.validation)
            Task(measure, group=job.epoch_group, name=f"{phase.name}.validation", every=said.every)
    stop, epochs, ends = context.runner.stop, context.runner.max_epochs, list[Any]()
    ends += [] if epochs is None else [max_epochs(epochs)]
    if stop is not None:
        ends += [] if stop.max_steps is None else [max_steps(stop.max_steps)]
        ends += [] if stop.max_time is None else [max_time(stop.max_time)]
        ends += [] if stop.early_stopping is None else [early_stopping(**vars(stop.early_stopping))]
    job.stop_when(*ends, *ends_of_data(context))
    return job


def runner_options(runner: RunnerSection, where: str) -> dict[str, Any]:
    """Return JobRunner's options of a profile whose run is at `where`."""
    found = keeping(runner) | {"on_crash": runner.on_crash}
    signal = runner.save_signal
    if runner.time_limit is not None:
        found["time_limit"] = runner.time_limit
    if (checkpoint := runner.checkpoint) is not None:
        found |= {"include": checkpoint.include, "exclude": checkpoint.exclude}
        found |= {"asynchronous": checkpoint.asynchronous, "max_failed_saves": checkpoint.max_failed_saves}
        found |= {"compare_every": checkpoint.compare_every, "rename": checkpoint.rename}
        found |= {"resume_exclude": checkpoint.resume_exclude, "resume_strict": checkpoint.resume_strict}
        if checkpoint.near is not None:  # each run has a directory of its own below it
            own = f"{runner.name}-{sha256(where.encode())[:12]}"
            lag = {} if checkpoint.lag is None else {"lag": checkpoint.lag}
            found["tier"] = Tier(joined(checkpoint.near, own), **lag)
    kept = {name: one for name, one in found.items() if one is not None or name == "best"}
    return kept | {"save_signal": None if signal == "none" else signal}


def phase_task(context: StepContext, phase: PhaseState) -> Callable[[Context], None]:
    """Return the task that trains a phase for one epoch."""
    unwatched = context.settings.debug

    def train(ctx: Context) -> None:
        nonlocal unwatched
        phase.trained.train()
        interval = context.runner.print_interval
        name = f"{context.runner_name} epoch {ctx.epoch} {phase.name}"
        meter, tally = Meter(interval, phase.loader.world), Tally(phase.model)
        if isinstance(phase.loader, GrowingLoader):
            phase.loader.look(ctx.session.peers)
        batches = ctx.steps(phase.loader)
        if unwatched and ctx.rank == 0:  # the first steps of this start
            unwatched = False
            batches = watched(
                batches, interval, lambda line: print_line(f"{name} debug {line}", required=False)
            )
        for batch in meter.over(batches):
            values = train_step(phase, ctx, batch, tally)
            line = meter.step(batch.count, values)
            if line is not None and ctx.rank == 0:
                print_line(f"{name} step {ctx.step}: {line}", required=False)
            if ctx.rank == 0:
                _keep(context, phase, ctx, values)
        log_tally(phase, ctx, tally)
        phase.step_scheduler(epoch=True)

    return train


def train_step(phase: PhaseState, ctx: Context, batch: Any, tally: Tally) -> dict[str, torch.Tensor]:
    """Run forward, backward and one optimizer step; return logged values by the model's names."""
    moved = moved_batch(batch, ctx.device)
    outputs = phase.trained(moved)
    loss = phase.model.loss(outputs, moved)  # type: ignore[operator]
    if phase.optimizer is not None:
        phase.optimizer.zero_grad()
        (loss * batch.weight).backward()
        phase.optimizer.step()
        phase.step_scheduler(epoch=False)
    tally.add(outputs, moved)
    values = {"loss": loss.detach(), **metrics_of(phase, outputs, moved)}
    for name, value in values.items():
        ctx.log(f"{phase.prefix}{name}", value, weight=phase.weight(batch.count, ctx.world_size))
    return values


def _keep(context: StepContext, phase: PhaseState, ctx: Context, values: Mapping[str, Any]) -> None:
    """Write results of a step, and weights at steps; on rank 0 only."""
    runner = context.runner
    if runner.runner_result_dump_path is not None:
        path = Path(runner.runner_result_dump_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        shown = {name: float(value) for name, value in values.items()}
        append_lines(path, {"epoch": ctx.epoch, "phase": phase.name, "step": ctx.step, **shown})
    if runner.save_step_interval is not None and ctx.step % runner.save_step_interval == 0:
        folder = local_beside(runner.save_step_path, context.run_dir, "steps", "save_step_path")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"epoch_{ctx.epoch}_step_{ctx.step}.safetensors"
        save_blobs(folder / name, phase.blobs(), overwrite=True)
