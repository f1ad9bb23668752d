"""Which of several near logs tells the run, where hosts have near directories of their own.

The log lies on the host that had rank 0, and ranks may come to other hosts at the next start. So the leader
of each place says what the near log there knows. Of those that are ahead of the far one (`histories`) and
have more, the one counts that has held the far log last: two such logs are two histories.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchrelay.checkpoint.log.job_file import same_job
from torchrelay.checkpoint.log.reader import open_log
from torchrelay.checkpoint.log.tiered_storage import Notes, TierStorage, read_notes
from torchrelay.checkpoint.tier import histories
from torchrelay.records import dataclass

Json = Any


@dataclass(frozen=True)
class Claim:
    """What a leader says. `generation`: that of the far log when this near log was taken with it, or -1.

    `ahead`: all that the far log has came from it. `sends`: it has what the far log lacks. `alone` are the
    epochs that it has and the far log never had.
    """

    rank: int
    generation: int = -1
    ahead: bool = False
    sends: bool = False
    alone: tuple[str, ...] = ()

    def row(self) -> list[Json]:
        """The claim as JSON."""
        return [self.rank, self.generation, self.ahead, self.sends, list(self.alone)]


def claim_of(row: list[Json]) -> Claim:
    """Read what `row` made."""
    rank, generation, ahead, sends, alone = row
    return Claim(int(rank), int(generation), bool(ahead), bool(sends), tuple(map(str, alone)))


def claim(storage: TierStorage, job_name: str | None, rank: int) -> Claim | None:
    """That of the near log here; None without one, or where another place's log counts since then.

    Raises StorageError and DamagedError for logs that cannot be read, UsageError for that of another job.
    """
    notes = read_notes(storage.near) or Notes()
    if notes.part:
        return None
    same_job(storage.near, storage.far)
    near = open_log(storage.near, job_name)
    if near.slot < 0:
        return None
    far = open_log(storage.far, job_name)
    mine = notes if notes.far == storage.far.url else Notes()
    lacks = histories.to_send(near, far)
    return Claim(
        rank,
        mine.generation,
        histories.is_ahead(near, far, untouched=mine.made(far)),
        bool(lacks) or histories.branches_differ(near, far),
        tuple(str(entry.position) for entry in lacks if entry.try_name not in mine.replicated),
    )


def teller(claims: Iterable[Claim | None]) -> Claim | None:
    """The claim that counts; None where the far log alone tells the run."""
    ahead = [one for one in claims if one is not None and one.ahead]
    return max(ahead, key=lambda one: (one.sends, one.generation, -one.rank), default=None)


def given_up(claims: Iterable[Claim | None], counts: Claim | None) -> list[Claim]:
    """Those whose epochs are of another history than the one that counts."""
    return [one for one in claims if one is not None and one != counts and one.alone]
