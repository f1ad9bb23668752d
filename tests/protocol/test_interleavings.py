"""Two writers, takeovers at any moment, guests, lost answers: every order of what the real log code does."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from interleaving import Explorer, Processes, Programme, exploring
from rivals import Rules, begun, guest, marks, writer

from torchrelay.checkpoint.log import chain, view


@dataclass(frozen=True)
class Meeting:
    """Programmes that meet; `states` are the least that must be visited.

    `errors` are those by which processes end, where that is certain in the states that are visited.
    """

    programmes: tuple[Programme, ...]
    states: int
    losses: int = 0
    limit: int = 20_000
    held: bool = False
    stride: int = 256
    epochs: int = 1
    errors: tuple[str, ...] | None = None


MEETINGS = {
    "two writers, all orders": Meeting(
        (writer(1, 1), writer(2, 1)), 15_000, limit=1_000_000, errors=("FencedError",)
    ),
    "two writers, a lost answer": Meeting((writer(1, 1), writer(2, 1)), 10_000, losses=1, limit=15_000),
    "two writers and a guest": Meeting((writer(1, 1), writer(2, 1), guest(3)), 6_000, limit=10_000),
    "a writer, two guests": Meeting((writer(1, 1, releases=False), guest(3), guest(4)), 6_000, limit=10_000),
    "retention beside a guest": Meeting(
        (writer(1, 2, retires=True), writer(2, 1, retires=True), guest(3)), 6_000, losses=1, limit=10_000
    ),
    "three takeovers": Meeting((writer(1, 0), writer(2, 0), writer(3, 0)), 6_000, losses=1, limit=10_000),
    "a paused writer, a thinned log": Meeting(
        (writer(1, 1), writer(2, 6)), 6_000, limit=10_000, held=True, stride=4
    ),
    "very many marks between two records": Meeting(
        (writer(1, 1), marks(3, 7)), 10_000, limit=20_000, stride=4, epochs=2, errors=()
    ),
    "a second start with the same id": Meeting(
        (writer(1, 1, launched=("first", 0)), writer(2, 1, launched=("second", 1), watches=True)),
        1_400,
        limit=1_000_000,
        errors=("DirectoryInUseError",),
    ),
    "a prune": Meeting(
        (writer(1, 2), writer(3, 0, retires=True, watches=True)),
        3_800,
        limit=1_000_000,
        errors=("DirectoryInUseError",),
    ),
    "a restart of the same agent": Meeting(
        (writer(1, 1, launched=("first", 0)), writer(2, 1, launched=("first", 1), watches=True)),
        7_000,
        limit=1_000_000,
        errors=("DirectoryInUseError", "FencedError"),
    ),
}


@contextmanager
def stride(slots: int):
    with ExitStack() as stack:
        for module in (view, chain, chain, chain):
            stack.enter_context(patch.object(module, "STRIDE", slots))
        yield


def explored(meeting: Meeting, *, exclusive: bool = True) -> Explorer:
    files, thins = begun(meeting.epochs), meeting.stride < 256
    rules = Rules.of(files, thins=thins)
    with exploring(), stride(meeting.stride):
        explorer = Explorer(
            Processes(meeting.programmes),
            rules.check,
            losses=meeting.losses,
            limit=meeting.limit,
            thins=thins,
            exclusive=exclusive,
        )
        explorer.explore(files, len(meeting.programmes), held=meeting.held)
    return explorer


@pytest.mark.parametrize("name", MEETINGS)
def test_whoever_meets_there_is_one_history(name, tell):
    """Linear, nothing acknowledged lost, after a power cut too; whoever is fenced acknowledges nothing."""
    explorer = explored(MEETINGS[name])
    tell(f"orders of writers, {name}: {explorer.visited:,} distinct states")
    assert explorer.wrong == []
    assert explorer.visited >= MEETINGS[name].states
    if MEETINGS[name].errors is not None:
        assert explorer.errors == set(MEETINGS[name].errors)
