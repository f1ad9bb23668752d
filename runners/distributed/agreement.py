"""Agreement between processes over the store, and which rank it is that will never come to one.

Of a loop over `ctx.steps` (`loops`) the thread that trains looks while it waits for an agreement, and raises.
The watcher's looks when the loop is still for seconds (in a collective of the program, say), and reports,
which ends all processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from typing import Any

from torchrelay.errors import DeadlineError, PeerError, UsageError
from torchrelay.jobs.runtime import phase, undisturbed
from torchrelay.records import Json
from torchrelay.runners.distributed.loops import Loops, Note, contradiction
from torchrelay.runners.distributed.rendezvous import POLL_SECS, Deadline, Hosts, StoreClient, ranks_text

DEADLINE_SECS = 600.0
_SLACK_SECS = 3.0  # others give rank 0 this much longer, because its answer names the late ranks
_KEPT_ROUNDS = 2
_ASKED = 4
_LEAVERS = "leavers"


_Runs = list[tuple[int, Any]]
"""Entries in the hosts' order, with the number of ranks in a row that posted the very same one."""


class StorePeers:
    """The processes of a distributed session as `jobs.peers.Peers`.

    In every round each rank posts its value; rank 0 gathers them and publishes one list, so that
    the others read a single key. Of more than `most_posts` ranks on known `hosts` rank 0 reads the posts
    of its own host only, and of each other host the report in which the lowest rank there joins the posts.
    Reports shorten the way and decide nothing: rank 0's clock alone says who is late, and where a report
    is missing then, rank 0 reads the posts themselves. `hosts` may be set between two rounds, the same on
    all ranks. `name_of(rank)` says who a rank is in messages; `failure()` returns what the watcher knows
    about a failed rank, so that nobody waits for it; `ask(ranks)` what late ranks say that they are doing;
    `waiting()` is called once a second while others are waited for.
    """

    most_posts = 512

    def __init__(
        self,
        store: StoreClient,
        rank: int,
        size: int,
        *,
        deadline_secs: float = DEADLINE_SECS,
        name_of: Callable[[int], str] = lambda rank: f"rank {rank}",
        failure: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.name_of = name_of
        self.failure = failure
        self.ask: Callable[[Sequence[int]], dict[int, str]] | None = None
        self.waiting: Callable[[], object] = lambda: None
        self.hosts: Hosts | None = None
        self.launch = ""
        self._flat = Hosts.one(size)
        self._store = store
        self._deadline_secs = deadline_secs
        self._round = 0
        self._lines = 0

    def exchange(
        self,
        topic: str,
        value: Json,
        *,
        deadline_secs: float | None = None,
        told: Callable[[Json], Json] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Json]:
        """Post `value` about `topic`; return the values of all ranks in rank order (see `Peers`).

        Raises DeadlineError naming the late ranks, PeerError when ranks are at different topics,
        a rank failed, or the store is lost. After an error the peers are out of step: use no more.
        """
        self._round += 1
        secs = self._deadline_secs if deadline_secs is None else deadline_secs
        hosts = self._flat if self.hosts is None or self.size <= self.most_posts else self.hosts
        with phase.during(f"waiting for the others at {topic!r}"):
            self._post(topic, value)
            if meanwhile is not None:
                meanwhile()
            if self.rank == 0:
                runs = self._lead(topic, hosts, secs, told)
            else:
                runs = self._follow(topic, hosts, secs)
        self._forget(leads=self.rank in hosts.leaders)
        if any(entry is None or entry["topic"] != topic for _, entry in runs):
            self._refuse(topic, hosts.in_rank_order(_spread(runs)), secs)
        return hosts.in_rank_order(_spread((count, entry["value"]) for count, entry in runs))

    def apart(self) -> StorePeers:
        """The same ranks over a connection and below keys of their own, for another thread."""
        self._lines += 1
        line = StorePeers(
            self._store.clone(f"line-{self._lines}"),
            self.rank,
            self.size,
            deadline_secs=self._deadline_secs,
            name_of=self.name_of,
            failure=self.failure,
        )
        line.hosts = self.hosts
        line.ask = self.ask
        line.launch = self.launch
        return line

    def leave(self) -> None:
        """Say that this rank comes to no further round, so that nobody waits for it."""
        self._store.put(self._left(self.rank), b"")
        self._store.add(_LEAVERS, 1)

    def _post(self, topic: str, value: Json) -> None:
        entry = {"topic": topic, "value": value}
        self._store.put(self._key(self.rank), json.dumps(entry, allow_nan=True).encode())

    def _lead(self, topic: str, hosts: Hosts, secs: float, told: Callable[[Json], Json] | None) -> _Runs:
        """Rank 0's part: gather, publish, and return what all said."""
        answer = joined(self._gather(topic, hosts, Deadline(secs)))
        with undisturbed():
            runs = _runs_in(answer)
        self._store.put(self._answer(), answer if told is None else _retold(runs, topic, told))
        return runs

    def _follow(self, topic: str, hosts: Hosts, secs: float) -> _Runs:
        patience = Deadline(secs + _SLACK_SECS)
        if self.rank in hosts.leaders:
            self._report(topic, hosts.around(self.rank), secs, patience)
        self._await([self._answer()], topic, secs, patience)
        return _runs_in(self._store.get([self._answer()])[0])

    def _gather(self, topic: str, hosts: Hosts, deadline: Deadline) -> list[bytes]:
        """Wait for the reports of all hosts; a rank that is late has null in its host's."""
        own = [self._key(rank) for rank in hosts.around(0)]
        reports = [self._reported(leader) for leader in hosts.leaders[1:]]
        while not self._store.wait(own + reports, deadline.left):
            self.waiting()
            self._stop_for_failure()
            self._stop_for_leavers(topic)
            if deadline.over:
                return self._present(hosts)
        found = self._store.get(own + reports)
        return [joined(found[: len(own)]), *found[len(own) :]]

    def _report(self, topic: str, members: Sequence[int], secs: float, patience: Deadline) -> None:
        """Join the posts of the own host for rank 0, unless it answers without."""
        keys = [self._key(rank) for rank in members]
        if self._await(keys, topic, secs, patience):
            self._store.put(self._reported(self.rank), joined(self._store.get(keys)))

    def _await(self, keys: Sequence[str], topic: str, secs: float, patience: Deadline) -> bool:
        """Wait until the keys exist (True) or rank 0 has answered."""
        while not self._store.wait(keys, patience.left):
            self.waiting()
            if self._store.has(self._answer()):
                return False
            self._stop_for_failure()
            self._stop_for_leavers(topic)
            if patience.over:
                late = [rank for rank in range(self.size) if not self._store.has(self._key(rank))]
                raise DeadlineError(self._late_text(topic, secs, late or [0]))
        return True

    def _present(self, hosts: Hosts) -> list[bytes]:
        """The reports that are there; of the other hosts the posts that are there."""
        return [
            self._post_of(self._reported(leader))
            or joined([self._post_of(self._key(rank)) or b"null" for rank in host])
            for leader, host in zip(hosts.leaders, hosts.members, strict=True)
        ]

    def _post_of(self, key: str) -> bytes | None:
        return self._store.get([key])[0] if self._store.has(key) else None

    def _stop_for_failure(self) -> None:
        failure = self.failure()
        if failure is not None:
            raise PeerError(failure)

    def _stop_for_leavers(self, topic: str) -> None:
        """Raise PeerError when a rank that this round still needs has left."""
        if self._store.add(_LEAVERS, 0) == 0:
            return
        left = [rank for rank in range(self.size) if self._store.has(self._left(rank))]
        # In this order: whoever left had posted before, and rank 0 had answered.
        needed = [rank for rank in left if not self._store.has(self._key(rank))]
        if 0 in left and self.rank != 0 and not self._store.has(self._answer()):
            needed = needed or [0]
        if needed:
            names = ", ".join(self.name_of(rank) for rank in needed[:16])
            raise PeerError(f"{names} left without coming to {topic!r}, for which the others wait")

    def _refuse(self, topic: str, entries: list[Json], secs: float) -> None:
        if mismatch := mismatch_text(topic, entries, self.name_of):
            raise PeerError(mismatch)
        late = [rank for rank, entry in enumerate(entries) if entry is None]
        raise DeadlineError(self._late_text(topic, secs, late))

    def _late_text(self, topic: str, secs: float, late: Sequence[int]) -> str:
        """Who is late and, where they can still tell, in what and at which line."""
        names = ", ".join(self.name_of(rank) for rank in late[:16])
        more = f" and {len(late) - 16} more" if len(late) > 16 else ""
        text = f"waited {secs:g} s at {topic!r} for {names}{more}"
        if self.ask is None:
            return text
        mute = "does not say where it is: its interpreter is busy, or it is stopped or gone"
        return f"{text}; {_where(late[:_ASKED], self.ask, mute)}"

    def _forget(self, *, leads: bool) -> None:
        """Delete own keys that everybody has read: whoever posts a round has read the ones before."""
        old = self._round - _KEPT_ROUNDS
        if old <= 0:
            return
        of_leader = (
            [self._answer(old)] if self.rank == 0 else [self._reported(self.rank, old)] if leads else []
        )
        self._store.delete(self._key(self.rank, old), *of_leader)

    def _left(self, rank: int) -> str:
        return f"left/{rank}"

    def _key(self, rank: int, of_round: int | None = None) -> str:
        return f"round/{of_round or self._round}/{rank}"

    def _reported(self, leader: int, of_round: int | None = None) -> str:
        return f"round/{of_round or self._round}/host/{leader}"

    def _answer(self, of_round: int | None = None) -> str:
        return f"round/{of_round or self._round}/all"


def joined(texts: Sequence[bytes]) -> bytes:
    """Runs of equal texts as one JSON text: what all say alike costs no more than what one says.

    Joined posts are a host's report, joined reports the answer to all.
    """
    runs = [(text, sum(1 for _ in same)) for text, same in groupby(texts)]
    return b"[%b]" % b",".join(b"[%d,%b]" % (count, text) for text, count in runs)


def _runs_in(answer: bytes) -> _Runs:
    """The runs of entries in the reports of all hosts, in the hosts' order."""
    return [run for report in _spread(json.loads(answer)) for run in report]


def _spread(runs: Iterable[tuple[int, Any]]) -> list[Any]:
    """The entries of runs one by one, equal ones as one object."""
    return [one for count, entry in runs for one in [entry] * count]


def _retold(runs: _Runs, topic: str, told: Callable[[Json], Json]) -> bytes:
    """What the others get instead: each value as `told` makes it. Late ranks and other topics stay."""

    def seen(run: tuple[int, Json]) -> tuple[bool, Json]:
        entry = run[1]
        here = entry is not None and entry["topic"] == topic
        return here, told(entry["value"]) if here else entry

    report = [
        [sum(count for count, _ in some), {"topic": topic, "value": shown} if here else shown]
        for (here, shown), some in groupby(runs, key=seen)
    ]
    return json.dumps([[1, report]]).encode()


def mismatch_text(topic: str, entries: Sequence[Json], name_of: Callable[[int], str]) -> str | None:
    """Say which ranks are at which topics, and what failed there; None when all are at `topic`."""
    others: dict[str, list[int]] = {}
    for rank, entry in enumerate(entries):
        if entry is not None:
            others.setdefault(entry["topic"], []).append(rank)
    if set(others) <= {topic}:
        return None
    where = "; ".join(f"{ranks_text(ranks)} at {name!r}" for name, ranks in others.items())
    failures = [
        f"{name_of(rank)} failed with {entry['value']['error']}: {entry['value'].get('message', '')}"
        for rank, entry in enumerate(entries)
        if entry is not None and isinstance(entry["value"], dict) and "error" in entry["value"]
    ]
    why = "; ".join(failures) or "all processes must make the same calls in the same order"
    return f"the processes are at different places: {where}; {why}"


def _where(ranks: Sequence[int], ask: Callable[[Sequence[int]], dict[int, str]], mute: str) -> str:
    """What ranks are doing; `mute` of those that do not say it."""
    doing = ask(ranks)
    return "; ".join(f"rank {one} {'is in ' + doing[one] if one in doing else mute}" for one in ranks)


STILL_SECS = 3.0
"""How long a rank begins no step of its loop before its watcher compares: the loop itself finds it first."""
_LEFT, _WAITS = "left", "waits"
_MOST_ASKED = 16


class LoopWatch:
    """What one rank knows of the others' loops. Newer notes replace older ones, whoever's: all write again.

    `failure()` is what the watcher knows of a failed rank, `ask(ranks)` what ranks say that they are doing.
    """

    def __init__(
        self,
        store: StoreClient,
        rank: int,
        size: int,
        loops: Loops,
        failure: Callable[[], str | None],
        ask: Callable[[Sequence[int]], dict[int, str]],
    ) -> None:
        self._rank, self._size, self._loops = rank, size, loops
        self._failure, self._ask = failure, ask
        self._store, self._watching = store.clone("loops"), store.clone("loops")
        loops.show = lambda: self._put(_LEFT)

    def show_waiting(self) -> None:
        """Let others see the loops of this rank, which waits for them. For the thread that trains."""
        self._put(_WAITS)

    def astray(self) -> str | None:
        """What keeps this rank in its loop for good, whatever call it is in; for the watcher's thread."""
        if not self._loops.still_for(STILL_SECS):
            return None
        return self._contradiction(self._watching)

    def wait(self, work: Any) -> None:
        """Wait for an agreement of a loop; for the thread that trains.

        Raises UsageError naming a rank that does not come because it has left the loop, or makes another,
        PeerError where a rank has failed, DeadlineError saying where all are when the group's time is over.
        """
        poll = timedelta(seconds=POLL_SECS)
        while True:
            try:
                work.wait(poll)
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise self._late(error) from error
            with phase.during("waiting for the others in ctx.steps"):
                if (found := self._contradiction(self._store)) is not None:
                    raise UsageError(found)
                self._check_failed()
                self.show_waiting()  # after it looked: its note replaces that of another
                if (failure := self._failure()) is not None:
                    raise PeerError(failure)

    def _late(self, error: RuntimeError) -> Exception:
        """What the end of an agreement without an answer is: its time is over, or a connection broke."""
        if "timed out" not in str(error).lower():
            return error
        others = [rank for rank in range(self._size) if rank != self._rank][:_MOST_ASKED]
        where = _where(others, self._ask, "does not say where it is")
        return DeadlineError(
            f"waited for the others in ctx.steps for as long as a collective may take: {where}"
        )

    def _contradiction(self, store: StoreClient) -> str | None:
        own = self._loops.note()
        for rank, note in self._notes(store):
            if not note["failed"] and (found := contradiction(self._rank, own, rank, note)) is not None:
                return found
        return None

    def _check_failed(self) -> None:
        """Leave the loop when another rank has failed, to hear of it where all meet."""
        for rank, note in self._notes(self._store):
            if note["failed"] and note["run"] == self._loops.note()["run"]:
                error = PeerError(f"rank {rank} failed while this one was in a loop of ctx.steps")
                error.consequence = True
                raise error

    def _notes(self, store: StoreClient) -> list[tuple[int, Note]]:
        with suppress(PeerError):  # the watcher looks after the store
            found = [store.get([key])[0] for key in (_LEFT, _WAITS) if store.has(key)]
            return [(rank, note) for rank, note in map(json.loads, found) if rank != self._rank]
        return []

    def _put(self, key: str) -> None:
        with suppress(PeerError):
            self._store.put(key, json.dumps([self._rank, self._loops.note()]).encode())
