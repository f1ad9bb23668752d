"""`torchrelay.Program`: base class for user programs that train, test and evaluate."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config, load_config
from torchrelay.jobs.config.interpolation import RunPlace
from torchrelay.jobs.config.schema import RunnerSection
from torchrelay.jobs.job import Job
from torchrelay.jobs.random import seed as set_seed
from torchrelay.jobs.stop import max_epochs, max_steps
from torchrelay.metadata.experiments import metric_rows
from torchrelay.models.package.reader import Package
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.user_objects import on_device
from torchrelay.runners.programs.command_context import BaseCommand
from torchrelay.runners.programs.request import VerbRequest
from torchrelay.runners.programs.run_selection import ProgramOrigin, origin_of
from torchrelay.runners.programs.steps import ProgramSteps
from torchrelay.runners.session.context import Context
from torchrelay.runners.session.local import current_or_new_session
from torchrelay.runners.session.stop_requests import TimeLimit
from torchrelay.runners.training.job_runner import JobRunner
from torchrelay.runners.training.plan import Recipe, RunResult


class Samples(ProgramSteps):
    """Evaluation of samples: `load_sample`, `prepare_sample`, `forward`, `postprocess`, `store_result`."""

    result_suffix: str = ".json"
    """Suffix of result files in a directory of results."""
    batches_samples: bool | None = None
    """True lets the server concatenate prepared samples along the first dimension. None: only if
    `prepare_sample` is not overridden."""

    def load_sample(self, path: Path) -> Any:
        """Load a sample from a file: numbers as text, or JSON. Raises UsageError for anything else.

        A single row of text is a vector, as `[1, 2]` in JSON; several rows are a matrix.
        """
        try:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".json":
                return self._as_inputs(torch.tensor(json.loads(text)))
            rows = [[float(word) for word in line.replace(",", " ").split()] for line in text.splitlines()]
            rows = [row for row in rows if row]
            return torch.tensor(rows[0] if len(rows) == 1 else rows)
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(
                f"{path} does not hold numbers as text or JSON ({error}): override load_sample(self, path)"
            ) from None

    def prepare_sample(self, sample: Any) -> Any:
        """Return the model's inputs for a sample: on the device, as a batch of one."""
        return on_device(sample.unsqueeze(0) if isinstance(sample, torch.Tensor) else sample, self.device)

    def postprocess(self, output: Any) -> Any:
        """Convert the output for a batch of one to a result: its only row."""
        return output[0]

    def store_result(self, result: Any, path: Path) -> None:
        """Write a result as JSON, tensors as lists. The caller publishes the file atomically."""
        path.write_text(json.dumps(_plain(result), indent=1) + "\n", encoding="utf-8")

    def example_inputs(self) -> Any:
        """Return example inputs for `to_onnx`: those of the first batch of a dataset."""
        name = next((one for one in ("test", "val", "train") if one in self.data), "train")
        batch = next(iter(self.make_loader(self.dataset(name), training=False)))
        return (self.prepare(batch)[0],)

    def eval(self, sample: Any) -> Any:
        """Return the result for a sample, or for a file given by its path; without gradients."""
        if isinstance(sample, (str, Path)):
            sample = self.load_sample(Path(sample))
        return self.result_of(sample)

    def result_of(self, sample: Any) -> Any:
        """Return the result for a sample; a text is not taken for a path."""
        with self.evaluating():
            return self.postprocess(self.forward(self.prepare_sample(sample)))

    # For clients of the server

    def decode_sample(self, sent: Any) -> Any:
        """Convert a client's request to a sample: JSON numbers as in a file, tensors unchanged.

        `sent` is JSON, or a dict of tensors by name; the name of a single tensor does not matter. Raises
        ValueError or TypeError for anything else.
        """
        if isinstance(sent, dict):
            named = {name: self.decode_sample(one) for name, one in sent.items()}
            return next(iter(named.values())) if len(named) == 1 else named
        if isinstance(sent, torch.Tensor):
            return sent
        try:
            return self._as_inputs(torch.tensor(sent))
        except (RuntimeError, OverflowError) as error:
            raise ValueError(f"not numbers: {error}") from None

    def _as_inputs(self, sample: torch.Tensor) -> torch.Tensor:
        whole = not sample.is_floating_point() and not sample.is_complex() and sample.dtype is not torch.bool
        return sample.to(torch.get_default_dtype()) if whole and self._takes_fractions else sample

    @cached_property
    def _takes_fractions(self) -> bool:
        try:
            inputs = self.example_inputs()[0]
        except Exception:  # no dataset to take an example from
            return False
        return isinstance(inputs, torch.Tensor) and inputs.is_floating_point()

    def encode_result(self, result: Any) -> Any:
        """Convert a result for clients: tensors, numbers, texts, lists and dicts. Unchanged by default."""
        return result


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value


P = TypeVar("P", bound="Program")


class Program(Samples):
    """Base class of user programs: override `make_data`, `make_model`; end with `torchrelay.main(TheClass)`.

        python script.py train | test | eval IN OUT | server | status | amend

    Without `main`, as in a notebook, `train()`, `test()` and `eval(sample)` work on this object and write
    nothing. Each step is a method that can be overridden. Values in the class are code: another `max_epochs`
    there makes another run, `--max-epochs` continues the same one.
    """

    name: str | None = None
    """Name of the experiment; None: the script's name."""
    runs_dir: str | Path | None = None
    """Parent directory of its runs; None: `runs` next to the script."""
    code: Any = None
    """Source to archive, as JobRunner's `code`; None: the script's directory."""
    max_epochs: int | None = 10
    max_steps: int | None = None
    time_limit: TimeLimit | None = None
    log_every_n_secs: float | None = None
    best: tuple[str, str] | None = None
    """Metric of the epoch `best`: `("val/accuracy", "max")`. That epoch is kept despite `keep_last`."""
    labels: Sequence[str] | None = None
    """Class names of the output, for packages."""
    preprocessing: Any = None
    """Description of the preprocessing for packages: a text or a value of your own."""
    keep_last: int | None = None
    """Number of newest epochs to keep; None: all."""
    replay: bool = False
    """Record a call of the model in every epoch, for `torchrelay verify RUN --replay`."""

    def stop_conditions(self) -> Iterable[Any]:
        """Return stop conditions besides the limits, such as early stopping."""
        return ()

    def runner_options(self) -> dict[str, Any]:
        """Return further options of JobRunner."""
        return {}

    # In Python

    def train(self, where: str | Path | None = None, *, resume_from_epoch: int | None = None) -> RunResult:
        """Train in this process: in memory, or in a run directory, which is then resumed.

        In memory, `rows` returns the measurements, and a second call continues with the same weights. A
        subclass may override it; the subcommand calls it with the run directory.

        Args:
            where: The run directory; None trains in memory.
            resume_from_epoch: Epoch to rewind to; default: the newest position.

        Returns:
            The result of the training.

        Raises:
            RelayError: The errors of `JobRunner.train`.

        Example:
            result = Digits().train("runs/digits")
        """
        if "model" not in self.__dict__:  # existing parts are kept
            set_seed(self.seed)
        with current_or_new_session() as session:
            job = self.job()
            self._where, self._history = (None, []) if where is None else (Path(where), self._history)
            if where is None:

                def note(ctx: Context) -> bool:  # never stops
                    self._history = [*self._history, (ctx.epoch, dict(ctx.measured))]
                    return False

                job.stop_when(note)
            options = {} if where is None else self.options_of_verb
            return self.runner(job, where, **options).train(session, resume_from_epoch)

    def test(self, data: Any = None) -> dict[str, Any]:
        """Measure a dataset (default `test`) with the current weights; returns numbers by name."""
        return self.test_on(self.dataset("test") if data is None else data)

    def package(
        self,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> Package:
        """Write the current model as a package, with `package_inputs`, `labels`, `preprocessing`.

        Args:
            path: The file to write.
            metadata: Further metadata of the package.
            overwrite: Replace an existing file.

        Returns:
            The written package.

        Raises:
            RelayError: The errors of `torchrelay.save`.

        Example:
            program.package("digits.pkg", overwrite=True)
        """
        from torchrelay.models.package.api import save

        said = {"labels": self.labels, "preprocessing": self.preprocessing, "metadata": metadata}
        return save(path, self.model, self.package_inputs(), **said, overwrite=overwrite)

    def package_inputs(self) -> Any:
        """Return example inputs for the package: those of the first batch of a dataset."""
        name = next((one for one in ("val", "test", "train") if one in self.data), "train")
        loader = self.make_loader(self.dataset(name), training=False)
        for batch in loader:
            inputs, _ = self.prepare(batch)
            return (inputs,)
        raise UsageError(f"the dataset {name!r} has no batch: override package_inputs(self)")

    def rows(self, stream: str) -> list[dict[str, Any]]:
        """Return the measurements of the last `train()` in stream `train` or `val`, one row per epoch."""
        if self._where is not None:
            return metric_rows(self._where, stream)
        start, rows = f"{stream}/", []
        for epoch, metrics in self._history:
            row = {name.removeprefix(start): one for name, one in metrics.items() if name.startswith(start)}
            rows += [{"epoch": epoch, **row}] if row else []
        return rows

    @classmethod
    def restored(cls: type[P], run: str | os.PathLike[str], epoch: int | str = "last") -> P:
        """Create an object with the weights of an epoch of a run, for `test()` and `eval(sample)`.

        It uses the code of this class, not the archived one; see `load_code` for that.

        Args:
            run: The run directory.
            epoch: A number, `"last"`, `"best"`, or a tag.

        Returns:
            The new object.

        Raises:
            RelayError: The errors of `open_checkpoint` and of its `load`.

        Example:
            program = Digits.restored("runs/digits", "best")
        """
        program = cls()
        program.load_weights(run, epoch)
        return program

    def load_weights(self, run: str | os.PathLike[str], epoch: int | str = "last") -> int:
        """Load and verify the model's weights of an epoch on this device.

        Args:
            run: The run directory.
            epoch: A number, `"last"`, `"best"`, or a tag.

        Returns:
            The number of the epoch.

        Example:
            epoch = program.load_weights("runs/digits")
        """
        opened = open_checkpoint(run, epoch)
        opened.load_saved({"model": self.model})
        return opened.epoch

    # Parts of a training

    def job(self, *, epochs: int | None = None) -> Job:
        """Return the training job; `epochs` overrides `max_epochs`."""
        self._build()
        job = Job(self.name or type(self).__name__, blobs=self._blobs())
        if self._collector.keeps:
            job.blobs.add(collected=self._collector.collected, scope="rank", reshard="drop")
        job.epoch(self._train_task)
        job.epoch(self._after_task)
        limit = self.max_epochs if epochs is None else epochs
        limits = [max_epochs(limit)] if limit is not None else []
        job.stop_when(*limits, *([max_steps(self.max_steps)] if self.max_steps else []))
        job.stop_when(*self.stop_conditions())
        return job

    def runner(self, job: Job, where: str | Path | None, **options: Any) -> JobRunner:
        """Return the runner of a job with the options of this class.

        Args:
            job: The job to run.
            where: The run directory; None runs in memory.
            options: Options of JobRunner that override those of this class.

        Returns:
            The runner.

        Example:
            runner = program.runner(program.job(), "runs/digits", keep_last=3)
        """
        own: dict[str, Any] = {"best": self.best, "log_every_n_secs": self.log_every_n_secs}
        if where is not None:
            own |= {"time_limit": self.time_limit, "keep_last": self.keep_last, "code": self.code}
            if self.keep_last is not None and self.best is not None:
                own["keep_best"] = self.best
            if self.replay:
                kind = type(self)
                own["replay"] = {"model": Recipe("program", kind.__module__, kind.__qualname__)}
        return JobRunner(job, where, **(own | self.runner_options() | options))

    def _blobs(self) -> dict[str, Any]:
        blobs = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        blobs["loader"] = self.loader if hasattr(self.loader, "state_dict") else None
        more = dict(self.more_state())
        taken = sorted(more.keys() & {*blobs, "collected"})
        if taken:
            raise UsageError(f"more_state() uses the reserved name {', '.join(taken)}: rename it")
        return {name: one for name, one in blobs.items() if one is not None} | more

    options_of_verb: Mapping[str, Any] = {}
    """Options of JobRunner from the command line that called `train`."""
    _history: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012 - replaced, never changed
    _where: Path | None = None


def made_program(kind: type[P], config: Config | None) -> P:
    """Create a program object whose configuration is set before its `__init__` runs."""
    program = kind.__new__(kind)
    program.config = config
    if config is not None:
        program.seed = config.settings.seed
    program.__init__()  # type: ignore[misc]
    return program


@dataclass(frozen=True)
class ProgramCommand(BaseCommand):
    """A program and a request."""

    program: type[Program]
    request: VerbRequest
    archived: str | None = None
    rename = "name = ... in the class"
    with_archived_code = ("test", "eval", "server", "package")

    @cached_property
    def origin(self) -> ProgramOrigin:
        """Location of the program's source and runs."""
        return origin_of(self.program)

    @cached_property
    def config(self) -> Config | None:
        """The configuration of `-m`; raises ConfigError with all mistakes."""
        if self.request.config is None:
            return None
        place = RunPlace(run=str(self.store.directory))
        return load_config(self.request.config, self.request.overrides, place=place)

    @cached_property
    def config_id(self) -> str | None:
        """The id of the whole configuration."""
        return self.config.id if self.config is not None else None

    @cached_property
    def profile(self) -> RunnerSection | None:
        """The first training profile of the configuration."""
        runners = self.config.settings.runners_of_mode() if self.config is not None else ()
        return next((one for one in runners if not one.infers), None)

    def limits(self, program: Program | None = None) -> dict[str, Any]:
        """Return the limits of a training: typed, else configured, else those of the program or class."""
        source = self.program if program is None else program
        said = self.profile.max_epochs if self.profile is not None else None
        wished = said if self.request.max_epochs is None else self.request.max_epochs
        return {
            "max_epochs": source.max_epochs if wished is None else wished,
            "max_steps": source.max_steps,
        }

    def made(self) -> Program:
        """Create an object of the program."""
        return made_program(self.program, self.config)
