"""The job of a profile that trains: a task per phase and epoch, and what is measured of its steps.

PaddleRec prints this for its queue datasets; here every phase has it, once per start, in rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.files.blob_files import save_blobs
from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.storage.open import Tier, joined
from torchrelay.jobs.config.runner_schema import CheckpointKeys
from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys
from torchrelay.jobs.job import Job
from torchrelay.jobs.stop import early_stopping, max_epochs, max_steps, max_time
from torchrelay.jobs.task import Task
from torchrelay.metadata.fs import append_line
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.context import PhaseState, StepContext
from torchrelay.runners.config_runs.evaluation import Tally, evaluation, log_tally, metrics_of, moved_batch
from torchrelay.runners.config_runs.exports import local_beside
from torchrelay.runners.config_runs.growing_data import ends_of_data, look
from torchrelay.runners.config_runs.selection import keeping
from torchrelay.runners.session.context import Context

_MILLI = 1000.0


@dataclass
class Meter:
    """Measures a loop over batches; `line` is due every `interval` steps. Seconds, of this process.

    `samples` are those of all ranks, as far as this one knows: its own times their number.
    """

    interval: int
    ranks: int = 1
    clock: Callable[[], float] = time.perf_counter
    steps: int = 0
    _since: float = 0.0
    _data_secs: float = 0.0
    _samples: int = 0
    _values: dict[str, Any] = field(default_factory=dict)

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches; what they take to come counts as data time."""
        source = iter(batches)
        self._begin()
        while True:
            asked = self.clock()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._data_secs += self.clock() - asked
            yield batch

    def step(self, samples: int, values: Mapping[str, Any]) -> str | None:
        """Count a step; the line where one is due. `values` are looked at only then."""
        self.steps += 1
        self._samples += samples * self.ranks
        if self.steps % self.interval:
            return None
        text = self._text(values)
        self._begin()
        return text

    def _begin(self) -> None:
        self._since, self._data_secs, self._samples = self.clock(), 0.0, 0

    def _text(self, values: Mapping[str, Any]) -> str:
        shown = [f"{name} {float(value):.6g}" for name, value in values.items()]  # waits for the device
        secs = max(self.clock() - self._since, 1e-9)
        each = secs / self.interval
        timing = (
            f"{each * _MILLI:.2f} ms/step, data {self._data_secs / self.interval * _MILLI:.2f} ms, "
            f"{self._samples / secs:.0f} samples/s"
        )
        return ", ".join([*shown, timing])


_SHOWN = 15
_US_PER_MS = 1e-3
_PERCENT = 100.0


def watched(batches: Iterable[Any], steps: int, tell: Callable[[str], None]) -> Iterator[Any]:
    """The batches; torch's profiler looks at the first `steps` of them, then `tell` gets lines about it."""
    source, data_secs, taken = iter(batches), 0.0, 0
    profiler = torch.profiler.profile(activities=_activities(), acc_events=True)
    began = time.perf_counter()
    profiler.start()
    try:
        while taken < steps:
            asked = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                break
            data_secs += time.perf_counter() - asked
            taken += 1
            yield batch
    finally:
        profiler.stop()
        secs = time.perf_counter() - began
        for line in _lines(profiler.key_averages(), taken, data_secs / max(secs, 1e-9)):
            tell(line)
    yield from source


def _activities() -> list[Any]:
    known = torch.profiler.ProfilerActivity
    return [known.CPU, *([known.CUDA] if torch.cuda.is_available() else [])]


def _lines(rows: Iterable[Any], steps: int, share_of_data: float) -> Iterator[str]:
    """A line for all, then one for each of the dearest operators; milliseconds of itself, without callees."""
    costs = sorted(((_cost_ms(row), row.key, row.count) for row in rows), reverse=True)
    total = max(sum(cost for cost, _, _ in costs), 1e-9)
    yield f"{steps} steps: operators {total:.3f} ms, data {_PERCENT * share_of_data:.1f} % of the time"
    for cost, name, count in costs[:_SHOWN]:
        yield f"  {name}: {cost:.3f} ms, {_PERCENT * cost / total:.1f} %, {count} calls"


def _cost_ms(row: Any) -> float:
    """Of the device where it computed, else of the CPU."""
    return float(row.self_device_time_total or row.self_cpu_time_total) * _US_PER_MS


def train_job(context: StepContext) -> Job:
    """The job over the phases of the context: their blobs, a task for each, the ends of the configuration."""
    job = Job(context.runner_name)
    for phase in context.phases.values():
        job.blobs.add(phase.blobs())
        Task(phase_task(context, phase), group=job.epoch_group, name=phase.name)
        if phase.validation is not None and (said := phase.keys.validation) is not None:
            measure = evaluation(context, phase.validation)
            Task(measure, group=job.epoch_group, name=f"{phase.name}.validation", every=said.every)
    job.stop_when(*_ends(context.runner), *ends_of_data(context))
    return job


def _ends(runner: RunnerKeys) -> list[Any]:
    stop, ends = runner.stop, list[Any]()
    if runner.max_epochs is not None:
        ends.append(max_epochs(runner.max_epochs))
    if stop is None:
        return ends
    if stop.max_steps is not None:
        ends.append(max_steps(stop.max_steps))
    if stop.max_time is not None:
        ends.append(max_time(stop.max_time))
    if (early := stop.early_stopping) is not None:
        ends.append(
            early_stopping(early.metric, mode=early.mode, patience=early.patience, min_delta=early.min_delta)  # type: ignore[arg-type]
        )
    return ends


def runner_options(runner: RunnerKeys, where: str) -> dict[str, Any]:
    """What JobRunner is told of the keys of a profile, whose run lies at `where`."""
    found = keeping(runner) | {"on_crash": runner.on_crash}
    signal = runner.save_signal
    if runner.time_limit is not None:
        found["time_limit"] = runner.time_limit
    if (checkpoint := runner.checkpoint) is not None:
        found |= {"include": checkpoint.include, "exclude": checkpoint.exclude}
        found |= {"asynchronous": checkpoint.asynchronous, "max_failed_saves": checkpoint.max_failed_saves}
        found |= {"compare_every": checkpoint.compare_every, "rename": checkpoint.rename}
        found |= {"resume_exclude": checkpoint.resume_exclude, "resume_strict": checkpoint.resume_strict}
        found["tier"] = _tier(checkpoint, runner.name, where)
    kept = {name: one for name, one in found.items() if one is not None or name == "best"}
    return kept | {"save_signal": None if signal == "none" else signal}


def _tier(checkpoint: CheckpointKeys, name: str, where: str) -> Tier | None:
    """The near place of a profile's run: every run has a directory of its own below the one that is given."""
    if checkpoint.near is None:
        return None
    own = f"{name}-{sha256(where.encode())[:12]}"
    lag = {} if checkpoint.lag is None else {"lag": checkpoint.lag}
    return Tier(joined(checkpoint.near, own), **lag)


def phase_task(context: StepContext, phase: PhaseState) -> Callable[[Context], None]:
    """What a phase does in an epoch: a step for each batch."""
    unwatched = context.settings.debug

    def watch(ctx: Context) -> Iterable[Any]:
        """With `debug` the first steps of this start are looked at."""
        nonlocal unwatched
        steps = ctx.steps(phase.loader)
        if not unwatched or ctx.rank != 0:
            return steps
        unwatched = False
        of_what = f"{context.runner_name} epoch {ctx.epoch} {phase.name} debug"
        return watched(steps, context.runner.print_interval, lambda line: print(of_what, line, flush=True))

    def train(ctx: Context) -> None:
        phase.trained.train()
        meter, tally = Meter(context.runner.print_interval, phase.loader.world), Tally(phase.model)
        look(phase, ctx.session.peers)
        for batch in meter.over(watch(ctx)):
            values = train_step(phase, ctx, batch, tally)
            _tell(context, phase, ctx, meter.step(batch.count, values))
            _keep(context, phase, ctx, values)
        log_tally(phase, ctx, tally)
        phase.step_scheduler(epoch=True)

    return train


def train_step(phase: PhaseState, ctx: Context, batch: Any, tally: Tally) -> dict[str, torch.Tensor]:
    """Forward, backward, one step of the optimizer; returns what was logged, by the model's own names."""
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


def _tell(context: StepContext, phase: PhaseState, ctx: Context, line: str | None) -> None:
    if line is not None and ctx.rank == 0:
        print(f"{context.runner_name} epoch {ctx.epoch} {phase.name} step {ctx.step}: {line}", flush=True)


def _keep(context: StepContext, phase: PhaseState, ctx: Context, values: Mapping[str, Any]) -> None:
    """What rank 0 writes beside the epochs: its own batches' results, and weights at steps."""
    if ctx.rank != 0:
        return
    runner = context.runner
    if runner.runner_result_dump_path is not None:
        path = Path(runner.runner_result_dump_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        shown = {name: float(value) for name, value in values.items()}
        append_line(path, {"epoch": ctx.epoch, "phase": phase.name, "step": ctx.step, **shown})
    if runner.save_step_interval is not None and ctx.step % runner.save_step_interval == 0:
        folder = local_beside(runner.save_step_path, context.run_dir, "steps", "save_step_path")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"epoch_{ctx.epoch}_step_{ctx.step}.safetensors"
        save_blobs(folder / name, phase.blobs(), overwrite=True)
