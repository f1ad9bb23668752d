"""Which ranks see the same near directory: a *place* is that directory with its ranks, the lowest one leads.

One machine is one place, as are hosts that share a file system; hosts with disks of their own are several.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import RelayError, StorageError, UsageError
from torchrelay.jobs.session import Peers, together
from torchrelay.records import dataclass

SEEN_WITHIN_SECS = 10.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Places:
    """`leader_of[rank]` is the lowest rank that sees the same directory; `rank` is this process."""

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
        """Whether this process does what its place has to do."""
        return self.leader_of[self.rank] == self.rank

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks of this place."""
        mine = self.leader_of[self.rank]
        return tuple(rank for rank, leader in enumerate(self.leader_of) if leader == mine)


def guessed(peers: Peers, directory: Path) -> Places:
    """The places as the systems tell them, without a write: hosts that share a file system seem apart.

    Raises StorageError on all ranks where one cannot look there.
    """
    if peers.size == 1:
        return Places()
    keys = together(peers, "near directories", lambda: _key(directory))
    return Places(tuple(keys.index(key) for key in keys), peers.rank)


def seen(peers: Peers, storage: Storage, directory: Path) -> Places:
    """The places as they are: each leader writes a file, and all tell which of these they see.

    Raises UsageError where ranks that should see the same directory do not.
    """
    if peers.size == 1:
        return Places()
    together(peers, "make the near directory", lambda: storage.mkdir(""))
    guess = guessed(peers, directory)
    nonce = peers.exchange("near probes", secrets.token_hex(8))[0]
    mine = f".probe-{nonce}-{peers.rank}"

    def write(name: str) -> None:
        if guess.leads:
            storage.replace(name, b"seen\n")

    try:
        together(peers, "write to the near directory", lambda: write(mine))
        # Once more when all have written: a change of one's own has a network file system ask its server.
        together(peers, "write to the near directory again", lambda: write(f"{mine}.again"))
        return _agreed(peers, storage, guess, nonce)
    finally:
        if guess.leads:
            with suppress(RelayError):
                storage.delete(mine)
                storage.delete(f"{mine}.again")


def _agreed(peers: Peers, storage: Storage, guess: Places, nonce: str) -> Places:
    until = time.monotonic() + SEEN_WITHIN_SECS

    def look() -> list[int | str | bool]:
        sight = sight_of(_probes(storage, nonce), guess.leader_of[peers.rank])
        return [*sight, time.monotonic() > until]

    while True:
        told = together(peers, "near directories seen", look)
        blind = blind_ranks([(least, digest, count) for least, digest, count, _ in told], guess.leaders)
        if not blind:
            return Places(tuple(one[0] for one in told), peers.rank)
        if told[0][-1]:
            few = ", ".join(map(str, blind[:8])) + (f" and {len(blind) - 8} more" if len(blind) > 8 else "")
            raise UsageError(
                f"the near directory {storage.url} is not the one that rank {few} sees there: ranks of a "
                "host need one that they share, or near= must differ between them"
            )
        time.sleep(0.05)


Sight = tuple[int, str, int]
"""What a rank sees: the least leader (-1: not its own one), a digest of all that it sees, and how many."""


def sight_of(probes: Sequence[int], leader: int) -> Sight:
    """From the leaders whose files are there; few bytes however many they are."""
    seen_ones = ",".join(map(str, probes))
    return (min(probes) if leader in probes else -1), sha256(seen_ones.encode())[:16], len(probes)


def blind_ranks(sights: Sequence[Sight], leaders: Sequence[int]) -> list[int]:
    """Ranks that do not see what their leader wrote, or see leaders who do not see the same in turn."""
    alike = Counter(sights[leader][1] for leader in leaders)
    return [rank for rank, (least, digest, count) in enumerate(sights) if least < 0 or alike[digest] != count]


def _probes(storage: Storage, nonce: str) -> list[int]:
    start = f".probe-{nonce}-"
    names = [name.removeprefix(start) for name in storage.list("") if name.startswith(start)]
    return sorted(int(name) for name in names if name.isdigit())


def _key(directory: Path) -> str:
    """The same text where it is the same directory of the same running system."""
    there = directory
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
        found = there.stat()
    except OSError as error:
        raise StorageError(f"the near directory {directory} cannot be looked at: {error}") from error
    boot = ""
    with suppress(OSError):
        boot = _BOOT.read_text().strip()
    rest = directory.relative_to(there)
    return f"{socket.gethostname()} {boot} {found.st_dev} {found.st_ino} {rest}"
