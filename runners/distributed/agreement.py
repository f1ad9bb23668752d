"""Agreement between processes over the store, and detection of ranks that never reach it.

While the training thread waits in a loop over `ctx.steps` it compares the loops of all ranks, and raises an
error. If the loop is stuck for seconds, for example in a collective, the watcher thread does the same and
ends all processes.
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
_SLACK_SECS = 3.0  # added on other ranks, because rank 0's answer names the late ones
_KEPT_ROUNDS = 2
_ASKED = 4
_LEAVERS = "leavers"


_Runs = list[tuple[int, Any]]
"""Entries in host order, each with the number of consecutive ranks that posted the same one."""


class StorePeers:
    """The processes of a distributed session; implements `jobs.session.Peers`.

    In every round each rank posts its value; rank 0 gathers all and publishes one list, so that other ranks
    read a single key. With more than `most_posts` ranks the lowest rank of each other host joins the posts of
    that host in a report. Only rank 0's clock decides who is late; where a report is missing, rank 0 reads
    the posts themselves. `hosts` may be set between two rounds, identically on all ranks.

    Callbacks: `name_of(rank)` names a rank in messages, `failure()` returns a known failure of another rank,
    `ask(ranks)` returns what late ranks are doing, `waiting()` is called once a second during waits.
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
        self.rank, self.size, self.name_of, self.failure = rank, size, name_of, failure
        self.ask: Callable[[Sequence[int]], dict[int, str]] | None = None
        self.waiting: Callable[[], object] = lambda: None
        self.hosts: Hosts | None = None
        self.launch = ""
        self._flat = Hosts((tuple(range(size)),))
        self._store, self._deadline_secs = store, deadline_secs
        self._round = self._lines = 0

    def exchange(
        self,
        topic: str,
        value: Json,
        *,
        deadline_secs: float | None = None,
        for_others: Callable[[Json], Json] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Json]:
        """Post `value` about `topic`; return the values of all ranks in rank order (see `Peers`).

        Raises DeadlineError naming the late ranks, PeerError if ranks are at different topics, a rank failed,
        or the store is lost. After an error the peers cannot be used any more.
        """
        self._round += 1
        secs = self._deadline_secs if deadline_secs is None else deadline_secs
        hosts = self._flat if self.hosts is None or self.size <= self.most_posts else self.hosts
        with phase.during(f"waiting for the others at {topic!r}"):
            entry = {"topic": topic, "value": value}
            self._store.put(self._key(self.rank), json.dumps(entry, allow_nan=True).encode())
            if meanwhile is not None:
                meanwhile()
            if self.rank == 0:
                answer = joined(self._gather(topic, hosts, Deadline(secs)))
                with undisturbed():
                    runs = _runs_in(answer)
                sent = answer if for_others is None else _abridged(runs, topic, for_others)
                self._store.put(self._answer(), sent)
            else:
                runs = self._follow(topic, hosts, secs)
        self._forget(leads=self.rank in hosts.leaders)
        if any(entry is None or entry["topic"] != topic for _, entry in runs):
            entries = hosts.in_rank_order(_spread(runs))
            if mismatch := mismatch_text(topic, entries, self.name_of):
                raise PeerError(mismatch)
            late = [rank for rank, entry in enumerate(entries) if entry is None]
            raise DeadlineError(self._late_text(topic, secs, late))
        return hosts.in_rank_order(_spread((count, entry["value"]) for count, entry in runs))

    def apart(self) -> StorePeers:
        """Return the same ranks over another connection and other keys, for another thread."""
        self._lines += 1
        line = StorePeers(self._store.clone(f"line-{self._lines}"), self.rank, self.size)
        line._deadline_secs, line.name_of, line.failure = self._deadline_secs, self.name_of, self.failure
        line.hosts, line.ask, line.launch = self.hosts, self.ask, self.launch
        return line

    def leave(self) -> None:
        """Announce that this rank takes part in no further round, so that no rank waits for it."""
        self._store.put(f"left/{self.rank}", b"")
        self._store.add(_LEAVERS, 1)

    def _follow(self, topic: str, hosts: Hosts, secs: float) -> _Runs:
        """Wait for rank 0's answer on another rank; the lowest one of a host first joins its posts."""
        patience = Deadline(secs + _SLACK_SECS)
        if self.rank in hosts.leaders:
            keys = [self._key(rank) for rank in hosts.around(self.rank)]
            if self._await(keys, topic, secs, patience):  # otherwise rank 0 has answered earlier
                self._store.put(self._reported(self.rank), joined(self._store.get(keys)))
        self._await([self._answer()], topic, secs, patience)
        return _runs_in(self._store.get([self._answer()])[0])

    def _gather(self, topic: str, hosts: Hosts, deadline: Deadline) -> list[bytes]:
        """Wait for the reports of all hosts; a late rank is null in the report of its host."""
        own = [self._key(rank) for rank in hosts.around(0)]
        reports = [self._reported(leader) for leader in hosts.leaders[1:]]
        while not self._store.wait(own + reports, deadline.left):
            self.waiting()
            self._check_others(topic)
            if deadline.over:
                return [  # the available reports, or the available posts of hosts without one
                    self._post_of(self._reported(leader))
                    or joined([self._post_of(self._key(rank)) or b"null" for rank in host])
                    for leader, host in zip(hosts.leaders, hosts.members, strict=True)
                ]
        found = self._store.get(own + reports)
        return [joined(found[: len(own)]), *found[len(own) :]]

    def _await(self, keys: Sequence[str], topic: str, secs: float, patience: Deadline) -> bool:
        """Wait until the keys exist (True) or rank 0 has answered."""
        while not self._store.wait(keys, patience.left):
            self.waiting()
            if self._store.has(self._answer()):
                return False
            self._check_others(topic)
            if patience.over:
                late = [rank for rank in range(self.size) if not self._store.has(self._key(rank))]
                raise DeadlineError(self._late_text(topic, secs, late or [0]))
        return True

    def _post_of(self, key: str) -> bytes | None:
        return self._store.get([key])[0] if self._store.has(key) else None

    def _check_others(self, topic: str) -> None:
        """Raise PeerError if a rank has failed, or has left although this round needs it."""
        failure = self.failure()
        if failure is not None:
            raise PeerError(failure)
        if self._store.add(_LEAVERS, 0) == 0:
            return
        left = [rank for rank in range(self.size) if self._store.has(f"left/{rank}")]
        # In this order: a rank posts, and rank 0 answers, before it leaves.
        needed = [rank for rank in left if not self._store.has(self._key(rank))]
        if 0 in left and self.rank != 0 and not self._store.has(self._answer()):
            needed = needed or [0]
        if needed:
            names = ", ".join(self.name_of(rank) for rank in needed[:16])
            raise PeerError(f"{names} exited without reaching {topic!r}, where the other ranks wait")

    def _late_text(self, topic: str, secs: float, late: Sequence[int]) -> str:
        """Name the late ranks and, as far as they answer, what they are doing and at which line."""
        names = ", ".join(self.name_of(rank) for rank in late[:16])
        more = f" and {len(late) - 16} more" if len(late) > 16 else ""
        text = f"waited {secs:g} s at {topic!r} for {names}{more}"
        if self.ask is None:
            return text
        mute = "does not answer: its interpreter is busy, or it is stopped or gone"
        return f"{text}; {_where(late[:_ASKED], self.ask, mute)}"

    def _forget(self, *, leads: bool) -> None:
        """Delete own keys that every rank has read: a rank that posts has read earlier rounds."""
        old = self._round - _KEPT_ROUNDS
        if old <= 0:
            return
        own = [self._key(self.rank, old)]
        if self.rank == 0 or leads:
            own.append(self._answer(old) if self.rank == 0 else self._reported(self.rank, old))
        self._store.delete(*own)

    # Keys in the store: of a rank's post, of a host's report, of rank 0's answer

    def _key(self, rank: int, of_round: int | None = None) -> str:
        return f"round/{of_round or self._round}/{rank}"

    def _reported(self, leader: int, of_round: int | None = None) -> str:
        return f"round/{of_round or self._round}/host/{leader}"

    def _answer(self, of_round: int | None = None) -> str:
        return f"round/{of_round or self._round}/all"


def joined(texts: Sequence[bytes]) -> bytes:
    """Encode runs of equal texts once, as one JSON text: posts of a host, or reports of all hosts."""
    runs = [(text, sum(1 for _ in same)) for text, same in groupby(texts)]
    return b"[%b]" % b",".join(b"[%d,%b]" % (count, text) for text, count in runs)


def _runs_in(answer: bytes) -> _Runs:
    """Decode the runs of entries in the reports of all hosts, in host order."""
    return [run for report in _spread(json.loads(answer)) for run in report]


def _spread(runs: Iterable[tuple[int, Any]]) -> list[Any]:
    """Expand runs to single entries; equal ones are one object."""
    return [one for count, entry in runs for one in [entry] * count]


def _abridged(runs: _Runs, topic: str, for_others: Callable[[Json], Json]) -> bytes:
    """Encode the answer with each value replaced by `for_others(value)`; late ranks and other topics stay."""

    def seen(run: tuple[int, Json]) -> tuple[bool, Json]:
        entry = run[1]
        here = entry is not None and entry["topic"] == topic
        return here, for_others(entry["value"]) if here else entry

    report = [
        [sum(count for count, _ in some), {"topic": topic, "value": shown} if here else shown]
        for (here, shown), some in groupby(runs, key=seen)
    ]
    return json.dumps([[1, report]]).encode()


def mismatch_text(topic: str, entries: Sequence[Json], name_of: Callable[[int], str]) -> str | None:
    """Describe which ranks are at which topics, and what failed there; None if all are at `topic`."""
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
    why = "; ".join(failures) or "all ranks must make the same calls in the same order"
    return f"the ranks are at different points: {where}; {why}"


def _where(ranks: Sequence[int], ask: Callable[[Sequence[int]], dict[int, str]], mute: str) -> str:
    """Describe what ranks are doing; `mute` for those that do not answer."""
    doing = ask(ranks)
    return "; ".join(f"rank {one} {'is in ' + doing[one] if one in doing else mute}" for one in ranks)


STILL_SECS = 3.0
"""Seconds without a step after which the watcher compares loops; the loop itself usually does so earlier."""
_LEFT, _WAITS = "left", "waits"
_MOST_ASKED = 16


class LoopWatch:
    """Compare this rank's loops with those of others. A newer note of any rank replaces the older one.

    `failure()` returns a known failure of another rank, `ask(ranks)` what ranks are doing.
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
        """Publish the loops of this rank while it waits. For the training thread."""
        self._put(_WAITS)

    def astray(self) -> str | None:
        """Describe why this rank cannot leave its loop, if so; for the watcher thread."""
        if not self._loops.still_for(STILL_SECS):
            return None
        return self._contradiction(self._watching)

    def wait(self, work: Any) -> None:
        """Wait for an agreement of a loop; for the training thread.

        Raises UsageError naming a rank that has left the loop or runs another one, PeerError if a rank has
        failed, DeadlineError with the position of all ranks at the timeout of the group.
        """
        poll = timedelta(seconds=POLL_SECS)
        while True:
            try:
                work.wait(poll)
                return
            except RuntimeError as failed:
                if work.is_completed():
                    raise self._late(failed) from failed
            with phase.during("waiting for the others in ctx.steps"):
                if (found := self._contradiction(self._store)) is not None:
                    raise UsageError(found)
                for rank, note in self._notes(self._store):
                    if note["failed"] and note["run"] == self._loops.note()["run"]:
                        error = PeerError(f"rank {rank} failed while this one was in a loop of ctx.steps")
                        error.consequence = True
                        raise error  # the failure itself arrives in the next round
                self.show_waiting()  # after reading: its note replaces that of another rank
                if (failure := self._failure()) is not None:
                    raise PeerError(failure)

    def _late(self, error: RuntimeError) -> Exception:
        if "timed out" not in str(error).lower():
            return error
        others = [rank for rank in range(self._size) if rank != self._rank][:_MOST_ASKED]
        where = _where(others, self._ask, "does not answer")
        return DeadlineError(
            f"the other ranks did not arrive in ctx.steps within the timeout of collectives: {where}"
        )

    def _contradiction(self, store: StoreClient) -> str | None:
        """Compare with the published notes; describe the first contradiction."""
        own = self._loops.note()
        for rank, note in self._notes(store):
            if not note["failed"] and (found := contradiction(self._rank, own, rank, note)) is not None:
                return found
        return None

    def _notes(self, store: StoreClient) -> list[tuple[int, Note]]:
        with suppress(PeerError):  # the watcher looks after the store
            found = [store.get([key])[0] for key in (_LEFT, _WAITS) if store.has(key)]
            return [(rank, note) for rank, note in map(json.loads, found) if rank != self._rank]
        return []

    def _put(self, key: str) -> None:
        with suppress(PeerError):
            self._store.put(key, json.dumps([self._rank, self._loops.note()]).encode())
