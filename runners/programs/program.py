"""`torchrelay.Program`: what a user writes, once, to train, test and evaluate."""

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
from torchrelay.jobs.config.runner_schema import RunnerSection
from torchrelay.jobs.job import Job
from torchrelay.jobs.random import seed as set_seed
from torchrelay.jobs.stop import max_epochs, max_steps
from torchrelay.metadata.experiments import metric_rows
from torchrelay.models.package.reader import Package
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.user_objects import on_device
from torchrelay.runners.programs.command_context import BaseScene
from torchrelay.runners.programs.epoch_selection import load_what_is_there
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
    """What is added to the names of inputs where a directory of results is written."""
    batches_samples: bool | None = None
    """Whether the server may join prepared samples along their first dimension, and compute several at once.
    None: only where `prepare_sample` is torchrelay's own, of which it is known."""

    def load_sample(self, path: Path) -> Any:
        """The sample in a file: numbers as text, or JSON. Raises UsageError for anything else.

        A single row of text is a vector, as `[1, 2]` of JSON; several are a matrix.
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
                f"{path} holds no numbers as text or JSON ({error}): write load_sample(self, path) for it"
            ) from None

    def prepare_sample(self, sample: Any) -> Any:
        """Inputs of a sample: on the device, as a batch of one."""
        return on_device(sample.unsqueeze(0) if isinstance(sample, torch.Tensor) else sample, self.device)

    def postprocess(self, output: Any) -> Any:
        """What a user wants of the output of a batch of one: its only row."""
        return output[0]

    def store_result(self, result: Any, path: Path) -> None:
        """Write a result to a file, as JSON; tensors as lists. The file takes its place when it is whole."""
        path.write_text(json.dumps(_plain(result), indent=1) + "\n", encoding="utf-8")

    def example_inputs(self) -> Any:
        """What the model is called with, for `to_onnx`: the inputs of the first batch of a dataset."""
        name = next((one for one in ("test", "val", "train") if one in self.data), "train")
        batch = next(iter(self.make_loader(self.dataset(name), training=False)))
        return (self.prepare(batch)[0],)

    def eval(self, sample: Any) -> Any:
        """The result for a sample, or for the file of a path: evaluation mode, no gradients."""
        if isinstance(sample, (str, Path)):
            sample = self.load_sample(Path(sample))
        return self.result_of(sample)

    def result_of(self, sample: Any) -> Any:
        """The same for what is a sample already, whatever it is; no text is taken for the name of a file."""
        with self.evaluating():
            return self.postprocess(self.forward(self.prepare_sample(sample)))

    # For clients of the server

    def decode_sample(self, sent: Any) -> Any:
        """A sample of what a client sent: numbers as in a file of JSON, tensors as they are.

        `sent` is JSON, or a dict of tensors by name; of one tensor the name does not matter. Raises
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
            raise ValueError(f"no numbers: {error}") from None

    def _as_inputs(self, sample: torch.Tensor) -> torch.Tensor:
        """Whole numbers as the inputs of the datasets are: of a model that takes fractions, fractions."""
        whole = not sample.is_floating_point() and not sample.is_complex() and sample.dtype is not torch.bool
        return sample.to(torch.get_default_dtype()) if whole and self._takes_fractions else sample

    @cached_property
    def _takes_fractions(self) -> bool:
        try:
            inputs = self.example_inputs()[0]
        except Exception:  # no dataset that could say
            return False
        return isinstance(inputs, torch.Tensor) and inputs.is_floating_point()

    def encode_result(self, result: Any) -> Any:
        """What a client gets of a result: tensors, numbers, texts, lists and dicts of these. As it is."""
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
    """What a user writes: `make_data`, `make_model`, and `torchrelay.main(TheClass)` as the last line.

        python script.py train | test | eval IN OUT | server | status | amend

    Without `main`, as in a notebook, `train()`, `test()` and `eval(sample)` work on this object; nothing is
    written then. Every step is a method that can be overridden alone. What the class says is code: another
    `max_epochs` in it makes another run, `--max-epochs` goes on with the same one.
    """

    name: str | None = None
    """What the experiment is called; the script's name if None."""
    runs_dir: str | Path | None = None
    """Where its runs lie, in a directory of its name; `runs` beside the script if None."""
    code: Any = None
    """Where its source lies: as JobRunner's `code`; the script's directory if None."""
    max_epochs: int | None = 10
    max_steps: int | None = None
    time_limit: TimeLimit | None = None
    log_every_n_secs: float | None = None
    best: tuple[str, str] | None = None
    """Which epoch `best` means: `("val/accuracy", "max")`. It is kept, whatever `keep_last` says."""
    labels: Sequence[str] | None = None
    """Names of the classes of the output, for packages."""
    preprocessing: Any = None
    """What makes inputs of samples, as packages tell it: a text, or a value of your own."""
    keep_last: int | None = None
    """Keep so many of the newest epochs; all if None."""
    replay: bool = False
    """Whether a call of the model is recorded at every epoch, for `torchrelay verify RUN --replay`."""

    def stop_conditions(self) -> Iterable[Any]:
        """Stop conditions beside the limits, such as early stopping."""
        return ()

    def runner_options(self) -> dict[str, Any]:
        """More options of JobRunner."""
        return {}

    # In Python

    def train(self, where: str | Path | None = None, *, resume_from_epoch: int | None = None) -> RunResult:
        """Train in this process: in memory, or in the run directory `where`, which is then continued.

        In memory `rows` tells what was measured, and a second call goes on with the same weights. A class may
        write its own, which the verb calls with the directory of the run. Raises the errors of
        `JobRunner.train`.
        """
        if "model" not in self.__dict__:  # what is there stays as it is
            set_seed(self.seed)
        with current_or_new_session() as session:
            job = self.job()
            self._where, self._history = (None, []) if where is None else (Path(where), self._history)
            if where is None:
                job.stop_when(self._note_in_memory)
            options = {} if where is None else self.options_of_verb
            return self.runner(job, where, **options).train(session, resume_from_epoch)

    def test(self, data: Any = None) -> dict[str, Any]:
        """Measure a dataset (`test` if None) with the weights as they are now; returns numbers by name."""
        return self.test_on(self.dataset("test") if data is None else data)

    def package(
        self,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> Package:
        """Write the model as it is now into a package, with `package_inputs`, `labels`, `preprocessing`.

        Raises the errors of `torchrelay.save`.
        """
        from torchrelay.models.package.api import save

        said = {"labels": self.labels, "preprocessing": self.preprocessing, "metadata": metadata}
        return save(path, self.model, self.package_inputs(), **said, overwrite=overwrite)

    def package_inputs(self) -> Any:
        """An example of what the model takes, for the package: inputs of the first batch of a dataset."""
        name = next((one for one in ("val", "test", "train") if one in self.data), "train")
        loader = self.make_loader(self.dataset(name), training=False)
        for batch in loader:
            inputs, _ = self.prepare(batch)
            return (inputs,)
        raise UsageError(f"the dataset {name!r} has no batch: write package_inputs(self)")

    def rows(self, stream: str) -> list[dict[str, Any]]:
        """What the last `train()` of this object measured in `train` or `val`, a row per epoch."""
        if self._where is not None:
            return metric_rows(self._where, stream)
        rows = []
        for epoch, metrics in self._history:
            row = {
                name.removeprefix(f"{stream}/"): one
                for name, one in metrics.items()
                if name.startswith(f"{stream}/")
            }
            rows += [{"epoch": epoch, **row}] if row else []
        return rows

    @classmethod
    def restored(cls: type[P], run: str | os.PathLike[str], epoch: int | str = "last") -> P:
        """A new object with the weights of an epoch of a run, for `test()` and `eval(sample)`.

        The code is this class, whatever the run ran; `load_code` gives that. Raises the errors of
        `open_checkpoint` and of its `load`.
        """
        program = cls()
        program.load_weights(run, epoch)
        return program

    def load_weights(self, run: str | os.PathLike[str], epoch: int | str = "last") -> int:
        """Load the model's weights of an epoch onto this device, verified; returns the epoch's number."""
        opened = open_checkpoint(run, epoch)
        opened.load_saved({"model": self.model})
        return opened.epoch

    # What a training is made of

    def job(self, *, epochs: int | None = None) -> Job:
        """The job that trains; `epochs` counts before `max_epochs`."""
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
        """The runner of a job, with what this class says; `options` count before it."""
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
            raise UsageError(
                f"more_state() has {', '.join(taken)}, which checkpoints hold already: rename it"
            )
        return {name: one for name, one in blobs.items() if one is not None} | more

    options_of_verb: Mapping[str, Any] = {}
    """Options of JobRunner that were typed behind the verb which called `train`."""
    _history: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012 - replaced, never changed
    _where: Path | None = None

    def _note_in_memory(self, ctx: Context) -> bool:
        """Asked after every epoch, when its metrics are reduced; never ends anything."""
        self._history = [*self._history, (ctx.epoch, dict(ctx.measured))]
        return False


def made_program(kind: type[P], config: Config | None) -> P:
    """A new object of a program; its configuration is there before its `__init__` runs."""
    program = kind.__new__(kind)
    program.config = config
    if config is not None:
        program.seed = config.settings.seed
    program.__init__()  # type: ignore[misc]
    return program


@dataclass(frozen=True)
class Scene(BaseScene):
    """A program and a request."""

    program: type[Program]
    request: VerbRequest
    archived: str | None = None
    rename = "name = ... in the class"
    with_archived_code = ("test", "eval", "server", "package")

    @cached_property
    def origin(self) -> ProgramOrigin:
        """Where the program comes from."""
        return origin_of(self.program)

    @cached_property
    def config(self) -> Config | None:
        """The configuration of `-m`; raises ConfigError with all that is wrong."""
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
        """The first profile of the configuration that trains."""
        runners = self.config.settings.runners_of_mode() if self.config is not None else ()
        return next((one for one in runners if not one.infers), None)

    def limits(self, program: Program | None = None) -> dict[str, Any]:
        """The limits of a training: typed, else configured, else those of the program or its class."""
        source = self.program if program is None else program
        said = self.profile.max_epochs if self.profile is not None else None
        wished = said if self.request.max_epochs is None else self.request.max_epochs
        return {
            "max_epochs": source.max_epochs if wished is None else wished,
            "max_steps": source.max_steps,
        }

    def fit(self, run: Path, epoch: str) -> None:
        """Load what of an epoch the program knows into a new object of it; raises what that raises."""
        program = self.made()
        options = program.runner_options()
        given = [options.get(key) or () for key in ("resume_exclude", "exclude")]
        left_out = [(one,) if isinstance(one, str) else one for one in given]
        load_what_is_there(program.job(), run, epoch, *left_out)

    def made(self) -> Program:
        """A new object of the program."""
        return made_program(self.program, self.config)
