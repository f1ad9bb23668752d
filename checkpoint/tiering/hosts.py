"""Find out which ranks share a local directory, and choose the authoritative log.

One machine is one place, as are hosts that share a file system; hosts with their own disks are several. The
lowest rank of a place is its leader.

The local log is authoritative if it is ahead of the remote one: all remote entries came from it. Attempts
have unique names, so it is ahead exactly if it has the remote log's newest entry. Otherwise the run continued
elsewhere from the remote log.

After a restart rank 0 may run on another host, so the leader of each place reports the state of its local
log. Among those that are ahead and have more, the one whose writer held the remote lease last wins; the
others belong to an abandoned history.

A leader deletes only attempts that existed before the first save of this launch, or that rank 0 has reported
as deleted. A leader that was suspended for long therefore deletes no newer ones of other writers.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.position import Branch, CommittedPosition, Retirement, State
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import position_json
from torchrelay.checkpoint.log.retention import delete_attempt
from torchrelay.checkpoint.log.state import without
from torchrelay.checkpoint.log.tiered_storage import Notes, TierStorage, read_notes, same_job
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import RelayError, StorageError, UsageError
from torchrelay.jobs.session import Peers, together
from torchrelay.records import Json, dataclass

SEEN_WITHIN_SECS = 10.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Places:
    """The places of all ranks: `leader_of` has the lowest rank with the same directory."""

    leader_of: tuple[int, ...] = (0,)
    rank: int = 0

    @property
    def many(self) -> bool:
        """Whether there is more than one directory."""
        return any(self.leader_of)

    @property
    def leaders(self) -> tuple[int, ...]:
        """One rank per place, in rank order: rank 0 first."""
        return tuple(sorted(set(self.leader_of)))

    @property
    def leads(self) -> bool:
        """Whether this process is a leader."""
        return self.leader_of[self.rank] == self.rank

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks of this place."""
        mine = self.leader_of[self.rank]
        return tuple(rank for rank, leader in enumerate(self.leader_of) if leader == mine)


def guessed(peers: Peers, directory: Path) -> Places:
    """The places without a write: hosts that share a file system seem separate."""
    if peers.size == 1:
        return Places()
    keys = together(peers, "near directories", lambda: _key(directory))
    return Places(tuple(keys.index(key) for key in keys), peers.rank)


def seen(peers: Peers, storage: Storage, directory: Path) -> Places:
    """The places as they are: each leader writes a file, and all ranks report which they see."""
    if peers.size == 1:
        return Places()
    together(peers, "make the local directory", lambda: storage.mkdir(""))
    guess = guessed(peers, directory)
    nonce = peers.exchange("near probes", secrets.token_hex(8))[0]
    mine = f".probe-{nonce}-{peers.rank}"

    def write(name: str) -> None:
        if guess.leads:
            storage.replace(name, b"seen\n")

    def look(until: float) -> list[int | str | bool]:
        start = f".probe-{nonce}-"
        names = [name.removeprefix(start) for name in storage.list("") if name.startswith(start)]
        probes = sorted(int(name) for name in names if name.isdigit())
        return [*leaders_seen(probes, guess.leader_of[peers.rank]), time.monotonic() > until]

    try:
        together(peers, "write to the local directory", lambda: write(mine))
        # Again after all have written: a network file system refreshes its cache after a local change.
        together(peers, "write to the local directory again", lambda: write(f"{mine}.again"))
        until = time.monotonic() + SEEN_WITHIN_SECS
        while True:
            looks = together(peers, "local directories seen", lambda: look(until))
            blind = blind_ranks([(least, digest, count) for least, digest, count, _ in looks], guess.leaders)
            if not blind:
                return Places(tuple(one[0] for one in looks), peers.rank)
            if looks[0][-1]:
                more = f" and {len(blind) - 8} more" if len(blind) > 8 else ""
                raise UsageError(
                    f"the local directory {storage.url} is not the one that rank "
                    f"{', '.join(map(str, blind[:8]))}{more} sees there: give the ranks of a host one shared "
                    "directory"
                )
            time.sleep(0.05)
    finally:
        if guess.leads:
            with suppress(RelayError):
                storage.delete(mine)
                storage.delete(f"{mine}.again")


LeadersSeen = tuple[int, str, int]
"""What a rank sees: the lowest leader (-1: not its own one), a digest of all leaders, and their number."""


def leaders_seen(probes: Sequence[int], leader: int) -> LeadersSeen:
    """What a rank with this leader sees, by the leaders whose files exist; small for any number of them."""
    digest = sha256(",".join(map(str, probes)).encode())[:16]
    return (min(probes) if leader in probes else -1), digest, len(probes)


def blind_ranks(seen: Sequence[LeadersSeen], leaders: Sequence[int]) -> list[int]:
    """Ranks that do not see their leader's file, or see leaders that do not see the same."""
    alike = Counter(seen[leader][1] for leader in leaders)
    return [rank for rank, (least, digest, count) in enumerate(seen) if least < 0 or alike[digest] != count]


def _key(directory: Path) -> str:
    """Equal for the same directory of the same running system."""
    there = directory
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
        found = there.stat()
    except OSError as error:
        raise StorageError(f"the local directory {directory} cannot be accessed: {error}") from error
    boot = ""
    with suppress(OSError):
        boot = _BOOT.read_text().strip()
    rest = directory.relative_to(there)
    return f"{socket.gethostname()} {boot} {found.st_dev} {found.st_ino} {rest}"


def is_ahead(local: LogView, remote: LogView, *, untouched: bool = False) -> bool:
    """Whether all of the remote log came from the local one, which is then authoritative.

    `untouched`: the remote log was not taken over since this local directory's writer did, so that a branch
    unknown to the local log is one that it has left.
    """
    if local.slot < 0 or remote.slot < 0:
        return local.slot >= 0
    if not remote.entries and remote.state.next_branch == 1:
        return True  # no save and no job: a new local directory, or an emptied one
    return _has_all(local, remote) and (untouched or remote.current in local.branches)


def _has_all(local: LogView, remote: LogView) -> bool:
    line = remote.line()
    if not line:
        return not remote.entries or bool(local.entries)
    if _knows(local, line[-1]):
        return True
    newest = local.line()[-1:]
    if line[-1].position.boundary or not newest or newest[0].position <= line[-1].position:
        return False
    # A mid-epoch position leaves the log when its epoch is committed.
    whole = [entry for entry in line if entry.position.boundary]
    return bool(whole) and _knows(local, whole[-1])


def _knows(view: LogView, entry: CommittedPosition) -> bool:
    own = view.entry(entry.key)
    return own is not None and (own.attempt_name, own.manifest_sha256) == (
        entry.attempt_name,
        entry.manifest_sha256,
    )


def anchor(remote: LogView) -> frozenset[str]:
    """Attempts that show that a local log is ahead of this one: they stay in it."""
    line = remote.line()
    whole = [entry for entry in line if entry.position.boundary]
    return frozenset(entry.attempt_name for entry in (*line[-1:], *whole[-1:]))


def adopted(local: State, remote: State) -> State:
    """The local log after it adopts the remote one; entries that only the local one had are dropped.

    The holder stays. Branches get numbers that neither log has used for another one.
    """
    gone = sorted(local.tries - remote.tries)
    live = {entry.key for entry in remote.entries}
    names = {(mark.kind, mark.name) for mark in remote.marks}
    own = (mark for mark in local.marks if mark.target in live and (mark.kind, mark.name) not in names)
    still = tuple(one for one in local.retiring if one.attempt_name not in gone)
    return replace(
        local,
        entries=remote.entries,
        branches=remote.branches,
        current=remote.current,
        next_branch=max(local.next_branch, remote.next_branch),
        marks=(*remote.marks, *own),
        retiring=(*still, *(Retirement(name) for name in gone)),
    )


def to_send(local: LogView, remote: LogView) -> tuple[CommittedPosition, ...]:
    """Entries of the local line that the remote log lacks, oldest first; without damaged ones.

    Entries older than the newest remote one of this line are not missing: retention has deleted them.
    """
    there = {entry.attempt_name for entry in remote.entries}
    line = local.line()
    known = [number for number, entry in enumerate(line) if entry.attempt_name in there]
    rest = line[known[-1] + 1 :] if known else line
    return tuple(entry for entry in rest if entry.healthy and entry.resumable)


def branched_like(remote: State, local: State) -> State:
    """The remote log after a rewind; its entries of other branches stay, abandoned."""
    given = {branch.id: branch for branch in (*remote.branches, *local.branches)}
    state = replace(
        remote,
        branches=tuple(given[number] for number in sorted(given)),
        current=local.current,
        next_branch=max(remote.next_branch, local.next_branch),
    )
    return without(state, ())


def branch_payload(branch: Branch) -> Mapping[str, Json]:
    """Payload of a `rewind` record for the branch that it begins."""
    request = dict(branch.request or {})
    return {"base": position_json(branch.base), "branch": branch.id, "request": request}


def mirrored(remote: State, entry: CommittedPosition) -> State | None:
    """The remote log with an entry of the local one; None if it has it.

    As a commit does, it retires mid-epoch positions that this completes. The caller ensures that all attempts
    of the entry are complete on the remote.
    """
    if any(one.attempt_name == entry.attempt_name for one in remote.entries):
        return None
    if any(one.key == entry.key for one in remote.entries):
        raise StorageError(f"the remote log has another epoch {entry.key}: it has another history")
    over = [
        one
        for one in remote.entries
        if one.branch == entry.branch and entry.position.boundary and not one.position.boundary
        if one.position < entry.position
    ]
    still = tuple(one for one in remote.retiring if one.attempt_name not in entry.tries)
    entries = tuple(sorted((*remote.entries, entry), key=lambda one: one.key))
    return without(replace(remote, entries=entries, retiring=still), over)


@dataclass(frozen=True)
class LocalLogStatus:
    """Report of a leader. `generation`: that of the remote log when this log was taken with it, or -1.

    `ahead`: all of the remote log came from it. `sends`: it has entries that the remote log lacks. `alone`
    are epochs that the remote log never had.
    """

    rank: int
    generation: int = -1
    ahead: bool = False
    sends: bool = False
    alone: tuple[str, ...] = ()


def status_of(report: Mapping[str, Json]) -> LocalLogStatus:
    """Read the JSON of `asdict`."""
    return LocalLogStatus(**{**report, "alone": tuple(report["alone"])})


def notes_of(storage: TierStorage) -> Notes:
    """The local notes about this remote."""
    noted = read_notes(storage.local)
    return noted if noted is not None and noted.remote == storage.remote.url else Notes(storage.remote.url)


def is_part(storage: TierStorage) -> bool:
    """Whether another place has the local log of the run, so that this one is ignored."""
    noted = read_notes(storage.local)
    return noted is not None and noted.part


def claim(storage: TierStorage, job_name: str | None, rank: int) -> LocalLogStatus | None:
    """The report about the local log; None without one, or if another place's log is used since then.

    Raises StorageError and DamagedError for logs that cannot be read, UsageError for that of another job.
    """
    if is_part(storage):
        return None
    same_job(storage.local, storage.remote)
    local = open_log(storage.local, job_name)
    if local.slot < 0:
        return None
    remote = open_log(storage.remote, job_name)
    mine = notes_of(storage)
    lacks = to_send(local, remote)
    return LocalLogStatus(
        rank,
        mine.generation,
        is_ahead(local, remote, untouched=mine.made(remote)),
        bool(lacks) or local.current != remote.current,
        tuple(str(entry.position) for entry in lacks if entry.attempt_name not in mine.replicated),
    )


def teller(claims: Iterable[LocalLogStatus | None]) -> LocalLogStatus | None:
    """The report of the authoritative local log; None if the remote log is."""
    ahead = [one for one in claims if one is not None and one.ahead]
    return max(ahead, key=lambda one: (one.sends, one.generation, -one.rank), default=None)


def given_up(claims: Iterable[LocalLogStatus | None], counts: LocalLogStatus | None) -> list[LocalLogStatus]:
    """Reports whose epochs belong to an abandoned history."""
    return [one for one in claims if one is not None and one != counts and one.alone]


def gone_between(before: State, now: State) -> tuple[Retirement, ...]:
    """Attempts, or groups of their files, that the log needed before and does not need any more."""
    old, new = _groups_by_attempt(before), _groups_by_attempt(now)
    whole = (Retirement(name) for name in sorted(old.keys() - new.keys()))
    less = (
        Retirement(name, tuple(group for group in groups if group not in (new[name] or ())))
        for name, groups in sorted(old.items())
        if groups is not None and new.get(name) is not None and new[name] != groups
    )
    return (*whole, *(one for one in less if one.groups))


def _groups_by_attempt(state: State) -> dict[str, tuple[str, ...] | None]:
    """All attempts that the log needs; None: with all of their files."""
    groups = {entry.attempt_name: entry.groups or None for entry in state.entries}
    return {name: groups.get(name) for name in state.tries}


def delete(local: Storage, gone: Iterable[Retirement]) -> None:
    """Delete their files. Raises StorageError, after trying all of them."""
    failed: StorageError | None = None
    for one in gone:
        try:
            delete_attempt(local, one)
        except StorageError as error:
            failed = error
    if failed is not None:
        raise failed
