"""The keys of a configuration, from the top. Each key stands in one place, with form, default and meaning.

The names are PaddleRec's; what is told of a key here is what torchrelay means by it. The JSON Schema,
the table in docs/configuration.md and the identity of a run are made from these classes.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchrelay.jobs.config.data_keys import Dataset, HyperParameters, Phase
from torchrelay.jobs.config.forms import ListOf, RunName, Text, TextMap, Truth, Whole
from torchrelay.jobs.config.key import key
from torchrelay.jobs.config.path_forms import PathAt
from torchrelay.jobs.config.runner_keys import Runner
from torchrelay.jobs.config.section_forms import Named, Section
from torchrelay.records import dataclass


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
