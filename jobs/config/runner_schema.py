"""Keys of a runner: which steps run, for how long, what is kept, what is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torchrelay.jobs.config.section_types import (
    ClassAt,
    ClassPath,
    EpochChoice,
    EpochsChosen,
    GpuNumbers,
    Section,
)
from torchrelay.jobs.config.types import (
    ListOf,
    Number,
    OneOf,
    RunName,
    Seconds,
    Text,
    TextMap,
    Truth,
    Whole,
    key,
)
from torchrelay.jobs.config.user_sections import PathAt, WeightsAt
from torchrelay.records import dataclass

TRAIN, LOCAL_TRAIN, CLUSTER_TRAIN = "train", "local_cluster_train", "cluster_train"
INFER_CLASSES = ("infer", "single_infer")
CLASSES = (TRAIN, "single_train", LOCAL_TRAIN, CLUSTER_TRAIN, *INFER_CLASSES)
_NO_SERVERS = "there are no parameter servers: gradients are reduced between the ranks; leave the key out"
_OTHER_CLASSES = {
    "online_learning": "write `train`, and `epochs_per_partition` for so many epochs over each day's data",
    "local_cluster": "write `local_cluster_train`",
    "cluster": "write `cluster_train`",
}
_NO_VARIABLES = (
    "a module has no named variables: what goes out are the weights of the whole model, and what comes in "
    "and out of it is its forward; leave the key out"
)
_SERVER_WORDS = dict.fromkeys(("ps", "pslib", "async", "half_async", "geo"), _NO_SERVERS)


@dataclass(frozen=True, kw_only=True)
class KeepBest:
    """Which epoch is the best one: it is kept, and found as `best`."""

    metric: str = key(
        Text("the name of a metric"), "the metric, such as `val/auc`", required=True, identity=False
    )
    mode: str = key(OneOf(("min", "max")), "whether less or more is better", required=True, identity=False)


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when a metric has not become better for some measurements."""

    metric: str = key(
        Text("the name of a metric"), "the metric, such as `val/auc`", required=True, identity=False
    )
    mode: str = key(OneOf(("min", "max")), "whether less or more is better", required=True, identity=False)
    patience: int = key(
        Whole(1),
        "so many measurements without a better value; an epoch that does not log it has none",
        required=True,
        identity=False,
    )
    min_delta: float = key(Number(least=0), "what counts as better", default=0, identity=False)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """When a run is over; totals over all its starts. Any of them ends it."""

    max_epochs: int | None = key(Whole(1), "so many epochs, as `epochs` of the runner", identity=False)
    max_steps: int | None = key(Whole(1), "so many steps", identity=False)
    max_time: float | None = key(Seconds(), "so much time of running", identity=False)
    early_stopping: EarlyStopping | None = key(
        Section(EarlyStopping), "a metric got no better", identity=False
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointKeys:
    """What checkpoints hold, and how they are written."""

    include: tuple[str, ...] | None = key(
        ListOf(Text("a pattern"), lone=True), "only blobs and leaves like these"
    )
    exclude: tuple[str, ...] | None = key(
        ListOf(Text("a pattern"), lone=True), "without blobs and leaves like these"
    )
    asynchronous: bool = key(Truth(), "write behind the training", default=False, identity=False)
    max_failed_saves: int | None = key(Whole(0), "so many saves may fail in a row", identity=False)
    compare_every: int | None = key(
        Whole(1), "all bytes of the replicas are compared every so many epochs; 10 if missing", identity=False
    )
    rename: Mapping[str, str] | None = key(
        TextMap(), "beginnings of names in older epochs, and what a resume finds them as", identity=False
    )
    resume_exclude: tuple[str, ...] | None = key(
        ListOf(Text("a pattern"), lone=True),
        "leaves like these stay as the program made them where a resume finds that they do not fit",
        identity=False,
    )
    resume_strict: bool = key(
        Truth(), "refuse to resume where blobs are new or gone", default=False, identity=False
    )
    near: str | None = key(
        PathAt(), "save below this quick local directory, and send it on behind the training", identity=False
    )
    lag: int | None = key(
        Whole(1), "with `near`: so many saved epochs may be there only; 2 if missing", identity=False
    )


@dataclass(frozen=True, kw_only=True)
class OnnxKeys:
    """Which ONNX files of the models a run makes while it trains; `every`, `best`, or both."""

    every: int | None = key(Whole(1), "`<model>-epoch-<k>.onnx` every so many epochs", identity=False)
    best: bool = key(
        Truth(), "`<model>-best.onnx` of the epoch that `keep_best` means", default=False, identity=False
    )


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A profile of what is run. Keys that make no sense for `infer` are left unread there."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "server_num": _NO_SERVERS,
        "save_inference_feed_varnames": _NO_VARIABLES,
        "save_inference_fetch_varnames": _NO_VARIABLES,
        "trainer_class": "replace the steps that differ instead, by `runner_class_path` and the other four",
    }
    name: str = key(RunName("a name"), "what `mode` and overrides call it", required=True)
    kind: str = key(
        OneOf(CLASSES, _OTHER_CLASSES),
        "`train`, `infer`: in this process, or in those that torchrun started; `local_cluster_train`: starts "
        "`worker_num` processes here; `cluster_train`: only under a launcher; `single_train` is `train`, "
        "`single_infer` is `infer`",
        default=TRAIN, identity=False, name="class",
    )  # fmt: skip
    device: str = key(
        OneOf(("auto", "cpu", "cuda", "gpu")),
        "`auto` is `cuda` where there is one; `gpu` is `cuda`", default="auto", identity=False,
    )  # fmt: skip
    selected_gpus: tuple[int, ...] | None = key(
        GpuNumbers(), "the GPUs that may be used; all if missing", identity=False
    )
    fleet_mode: str = key(
        OneOf(("collective",), _SERVER_WORDS), "the only one", default="collective", identity=False
    )
    distribute_strategy: str = key(
        OneOf(("sync",), _SERVER_WORDS), "the only one", default="sync", identity=False
    )
    worker_num: int = key(Whole(1), "processes of `local_cluster_train`", default=1, identity=False)
    epochs: int | None = key(
        Whole(1), "train until so many epochs are done, in all starts together", identity=False
    )
    epochs_per_partition: int | None = key(
        Whole(1),
        "so many epochs over each file, or directory of files, in `data_path`, one after another; over when "
        "none is left, and goes on when started with more",
    )
    stop: Stop | None = key(Section(Stop), "other ends of the run", identity=False)
    time_limit: float | None = key(Seconds(), "leave after so long; the same command goes on", identity=False)
    phases: tuple[str, ...] | None = key(
        ListOf(Text("the name of a phase"), lone=True),
        "the phases of an epoch, in this order; all if it is missing",
    )
    init_model_path: str | None = key(
        WeightsAt(),
        "`train`: start from these weights, once, never on resume; `infer`: where the epochs are",
    )
    init_prefix: str | None = key(
        Text("a dotted name"), "take only what lies below this name of `init_model_path`"
    )
    init_rename: Mapping[str, str] | None = key(
        TextMap(), "beginnings of names there, and what they become here"
    )
    init_strict: bool = key(Truth(), "missing, unexpected and mis-shaped names are errors", default=True)
    init_optimizer: bool = key(Truth(), "take the optimizer's state, too", default=False)
    save_checkpoint_interval: int = key(
        Whole(1, unset=-1), "save every so many epochs, and always the last one", default=1, identity=False
    )
    save_checkpoint_path: str | None = key(
        PathAt(), "where epochs go; in the run if it is missing", identity=False
    )
    save_step_interval: int | None = key(Whole(1, unset=-1), "also save every so many steps", identity=False)
    save_step_path: str | None = key(PathAt(), "where these go; in the run if it is missing", identity=False)
    save_inference_interval: int | None = key(
        Whole(1, unset=-1),
        "write the weights of the models alone every so many epochs, and of the last one",
        identity=False,
    )
    save_inference_path: str | None = key(
        PathAt(),
        "where these go, `<epoch>/<phase>.safetensors`; `inference/` of the run if it is missing",
        identity=False,
    )
    onnx: OnnxKeys | None = key(
        Section(OnnxKeys),
        "ONNX files of the models, in `exports/` of the run; needs the extra `onnx`",
        identity=False,
    )
    keep_last: int | None = key(
        Whole(1), "keep so many of the newest epochs; all if it is missing", identity=False
    )
    keep_every: int | None = key(
        Whole(1), "also keep the epochs with a multiple of this number", identity=False
    )
    keep_best: KeepBest | None = key(
        Section(KeepBest), "keep the best epoch, and call it `best`", identity=False
    )
    checkpoint: CheckpointKeys | None = key(Section(CheckpointKeys), "what checkpoints hold")
    print_interval: int = key(Whole(1), "a line in the log every so many steps", default=20, identity=False)
    runner_result_dump_path: str | None = key(
        PathAt(), "the results of all batches go there, as JSON", identity=False
    )
    on_crash: str = key(
        OneOf(("none", "save")),
        "`save`: where a task fails, what its process holds goes to `crash/` of the run",
        default="none",
        identity=False,
    )
    save_signal: str = key(
        Text("the name of a signal, or `none`"),
        "this signal makes a checkpoint at the next step that can be saved, and training goes on",
        default="SIGUSR2",
        identity=False,
    )
    replay: bool = key(
        Truth(),
        "record a call of each model at every epoch, for `torchrelay verify RUN --replay`",
        default=False,
        identity=False,
    )
    epoch: EpochChoice | None = key(
        EpochsChosen(),
        "which epochs `infer` goes over; all if it is missing",
        identity=False,
        infer_only=True,
    )
    infer_start_epoch: int | None = key(
        Whole(0), "older form of `epoch`: the first one", identity=False, infer_only=True
    )
    infer_end_epoch: int | None = key(
        Whole(1), "older form of `epoch`: the one behind the last", identity=False, infer_only=True
    )
    predictions_path: str | None = key(
        PathAt(),
        "what the model predicts of each sample goes there, in the order of the input",
        identity=False,
        infer_only=True,
    )
    predictions_format: str | None = key(
        OneOf(("jsonl", "csv")), "its format; that of the name's ending if it is missing, else `jsonl`",
        identity=False, infer_only=True,
    )  # fmt: skip
    metrics_path: str | None = key(
        PathAt(), "the metrics go there, a JSON line for each epoch", identity=False, infer_only=True
    )
    instance_class_path: ClassPath | None = key(
        ClassAt("Instance"), "replaces the step that sets up processes"
    )
    network_class_path: ClassPath | None = key(
        ClassAt("Network"), "replaces the step that builds model and data"
    )
    startup_class_path: ClassPath | None = key(
        ClassAt("Startup"), "replaces the step that gives initial values"
    )
    runner_class_path: ClassPath | None = key(ClassAt("Runner"), "replaces the step that loops over epochs")
    terminal_class_path: ClassPath | None = key(ClassAt("Terminal"), "replaces the step that ends the run")

    @property
    def infers(self) -> bool:
        """Whether it evaluates stored epochs instead of training."""
        return self.kind in INFER_CLASSES

    @property
    def max_epochs(self) -> int | None:
        """The limit on epochs, in whichever of the two keys it stands."""
        return self.epochs if self.epochs is not None or self.stop is None else self.stop.max_epochs

    @property
    def infer_epochs(self) -> EpochChoice:
        """The epochs that `infer` goes over, in whichever form they stand."""
        if self.infer_start_epoch is None or self.infer_end_epoch is None:
            return self.epoch or EpochChoice("all")
        return EpochChoice("numbers", first=self.infer_start_epoch, last=self.infer_end_epoch - 1)


def is_infer(runner: Mapping[str, Any]) -> bool:
    """Whether a runner, as it stands in a file, infers."""
    return runner.get("class") in INFER_CLASSES
