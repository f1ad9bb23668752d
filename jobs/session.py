"""Protocol of sessions, which execute jobs, and agreement between the processes of a session.

Every decision is taken once and sent to all processes. A failure of one process raises the same error, with
its rank, in all of them instead of a hang. Values are JSON (None, bool, int, float, str, list, dict with
string keys) of at most a few MiB. The sessions themselves are in `runners`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from torchrelay import errors
from torchrelay.errors import PeerError, RelayError
from torchrelay.records import Json

if TYPE_CHECKING:
    from torchrelay.jobs.cluster import NodePlace
    from torchrelay.jobs.random import RandomStreams
    from torchrelay.jobs.workspace import Workspace


class Peers(Protocol):
    """The processes of a session; all of them make the same calls in the same order."""

    rank: int
    size: int
    launch: str
    """Id of the launch, equal for its restarts; empty if unknown."""

    def exchange(
        self,
        topic: str,
        value: Json,
        *,
        deadline_secs: float | None = None,
        for_others: Callable[[Json], Json] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Json]:
        """Send `value` and return the values of all processes in rank order.

        `topic` names the purpose; different topics at the same time are an error. With `for_others` only rank
        0 gets the values, and the others get `for_others(value)` of each, so that data only needed by rank 0
        is not sent to all. `meanwhile`, which must not raise, is called after sending and before waiting.
        Equal values may be one object, so do not modify them. Raises DeadlineError, which names the late
        ranks and the topic, and PeerError if the store is lost.
        """

    def apart(self) -> Peers:
        """Return an independent channel between the same processes, for another thread. Collective call."""


class Solo:
    """The peers of a session with a single process."""

    rank, size, launch = 0, 1, ""

    def exchange(self, topic: str, value: Json, **options: Any) -> list[Json]:
        """Return the only value there is."""
        return [value]

    def apart(self) -> Solo:
        """Return itself."""
        return self


def together(
    peers: Peers,
    topic: str,
    work: Callable[[], Json],
    *,
    deadline_secs: float | None = None,
    for_first: bool = False,
    meanwhile: Callable[[], object] | None = None,
) -> list[Json]:
    """Run `work` in every process and return all results in rank order.

    With `for_first` only rank 0 gets the results, the others None for each. `meanwhile`, which must not
    raise, is called after `work` and before waiting for the others.

    If processes raise, all raise the error of the first process whose failure is not a consequence of
    another one. That process raises its own exception, the others an error of the same class (RelayError for
    foreign classes) that names the rank.
    """
    own: Exception | None = None
    outcome: dict[str, Json]
    try:
        outcome = {"value": work()}
    except Exception as error:
        own = error
        outcome = {"error": type(error).__name__, "message": str(error)}
        outcome["consequence"] = getattr(error, "consequence", False)
    try:
        for_others = (lambda other: other if "error" in other else _NOTHING) if for_first else None
        meanwhile = None if own is not None else meanwhile
        outcomes = peers.exchange(
            topic, outcome, deadline_secs=deadline_secs, for_others=for_others, meanwhile=meanwhile
        )
    except PeerError:
        if own is None:
            raise
        try:
            _mark_unagreed(own, since=True)
            raise own from own.__cause__  # the own failure is more informative than the missing others
        finally:
            del own  # break the reference cycle through its traceback
    failed = [rank for rank, other in enumerate(outcomes) if "error" in other]
    # All processes raise the first cause, so that they agree.
    try:
        for rank in sorted(failed, key=lambda rank: (outcomes[rank]["consequence"], rank)):
            if own is not None and rank == peers.rank:
                _mark_unagreed(own, since=False)
                raise own
            raise error_of(outcomes[rank]["error"], outcomes[rank]["message"], rank) from own
    finally:
        del own
    return [other["value"] for other in outcomes]


_NOTHING = {"value": None}
"""One shared object, which is cheap to compare with itself."""


def decide(
    peers: Peers, topic: str, choose: Callable[[], Json], *, deadline_secs: float | None = None, by: int = 0
) -> Json:
    """Run `choose` on rank `by` and return its result, or raise its error, on all ranks."""
    results = together(
        peers, topic, lambda: choose() if peers.rank == by else None, deadline_secs=deadline_secs
    )
    return results[by]


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """Issue a warning in one of several processes.

    A warning that would be an error is printed instead, because the others would wait for this process.
    """
    try:
        warnings.warn(text, category, stacklevel=stacklevel + 1)
    except Warning as error:
        if not is_grouped():
            raise
        caller = sys._getframe(1)
        with suppress(Exception):  # raised by a hook of the program
            warnings.showwarning(error, category, caller.f_code.co_filename, caller.f_lineno)


def is_grouped() -> bool:
    """Return True if the process group of torch has several ranks; it may be the program's own."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return False
    return bool(distributed.get_world_size() > 1)


def is_agreed(error: Exception) -> bool:
    """Return True if all processes know of a failure raised by `together`; else others may still run."""
    return not isinstance(error, PeerError) and not getattr(error, "_unagreed", False)


def _mark_unagreed(error: Exception, *, since: bool) -> None:
    """Mark an error of which the others could not be notified."""
    with suppress(AttributeError):  # a class with slots: assume that the others know
        error._unagreed = since  # type: ignore[attr-defined]


def error_of(name: str, message: str, rank: int) -> RelayError:
    """Rebuild the error that another rank reported; unknown classes, and PeerError, become RelayError."""
    found = getattr(errors, name, None)
    known = isinstance(found, type) and issubclass(found, RelayError)
    kind: type[RelayError] = found if known else RelayError  # type: ignore[assignment]
    error = kind(message if rank == 0 and known else f"rank {rank}: {'' if known else name + ': '}{message}")
    error.of_rank = rank
    return error


class Wire(Protocol):
    """Connections between the processes of a session, separate from those of the training."""

    rank: int

    def broadcast(self, memory: memoryview, source: int) -> None:
        """Send `memory` (1-D bytes) of process `source` to all; fills that of the others.

        The size is equal everywhere and not 0. Nothing is verified. Raises PeerError if a process is lost or
        late; the wire is unusable then.
        """


class Session(Protocol):
    """Executes task groups on the nodes of a job: one node per process, or all of them, in turn, in one."""

    peers: Peers

    @property
    def nodes(self) -> tuple[NodePlace, ...]:
        """All nodes of the job in rank order."""

    @property
    def local_nodes(self) -> tuple[NodePlace, ...]:
        """Nodes hosted by this process."""

    def place(self, node_names: Sequence[str]) -> None:
        """Place the declared nodes of a job; raises UsageError for more nodes than ranks."""

    def workspace(self, node: str | None = None) -> Workspace:
        """Return the GLOBAL workspace of a hosted node (default: the only or first one)."""

    def streams(self, node: str) -> RandomStreams:
        """Return the current random streams of a hosted node."""

    def set_streams(self, node: str, streams: RandomStreams) -> None:
        """Set the random streams of a hosted node."""

    def wire(self) -> Wire | None:
        """Return the connections between the processes, opened by the first call; None for one process."""

    def run(self, work: Any) -> Any:
        """Run a TaskGroup, SessionGroup, Task or callable on its nodes; blocks until it has finished."""
