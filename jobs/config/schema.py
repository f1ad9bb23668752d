"""The keys of a configuration, from the top. Each key is defined once, with its type, default and meaning.

The names are PaddleRec's; what is told of a key here is what torchrelay means by it. The JSON Schema, the
table in docs/configuration.md, the resolved form and the identity of a run are made from these classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torchrelay.jobs.config.runner_schema import RunnerSection
from torchrelay.jobs.config.section_types import PATH, ClassPath, class_at
from torchrelay.jobs.config.tree import Tracked
from torchrelay.jobs.config.types import (
    RUN_NAME,
    TEXTS,
    TRUTH,
    FieldType,
    Json,
    KeySpec,
    Many,
    Section,
    free,
    key,
    list_of,
    named,
    number,
    one_of,
    section,
    side_key,
    some,
    text,
    whole,
)
from torchrelay.jobs.config.yaml_reader import Where, scalar
from torchrelay.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Measuring a phase's model while it trains; its metrics are called `val/<metric>`."""

    dataset_name: str = side_key(text("the name of a dataset"), "the dataset that is measured", required=True)
    every: int = side_key(whole(1), "measure after every so many epochs", 1)
    metrics: tuple[str, ...] | None = side_key(
        some(text("the name of a metric")), "only these, such as `loss`; all if it is missing"
    )


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A pair of a model and a dataset, executed once in each epoch."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "gradient_scale_strategy": "gradients are the mean over all ranks; scale the loss in the model"
    }
    name: str = key(
        text("a name"), "what the phase is called; its state is kept under this name", required=True
    )
    model: ClassPath = key(class_at("Model"), "the class of the model", required=True)
    dataset_name: str | None = key(text("the name of a dataset"), "its dataset; the only one if there is one")
    validation: Validation | None = side_key(
        section(Validation, short="dataset_name"), "measure the model while it trains"
    )
    thread_num: int = side_key(whole(1), "threads that read samples", 1)
    shuffle_filelist: bool = key(TRUTH, "draw the order of all samples anew in each epoch", False)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Where samples come from. Keys that are not listed are for the reader."""

    name: str = key(text("a name"), "what the dataset is called", required=True)
    type: str = side_key(
        one_of("DataLoader", "QueueDataset"),
        "both words mean the same: the reader's samples in batches",
        "DataLoader",
    )
    batch_size: int = key(whole(1), "samples in a batch, those of all ranks together", required=True)
    data_path: tuple[str, ...] = key(
        some(PATH), "files and directories of data; not looked up before the run", []
    )
    grows: bool = key(
        TRUTH,
        "look for new files in `data_path` before each epoch; which ones an epoch had is saved with it",
        False,
    )
    data_converter: ClassPath | None = key(
        class_at("Reader"), "the class that reads samples; without it lines of slots are read"
    )
    reader_class_name: str | None = key(
        text("a class name"), "the class in `data_converter`, if it is not `Reader`"
    )
    sparse_slots: str | None = key(
        text(), "names of slots of whole numbers; lines of `slot:value` are read without `data_converter`"
    )
    dense_slots: str | None = key(text(), "names of slots of numbers, with their sizes: `wide:4 image:[2,3]`")
    padding: float | None = key(number(), "what stands for a missing value; 0 if missing")
    extra: Tracked = free("any other key is for the reader")


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """How the learning rate changes. Keys that are not listed are arguments of the class."""

    kind: str = key(
        text("a class of torch.optim.lr_scheduler such as `CosineAnnealingLR`"),
        "a class of `torch.optim.lr_scheduler`",
        required=True,
        name="class",
    )
    per: str = key(one_of("step", "epoch"), "what it counts", "step")
    arguments: Tracked = free("any other key is an argument of the class")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What the default steps make an optimizer of. Keys that are not listed are its arguments."""

    kind: str = key(
        text("a class of torch.optim such as `Adam`, or `module:Class`"),
        "a class of `torch.optim`, or `module:Class`",
        "SGD",
        name="class",
    )
    learning_rate: float | None = key(number(above=0), "the learning rate; the class's own if it is missing")
    lr_scheduler: LRScheduler | None = key(section(LRScheduler), "how the learning rate changes")
    decay_steps: int | None = key(
        whole(1), "multiply the learning rate by `decay_rate` behind every so many steps"
    )
    decay_rate: float | None = key(number(above=0), "see `decay_steps`")
    strategy: str | None = side_key(
        text(), "how gradients travel, in PaddleRec: `sync` is what happens; other words change nothing"
    )
    arguments: Tracked = free("any other key is an argument of the class")


@dataclass(frozen=True, kw_only=True)
class HyperParameters:
    """The user's own section; only `optimizer` is known."""

    optimizer: Optimizer | None = key(section(Optimizer), "what the default steps make the optimizer of")
    extra: Tracked = free("any other key is yours")


def user_sections(settings: Any) -> tuple[Tracked, ...]:
    """The parts of settings in which keys are the user's, and may be dead."""
    optimizer = settings.hyper_parameters.optimizer
    scheduler = None if optimizer is None else optimizer.lr_scheduler
    kept = tuple(one.arguments for one in (optimizer, scheduler) if one is not None)
    own = (settings.hyper_parameters.extra, *kept)
    return (*(one.extra for one in settings.dataset), *own)


@dataclass(frozen=True, kw_only=True)
class UpstreamSection:
    """An earlier run whose weights, config and sources this one is built on."""

    run: str = key(
        text("a run, such as `runs/expert@best`"),
        "the run, `@` its epoch: a number, `last` or `best`",
        required=True,
    )
    into: str | None = key(
        text("a dotted name"),
        "the blob here, or the part of a module, that takes its weights when the run begins; never on resume",
    )
    prefix: str | None = key(
        text("a dotted name"), "take only what lies below this name, such as `model.encoder`"
    )
    rename: Mapping[str, str] | None = key(TEXTS, "beginnings of names there, and what they become here")
    strict: bool = key(TRUTH, "missing, unexpected and mis-shaped names are errors", True)
    keep: tuple[str, ...] | None = key(
        some(text("a name or pattern")),
        "tensors of it that every checkpoint is to hold, though no model here does",
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole configuration. Fields have the names of the keys, lists are tuples, paths absolute."""

    version: int = side_key(whole(1, most=1), "version of this schema", 1)
    name: str | None = side_key(
        RUN_NAME, "what the run is called; if it is missing, below `--runs DIR`, as the workspace"
    )
    workspace: str = side_key(
        PATH,
        "directory where paths begin; relative to the file of the configuration; `{workspace}` stands for it",
        ".",
    )
    run_dir: str = side_key(PATH, "directory that holds the runs of this configuration", "runs")
    mode: tuple[str, ...] | None = side_key(
        some(text("the name of a runner")), "the runners that run, in this order; all if it is missing"
    )
    debug: bool = side_key(TRUTH, "print what operators and data cost in the first steps", False)
    seed: int = key(whole(0, most=2**64 - 1), "seed of all random streams", 0)
    upstream: Mapping[str, UpstreamSection] = key(
        named(section(UpstreamSection, short="run")),
        "earlier runs by the alias under which they are kept",
        {},
    )
    runner: tuple[RunnerSection, ...] = key(
        list_of(section(RunnerSection)), "profiles: what is run, and how", []
    )
    phase: tuple[Phase, ...] = key(list_of(section(Phase)), "pairs of a model and a dataset", [])
    dataset: tuple[Dataset, ...] = key(list_of(section(Dataset)), "where samples come from", [])
    hyper_parameters: HyperParameters = key(
        section(HyperParameters), "what belongs to the model: the optimizer, and any keys of yours", {}
    )

    def runner_named(self, name: str) -> RunnerSection:
        """The runner of this name; KeyError without one."""
        return {one.name: one for one in self.runner}[name]

    def runners_of_mode(self) -> tuple[RunnerSection, ...]:
        """The runners that run, in order."""
        return self.runner if self.mode is None else tuple(self.runner_named(name) for name in self.mode)

    def training(self) -> tuple[RunnerSection, ...]:
        """The runners of the mode that train; of the whole file where none of the mode does."""
        named = tuple(one for one in self.runners_of_mode() if not one.infers)
        return named or tuple(one for one in self.runner if not one.infers)


TOP = section(Settings)
"""The form of a whole configuration."""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def form_at(where: Where) -> FieldType | None:
    """The form of the value at a place; None where the schema knows nothing, as among the user's own keys."""
    form: FieldType | None = TOP
    for one in where:
        form = None if form is None else form.below(one)
    return form


def key_at(where: Where) -> KeySpec | None:
    """The key of the schema that stands at a place, if it is one."""
    around = form_at(where[:-1]) if where else None
    return around.keys.get(str(where[-1])) if isinstance(around, Section) else None


def json_schema() -> Json:
    """A schema of configuration files. Files and references between sections it knows not; `check` does."""
    top, *others = (_object(one) for one, _ in sections(TOP))
    expression = {
        "type": "string",
        "pattern": r"\$\{[^{}]+\}",
        "description": "`${key.path}`, `${upstream.low.key.path}` or `${env:NAME}`",
    }
    names = [one.of.__name__.removesuffix("Section") for one, _ in sections(TOP)][1:]
    return {
        "$schema": _DIALECT,
        "title": "Configuration of torchrelay",
        **top,
        "$defs": {"expression": expression, **dict(zip(names, others, strict=True))},
    }


def sections(form: FieldType) -> Iterator[tuple[Section, str]]:
    """A form's section and all below it, from the top, each once, with how people write its place."""
    seen: dict[type, None] = {}
    pending = [(form, "")]
    while pending:
        one, path = pending.pop(0)
        if isinstance(one, Many):
            pending.append((one.item, f"{path}[]" if one.kind is list else f"{path}.<alias>"))
        elif isinstance(one, Section) and one.of not in seen:
            seen[one.of] = None
            yield one, path
            prefix = f"{path}." if path else ""
            pending.extend((spec.form, prefix + name) for name, spec in one.keys.items())


def _object(form: Section) -> Json:
    properties: Json = {}
    for name, spec in form.keys.items():
        own = spec.form.schema if spec.required else {"anyOf": [spec.form.schema, {"type": "null"}]}
        default = {} if spec.default is None else {"default": spec.default}
        properties[name] = {"description": spec.doc, **own, **default}
    required = [name for name, spec in form.keys.items() if spec.required]
    return {
        "type": "object",
        "description": (form.of.__doc__ or "").partition("\n")[0],
        "properties": properties,
        "additionalProperties": form.free is not None,
        **({"required": required} if required else {}),
    }


def key_table() -> str:
    """Markdown: a table for each section, its keys with form, default, meaning, part in identity."""
    return "\n".join(_table(one, path) for one, path in sections(TOP))


def _table(form: Section, path: str) -> str:
    rows = [_row(one) for one in form.keys.values()]
    if form.free is not None:
        rows.append(f"| … | anything | | {form.free_doc} | yes |")
    rows += [f"| `{name}` | refused | | {_cell(remedy)} | |" for name, remedy in form.refused.items()]
    title = f"### {path}" if path else "### At the top"
    head = "| key | may be | default | meaning | another run? |\n|---|---|---|---|---|"
    return f"{title}\n\n{(form.of.__doc__ or '').strip()}\n\n{head}\n" + "\n".join(rows) + "\n"


def _row(spec: KeySpec) -> str:
    written = "" if spec.default in (None, [], {}) else f"`{scalar(spec.default)}`"
    default = "required" if spec.required else written
    other = "yes" if spec.identity else "no"
    return f"| `{spec.name}` | {_cell(spec.form.word)} | {default} | {_cell(spec.doc)} | {other} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def completed(form: FieldType, value: Any) -> Any:
    """A normal value with the defaults of the schema where nothing stands."""
    if not isinstance(form, Section):
        return form.mapped(value, completed)
    known = {}
    for name, spec in form.keys.items():
        if name in value:
            known[name] = completed(spec.form, value[name])
        elif spec.default not in (None, [], {}):
            known[name] = spec.default
    return known | {name: one for name, one in value.items() if name not in known}
