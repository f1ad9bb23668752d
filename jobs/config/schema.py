"""The keys of a configuration, from the top. Each key is defined once, with its type, default and meaning.

The names are PaddleRec's; what is told of a key here is what torchrelay means by it. The JSON Schema,
the table in docs/configuration.md and the identity of a run are made from these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torchrelay.jobs.config.runner_schema import Runner
from torchrelay.jobs.config.section_types import ClassAt, ClassPath, Named, Section
from torchrelay.jobs.config.tree import Tracked
from torchrelay.jobs.config.types import (
    ListOf,
    Number,
    OneOf,
    RunName,
    Text,
    TextMap,
    Truth,
    Whole,
    free,
    key,
)
from torchrelay.jobs.config.user_sections import PathAt
from torchrelay.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Measuring a phase's model while it trains; its metrics are called `val/<metric>`."""

    dataset_name: str = key(
        Text("the name of a dataset"), "the dataset that is measured", required=True, identity=False
    )
    every: int = key(Whole(1), "measure after every so many epochs", default=1, identity=False)
    metrics: tuple[str, ...] | None = key(
        ListOf(Text("the name of a metric"), lone=True), "only these, such as `loss`; all if it is missing",
        identity=False,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A pair of a model and a dataset, executed once in each epoch."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "gradient_scale_strategy": "gradients are the mean over all ranks; scale the loss in the model"
    }
    name: str = key(
        Text("a name"), "what the phase is called; its state is kept under this name", required=True
    )
    model: ClassPath = key(ClassAt("Model"), "the class of the model", required=True)
    dataset_name: str | None = key(Text("the name of a dataset"), "its dataset; the only one if there is one")
    validation: Validation | None = key(
        Section(Validation, short="dataset_name"), "measure the model while it trains", identity=False
    )
    thread_num: int = key(Whole(1), "threads that read samples", default=1, identity=False)
    shuffle_filelist: bool = key(Truth(), "draw the order of all samples anew in each epoch", default=False)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Where samples come from. Keys that are not listed are for the reader."""

    name: str = key(Text("a name"), "what the dataset is called", required=True)
    type: str = key(
        OneOf(("DataLoader", "QueueDataset")), "both words mean the same: the reader's samples in batches",
        default="DataLoader", identity=False,
    )  # fmt: skip
    batch_size: int = key(Whole(1), "samples in a batch, those of all ranks together", required=True)
    data_path: tuple[str, ...] = key(
        ListOf(PathAt(), lone=True), "files and directories of data; not looked up before the run", default=[]
    )
    grows: bool = key(
        Truth(),
        "look for new files in `data_path` before each epoch; which ones an epoch had is saved with it",
        default=False,
    )
    data_converter: ClassPath | None = key(
        ClassAt("Reader"), "the class that reads samples; without it lines of slots are read"
    )
    reader_class_name: str | None = key(
        Text("a class name"), "the class in `data_converter`, if it is not `Reader`"
    )
    sparse_slots: str | None = key(
        Text(), "names of slots of whole numbers; lines of `slot:value` are read without `data_converter`"
    )
    dense_slots: str | None = key(Text(), "names of slots of numbers, with their sizes: `wide:4 image:[2,3]`")
    padding: float | None = key(Number(), "what stands for a missing value; 0 if missing")
    extra: Tracked = free("any other key is for the reader")


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """How the learning rate changes. Keys that are not listed are arguments of the class."""

    kind: str = key(
        Text("a class of torch.optim.lr_scheduler such as `CosineAnnealingLR`"),
        "a class of `torch.optim.lr_scheduler`", required=True, name="class",
    )  # fmt: skip
    per: str = key(OneOf(("step", "epoch")), "what it counts", default="step")
    arguments: Tracked = free("any other key is an argument of the class")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What the default steps make an optimizer of. Keys that are not listed are its arguments."""

    kind: str = key(
        Text("a class of torch.optim such as `Adam`, or `module:Class`"),
        "a class of `torch.optim`, or `module:Class`", default="SGD", name="class",
    )  # fmt: skip
    learning_rate: float | None = key(Number(above=0), "the learning rate; the class's own if it is missing")
    lr_scheduler: LRScheduler | None = key(Section(LRScheduler), "how the learning rate changes")
    decay_steps: int | None = key(
        Whole(1), "multiply the learning rate by `decay_rate` behind every so many steps"
    )
    decay_rate: float | None = key(Number(above=0), "see `decay_steps`")
    strategy: str | None = key(
        Text(),
        "how gradients travel, in PaddleRec: `sync` is what happens; other words change nothing",
        identity=False,
    )
    arguments: Tracked = free("any other key is an argument of the class")


@dataclass(frozen=True, kw_only=True)
class HyperParameters:
    """The user's own section; only `optimizer` is known."""

    optimizer: Optimizer | None = key(Section(Optimizer), "what the default steps make the optimizer of")
    extra: Tracked = free("any other key is yours")


def user_sections(settings: Any) -> tuple[Tracked, ...]:
    """The parts of settings in which keys are the user's, and may be dead."""
    optimizer = settings.hyper_parameters.optimizer
    scheduler = None if optimizer is None else optimizer.lr_scheduler
    kept = tuple(one.arguments for one in (optimizer, scheduler) if one is not None)
    own = (settings.hyper_parameters.extra, *kept)
    return (*(one.extra for one in settings.dataset), *own)


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """An earlier run whose weights, config and sources this one is built on."""

    run: str = key(
        Text("a run, such as `runs/expert@best`"),
        "the run, `@` its epoch: a number, `last` or `best`",
        required=True,
    )
    into: str | None = key(
        Text("a dotted name"),
        "the blob here, or the part of a module, that takes its weights when the run begins; never on resume",
    )
    prefix: str | None = key(
        Text("a dotted name"), "take only what lies below this name, such as `model.encoder`"
    )
    rename: Mapping[str, str] | None = key(TextMap(), "beginnings of names there, and what they become here")
    strict: bool = key(Truth(), "missing, unexpected and mis-shaped names are errors", default=True)
    keep: tuple[str, ...] | None = key(
        ListOf(Text("a name or pattern"), lone=True),
        "tensors of it that every checkpoint is to hold, though no model here does",
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole configuration. Fields have the names of the keys, lists are tuples, paths absolute."""

    version: int = key(Whole(1, most=1), "version of this schema", default=1, identity=False)
    name: str | None = key(
        RunName("a name"),
        "what the run is called; if it is missing, below `--runs DIR`, as the workspace",
        identity=False,
    )
    workspace: str = key(
        PathAt(),
        "directory where paths begin; relative to the file of the configuration; `{workspace}` stands for it",
        default=".",
        identity=False,
    )
    run_dir: str = key(
        PathAt(), "directory that holds the runs of this configuration", default="runs", identity=False
    )
    mode: tuple[str, ...] | None = key(
        ListOf(Text("the name of a runner"), lone=True),
        "the runners that run, in this order; all if it is missing",
        identity=False,
    )
    debug: bool = key(
        Truth(),
        "print what operators and data cost in the first steps",
        default=False,
        identity=False,
    )
    seed: int = key(Whole(0, most=2**64 - 1), "seed of all random streams", default=0)
    upstream: Mapping[str, Upstream] = key(
        Named(Section(Upstream, short="run")),
        "earlier runs by the alias under which they are kept",
        default={},
    )
    runner: tuple[Runner, ...] = key(ListOf(Section(Runner)), "profiles: what is run, and how", default=[])
    phase: tuple[Phase, ...] = key(ListOf(Section(Phase)), "pairs of a model and a dataset", default=[])
    dataset: tuple[Dataset, ...] = key(ListOf(Section(Dataset)), "where samples come from", default=[])
    hyper_parameters: HyperParameters = key(
        Section(HyperParameters),
        "what belongs to the model: the optimizer, and any keys of yours",
        default={},
    )

    def runner_named(self, name: str) -> Runner:
        """The runner of this name; KeyError without one."""
        return {one.name: one for one in self.runner}[name]

    def runners_of_mode(self) -> tuple[Runner, ...]:
        """The runners that run, in order."""
        return self.runner if self.mode is None else tuple(self.runner_named(name) for name in self.mode)

    def training(self) -> tuple[Runner, ...]:
        """The runners of the mode that train; of the whole file where none of the mode does."""
        named = tuple(one for one in self.runners_of_mode() if not one.infers)
        return named or tuple(one for one in self.runner if not one.infers)
