"""What the steps of a profile pass on to each other: one object, typed and a mapping."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from torchrelay.errors import UsageError
from torchrelay.runners.distributed.environment import read_launch_env
from torchrelay.runners.lifecycle.order import STEPS, status_of
from torchrelay.runners.lifecycle.recording import run_of
from torchrelay.runners.lifecycle.slots import Slot
from torchrelay.runners.training.extras.load_upstream import LoadedUpstream, load_upstream

if TYPE_CHECKING:
    from pathlib import Path

    from torchrelay.jobs.config.config import Config
    from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys
    from torchrelay.jobs.config.schema import Settings
    from torchrelay.jobs.job import Job
    from torchrelay.runners.lifecycle.loading import Classes
    from torchrelay.runners.lifecycle.phase_state import PhaseState
    from torchrelay.runners.session.base import SessionBase

_CLASS_OF = {one.name: one.class_name for one in STEPS}


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
    runner: Slot[RunnerKeys] = Slot(None, "the keys of this profile")
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
            who = _CLASS_OF.get(slot.setter or "", "the run")
            return f"context[{key!r}] ({slot.__doc__}) is not set: the step {slot.setter} ({who}) sets it"
        near = difflib.get_close_matches(str(key), [*self._held, *self._declared()], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"no step has set context[{key!r}], and none of torchrelay's does{hint}; there is {self!r}"

    @classmethod
    def _declared(cls) -> list[str]:
        return [name for name, value in vars(cls).items() if isinstance(value, Slot)]


def place_of_process() -> dict[str, Any]:
    """The entries that say which of the processes this one is."""
    env = read_launch_env()
    engine = "single" if env.world_size == 1 else "cluster"
    return {"rank": env.rank, "world_size": env.world_size, "engine": engine}
