"""Context shared by the steps of a profile, the state of its phases, and the order of the steps.

setup (Instance) -> build (Network) -> start (Startup) -> loop (Runner) -> finish (Terminal) -> end
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from torchrelay.errors import UsageError
from torchrelay.jobs.config.schema import Phase
from torchrelay.jobs.workspace import Workspace
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.selection import LOADER, MODEL, OPTIMIZER, SCHEDULER, run_of
from torchrelay.runners.distributed.launcher import read_launch_env
from torchrelay.runners.training.extras.upstream import LoadedUpstream, load_upstream

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn, optim

    from torchrelay.jobs.config.config import Config
    from torchrelay.jobs.config.schema import RunnerSection, Settings
    from torchrelay.jobs.data.loader import EpochLoader
    from torchrelay.jobs.job import Job
    from torchrelay.runners.config_runs.class_loading import Classes
    from torchrelay.runners.session.base import SessionBase


END = "end"
"""The status after the last step."""


@dataclass(frozen=True)
class StepName:
    """A step: its `name` is the method and the status, `class_name` the class that a file must define.

    `older` is the corresponding method of PaddleRec's steps, `state` the status by which these select this
    step.
    """

    name: str
    class_name: str
    older: str
    state: str

    @property
    def key(self) -> str:
        """The key of a runner that replaces this step."""
        return f"{self.class_name.lower()}_class_path"


STEPS = (
    StepName("setup", "Instance", "instance", "instance_pass"),
    StepName("build", "Network", "build_network", "network_pass"),
    StepName("start", "Startup", "startup", "startup_pass"),
    StepName("loop", "Runner", "run", "train_pass"),
    StepName("finish", "Terminal", "terminal", "terminal_pass"),
)
LAST_OF_START_UP = "start"
LEGAL = (*(one.name for one in STEPS), END)
_ALSO = {one.state: one.name for one in STEPS} | {"infer_pass": "loop"}


def status_of(given: object) -> str:
    """Return the status; PaddleRec's `*_pass` names are aliases. Raises UsageError for others."""
    if isinstance(given, str) and given in (*LEGAL, *_ALSO):
        return _ALSO.get(given, given)
    raise UsageError(
        f"invalid context['status'] = {given!r:.80}: expected {', '.join(LEGAL)} "
        f"(or PaddleRec's {', '.join(_ALSO)})"
    )


def after(name: str) -> str:
    """Return the status that follows a step that set none."""
    return LEGAL[LEGAL.index(name) + 1]


def step_named(name: str) -> StepName:
    """Return the step of a status other than `end`."""
    return STEPS[LEGAL.index(name)]


class ContextKeyError(UsageError, KeyError):
    """A step reads an entry that is not set; the message names the step that should set it."""

    def __str__(self) -> str:
        return str(self.args[0])


ENTRIES: dict[str, tuple[str | None, str]] = {
    "config": (None, "the configuration"),
    "settings": (None, "its keys with their types"),
    "runner": (None, "the keys of this profile"),
    "runner_name": (None, "the profile's name"),
    "is_infer": (None, "True if it evaluates stored epochs instead of training"),
    "run_dir": (None, "the run directory of a profile that trains; for `infer`, the location of the epochs"),
    "job_options": (None, "options of JobRunner"),
    "classes": (None, "the user's classes, loaded"),
    "env": (None, "the whole configuration as plain values"),
    "config_yaml": (None, "the file it was read from"),
    "workspace": (None, "the directory that paths are relative to"),
    "rank": (None, "the number of this process"),
    "world_size": (None, "how many processes there are"),
    "engine": (None, "`single`, or `cluster` with several processes"),
    "session": ("setup", "the processes of the job"),
    "device": ("setup", "the torch.device of this process"),
    "phases": ("build", "models, data and optimizers by phase"),
    "job": ("build", "the training job; only if the profile trains"),
    "epochs": ("start", "the epochs that `infer` evaluates"),
    "result": ("loop", "a RunResult; for `infer` the rows, one dict per epoch"),
}
"""The step that sets each entry (None: set from the beginning), and what the entry is."""


class StepContext(MutableMapping[str, Any]):
    """The context of one profile. `context.job` and `context["job"]` are the same entry.

    A step may add its own entries as items. `context["status"] = name` chooses the next step; otherwise steps
    run in order. Raises ContextKeyError for entries that are not set, UsageError for an unknown status.
    """

    config: Config
    settings: Settings
    runner: RunnerSection
    runner_name: str
    is_infer: bool
    run_dir: str
    job_options: dict[str, Any]
    classes: Classes
    env: Mapping[str, Any]
    config_yaml: str
    workspace: Path
    rank: int
    world_size: int
    engine: str
    session: SessionBase
    device: Any
    phases: dict[str, PhaseState]
    job: Job
    epochs: tuple[int, ...]
    result: Any

    def __init__(self, **given: Any) -> None:
        self._held: dict[str, Any] = dict(given)

    @classmethod
    def of(
        cls, config: Config, runner: RunnerSection, run_dir: str, classes: Classes, **more: Any
    ) -> StepContext:
        """Create the context that a profile's steps begin with; `more` holds entries that differ."""
        env = read_launch_env()
        given = {
            "config": config, "settings": config.settings, "env": config.resolved,
            "config_yaml": config.name, "workspace": config.workspace,
            "runner": runner, "runner_name": runner.name, "is_infer": runner.infers,
            "run_dir": run_dir, "job_options": {}, "classes": classes,
            "rank": env.rank, "world_size": env.world_size,
            "engine": "single" if env.world_size == 1 else "cluster",
        }  # fmt: skip
        return cls(**{**given, **more})

    def __getitem__(self, key: str) -> Any:
        if key not in self._held:
            raise ContextKeyError(self._missing(key))
        return self._held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._held[key] = status_of(value) if key == "status" else value

    def __getattr__(self, name: str) -> Any:
        if name not in ENTRIES:
            raise AttributeError(f"the context has no attribute {name!r}", name=name, obj=self)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_held":
            super().__setattr__(name, value)
        elif name in ENTRIES:
            self[name] = value
        else:
            raise UsageError(f'the context has no attribute {name!r}: set your own as context["{name}"]')

    def __delitem__(self, key: str) -> None:
        if key not in self._held:
            raise ContextKeyError(self._missing(key))
        del self._held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"StepContext({', '.join(self._held)})"

    def get(self, key: str, default: Any = None, /) -> Any:
        """Return the entry, or `default` if it is not set."""
        return self._held.get(key, default)

    def load_upstream(self, alias: str) -> LoadedUpstream:
        """Return configuration and source of an `upstream` run; see `torchrelay.load_upstream`."""
        known = {name: run_of(self.config, one.run) for name, one in self.settings.upstream.items()}
        return load_upstream(alias, self.run_dir, known or None)

    def setting(self, path: str, default: Any = None) -> Any:
        """Read the configuration at a dotted path such as `runner.train1.epochs`; the key counts as read.

        A missing key has the schema's default, else `default`. PaddleRec's name is `get_global_env`.
        """
        return self.config.value(path, default)

    def barrier(self) -> None:
        """Wait for all processes. Raises PeerError or DeadlineError if one does not arrive."""
        self.session.peers.exchange("barrier of a step", None)

    def _missing(self, key: str) -> str:
        if key in ENTRIES:
            setter, text = ENTRIES[key]
            who = next((one.class_name for one in STEPS if one.name == setter), "the run")
            return f"context[{key!r}] ({text}) is not set: the step {setter} ({who}) sets it"
        similar = difflib.get_close_matches(str(key), [*self._held, *ENTRIES], 1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        return f"context[{key!r}] is not set, and no step of torchrelay sets it{hint}; available: {self!r}"


class PhaseScope(MutableMapping[str, Any]):
    """The workspace names that begin with a phase's name, without that prefix: `total` is `phase1.total`.

    A view that holds no data. Names that are created before the first epoch are part of the checkpoint.
    """

    def __init__(self, workspace: Workspace, name: str) -> None:
        self.name = name
        self._workspace = workspace
        self._begin = f"{name}."

    def __getitem__(self, name: str) -> Any:
        return self._workspace[self._begin + name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._workspace[self._begin + name] = value

    def __delitem__(self, name: str) -> None:
        del self._workspace[self._begin + name]

    def __iter__(self) -> Iterator[str]:
        begin = self._begin
        return iter([name.removeprefix(begin) for name in self._workspace if name.startswith(begin)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"PhaseScope({self.name}: {', '.join(self)})"


@dataclass
class PhaseState:
    """A model with its data, optimizer and schedule.

    `trained` is the module to call in training, wrapped if there are several ranks. `scope` is the phase's
    part of the workspace. `prefix` precedes the names of its metrics, and is empty if the profile has one
    phase. `optimizer` is None if nothing is trained. `scheduler` steps after each optimizer step, or after
    each epoch. `validation` is the same model with its validation data.
    """

    name: str
    keys: Phase
    model: nn.Module
    trained: nn.Module
    loader: EpochLoader
    scope: PhaseScope
    prefix: str
    optimizer: optim.Optimizer | None = None
    scheduler: Any = None
    scheduled_by_epoch: bool = False
    validation: PhaseState | None = None
    metrics: tuple[str, ...] | None = None
    """Metrics that an evaluation logs; None: all."""

    def logs(self, metric: str) -> bool:
        """Return True if an evaluation logs this metric."""
        return self.metrics is None or metric in self.metrics

    def weight(self, count: int, ranks: int) -> float:
        """Return the weight of `count` samples; less if several ranks read the same samples."""
        return count * self.loader.world / ranks

    def step_scheduler(self, *, epoch: bool) -> None:
        """Step the schedule if it counts epochs (or steps); raises UsageError at its end."""
        if self.scheduler is None or self.scheduled_by_epoch is not epoch:
            return
        try:
            self.scheduler.step()
        except ValueError as error:
            from torch.optim.lr_scheduler import OneCycleLR

            if not isinstance(self.scheduler, OneCycleLR):  # the only schedule with an end
                raise
            kind, unit = type(self.scheduler).__name__, "epochs" if epoch else "steps"
            raise UsageError(
                f"phase.{self.name}: its {kind} cannot step further ({error}): "
                f"configure it for as many {unit} as are trained"
            ) from error

    def blobs(self) -> Mapping[str, Any]:
        """Return the objects that a checkpoint stores, by blob name."""
        found = {MODEL: self.model, LOADER: self.loader}
        if self.optimizer is not None:
            found[OPTIMIZER] = self.optimizer
        if self.scheduler is not None:
            found[SCHEDULER] = self.scheduler
        return {f"{self.name}.{part}": thing for part, thing in found.items()}
