"""What the steps of a profile pass on to each other, what a phase consists of, and the order of the steps.

setup (Instance) -> build (Network) -> start (Startup) -> loop (Runner) -> finish (Terminal) -> end
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from torchrelay.errors import UsageError
from torchrelay.jobs.config.schema import Phase
from torchrelay.jobs.workspace import Workspace
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.selection import LOADER, MODEL, OPTIMIZER, SCHEDULER, run_of
from torchrelay.runners.distributed.environment import read_launch_env
from torchrelay.runners.training.extras.warm_start import LoadedUpstream, load_upstream

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn, optim

    from torchrelay.jobs.config.config import Config
    from torchrelay.jobs.config.runner_schema import RunnerSection
    from torchrelay.jobs.config.schema import Settings
    from torchrelay.jobs.data.loader import EpochLoader
    from torchrelay.jobs.job import Job
    from torchrelay.runners.config_runs.class_loading import Classes
    from torchrelay.runners.session.base import SessionBase


T = TypeVar("T")


class Slot(Generic[T]):
    """An entry that the step called `setter` sets; None: it is there from the beginning."""

    def __init__(self, setter: str | None, doc: str) -> None:
        self.setter = setter
        self.__doc__ = doc
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, holder: None, owner: type) -> Slot[T]: ...

    @overload
    def __get__(self, holder: MutableMapping[str, Any], owner: type) -> T: ...

    def __get__(self, holder: MutableMapping[str, Any] | None, owner: type) -> Any:
        return self if holder is None else holder[self.name]

    def __set__(self, holder: MutableMapping[str, Any], value: T) -> None:
        holder[self.name] = value


END = "end"
"""The status behind the last step."""


@dataclass(frozen=True)
class StepName:
    """A step: its `name` is the method and the status, `class_name` what a file must define.

    `older` is the method in which PaddleRec's steps do the same, `state` the status by which its steps go
    to this one.
    """

    name: str
    class_name: str
    older: str
    state: str

    @property
    def key(self) -> str:
        """The key of a runner that replaces it."""
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
    """The status that is meant; PaddleRec's `*_pass` names mean the same steps. UsageError for others."""
    if isinstance(given, str) and given in (*LEGAL, *_ALSO):
        return _ALSO.get(given, given)
    raise UsageError(
        f"context['status'] = {given!r:.80} is no step; legal are {', '.join(LEGAL)} "
        f"(and PaddleRec's {', '.join(_ALSO)})"
    )


def after(name: str) -> str:
    """The status behind a step that asked for none."""
    return LEGAL[LEGAL.index(name) + 1]


def step_named(name: str) -> StepName:
    """The step of a status other than `end`."""
    return STEPS[LEGAL.index(name)]


class ContextKeyError(UsageError, KeyError):
    """A step asks for what is not in the context; the message says which step should have set it."""

    def __str__(self) -> str:
        return str(self.args[0])


class StepContext(MutableMapping[str, Any]):
    """The context of one profile. `context.job` and `context["job"]` are the same entry.

    A step may put entries of its own there, as items. `context["status"] = name` chooses the next step;
    what does not set it goes on in order. Raises ContextKeyError for what nobody has set, UsageError for a
    status that is no step.
    """

    config: Slot[Config] = Slot(None, "the configuration")
    settings: Slot[Settings] = Slot(None, "its keys with their types")
    runner: Slot[RunnerSection] = Slot(None, "the keys of this profile")
    runner_name: Slot[str] = Slot(None, "the profile's name")
    is_infer: Slot[bool] = Slot(None, "whether it evaluates stored epochs instead of training")
    run_dir: Slot[str] = Slot(None, "the run directory of a profile that trains; where `infer` finds epochs")
    job_options: Slot[dict[str, Any]] = Slot(None, "what JobRunner is told, beside the job")
    classes: Slot[Classes] = Slot(None, "the user's classes, loaded")
    env: Slot[Mapping[str, Any]] = Slot(None, "the whole configuration as plain values")
    config_yaml: Slot[str] = Slot(None, "the file it was read from")
    workspace: Slot[Path] = Slot(None, "the directory where paths begin")
    rank: Slot[int] = Slot(None, "the number of this process")
    world_size: Slot[int] = Slot(None, "how many processes there are")
    engine: Slot[str] = Slot(None, "`single`, or `cluster` where there are several processes")
    session: Slot[SessionBase] = Slot("setup", "the processes of the job")
    device: Slot[Any] = Slot("setup", "the torch.device of this process")
    phases: Slot[dict[str, PhaseState]] = Slot("build", "models, data and optimizers by phase")
    job: Slot[Job] = Slot("build", "what is trained; only where a profile trains")
    epochs: Slot[tuple[int, ...]] = Slot("start", "the epochs that `infer` goes over")
    result: Slot[Any] = Slot("loop", "a RunResult; of `infer` the rows, one dict per epoch")

    def __init__(self, **given: Any) -> None:
        self._held: dict[str, Any] = dict(given)

    @classmethod
    def of(
        cls, config: Config, runner: RunnerSection, run_dir: str, classes: Classes, **more: Any
    ) -> StepContext:
        """What the steps of a profile begin with; `more` are entries that differ."""
        env = read_launch_env()
        given = {
            "config": config,
            "settings": config.settings,
            "runner": runner,
            "runner_name": runner.name,
            "is_infer": runner.infers,
            "run_dir": run_dir,
            "job_options": {},
            "classes": classes,
            "env": config.resolved,
            "config_yaml": config.name,
            "workspace": config.workspace,
            "rank": env.rank,
            "world_size": env.world_size,
            "engine": "single" if env.world_size == 1 else "cluster",
        }
        return cls(**{**given, **more})

    def __getitem__(self, key: str) -> Any:
        if key not in self._held:
            raise ContextKeyError(self._missing(key))
        return self._held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._held[key] = status_of(value) if key == "status" else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_held" and not isinstance(getattr(type(self), name, None), Slot):
            raise UsageError(f'the context has no attribute {name!r}: put your own as context["{name}"]')
        super().__setattr__(name, value)

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
        """The entry, or `default` where nobody has set it."""
        return self._held.get(key, default)

    def load_upstream(self, alias: str) -> LoadedUpstream:
        """The configuration and source of a run that `upstream` names; see `torchrelay.load_upstream`."""
        known = {name: run_of(self.config, one.run) for name, one in self.settings.upstream.items()}
        return load_upstream(alias, self.run_dir, known or None)

    def setting(self, path: str, default: Any = None) -> Any:
        """What the configuration has at a dotted path, `runner.train1.epochs`; it counts as read.

        Where nothing stands it is the schema's default, else `default`. PaddleRec's `get_global_env`.
        """
        return self.config.value(path, default)

    def barrier(self) -> None:
        """Wait until all processes are here. Raises PeerError or DeadlineError where one does not come."""
        self.session.peers.exchange("barrier of a step", None)

    def _missing(self, key: str) -> str:
        slot = getattr(type(self), key, None) if isinstance(key, str) else None
        if isinstance(slot, Slot):
            who = next((one.class_name for one in STEPS if one.name == slot.setter), "the run")
            return f"context[{key!r}] ({slot.__doc__}) is not set: the step {slot.setter} ({who}) sets it"
        declared = [name for name, value in vars(type(self)).items() if isinstance(value, Slot)]
        near = difflib.get_close_matches(str(key), [*self._held, *declared], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"no step has set context[{key!r}], and none of torchrelay's does{hint}; there is {self!r}"


class PhaseScope(MutableMapping[str, Any]):
    """The names of a workspace that begin with a phase's, without that beginning: `total` is `phase1.total`.

    Nothing is held here. Names that are made before the first epoch belong to the checkpoint.
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
    """A model with its data. `trained` is the model as it is called: wrapped where there are several ranks.

    `scope` is its part of the workspace. `prefix` stands before the names of its metrics: empty where the
    profile has one phase. `optimizer` is None where nothing is trained; `scheduler` is stepped behind each of
    its steps, or behind each epoch, where there is one. `validation` is the same model with the data that it
    is measured on while it trains.
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
    """Which metrics an evaluation logs; all if it is None."""

    def logs(self, metric: str) -> bool:
        """Whether an evaluation logs this metric."""
        return self.metrics is None or metric in self.metrics

    def weight(self, count: int, ranks: int) -> float:
        """What `count` samples of this process weigh: less where several ranks read the same ones."""
        return count * self.loader.world / ranks

    def step_scheduler(self, *, epoch: bool) -> None:
        """Step its schedule where that counts epochs (or steps); raises UsageError where it is at its end."""
        if self.scheduler is None or self.scheduled_by_epoch is not epoch:
            return
        try:
            self.scheduler.step()
        except ValueError as error:
            from torch.optim.lr_scheduler import OneCycleLR

            if not isinstance(self.scheduler, OneCycleLR):  # it alone has an end
                raise
            kind, unit = type(self.scheduler).__name__, "epochs" if epoch else "steps"
            raise UsageError(
                f"phase.{self.name}: its {kind} refuses to step ({error}): "
                f"give it as many {unit} as are trained"
            ) from error

    def blobs(self) -> Mapping[str, Any]:
        """What a checkpoint has of it, by blob name."""
        found = {MODEL: self.model, LOADER: self.loader}
        if self.optimizer is not None:
            found[OPTIMIZER] = self.optimizer
        if self.scheduler is not None:
            found[SCHEDULER] = self.scheduler
        return {f"{self.name}.{part}": thing for part, thing in found.items()}
