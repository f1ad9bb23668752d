"""A near place and its far one when things are bad: frozen losers, files that are gone, new places."""

from __future__ import annotations

import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from paired_sessions import Meeting, PairedPeers
from stores import Faulty
from tiers import WAIT_SECS, Gate, Places, numbers_in

from torchrelay import LocalSession, Tier
from torchrelay.checkpoint.format.position import Retirement
from torchrelay.checkpoint.log import writer as log_writer
from torchrelay.checkpoint.log.retention import KEEP_ALL
from torchrelay.checkpoint.log.tiered_storage import TierStorage
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.base import RetryTimeouts
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.checkpoint.tiering import session_log
from torchrelay.checkpoint.tiering.replicator import Replicator
from torchrelay.checkpoint.tiering.session_log import TierLedger
from torchrelay.errors import FencedError, StorageError


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


def test_a_frozen_loser_deletes_nothing(near: Path, far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that was frozen while another one sent and named the epoch deletes none of its files."""
    places = Places(near, far)
    places.save(0, 0)
    places.replicate()
    places.crash()
    frozen = LogWriter.take(places.storage.remote, "test", patience_secs=0.0)
    monkeypatch.setattr(log_writer, "_LIVE", weakref.WeakValueDictionary())  # as in another process
    winner = Places(near, far)
    entry = winner.save(1, 1)
    winner.replicate()
    winner.close()
    sending = Replicator(Tier(near), places.storage, frozen, frozen, lambda _: "")
    with pytest.raises(FencedError):
        sending.send(entry, frozenset())
    frozen.close()
    assert numbers_in(far) == {"0": 0, "1": 1}


def test_an_emptied_far_place_gets_all(near: Path, far: Path) -> None:
    """A far place that was emptied takes nothing from the near one, whose branches it never knew."""
    places = Places(near, far)
    places.save(0, 0)
    places.replicate()
    places.ledger.rewind(places.peers, None, {"resume": "never"})
    places.save(0, 10)
    places.save(1, 11)
    writer = places.ledger.required()
    assert writer.retire(Retirement(entry.attempt_name) for entry in writer.view.abandoned())
    places.replicate()
    places.close()
    shutil.rmtree(far)
    again = Places(near, far)
    again.replicate()
    again.close()
    assert numbers_in(far) == {"0": 10, "1": 11} == numbers_in(near)


def test_files_gone_near_keep_nothing_back(near: Path, far: Path) -> None:
    """An epoch whose files are gone before they went up is quarantined; later ones are sent."""
    gate = Gate(far)
    places = Places(near, gate.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    gate.open.clear()
    one, two = places.save(1, 1), places.save(2, 2)
    next((near / "data" / one.attempt_name).glob("trainer_0*.safetensors")).unlink()
    shutil.rmtree(near / "data" / two.attempt_name)
    places.save(3, 3)
    gate.open.set()
    places.replicate()
    assert any(
        "epoch 1 is damaged and is not replicated" in text for text in places.replicator.take_failures()
    )
    places.close()
    assert numbers_in(far) == {"0": 0, "3": 3}


def test_a_tier_at_a_url_is_asked_at_both_places(near: Path) -> None:
    """Whoever has lost the far log alone is told when it asks: others have near directories of their own."""
    url = "memory://hostile-tier/run"
    far = storage_of(url, "the place")
    places = Places(near, far)
    places.save(0, 0)
    places.replicate()
    assert places.ledger.last_generation() == places.ledger.generation
    log_writer._LIVE.clear()
    LogWriter.take(far, "test", patience_secs=0.0).close()
    with pytest.raises(FencedError):
        places.ledger.ask()
    assert places.ledger.last_generation() > places.ledger.generation
    places.crash()


def test_a_start_without_the_far_place_ends(near: Path) -> None:
    """A far place that cannot be reached ends a start of a bare manager too, as storage that fails."""
    faulty = Faulty(iter(["reset"] * 10_000))
    far = ObjectStorage(faulty, "/b/far", "memory://b/far", patience=RetryTimeouts(0.0, 0.0, 0.0))
    ledger = TierLedger(TierStorage(near, far), Tier(near), KEEP_ALL, 0.0)
    peers = LocalSession(["trainer_0"]).peers
    for attempt in (ledger.look, ledger.open):
        with pytest.raises(StorageError, match="cannot"):
            attempt(peers, tolerant=True)
    assert ledger.holding is None and not (near / "log").exists()


def test_a_signal_to_any_process_ends_the_waits(
    near: Path, far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for the far place hears within a turn that another process has to leave."""
    monkeypatch.setattr(session_log, "TURN_SECS", 0.01)
    gate = Gate(far)
    places = Places(near, gate.storage, lag=1)  # type: ignore[arg-type]
    gate.open.clear()
    places.save(0, 0)
    other = TierLedger(places.storage, places.tier, KEEP_ALL, 0.0)
    other.in_run = True
    other.hurried = lambda: places.replicator.pending != ()
    other.secs_left = lambda: 1.0  # less than what has to be left
    meeting, ended = Meeting(2), list[str]()

    def rank(number: int, ledger: TierLedger) -> None:
        peers: Any = PairedPeers(number, 2, meeting)
        ledger.wait_for_room(peers)
        ledger.drain(peers)
        ended.append(f"rank {number}")

    threads = [threading.Thread(target=rank, args=one) for one in enumerate((places.ledger, other))]
    with pytest.warns(UserWarning, match="epoch 0 is in .* only"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECS)
    assert sorted(ended) == ["rank 0", "rank 1"]
    gate.open.set()
    places.crash()
