"""Who may use a near place and its far one: one job, and who of its ranks sees which directory."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import pytest
from paired_sessions import Meeting, PairedPeers
from tiers import WAIT_SECS, Places, numbers_in, until

from torchrelay import Tier
from torchrelay.checkpoint.log import writer
from torchrelay.checkpoint.log.retention import KEEP_ALL
from torchrelay.checkpoint.log.tiered_storage import TierStorage
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.tiering import hosts
from torchrelay.checkpoint.tiering.multi_host import HostsLedger
from torchrelay.errors import FencedError, UsageError


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


def test_fenced_by_another(near: Path, far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job that takes the far log fences the run, which learns of it and sends nothing more."""
    told: list[FencedError] = []
    start = Places(near, far, when_fenced=told.append)
    start.save(0, 0)
    start.replicate()
    monkeypatch.setattr(writer, "_LIVE", weakref.WeakValueDictionary())  # as in another process
    other = LogWriter.take(LocalStorage(far), "test", patience_secs=0.0)
    start.save(1, 1)
    until(lambda: start.replicator._fenced is not None and told)
    with pytest.raises(FencedError, match="was taken over"):
        start.ledger.wait_for_room(start.peers)
    with pytest.raises(FencedError):
        start.ledger.drain(start.peers)
    start.crash()
    other.release()
    assert len(told) == 1  # by the counter's thread, which would end a run that saves nothing
    assert numbers_in(far) == {"0": 0} and numbers_in(near) == {"0": 0, "1": 1}


def test_two_jobs_never_share_a_place(near: Path, far: Path, tmp_path: Path) -> None:
    """A near directory that belongs to another history is refused."""
    Places(near, far).close()
    Places(tmp_path / "near2", tmp_path / "far2").close()
    with pytest.raises(UsageError, match="belong to two jobs"):
        Places(near, tmp_path / "far2")


def test_ranks_of_a_place_see_the_same_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories that are others, though the systems tell that they are one, are refused."""
    monkeypatch.setattr(hosts, "SEEN_WITHIN_SECS", 0.0)
    monkeypatch.setattr(hosts, "_key", lambda directory: "the same")
    meeting, errors = Meeting(2), dict[int, str]()

    def rank(number: int) -> None:
        storage = TierStorage(tmp_path / f"host{number}", LocalStorage(tmp_path / "far"))
        ledger = HostsLedger(storage, Tier(tmp_path / f"host{number}"), KEEP_ALL, 0.0)
        try:
            ledger.open(PairedPeers(number, 2, meeting))  # type: ignore[arg-type]
        except UsageError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECS)
    assert len(errors) == 2 and all("is not the one that rank 1 sees" in one for one in errors.values())
    assert not list(tmp_path.rglob(".probe*"))


@pytest.mark.parametrize(
    ("views", "leader_of", "blind"),
    [
        ([(0,), (0,)], [0, 0], []),
        ([(0,), (1,)], [0, 1], []),
        ([(0, 1), (0, 1)], [0, 1], []),
        ([(0, 1), (1,)], [0, 1], [0]),
        ([(0,), ()], [0, 0], [1]),
        ([(0, 2), (0, 2), (0, 2), (3,)], [0, 0, 2, 3], []),
    ],
)
def test_who_sees_what(views: list[tuple[int, ...]], leader_of: list[int], blind: list[int]) -> None:
    """All must see their leader, and those whom they see must see the same."""
    seen = [hosts.leaders_seen(view, leader) for view, leader in zip(views, leader_of, strict=True)]
    assert hosts.blind_ranks(seen, sorted(set(leader_of))) == blind
