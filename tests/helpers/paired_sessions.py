"""Sessions of several processes, played by threads that meet at real barriers."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Sequence

from torchrelay.runners.session.local import LocalSession

PATIENCE = 20.0


class Meeting:
    """Where `size` processes put values down and read those of all."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._values = [None] * size

    def swap(self, rank, value):
        self._values[rank] = value
        self._barrier.wait(PATIENCE)
        values = copy.deepcopy(self._values)
        self._barrier.wait(PATIENCE)
        return values


class PairedPeers:
    """Peers over a Meeting; values really are JSON, and topics really are the same."""

    launch = ""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def exchange(self, topic, value, *, deadline_secs=None, for_others=None, meanwhile=None):
        if meanwhile is not None:
            meanwhile()
        posted = [json.loads(text) for text in self._meeting.swap(self.rank, json.dumps([topic, value]))]
        assert {other for other, _ in posted} == {topic}
        values = [value for _, value in posted]
        return values if for_others is None or self.rank == 0 else [for_others(value) for value in values]


class PairedSession(LocalSession):
    """One process of several, hosting one node; agreements are posted at once and met by `wait`."""

    def __init__(self, rank: int, names: Sequence[str], meetings: tuple[Meeting, Meeting]) -> None:
        super().__init__(names)
        self.peers = PairedPeers(rank, len(names), meetings[0])
        self._flags = meetings[1]
        self.posted = 0

    @property
    def local_nodes(self):
        return (self.nodes[self.peers.rank],)

    def agree_flags(self, flags):
        self.posted += 1
        return _Handle(self, flags)

    def streams(self, node):
        raise NotImplementedError("threads share the random streams of one process")


class _Handle:
    def __init__(self, session, flags):
        self._session, self._flags = session, flags

    def wait(self):
        told = self._session._flags.swap(self._session.peers.rank, self._flags)
        return tuple(map(max, zip(*told, strict=True)))


def paired_sessions(size: int) -> list[PairedSession]:
    """One session per process; run each in a thread of its own."""
    meetings = Meeting(size), Meeting(size)
    return [PairedSession(rank, [f"trainer_{r}" for r in range(size)], meetings) for rank in range(size)]
