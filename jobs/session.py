"""What a job may ask of the session that executes it, and how the processes of a session agree.

Every decision is taken once and told to all; a failure of one process becomes everybody's
knowledge (the same error, with the rank that had it) instead of a wait that never ends.
Values are JSON (None, bool, int, float, str, list, dict with string keys), at most a few MiB.

The sessions themselves live in the `runners` room; this protocol is the arrow's direction.
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
    """The processes of a session. All of them make the same calls in the same order."""

    rank: int
    size: int
    launch: str
    """What the restarts of one launch share, and no other launch has; empty where nothing tells."""

    def exchange(
        self,
        topic: str,
        value: Json,
        *,
        deadline_secs: float | None = None,
        told: Callable[[Json], Json] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Json]:
        """Post `value`; get the values of all processes in rank order.

        `topic` says what this is about; processes at different topics are told so at once. With `told`
        rank 0 alone gets the values, all others what `told` makes of each: what only rank 0 needs does
        not travel to thousands. `meanwhile`, which raises nothing, is called before others are waited for,
        who have the value by then. Equal values may be one object, so nobody changes them. Raises
        DeadlineError naming the late ranks and the topic, PeerError when the store is lost.
        """

    def apart(self) -> Peers:
        """The same processes on a line of their own, for another thread; all call this in the same order."""


class Solo:
    """The peers of a session with a single process: everybody is present."""

    rank = 0
    size = 1
    launch = ""

    def exchange(
        self,
        topic: str,
        value: Json,
        *,
        deadline_secs: float | None = None,
        told: Callable[[Json], Json] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Json]:
        """Return the only value there is."""
        return [value]

    def apart(self) -> Solo:
        """Return itself: nobody else is on the line."""
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
    """Run `work` in every process and give everybody all results in rank order.

    `for_first`: only rank 0 gets the results, the others None for each. `meanwhile`, which raises nothing, is
    called when `work` is done, before the others are waited for.

    When one or more processes raise, all raise the failure of one: of the first process whose
    failure is no consequence of another's. That process raises its own exception, the others an error
    of the same class (where it is ours; else RelayError) whose message names the rank.
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
        told = (lambda other: other if "error" in other else _NOTHING) if for_first else None
        meanwhile = None if own is not None else meanwhile
        outcomes = peers.exchange(topic, outcome, deadline_secs=deadline_secs, told=told, meanwhile=meanwhile)
    except PeerError:
        if own is None:
            raise
        try:
            _untold(own, since=True)
            raise own from own.__cause__  # the own failure says more than that the others did not come
        finally:
            del own  # its traceback refers to this frame
    failed = [rank for rank, other in enumerate(outcomes) if "error" in other]
    # The first cause counts everywhere, so that all processes draw the same conclusion.
    try:
        for rank in sorted(failed, key=lambda rank: (outcomes[rank]["consequence"], rank)):
            if own is not None and rank == peers.rank:
                _untold(own, since=False)
                raise own
            raise error_of(outcomes[rank]["error"], outcomes[rank]["message"], rank) from own
    finally:
        del own
    return [other["value"] for other in outcomes]


_NOTHING = {"value": None}
"""One object for all, which costs nothing to compare with itself."""


def decide(
    peers: Peers, topic: str, choose: Callable[[], Json], *, deadline_secs: float | None = None, by: int = 0
) -> Json:
    """Let rank `by` run `choose` and tell everybody the outcome, or the error that it raised."""
    told = together(peers, topic, lambda: choose() if peers.rank == by else None, deadline_secs=deadline_secs)
    return told[by]


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """Give a warning that one process may give alone, between agreements.

    A program may make warnings errors. Among several processes this one is shown all the same, and not
    raised: the others would wait for the process that raises.
    """
    try:
        warnings.warn(text, category, stacklevel=stacklevel + 1)
    except Warning as error:
        distributed = sys.modules.get("torch.distributed")
        if not (distributed and distributed.is_available() and distributed.is_initialized()):
            raise
        if distributed.get_world_size() == 1:
            raise
        caller = sys._getframe(1)
        with suppress(Exception):  # of a hook of the program
            warnings.showwarning(error, category, caller.f_code.co_filename, caller.f_lineno)


def is_told(error: Exception) -> bool:
    """Whether all processes know of a failure that `together` raised; else others may be at work still."""
    return not isinstance(error, PeerError) and not getattr(error, "_untold", False)


def _untold(error: Exception, *, since: bool) -> None:
    """Note with an error whether the others could not be told of it."""
    with suppress(AttributeError):  # of a class with slots, which is then taken to be told
        error._untold = since  # type: ignore[attr-defined]


def error_of(name: str, message: str, rank: int) -> RelayError:
    """Rebuild the error that another rank reported; unknown classes become RelayError.

    Not PeerError: that says that a rank is lost, and this one has just told what happened to it.
    """
    found = getattr(errors, name, None)
    known = isinstance(found, type) and issubclass(found, RelayError)
    kind: type[RelayError] = found if known else RelayError  # type: ignore[assignment]
    error = kind(message if rank == 0 and known else f"rank {rank}: {'' if known else name + ': '}{message}")
    error.of_rank = rank
    return error


class Wire(Protocol):
    """Connections of their own between the processes of a session, beside those of the training.

    All processes make the same calls in the same order; decisions travel by `Peers`.
    """

    rank: int

    def broadcast(self, memory: memoryview, source: int) -> None:
        """Send `memory` (1-D bytes) of process `source` to all; the others' is filled.

        It has the same size everywhere and is not empty. Nothing is verified. Raises PeerError when
        a process is lost or does not come in time; the wire is of no use then.
        """


class Session(Protocol):
    """Executes task groups on the nodes of a job; each process hosts some of the nodes.

    A distributed session hosts one node per process; a local session hosts all nodes, one after
    another, and swaps their random streams.
    """

    peers: Peers

    @property
    def nodes(self) -> tuple[NodePlace, ...]:
        """All nodes of the job in the order of their ranks."""

    @property
    def local_nodes(self) -> tuple[NodePlace, ...]:
        """The nodes that this process hosts."""

    def place(self, node_names: Sequence[str]) -> None:
        """Give the declared nodes of a job their places; raises UsageError for more nodes than ranks."""

    def workspace(self, node: str | None = None) -> Workspace:
        """The GLOBAL workspace of a hosted node (by default the only or first one)."""

    def streams(self, node: str) -> RandomStreams:
        """The random streams of a hosted node as they are now."""

    def set_streams(self, node: str, streams: RandomStreams) -> None:
        """Make a hosted node continue from these random streams."""

    def wire(self) -> Wire | None:
        """What moves bytes between the processes, made at the first call; None where there is only one.

        All processes call this in the same order.
        """

    def run(self, work: Any) -> Any:
        """Run a TaskGroup, SessionGroup, Task or callable on the nodes it names; blocks until done."""
