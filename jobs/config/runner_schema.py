"""Keys of a runner: the steps to run, limits, retention and logging."""

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
class EarlyStoppingSection:
    """Stop when a metric stops improving."""

    metric: str = side_key(text("the name of a metric"), "such as `val/auc`", required=True)
    mode: str = side_key(one_of("min", "max"), "whether lower or higher is better", required=True)
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
        some(text("a pattern")),
        "on resume, matching leaves that do not fit keep their initial values",
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
    predictions_format: str | None = side_key(
        one_of("jsonl", "csv"),
        "format; by file extension if missing, else `jsonl`",
        infer_only=True,
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
