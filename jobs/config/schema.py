"""Schema of configurations: each key is defined once, with its type, default and meaning.

The names are PaddleRec's. These classes define the JSON Schema, the table in docs/configuration.md, the
resolved configuration and the identity of a run.
"""

from __future__ import annotations

import re
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
    """Evaluation of a phase's model during training, as metrics `val/<metric>`."""

    dataset_name: str = side_key(text("the name of a dataset"), "the dataset to evaluate", required=True)
    every: int = side_key(whole(1), "epochs between evaluations", 1)
    metrics: tuple[str, ...] | None = side_key(
        some(text("the name of a metric")), "metrics such as `loss`; all if missing"
    )


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A model and a dataset. Each phase runs once per epoch."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "gradient_scale_strategy": "gradients are the mean over all ranks; scale the loss in the model"
    }
    name: str = key(text("a name"), "name of the phase; its state is stored under it", required=True)
    model: ClassPath = key(class_at("Model"), "the model's class", required=True)
    dataset_name: str | None = key(
        text("the name of a dataset"), "its dataset; not needed if there is only one"
    )
    validation: Validation | None = side_key(
        section(Validation, short="dataset_name"), "evaluate the model during training"
    )
    thread_num: int = side_key(whole(1), "processes that read samples", 1)
    shuffle_filelist: bool = key(TRUTH, "shuffle all samples in each epoch", False)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A source of samples."""

    name: str = key(text("a name"), "name of the dataset", required=True)
    type: str = side_key(one_of("DataLoader", "QueueDataset"), "both mean the same", "DataLoader")
    batch_size: int = key(whole(1), "samples in a batch, over all ranks", required=True)
    data_path: tuple[str, ...] = key(some(PATH), "files and directories of data", [])
    grows: bool = key(TRUTH, "look for new files in `data_path` before each epoch", False)
    data_converter: ClassPath | None = key(
        class_at("Reader"), "class that reads samples; if missing, text lines of slots are read"
    )
    reader_class_name: str | None = key(text("a class name"), "class in `data_converter`, if not `Reader`")
    sparse_slots: str | None = key(text(), "slots of integers, for lines of `slot:value`")
    dense_slots: str | None = key(text(), "slots of numbers, with sizes: `wide:4 image:[2,3]`")
    padding: float | None = key(number(), "replaces missing values; 0 if missing")
    extra: Tracked = free("any key for your reader")


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """The learning rate schedule."""

    kind: str = key(
        text("a class of torch.optim.lr_scheduler such as `CosineAnnealingLR`"),
        "the scheduler's class",
        required=True,
        name="class",
    )
    per: str = key(one_of("step", "epoch"), "what a step of the schedule is", "step")
    arguments: Tracked = free("any argument of the class")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer of the default steps."""

    kind: str = key(
        text("a class of torch.optim such as `Adam`, or `module:Class`"),
        "the optimizer's class",
        "SGD",
        name="class",
    )
    learning_rate: float | None = key(number(above=0), "learning rate; the class's default if missing")
    lr_scheduler: LRScheduler | None = key(section(LRScheduler), "learning rate schedule")
    decay_steps: int | None = key(
        whole(1), "steps between multiplications of the learning rate by `decay_rate`"
    )
    decay_rate: float | None = key(number(above=0), "see `decay_steps`")
    strategy: str | None = side_key(text(), "PaddleRec's key; always `sync`, other values have no effect")
    arguments: Tracked = free("any argument of the class")


@dataclass(frozen=True, kw_only=True)
class HyperParameters:
    """Your own section; only `optimizer` is predefined."""

    optimizer: Optimizer | None = key(section(Optimizer), "the optimizer")
    extra: Tracked = free("any key for your model")


def user_sections(settings: Any) -> tuple[Tracked, ...]:
    """Return the sections with keys of the user, which may be unread."""
    optimizer = settings.hyper_parameters.optimizer
    scheduler = None if optimizer is None else optimizer.lr_scheduler
    kept = tuple(one.arguments for one in (optimizer, scheduler) if one is not None)
    own = (settings.hyper_parameters.extra, *kept)
    return (*(one.extra for one in settings.dataset), *own)


@dataclass(frozen=True, kw_only=True)
class UpstreamSection:
    """An earlier run that provides weights, configuration or sources."""

    run: str = key(
        text("a run, such as `runs/expert@best`"),
        "the run, and after `@` its epoch: a number, `last` or `best`",
        required=True,
    )
    into: str | None = key(
        text("a dotted name"), "blob, or part of a module, to initialise when this run begins"
    )
    prefix: str | None = key(
        text("a dotted name"), "take only leaves below this name, such as `model.encoder`"
    )
    rename: Mapping[str, str] | None = key(TEXTS, "name prefixes there, and here")
    strict: bool = key(TRUTH, "missing, unexpected or misshapen leaves are errors", True)
    keep: tuple[str, ...] | None = key(
        some(text("a name or pattern")), "its tensors to store in every checkpoint"
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole configuration."""

    version: int = side_key(whole(1, most=1), "schema version", 1)
    name: str | None = side_key(RUN_NAME, "name of the run; with `--runs DIR`, the workspace's if missing")
    workspace: str = side_key(PATH, "base of relative paths; itself relative to the configuration file", ".")
    run_dir: str = side_key(PATH, "directory for runs", "runs")
    mode: tuple[str, ...] | None = side_key(
        some(text("the name of a runner")), "runners to run, in order; all if missing"
    )
    debug: bool = side_key(TRUTH, "print costs of operators and data in the first steps", False)
    seed: int = key(whole(0, most=2**64 - 1), "random seed", 0)
    upstream: Mapping[str, UpstreamSection] = key(
        named(section(UpstreamSection, short="run")), "earlier runs, by alias", {}
    )
    runner: tuple[RunnerSection, ...] = key(
        list_of(section(RunnerSection)), "profiles: what to run, and how", []
    )
    phase: tuple[Phase, ...] = key(list_of(section(Phase)), "pairs of a model and a dataset", [])
    dataset: tuple[Dataset, ...] = key(list_of(section(Dataset)), "sources of samples", [])
    hyper_parameters: HyperParameters = key(
        section(HyperParameters), "the optimizer, and any keys for your model", {}
    )

    def runner_named(self, name: str) -> RunnerSection:
        """Return the runner with this name; raises KeyError for an unknown name."""
        return {one.name: one for one in self.runner}[name]

    def runners_of_mode(self) -> tuple[RunnerSection, ...]:
        """Return the runners to run, in order."""
        return self.runner if self.mode is None else tuple(self.runner_named(name) for name in self.mode)

    def training(self) -> tuple[RunnerSection, ...]:
        """Return the runners of the mode that train; if none does, all runners that train."""
        named = tuple(one for one in self.runners_of_mode() if not one.infers)
        return named or tuple(one for one in self.runner if not one.infers)


TOP = section(Settings)
"""Type of a whole configuration."""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def form_at(where: Where) -> FieldType | None:
    """Return the type of the value at a location; None outside the schema, as for the user's own keys."""
    form: FieldType | None = TOP
    for one in where:
        form = None if form is None else form.below(one)
    return form


def key_at(where: Where) -> KeySpec | None:
    """Return the schema's key at a location, if it is one."""
    around = form_at(where[:-1]) if where else None
    return around.keys.get(str(where[-1])) if isinstance(around, Section) else None


def json_schema() -> Json:
    """Return the JSON Schema of configurations; it does not check files and references between sections."""
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
    """Yield a type's sections from the top, each once, with their dotted paths."""
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


_BRIEF = tuple(
    (re.compile(pattern), short)
    for pattern, short in (
        (r"`file\.py` with a class (`\w+`), `file\.py:Class` or `module:Class`", r"class \1"),
        (r"a path or URL, of a run also with its epoch: (.*) \(an empty text: none\)", r"path or URL, \1"),
        ("seconds, or a text such as `1h30m` or `01:30:00`", "duration"),
        ("a whole number", "integer"),
        ("true or false", "boolean"),
        ("one of ", ""),
        (r" \(each item a mapping\)", " of mappings"),
        (", or a list of such", " or list"),
        ("a mapping of names; each value is a mapping.*", "mappings by alias"),
        ("a mapping of texts to texts", "mapping"),
        (r"the name of a (\w+)", r"\1 name"),
        (r"a class of torch\.\S+ such as (`\w+`)", r"\1"),
        (r"^an? ", ""),
    )
)
"""Shorter texts for the table of keys."""


def key_table() -> str:
    """Return a Markdown table of keys for each section."""
    head = (
        "† Changing this key starts a different run. A class is `file.py` with a class of that name,\n"
        "`file.py:Class` or `module:Class`. A duration is a number of seconds, `1h30m` or `01:30:00`.\n\n"
    )
    return head + "\n".join(_table(one, path) for one, path in sections(TOP))


def _table(form: Section, path: str) -> str:
    rows = []
    for spec in form.keys.values():
        word = spec.form.word
        for pattern, short in _BRIEF:
            word = pattern.sub(short, word)
        default = "" if spec.default in (None, [], {}) else f"; default `{scalar(spec.default)}`"
        note = "; required" if spec.required else default
        rows.append(f"| `{spec.name}`{'†' * spec.identity} | {_cell(word)}{note} | {_cell(spec.doc)} |")
    if form.free is not None:
        rows.append(f"| …† | anything | {form.free_doc} |")
    for remedy in dict.fromkeys(form.refused.values()):
        names = ", ".join(f"`{name}`" for name, why in form.refused.items() if why == remedy)
        rows.append(f"| {names} | refused | {_cell(remedy)} |")
    title = f"### {path}" if path else "### At the top"
    head = "| key | value | meaning |\n|---|---|---|"
    return f"{title}\n\n{(form.of.__doc__ or '').strip()}\n\n{head}\n" + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def completed(form: FieldType, value: Any) -> Any:
    """Fill in a normalised value with the defaults of the schema."""
    if not isinstance(form, Section):
        return form.mapped(value, completed)
    known = {}
    for name, spec in form.keys.items():
        if name in value:
            known[name] = completed(spec.form, value[name])
        elif spec.default not in (None, [], {}):
            known[name] = spec.default
    return known | {name: one for name, one in value.items() if name not in known}
