"""A near place before the far one: acknowledged near, replicated behind the training, never a mixture."""

from __future__ import annotations

import shutil
import threading
import warnings
from pathlib import Path

import pytest
from s3_server import BUCKET, needs_s3, s3_server
from tiers import WAIT_SECS, Away, Gate, Places, numbers_in, until

from torchrelay.checkpoint.coordinator.retention import Retaining, prune
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.retention import Keeping
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.errors import SaveFailedError


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


def test_files_go_up_byte_for_byte(near: Path, far: Path) -> None:
    """What is replicated is, file by file, what was saved near, and the far place needs nothing else."""
    places = Places(near, far)
    for epoch in range(3):
        places.save(epoch, epoch)
    places.replicate()
    places.close()
    files = [path.relative_to(near) for path in (near / "data").rglob("*") if path.is_file()]
    assert len(files) == 3 * 3
    assert all((near / path).read_bytes() == (far / path).read_bytes() for path in files)
    assert numbers_in(far) == numbers_in(near) == {"0": 0, "1": 1, "2": 2}
    shutil.rmtree(near)
    assert numbers_in(far) == {"0": 0, "1": 1, "2": 2}


def test_another_kind_of_store(near: Path) -> None:
    """The far place may be any store that checkpoints may be on."""
    store = ObjectStorage.open("memory://tier-test/run", "the store")
    places = Places(near, store)
    places.save(0, 7)
    places.replicate()
    places.close()
    assert numbers_in(store) == {"0": 7}
    shutil.rmtree(near)
    again = Places(near, store)
    assert again.look.position == Position(0)
    again.save(1, 8)
    again.replicate()
    again.close()
    assert numbers_in(store) == {"0": 7, "1": 8}


@needs_s3
def test_a_real_s3_server(near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over S3 too the run is replicated, and goes on from there without its near directory."""
    with s3_server() as env:
        for name, told in env.items():
            monkeypatch.setenv(name, told)
        for epoch in range(2):
            places = Places(near, storage_of(f"s3://{BUCKET}/tier/run", "the place"))
            assert places.look.position == (Position(0) if epoch else None)
            places.save(epoch, epoch)
            places.replicate()
            places.close()
            shutil.rmtree(near)
        assert numbers_in(storage_of(f"s3://{BUCKET}/tier/run", "the place")) == {"0": 0, "1": 1}


def test_all_near_disks_lost(near: Path, far: Path) -> None:
    """What was told to be replicated is there when the near directory is gone; the run goes on with it."""
    gate = Gate(far)
    places = Places(near, gate.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    gate.open.clear()
    places.save(1, 1)
    assert [entry.position.epoch for entry in places.replicator.pending] == [1]
    shutil.rmtree(near)
    gate.open.set()
    places.crash()
    again = Places(near, far)
    assert again.look.position == Position(0)
    again.save(1, 11)
    again.replicate()
    again.close()
    assert numbers_in(far) == {"0": 0, "1": 11}


def test_near_is_newer(near: Path, far: Path) -> None:
    """A start takes what is near only, where that is newer, and sends it."""
    down = Away(far)
    places = Places(near, down.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    down.away = True
    places.save(1, 1)
    places.save(2, 2)
    places.crash()
    assert numbers_in(far) == {"0": 0}
    again = Places(near, far)
    assert again.look.position == Position(2)
    again.replicate()
    again.close()
    assert numbers_in(far) == {"0": 0, "1": 1, "2": 2}


def test_far_is_newer(near: Path, far: Path, tmp_path: Path) -> None:
    """A near directory that was away while the run went on follows the far place; nothing is mixed."""
    places = Places(near, far)
    places.save(0, 0)
    places.replicate()
    places.close()
    other = Places(tmp_path / "elsewhere", far)
    other.save(1, 10)
    other.save(2, 20)
    other.replicate()
    other.close()
    again = Places(near, far)
    assert again.look.position == Position(2)
    again.save(3, 30)
    again.replicate()
    again.close()
    assert numbers_in(far) == {"0": 0, "1": 10, "2": 20, "3": 30}


def test_near_disk_set_back(near: Path, far: Path, tmp_path: Path) -> None:
    """A near directory that is an older copy of itself follows the far place as any other does."""
    places = Places(near, far)
    places.save(0, 0)
    places.replicate()
    shutil.copytree(near, tmp_path / "copy")
    places.save(1, 1)
    places.replicate()
    places.close()
    shutil.rmtree(near)
    shutil.copytree(tmp_path / "copy", near)
    again = Places(near, far)
    assert again.look.position == Position(1)
    again.save(2, 2)
    again.replicate()
    again.close()
    assert numbers_in(far) == {"0": 0, "1": 1, "2": 2}


def test_branches_left_before_they_went_up(near: Path, far: Path) -> None:
    """The far log may stand on a branch that the near one has left and forgotten."""
    down = Away(far)
    places = Places(near, down.storage)  # type: ignore[arg-type]
    for epoch in range(3):
        places.save(epoch, epoch)
    places.ledger.rewind(places.peers, Position(2), {"epoch": 2})
    places.replicate()
    down.away = True
    places.ledger.rewind(places.peers, Position(1), {"epoch": 1})
    places.save(2, 22)
    places.crash()
    again = Places(near, far)
    assert again.look.position == Position(2)
    again.replicate()
    again.close()
    assert numbers_in(far) == numbers_in(near) == {"0": 0, "1": 1, "2": 22}


def test_two_lines_are_never_mixed(near: Path, far: Path, tmp_path: Path) -> None:
    """Where both went on, the far line counts; what the near one had alone is given up, and said so."""
    down = Away(far)
    places = Places(near, down.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    down.away = True
    for epoch in (1, 2, 3):
        places.save(epoch, epoch)
    places.crash()
    other = Places(tmp_path / "elsewhere", far)
    other.save(1, 10)
    other.replicate()
    other.close()
    with pytest.warns(UserWarning, match=r"not uploaded \(epoch 1, 2, 3\) are abandoned"):
        again = Places(near, far)
    again.save(2, 20)
    again.replicate()
    again.close()
    assert numbers_in(far) == {"0": 0, "1": 10, "2": 20}
    logs = [open_log(LocalStorage(place), "test").state for place in (near, far)]
    assert logs[0].tries == logs[1].tries


def test_rewinds_go_far_as_well(near: Path, far: Path) -> None:
    """The far log has the branches of the near one, also where nothing was saved after the rewind."""
    places = Places(near, far)
    for epoch in range(4):
        places.save(epoch, epoch)
    places.ledger.rewind(places.peers, Position(1), {"epoch": 1})
    places.replicate()
    view = open_log(LocalStorage(far), "test")
    assert view.epochs() == (0, 1) and view.current.base == Position(1)
    assert view.begun_by == {"epoch": 1}
    places.save(2, 22)
    places.replicate()
    places.close()
    assert numbers_in(far) == {"0": 0, "1": 1, "2": 22}
    shutil.rmtree(near)
    again = Places(near, far)
    assert (again.look.position, again.look.branch, again.look.request) == (Position(2), 1, {"epoch": 1})
    again.close()


def test_rewind_to_what_is_near_only(near: Path, far: Path) -> None:
    """A rewind to an epoch that is not replicated yet is replicated with that epoch."""
    down = Away(far)
    places = Places(near, down.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    down.away = True
    for epoch in (1, 2, 3):
        places.save(epoch, epoch)
    places.ledger.rewind(places.peers, Position(2), {"epoch": 2})
    places.save(3, 33)
    places.crash()
    again = Places(near, far)
    again.replicate()
    again.close()
    assert numbers_in(far) == numbers_in(near) == {"0": 0, "1": 1, "2": 2, "3": 33}


def test_positions_inside_of_an_epoch(near: Path, far: Path) -> None:
    """They go up too, and leave the far log when their epoch comes."""
    places = Places(near, far)
    places.save(0, 0)
    places.save(0, 5, step=3)
    places.replicate()
    assert numbers_in(far) == {"0": 0, "0+3": 5}
    places.save(1, 1)
    places.replicate()
    places.close()
    assert numbers_in(far) == numbers_in(near) == {"0": 0, "1": 1}


def test_lag_is_bounded(near: Path, far: Path) -> None:
    """With a far place that stands still a save beyond the lag waits; it goes on when one is replicated."""
    gate = Gate(far)
    places = Places(near, gate.storage, lag=2)  # type: ignore[arg-type]
    gate.open.clear()
    most, saved = 0, []

    def train() -> None:
        nonlocal most
        for epoch in range(6):
            places.ledger.wait_for_room(places.peers)
            places.save(epoch, epoch)
            most = max(most, len(places.replicator.pending))
            saved.append(epoch)

    thread = threading.Thread(target=train)
    thread.start()
    until(lambda: len(saved) == 2)
    gate.open.set()
    thread.join(WAIT_SECS)
    assert saved == list(range(6)) and most <= 2
    places.replicate()
    places.close()
    assert numbers_in(far) == {str(epoch): epoch for epoch in range(6)}


def test_far_place_away(near: Path, far: Path) -> None:
    """Failures are told at the next boundary, a save beyond the lag fails, nothing near is lost."""
    down = Away(far)
    places = Places(near, down.storage, lag=1, patience_secs=0.01)  # type: ignore[arg-type]
    down.away = True
    places.save(0, 0)
    until(lambda: places.replicator._failures)
    with (
        pytest.warns(UserWarning, match="cannot be sent to .* now: the far place is away"),
        pytest.raises(SaveFailedError, match=r"1 saved positions are in .* only"),
    ):
        places.ledger.wait_for_room(places.peers)
    places.ledger.hurried = lambda: True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may have been tried again, and failed
        places.ledger.wait_for_room(places.peers)  # who leaves early saves without waiting
    assert numbers_in(near) == {"0": 0}
    places.crash()


def test_end_does_not_wait_for_ever(near: Path, far: Path) -> None:
    """Draining ends after its time, says what is near only, and the next start sends it."""
    down = Away(far)
    places = Places(near, down.storage, drain_secs=0.01)  # type: ignore[arg-type]
    down.away = True
    places.save(0, 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        places.ledger.drain(places.peers)
    assert any("epoch 0 is in" in str(one.message) and "the next start" in str(one.message) for one in told)
    down.away = False
    places.close()
    again = Places(near, far)
    again.ledger.drain(again.peers)
    again.close()
    assert numbers_in(far) == {"0": 0}


def test_retention_spares_what_is_near_only(near: Path, far: Path) -> None:
    """Neither retention nor `prune` deletes near what is not replicated; once it is, both follow the rule."""
    keeping = Keeping(1)
    down = Away(far)
    places = Places(near, down.storage, keeping=keeping)  # type: ignore[arg-type]
    retaining = Retaining(places.ledger, keeping)
    places.save(0, 0)
    places.replicate()
    down.away = True
    for epoch in (1, 2, 3):
        places.save(epoch, epoch)
        retaining.now(places.peers)
    places.ledger.finish_deletions()
    assert set(numbers_in(near)) == {"0", "1", "2", "3"}
    places.crash()
    prune(LocalStorage(near), keeping, patience_secs=0.0)
    assert set(numbers_in(near)) == {"0", "1", "2", "3"}
    again = Places(near, far, keeping=keeping)
    again.replicate()
    Retaining(again.ledger, keeping).now(again.peers)
    again.close()
    assert numbers_in(near) == numbers_in(far) == {"3": 3}


def test_damage_near_costs_nothing(near: Path, far: Path) -> None:
    """An epoch whose near files are damaged is read from the far place."""
    places = Places(near, far)
    places.save(0, 0)
    entry = places.save(1, 1)
    places.replicate()
    places.close()
    shard = next((near / "data" / entry.attempt_name).glob("trainer_1*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    again = Places(near, far)
    with pytest.warns(UserWarning, match="the local files of epoch 1 are damaged"):
        target = again.ledger.newest(again.peers, lambda text: pytest.fail(text))
    assert target.position == Position(1)
    again.close()


def test_damage_is_never_sent(near: Path, far: Path) -> None:
    """A near epoch that is damaged before it goes up is quarantined; later ones are sent."""
    gate = Gate(far)
    places = Places(near, gate.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    gate.open.clear()
    entry = places.save(1, 1)
    shard = next((near / "data" / entry.attempt_name).glob("trainer_0*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    places.save(2, 2)
    gate.open.set()
    places.replicate()
    told = places.replicator.take_failures()
    assert any("epoch 1 is damaged and is not replicated" in one for one in told)
    places.close()
    assert numbers_in(far) == {"0": 0, "2": 2}
