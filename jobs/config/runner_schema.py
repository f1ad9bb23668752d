"""Keys of a runner: which steps run, for how long, what is kept, what is said."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torchrelay.jobs.config.section_types import EPOCHS, GPUS, PATH, WEIGHTS, ClassPath, EpochChoice, class_at
from torchrelay.jobs.config.types import (
    RUN_NAME,
    SECONDS,
    TEXTS,
    TRUTH,
    key,
    number,
    one_of,
    section,
    side_key,
    some,
    text,
    whole,
)
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
infer_key = partial(side_key, infer_only=True)
_SERVER_WORDS = dict.fromkeys(("ps", "pslib", "async", "half_async", "geo"), _NO_SERVERS)


@dataclass(frozen=True, kw_only=True)
class KeepBest:
    """Which epoch is the best one: it is kept, and found as `best`."""

    metric: str = side_key(text("the name of a metric"), "the metric, such as `val/auc`", required=True)
    mode: str = side_key(one_of("min", "max"), "whether less or more is better", required=True)


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingSection:
    """Stop when a metric has not become better for some measurements."""

    metric: str = side_key(text("the name of a metric"), "the metric, such as `val/auc`", required=True)
    mode: str = side_key(one_of("min", "max"), "whether less or more is better", required=True)
    patience: int = side_key(
        whole(1),
        "so many measurements without a better value; an epoch that does not log it has none",
        required=True,
    )
    min_delta: float = side_key(number(least=0), "what counts as better", 0)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """When a run is over; totals over all its starts. Any of them ends it."""

    max_epochs: int | None = side_key(whole(1), "so many epochs, as `epochs` of the runner")
    max_steps: int | None = side_key(whole(1), "so many steps")
    max_time: float | None = side_key(SECONDS, "so much time of running")
    early_stopping: EarlyStoppingSection | None = side_key(
        section(EarlyStoppingSection), "a metric got no better"
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointKeys:
    """What checkpoints hold, and how they are written."""

    include: tuple[str, ...] | None = key(some(text("a pattern")), "only blobs and leaves like these")
    exclude: tuple[str, ...] | None = key(some(text("a pattern")), "without blobs and leaves like these")
    asynchronous: bool = side_key(TRUTH, "write behind the training", False)
    max_failed_saves: int | None = side_key(whole(0), "so many saves may fail in a row")
    compare_every: int | None = side_key(
        whole(1), "all bytes of the replicas are compared every so many epochs; 10 if missing"
    )
    rename: Mapping[str, str] | None = side_key(
        TEXTS, "beginnings of names in older epochs, and what a resume finds them as"
    )
    resume_exclude: tuple[str, ...] | None = side_key(
        some(text("a pattern")),
        "leaves like these stay as the program made them where a resume finds that they do not fit",
    )
    resume_strict: bool = side_key(TRUTH, "refuse to resume where blobs are new or gone", False)
    near: str | None = side_key(
        PATH, "save below this quick local directory, and send it on behind the training"
    )
    lag: int | None = side_key(whole(1), "with `near`: so many saved epochs may be there only; 2 if missing")


@dataclass(frozen=True, kw_only=True)
class OnnxKeys:
    """Which ONNX files of the models a run makes while it trains; `every`, `best`, or both."""

    every: int | None = side_key(whole(1), "`<model>-epoch-<k>.onnx` every so many epochs")
    best: bool = side_key(TRUTH, "`<model>-best.onnx` of the epoch that `keep_best` means", False)


@dataclass(frozen=True, kw_only=True)
class RunnerSection:
    """A profile of what is run. Keys that make no sense for `infer` are left unread there."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "server_num": _NO_SERVERS,
        "save_inference_feed_varnames": _NO_VARIABLES,
        "save_inference_fetch_varnames": _NO_VARIABLES,
        "trainer_class": "replace the steps that differ instead, by `runner_class_path` and the other four",
    }
    name: str = key(RUN_NAME, "what `mode` and overrides call it", required=True)
    kind: str = side_key(
        one_of(*CLASSES, refused=_OTHER_CLASSES),
        "`train`, `infer`: in this process, or in those that torchrun started; `local_cluster_train`: starts "
        "`worker_num` processes here; `cluster_train`: only under a launcher; `single_train` is `train`, "
        "`single_infer` is `infer`",
        TRAIN,
        name="class",
    )
    device: str = side_key(
        one_of("auto", "cpu", "cuda", "gpu"), "`auto` is `cuda` where there is one; `gpu` is `cuda`", "auto"
    )
    selected_gpus: tuple[int, ...] | None = side_key(GPUS, "the GPUs that may be used; all if missing")
    fleet_mode: str = side_key(one_of("collective", refused=_SERVER_WORDS), "the only one", "collective")
    distribute_strategy: str = side_key(one_of("sync", refused=_SERVER_WORDS), "the only one", "sync")
    worker_num: int = side_key(whole(1), "processes of `local_cluster_train`", 1)
    epochs: int | None = side_key(whole(1), "train until so many epochs are done, in all starts together")
    epochs_per_partition: int | None = key(
        whole(1),
        "so many epochs over each file, or directory of files, in `data_path`, one after another; over when "
        "none is left, and goes on when started with more",
    )
    stop: Stop | None = side_key(section(Stop), "other ends of the run")
    time_limit: float | None = side_key(SECONDS, "leave after so long; the same command goes on")
    phases: tuple[str, ...] | None = key(
        some(text("the name of a phase")), "the phases of an epoch, in this order; all if it is missing"
    )
    init_model_path: str | None = key(
        WEIGHTS, "`train`: start from these weights, once, never on resume; `infer`: where the epochs are"
    )
    init_prefix: str | None = key(
        text("a dotted name"), "take only what lies below this name of `init_model_path`"
    )
    init_rename: Mapping[str, str] | None = key(TEXTS, "beginnings of names there, and what they become here")
    init_strict: bool = key(TRUTH, "missing, unexpected and mis-shaped names are errors", True)
    init_optimizer: bool = key(TRUTH, "take the optimizer's state, too", False)
    save_checkpoint_interval: int = side_key(
        whole(1, unset=-1), "save every so many epochs, and always the last one", 1
    )
    save_checkpoint_path: str | None = side_key(PATH, "where epochs go; in the run if it is missing")
    save_step_interval: int | None = side_key(whole(1, unset=-1), "also save every so many steps")
    save_step_path: str | None = side_key(PATH, "where these go; in the run if it is missing")
    save_inference_interval: int | None = side_key(
        whole(1, unset=-1), "write the weights of the models alone every so many epochs, and of the last one"
    )
    save_inference_path: str | None = side_key(
        PATH, "where these go, `<epoch>/<phase>.safetensors`; `inference/` of the run if it is missing"
    )
    onnx: OnnxKeys | None = side_key(
        section(OnnxKeys), "ONNX files of the models, in `exports/` of the run; needs the extra `onnx`"
    )
    keep_last: int | None = side_key(whole(1), "keep so many of the newest epochs; all if it is missing")
    keep_every: int | None = side_key(whole(1), "also keep the epochs with a multiple of this number")
    keep_best: KeepBest | None = side_key(section(KeepBest), "keep the best epoch, and call it `best`")
    checkpoint: CheckpointKeys | None = key(section(CheckpointKeys), "what checkpoints hold")
    print_interval: int = side_key(whole(1), "a line in the log every so many steps", 20)
    runner_result_dump_path: str | None = side_key(PATH, "the results of all batches go there, as JSON")
    on_crash: str = side_key(
        one_of("none", "save"),
        "`save`: where a task fails, what its process holds goes to `crash/` of the run",
        "none",
    )
    save_signal: str = side_key(
        text("the name of a signal, or `none`"),
        "this signal makes a checkpoint at the next step that can be saved, and training goes on",
        "SIGUSR2",
    )
    replay: bool = side_key(
        TRUTH, "record a call of each model at every epoch, for `torchrelay verify RUN --replay`", False
    )
    epoch: EpochChoice | None = infer_key(EPOCHS, "which epochs `infer` goes over; all if it is missing")
    infer_start_epoch: int | None = infer_key(whole(0), "older form of `epoch`: the first one")
    infer_end_epoch: int | None = infer_key(whole(1), "older form of `epoch`: the one behind the last")
    predictions_path: str | None = infer_key(
        PATH, "what the model predicts of each sample goes there, in the order of the input"
    )
    predictions_format: str | None = side_key(
        one_of("jsonl", "csv"),
        "its format; that of the name's ending if it is missing, else `jsonl`",
        infer_only=True,
    )
    metrics_path: str | None = infer_key(PATH, "the metrics go there, a JSON line for each epoch")
    instance_class_path: ClassPath | None = key(
        class_at("Instance"), "replaces the step that sets up processes"
    )
    network_class_path: ClassPath | None = key(
        class_at("Network"), "replaces the step that builds model and data"
    )
    startup_class_path: ClassPath | None = key(
        class_at("Startup"), "replaces the step that gives initial values"
    )
    runner_class_path: ClassPath | None = key(class_at("Runner"), "replaces the step that loops over epochs")
    terminal_class_path: ClassPath | None = key(class_at("Terminal"), "replaces the step that ends the run")

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
