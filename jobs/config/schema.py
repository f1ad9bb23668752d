"""Schema of configurations, with PaddleRec's names: each key is defined once, with type, default and meaning.

It gives the JSON Schema, the table of keys, the resolved configuration and the identity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from torchrelay.jobs.config.section_types import EPOCHS, GPUS, PATH, WEIGHTS, ClassPath, EpochChoice, class_at
from torchrelay.jobs.config.tree import Tracked
from torchrelay.jobs.config.types import (
    RUN_NAME,
    SECONDS,
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

TRAIN, LOCAL_TRAIN, CLUSTER_TRAIN = "train", "local_cluster_train", "cluster_train"
INFER_CLASSES = ("infer", "single_infer")
CLASSES = (TRAIN, "single_train", LOCAL_TRAIN, CLUSTER_TRAIN, *INFER_CLASSES)
_NO_SERVERS = "torchrelay has no parameter servers: gradients are reduced between ranks; remove the key"
_OTHER_CLASSES = {
    "online_learning": "write `train`, and `epochs_per_partition` for so many epochs over each day's data",
    "local_cluster": "write `local_cluster_train`",
    "cluster": "write `cluster_train`",
}
_NO_VARIABLES = "a module has no named variables: the weights of the whole model are written; remove the key"
infer_key = partial(side_key, infer_only=True)
_SERVER_WORDS = dict.fromkeys(("ps", "pslib", "async", "half_async", "geo"), _NO_SERVERS)


@dataclass(frozen=True, kw_only=True)
class KeepBest:
    """The best epoch, which is kept and found as `best`."""

    metric: str = side_key(text("the name of a metric"), "such as `val/auc`", required=True)
    mode: str = side_key(one_of("min", "max"), "whether lower or higher is better", required=True)


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingSection(KeepBest):
    """Stop when a metric stops improving."""

    patience: int = side_key(
        whole(1),
        "measurements without improvement before stopping; unlogged epochs are skipped",
        required=True,
    )
    min_delta: float = side_key(number(least=0), "smallest change that counts as an improvement", 0)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop conditions. Totals count all launches; the first condition that is met ends the run."""

    max_epochs: int | None = side_key(whole(1), "same as `epochs`")
    max_steps: int | None = side_key(whole(1), "total steps")
    max_time: float | None = side_key(SECONDS, "total running time")
    early_stopping: EarlyStoppingSection | None = side_key(
        section(EarlyStoppingSection), "stop when a metric stops improving"
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointKeys:
    """Contents of checkpoints, and how they are written."""

    include: tuple[str, ...] | None = key(some(text("a pattern")), "save only matching blobs and leaves")
    exclude: tuple[str, ...] | None = key(some(text("a pattern")), "do not save matching blobs and leaves")
    asynchronous: bool = side_key(TRUTH, "write in the background", False)
    max_failed_saves: int | None = side_key(whole(0), "consecutive failed saves that are tolerated")
    compare_every: int | None = side_key(
        whole(1), "epochs between full comparisons of replicas; 10 if missing"
    )
    rename: Mapping[str, str] | None = side_key(
        TEXTS, "prefixes of names in older epochs, and their new prefixes on resume"
    )
    resume_exclude: tuple[str, ...] | None = side_key(
        some(text("a pattern")), "on resume, matching leaves that do not fit keep their initial values"
    )
    resume_strict: bool = side_key(TRUTH, "refuse to resume if blobs were added or removed", False)
    near: str | None = side_key(PATH, "save to this fast local directory, upload in the background")
    lag: int | None = side_key(whole(1), "with `near`: most epochs not uploaded yet; 2 if missing")


@dataclass(frozen=True, kw_only=True)
class OnnxKeys:
    """ONNX files to write during training; `every`, `best`, or both."""

    every: int | None = side_key(whole(1), "epochs between files `<model>-epoch-<k>.onnx`")
    best: bool = side_key(TRUTH, "`<model>-best.onnx` for the best epoch, by `keep_best`", False)


@dataclass(frozen=True, kw_only=True)
class RunnerSection:
    """A profile. `infer` ignores keys that only apply to training."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "server_num": _NO_SERVERS,
        "save_inference_feed_varnames": _NO_VARIABLES,
        "save_inference_fetch_varnames": _NO_VARIABLES,
        "trainer_class": "replace single steps instead, with `runner_class_path` and the other four keys",
    }
    name: str = key(RUN_NAME, "its name in `mode` and overrides", required=True)
    kind: str = side_key(
        one_of(*CLASSES, refused=_OTHER_CLASSES),
        "`train`, `infer`: in this process, or on all ranks of a launcher; `cluster_train`: only under a "
        "launcher; `local_cluster_train`: starts `worker_num` processes here; `single_...`: same as without",
        TRAIN,
        name="class",
    )
    device: str = side_key(
        one_of("auto", "cpu", "cuda", "gpu"), "`auto`: `cuda` if available; `gpu` means `cuda`", "auto"
    )
    selected_gpus: tuple[int, ...] | None = side_key(GPUS, "GPUs to use; all if missing")
    fleet_mode: str = side_key(one_of("collective", refused=_SERVER_WORDS), "the only choice", "collective")
    distribute_strategy: str = side_key(one_of("sync", refused=_SERVER_WORDS), "the only choice", "sync")
    worker_num: int = side_key(whole(1), "processes for `local_cluster_train`", 1)
    epochs: int | None = side_key(whole(1), "total epochs to train, over all launches")
    epochs_per_partition: int | None = key(
        whole(1),
        "epochs to train on each file or directory in `data_path`, one after another; ends when none is left",
    )
    stop: Stop | None = side_key(section(Stop), "other stop conditions")
    time_limit: float | None = side_key(SECONDS, "exit after this time; the same command resumes")
    phases: tuple[str, ...] | None = key(
        some(text("the name of a phase")), "phases of an epoch, in order; all if missing"
    )
    init_model_path: str | None = key(
        WEIGHTS, "`train`: initial weights of a new run; `infer`: the run to evaluate"
    )
    init_prefix: str | None = key(
        text("a dotted name"), "take only leaves of `init_model_path` below this name"
    )
    init_rename: Mapping[str, str] | None = key(TEXTS, "name prefixes there, and here")
    init_strict: bool = key(TRUTH, "missing, unexpected or misshapen leaves are errors", True)
    init_optimizer: bool = key(TRUTH, "also take the optimizer's state", False)
    save_checkpoint_interval: int = side_key(whole(1, unset=-1), "keep every k-th epoch and the newest", 1)
    save_checkpoint_path: str | None = side_key(PATH, "checkpoint directory; in the run if missing")
    save_step_interval: int | None = side_key(whole(1, unset=-1), "steps between extra saves")
    save_step_path: str | None = side_key(PATH, "their directory; in the run if missing")
    save_inference_interval: int | None = side_key(
        whole(1, unset=-1), "epochs between exports of model weights; always after the last"
    )
    save_inference_path: str | None = side_key(
        PATH, "directory for `<epoch>/<phase>.safetensors`; `inference/` of the run if missing"
    )
    onnx: OnnxKeys | None = side_key(
        section(OnnxKeys), "ONNX files in `exports/` of the run; needs the package onnx"
    )
    keep_last: int | None = side_key(whole(1), "newest epochs to keep; all if missing")
    keep_every: int | None = side_key(whole(1), "also keep epochs that are multiples of this")
    keep_best: KeepBest | None = side_key(section(KeepBest), "keep the best epoch")
    checkpoint: CheckpointKeys | None = key(
        section(CheckpointKeys), "contents of checkpoints, and how they are written"
    )
    print_interval: int = side_key(whole(1), "steps between log lines", 20)
    runner_result_dump_path: str | None = side_key(PATH, "JSON lines file for the results of each batch")
    on_crash: str = side_key(
        one_of("none", "save"),
        "`save`: when a task fails, write the process's state to `crash/` of the run",
        "none",
    )
    save_signal: str = side_key(
        text("the name of a signal, or `none`"),
        "this signal saves a checkpoint at the next possible step; training continues",
        "SIGUSR2",
    )
    replay: bool = side_key(TRUTH, "record model calls for `torchrelay verify RUN --replay`", False)
    epoch: EpochChoice | None = infer_key(EPOCHS, "epochs to evaluate; all if missing")
    infer_start_epoch: int | None = infer_key(whole(0), "older form of `epoch`: first")
    infer_end_epoch: int | None = infer_key(whole(1), "older form of `epoch`: last + 1")
    predictions_path: str | None = infer_key(PATH, "file for the predictions, in input order")
    predictions_format: str | None = infer_key(
        one_of("jsonl", "csv"), "format; by file extension if missing, else `jsonl`"
    )
    metrics_path: str | None = infer_key(PATH, "JSON lines file for the metrics of each epoch")
    instance_class_path: ClassPath | None = key(class_at("Instance"), "replaces the step `setup`")
    network_class_path: ClassPath | None = key(class_at("Network"), "replaces the step `build`")
    startup_class_path: ClassPath | None = key(class_at("Startup"), "replaces the step `start`")
    runner_class_path: ClassPath | None = key(class_at("Runner"), "replaces the step `loop`")
    terminal_class_path: ClassPath | None = key(class_at("Terminal"), "replaces the step `finish`")

    @property
    def infers(self) -> bool:
        """True if it evaluates stored epochs instead of training."""
        return self.kind in INFER_CLASSES

    @property
    def max_epochs(self) -> int | None:
        """The limit on epochs, from `epochs` or `stop`."""
        return self.epochs if self.epochs is not None or self.stop is None else self.stop.max_epochs

    @property
    def infer_epochs(self) -> EpochChoice:
        """The epochs that `infer` evaluates, from `epoch` or its older form."""
        if self.infer_start_epoch is None or self.infer_end_epoch is None:
            return self.epoch or EpochChoice("all")
        return EpochChoice("numbers", first=self.infer_start_epoch, last=self.infer_end_epoch - 1)


def is_infer(runner: Mapping[str, Any]) -> bool:
    """Return True if a runner in file notation is of class `infer`."""
    return runner.get("class") in INFER_CLASSES


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
    defined: Json = {}
    for form, _ in sections(TOP):
        properties: Json = {}
        for name, spec in form.keys.items():
            own = spec.form.schema if spec.required else {"anyOf": [spec.form.schema, {"type": "null"}]}
            default = {} if spec.default is None else {"default": spec.default}
            properties[name] = {"description": spec.doc, **own, **default}
        required = [name for name, spec in form.keys.items() if spec.required]
        defined[form.of.__name__.removesuffix("Section")] = {
            "type": "object",
            "description": (form.of.__doc__ or "").partition("\n")[0],
            "properties": properties,
            "additionalProperties": form.free is not None,
            **({"required": required} if required else {}),
        }
    expression = {
        "type": "string",
        "pattern": r"\$\{[^{}]+\}",
        "description": "`${key.path}`, `${upstream.low.key.path}` or `${env:NAME}`",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of torchrelay",
        **defined.pop(Settings.__name__),
        "$defs": {"expression": expression, **defined},
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


_SHORT_WORDS = (
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


def key_table() -> str:
    """Return a Markdown table of keys for each section."""
    head = (
        "† Changing this key starts a different run. A class is `file.py` with a class of that name,\n"
        "`file.py:Class` or `module:Class`. A duration is a number of seconds, `1h30m` or `01:30:00`.\n\n"
    )
    tables = []
    for form, path in sections(TOP):
        rows = []
        for spec in form.keys.values():
            word = spec.form.word
            for pattern, short in _SHORT_WORDS:
                word = re.sub(pattern, short, word)
            default = "" if spec.default in (None, [], {}) else f"; default `{scalar(spec.default)}`"
            note = "; required" if spec.required else default
            rows.append(f"| `{spec.name}`{'†' * spec.identity} | {_cell(word)}{note} | {_cell(spec.doc)} |")
        if form.free is not None:
            rows.append(f"| …† | anything | {form.free_doc} |")
        for remedy in dict.fromkeys(form.refused.values()):
            names = ", ".join(f"`{name}`" for name, why in form.refused.items() if why == remedy)
            rows.append(f"| {names} | refused | {_cell(remedy)} |")
        begin = f"### {path or 'At the top'}\n\n{(form.of.__doc__ or '').strip()}\n"
        tables.append("\n".join((begin, "| key | value | meaning |\n|---|---|---|", *rows, "")))
    return head + "\n".join(tables)


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
