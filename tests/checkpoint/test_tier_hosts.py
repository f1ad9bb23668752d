"""A near directory per host: nothing is mixed, and what is replicated outlives every disk."""

from __future__ import annotations

import random
import shutil
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from near_places import NearPlaces, damage
from tiers import WAIT_SECS, Away, Gate, Places, Scheduled, numbers_in, until

from torchrelay.checkpoint.coordinator.retention import prune
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.retention import Keeping
from torchrelay.checkpoint.log.tiered_storage import read_notes
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.tiering import multi_host, upload
from torchrelay.checkpoint.tiering.multi_host import HostsLedger
from torchrelay.errors import DamagedError, StorageError, UsageError


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    return [tmp_path / "host-a", tmp_path / "host-b"]


@pytest.fixture(autouse=True)
def hosts_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread is a host to whoever asks which one has seen damage."""
    named = SimpleNamespace(gethostname=lambda: threading.current_thread().name)
    monkeypatch.setattr("torchrelay.checkpoint.load.verify.socket", named)


def files(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in (place / "data").rglob("*") if path.is_file()}


def test_each_host_sends_what_it_has(disks: list[Path], far: Path) -> None:
    """The far place gets the files of all hosts, byte for byte, and nothing else stays there."""
    places = NearPlaces(disks, far)
    entries = [places.save(epoch, epoch) for epoch in range(3)]
    places.replicate()
    places.close()
    assert numbers_in(far) == {"0": 0, "1": 1, "2": 2}
    assert len(files(far)) == 3 * 3 and files(far) == files(disks[0]) | files(disks[1])
    for disk in disks:
        assert all((disk / path).read_bytes() == (far / path).read_bytes() for path in files(disk))
    assert all(len(list((disks[1] / "data" / entry.attempt_name).iterdir())) == 1 for entry in entries)


@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_near_only_is_sent_by_the_next_start(disks: list[Path], far: Path, swapped: bool) -> None:
    """With all disks back the newest epoch counts, wherever the log lies and rank 0 comes up."""
    down = Away(far)
    places = NearPlaces(disks, down.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    down.away = True
    places.save(1, 1)
    places.save(2, 2)
    places.stop()
    assert numbers_in(far) == {"0": 0}
    again = NearPlaces(disks[::-1] if swapped else disks, far, nodes=disks)
    assert again.look.position == Position(2) == again.newest() and not again.told
    assert numbers_in(far) == {"0": 0, "1": 1, "2": 2}
    again.save(3, 3)
    again.replicate()
    again.close()
    assert numbers_in(far) == {"0": 0, "1": 1, "2": 2, "3": 3}


@pytest.mark.parametrize(("lost", "swapped"), [(1, False), (1, True), (0, False), (0, True)])
def test_a_disk_is_lost(disks: list[Path], far: Path, lost: int, swapped: bool) -> None:
    """Without its part of an epoch that is near only the run goes on from the newest replicated one."""
    down = Away(far)
    places = NearPlaces(disks, down.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.save(1, 1)
    places.replicate()
    down.away = True
    places.save(2, 2)
    places.stop()
    shutil.rmtree(disks[lost])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again = NearPlaces(disks[::-1] if swapped else disks, far, nodes=disks)
        assert again.newest() == Position(1)
    texts = [str(one.message) for one in told]
    # With the log of the run, nobody knows what else it had.
    assert any("epoch 2 is abandoned: 1 of its files" in text for text in texts) is (lost == 1), texts
    again.save(2, 22)
    again.replicate()
    again.close()
    assert numbers_in(far) == {"0": 0, "1": 1, "2": 22}


def test_damage_on_another_host_is_never_sent(disks: list[Path], far: Path) -> None:
    """An epoch that is damaged on any host before it went up is quarantined; later ones are sent."""
    gate = Gate(far)
    places = NearPlaces(disks, gate.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    gate.open.clear()
    damage(disks[1], places.save(1, 1).attempt_name)
    places.save(2, 2)
    gate.open.set()
    places.replicate()
    with pytest.warns(UserWarning, match=r"epoch 1 is abandoned: .*local, rank 1"):
        places.save(3, 3)
    places.replicate()
    places.close()
    assert numbers_in(far) == {"0": 0, "2": 2, "3": 3}


def test_a_manifest_that_is_damaged_far_is_sent_again(disks: list[Path], far: Path) -> None:
    """Hosts that wait for a manifest, which the far place damaged, do not wait for ever."""
    go = threading.Event()

    def held(verb: str, number: int) -> None:
        assert threading.current_thread().name != "torchrelay tier part" or go.wait(WAIT_SECS)

    places = NearPlaces(disks, Scheduled(LocalStorage(far), held))  # type: ignore[arg-type]
    manifest = far / "data" / places.save(0, 0).attempt_name / "manifest.json"
    replicator = places.first.replicator
    assert replicator is not None
    until(lambda: any(path.endswith("manifest.json") for path in replicator._notes.sent))
    manifest.write_bytes(manifest.read_bytes().replace(b"trainer", b"tRainer"))
    until(lambda: any("does not have what was sent" in text for text in replicator._failures))
    go.set()
    places.replicate()
    places.close()
    assert numbers_in(far) == {"0": 0}


@pytest.mark.parametrize("restarted", [False, True])
def test_another_hosts_file_that_is_damaged_far_is_sent_again(
    disks: list[Path], far: Path, restarted: bool
) -> None:
    """What the far place damages after a host has sent it comes again, in this start or the next."""
    done: list[Path] = []

    def damages(verb: str, number: int) -> None:
        if (threading.current_thread().name, verb, done) == ("torchrelay tier", "sync_dir", []):
            until(lambda: any(far.glob("data/*/sent.*")))
            (shard,) = far.glob("data/*/trainer_1.*.safetensors")
            shard.write_bytes(shard.read_bytes()[:20] + b"?" + shard.read_bytes()[21:])
            done.append(shard)
            if restarted:
                raise StorageError("cut off")

    places = NearPlaces(disks, Scheduled(LocalStorage(far), damages))  # type: ignore[arg-type]
    places.save(0, 0)
    if restarted:
        until(lambda: done)
        places.stop()
        places = NearPlaces(disks, far)
    places.replicate()
    places.close()
    assert done and numbers_in(far) == {"0": 0}


@pytest.mark.parametrize("host", [0, 1])
def test_damage_near_costs_nothing(disks: list[Path], far: Path, host: int) -> None:
    """A replicated epoch whose near files are damaged on one host is read from the far place by all."""
    places = NearPlaces(disks, far)
    places.save(0, 0)
    entry = places.save(1, 1)
    places.replicate()
    places.close()
    (shard,) = (disks[host] / "data" / entry.attempt_name).glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    again = NearPlaces(disks, far)
    with pytest.warns(UserWarning, match="the local files of epoch 1 are damaged"):
        assert again.newest() == Position(1)
    again.close()


def test_blocks_damaged_near_are_read_far(disks: list[Path], far: Path) -> None:
    """What a load finds damaged on one host alone is proved far by all, and loaded from there."""
    places = NearPlaces(disks, far)
    places.save(0, 0)
    entry = places.save(1, 1)
    places.replicate()
    places.close()
    damage(disks[1], entry.attempt_name)
    again = NearPlaces(disks, far)

    def load(ledger: HostsLedger, peers: Any) -> Position:
        target = ledger.newest(peers, pytest.fail)
        error = DamagedError("a block is damaged")
        return ledger.instead_of(peers, target, error, pytest.fail).position

    with pytest.warns(UserWarning, match="the local files of epoch 1 are damaged"):
        assert again.all(load) == [Position(1)] * 2
    assert all(entry.attempt_name in ledger.storage.remote_only for ledger in again.ledgers)
    again.close()


@pytest.mark.parametrize("swapped", [False, True])
def test_cut_off_in_the_sending_of_a_start(
    disks: list[Path], far: Path, tmp_path: Path, swapped: bool
) -> None:
    """A start that ends at any step of its sending leaves whole epochs only; the next one has them all."""
    down = Away(far)
    places = NearPlaces(disks, down.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    down.away = True
    places.save(1, 1)
    places.save(2, 2)
    places.stop()
    cut_off = 0
    for number in STEPS:
        now = tmp_path / f"{number}"
        nears = [now / disk.name for disk in disks]
        for source in (*disks, far):
            shutil.copytree(source, now / source.name)
        order = nears[::-1] if swapped else nears
        cut_off += _cut_off(number, order, now / "far", nears)
        whole = numbers_in(now / "far")
        assert whole in ({"0": 0}, {"0": 0, "1": 1}, {"0": 0, "1": 1, "2": 2})
        again = NearPlaces(nears, now / "far")
        assert again.newest() == Position(2)
        again.close()
        assert numbers_in(now / "far") == {"0": 0, "1": 1, "2": 2}
        shutil.rmtree(now)
    assert cut_off == len(STEPS)


STEPS = range(1, 40, 13)


def _cut_off(number: int, nears: list[Path], far: Path, nodes: list[Path]) -> bool:
    """Start where the far place takes no change from this one on; whether that ended the start."""

    def refuse(verb: str, count: int) -> None:
        if count >= number:
            raise StorageError("cut off")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cut = Scheduled(LocalStorage(far), refuse)
            NearPlaces(nears, cut, nodes=nodes, patience_secs=0.0).stop()  # type: ignore[arg-type]
        except (
            StorageError,
            UsageError,
        ):  # this one where it cannot be tried whether writers can be told apart
            return True
    return False


def test_retention_near_on_every_host(disks: list[Path], far: Path) -> None:
    """Hosts delete what the run no longer keeps, and what earlier starts left; never what is near only."""
    keeping = Keeping(1)
    down = Away(far)
    places = NearPlaces(disks, down.storage, keeping=keeping)  # type: ignore[arg-type]
    for epoch in range(3):
        places.save(epoch, epoch)
        places.replicate()
    down.away = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        local = [places.save(epoch, epoch).attempt_name for epoch in (3, 4)]
        places.all(lambda ledger, peers: ledger._exchange_news(peers))
    assert not [str(one.message) for one in told if "older ones stay" in str(one.message)]
    for ledger in places.ledgers:
        ledger.finish_deletions()
    for disk in disks:
        there = {one.name for one in (disk / "data").iterdir()}
        assert set(local) <= there and len(there) == 3
    places.stop()
    (disks[1] / "data" / "e00000009-0123456789ab").mkdir()
    again = NearPlaces(disks, far, keeping=keeping)
    last = again.save(5, 5).attempt_name
    again.replicate()
    again.all(lambda ledger, peers: again.retaining[peers.rank].now(peers))
    again.all(lambda ledger, peers: ledger.drain(peers))
    again.close()
    assert numbers_in(far) == {"5": 5}
    assert all({one.name for one in (disk / "data").iterdir()} == {last} for disk in disks)


def test_an_older_history_on_one_host(disks: list[Path], far: Path, tmp_path: Path) -> None:
    """A near log that another host's has replaced since tells nothing, also with epochs of its own."""
    down = Away(far)
    places = NearPlaces(disks, down.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    down.away = True
    places.save(1, 11)
    places.stop()
    third = [disks[1], tmp_path / "host-c"]  # host a is away
    again = NearPlaces(third, far)
    again.save(1, 1)
    again.replicate()
    again.close()
    for order in (disks, disks[::-1]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            back = NearPlaces(order, far, nodes=disks)
        assert back.newest() == Position(1)
        back.close()
        assert numbers_in(far) == {"0": 0, "1": 1}


@pytest.mark.parametrize("swapped", [False, True])
def test_nobody_went_on_without_a_host(disks: list[Path], far: Path, tmp_path: Path, swapped: bool) -> None:
    """A start without a host that saved nothing costs nothing: what the others had near only still counts."""
    down = Away(far)
    places = NearPlaces(disks, down.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    down.away = True
    places.save(1, 1)
    places.stop()
    NearPlaces([disks[1], tmp_path / "host-c"], far).stop()
    back = NearPlaces(disks[::-1] if swapped else disks, far, nodes=disks)
    assert back.newest() == Position(1)
    back.close()
    assert numbers_in(far) == {"0": 0, "1": 1}


def test_hosts_of_two_jobs(disks: list[Path], far: Path, tmp_path: Path) -> None:
    """A near directory of another job is refused, on whichever host it is."""
    NearPlaces(disks, far).close()
    Places(tmp_path / "near2", tmp_path / "far2").close()
    for order in ([disks[0], tmp_path / "near2"], [tmp_path / "near2", disks[1]]):
        with pytest.raises(UsageError, match="belong to two jobs"):
            NearPlaces(order, far)


def test_a_part_is_not_pruned_alone(disks: list[Path], far: Path) -> None:
    """The near directory of a host whose log is an older one decides nothing."""
    for order in (disks, disks[::-1]):
        places = NearPlaces(order, far, nodes=disks)
        places.save(len(open_log(LocalStorage(far), "test").epochs()), 1)
        places.replicate()
        places.close()
    notes = read_notes(LocalStorage(disks[0]))
    assert notes is not None and notes.part
    with pytest.raises(UsageError, match="has only a part of the epochs"):
        prune(LocalStorage(disks[0]), Keeping(1), patience_secs=0.0)


def test_a_shared_directory_is_one_place(tmp_path: Path, far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that share a file system see each other's files there, and are one place as one machine is."""
    names = iter(range(100))
    monkeypatch.setattr("torchrelay.checkpoint.tiering.hosts._key", lambda directory: f"host {next(names)}")
    shared = [tmp_path / "nfs"] * 2
    places = NearPlaces(shared, far)
    assert not places.first.places.many and places.first.places.leader_of == (0, 0)
    places.save(0, 0)
    places.replicate()
    places.close()
    assert numbers_in(far) == {"0": 0} and not list((tmp_path / "nfs").glob(".probe*"))


def test_a_start_that_cannot_send_ends(disks: list[Path], far: Path) -> None:
    """Where what is near only cannot be sent, nothing is chosen: the start ends and names the epoch."""
    down = Away(far)
    places = NearPlaces(disks, down.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    down.away = True
    places.save(1, 1)
    places.stop()

    def refuse(verb: str, number: int) -> None:
        if verb == "write_at":
            raise StorageError("no room")

    down.storage._before = refuse
    with (
        pytest.warns(UserWarning, match="cannot be sent to .* now: no room"),
        pytest.raises(StorageError, match="epoch 1 is in local directories only"),
    ):
        NearPlaces(disks, down.storage, patience_secs=0.3)  # type: ignore[arg-type]
    again = NearPlaces(disks, far)
    assert again.newest() == Position(1)
    again.close()


def test_loads_outside_of_a_run(disks: list[Path], far: Path) -> None:
    """Before it was sent an epoch that lies on several hosts is refused by name; others are proved."""
    down = Away(far)
    places = NearPlaces(disks, down.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    down.away = True
    places.save(1, 1)
    places.stop()
    again = NearPlaces(disks, far, opened=False)
    assert again.all(lambda ledger, peers: ledger.verify_epoch(peers, 0).position) == [Position(0)] * 2
    with pytest.raises(StorageError, match="epoch 1 is in the local directories of several hosts only"):
        again.all(lambda ledger, peers: ledger.verify_epoch(peers, 1))
    again.all(lambda ledger, peers: ledger.check(peers, 1))  # a run sends it first
    again.all(lambda ledger, peers: ledger.open(peers))
    assert again.all(lambda ledger, peers: ledger.verify_epoch(peers, 1).position) == [Position(1)] * 2
    again.close()


@pytest.mark.parametrize("seed", range(2))
def test_random_histories(tmp_path: Path, seed: int) -> None:
    """Kills, lost disks, hosts in any order: never a mixture, and no replicated epoch is lost."""
    rng = random.Random(seed)
    far, number, disks = tmp_path / "far", 0.0, [tmp_path / "a", tmp_path / "b"]
    saved: dict[str, float] = {}
    promised: dict[str, float] = {}
    for _ in range(7):
        if rng.random() < 0.3:
            shutil.rmtree(rng.choice(disks), ignore_errors=True)
        down = Away(far)
        order = disks if rng.random() < 0.5 else disks[::-1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            places = NearPlaces(order, down.storage, nodes=disks)  # type: ignore[arg-type]
        line = {str(one.position): one.attempt_name for one in places.first.view().line() if one.healthy}
        assert set(promised) <= set(line), "a replicated epoch is lost"
        assert all(saved[line[position]] == promised[position] for position in promised)
        there = numbers_in(far)
        assert all(there[position] == one for position, one in promised.items())
        assert all(saved[name] == there[position] for position, name in line.items()), "it was not sent"
        epochs = [int(position) for position in line]
        last = max(epochs, default=-1)
        if last < max((one.position.epoch for one in places.first.view().line()), default=-1):
            base = Position(last) if last >= 0 else None
            places.all(lambda ledger, peers, base=base: ledger.rewind(peers, base, {}))
        for _ in range(rng.randrange(4)):
            number, last = number + 1, last + 1
            saved[places.save(last, number).attempt_name] = number
            if rng.random() < 0.3:
                down.away = True
            elif not down.away and rng.random() < 0.5:
                places.replicate()
        promised = {
            str(one.position): saved[one.attempt_name] for one in open_log(LocalStorage(far), "test").line()
        }
        places.close() if rng.random() < 0.3 and not down.away else places.stop()
        assert all(numbers_in(far)[position] == one for position, one in promised.items())


def test_sending_the_same_for_ever_is_no_headway(
    disks: list[Path], far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start whose bytes go, again and again, and never come to stay ends as one that sends none."""
    monkeypatch.setattr(upload, "FIRST_PAUSE_SECS", 0.01)
    monkeypatch.setattr(upload, "LONGEST_PAUSE_SECS", 0.05)
    monkeypatch.setattr(multi_host, "TURN_SECS", 0.1)
    down = Away(far)
    places = NearPlaces(disks, down.storage)  # type: ignore[arg-type]
    down.away = True
    places.save(0, 0)
    places.stop()
    went: list[str] = []

    def refuse(verb: str, number: int) -> None:
        if verb == "sync_file" and list((far / "data").rglob("*.safetensors")):
            went.append(verb)
            raise StorageError("over quota")

    down.storage._before = refuse
    with (
        pytest.warns(UserWarning, match="cannot be sent to .* now: over quota"),
        pytest.raises(StorageError, match="epoch 0 is in local directories only"),
    ):
        NearPlaces(disks, down.storage, patience_secs=0.5)  # type: ignore[arg-type]
    assert len(went) > 4


@pytest.mark.parametrize("swapped", [False, True])
def test_a_signal_ends_the_sending_of_a_start(disks: list[Path], far: Path, swapped: bool) -> None:
    """A start that sends what was near only leaves when any process has to; the next one goes on with it."""
    down = Away(far)
    places = NearPlaces(disks, down.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    down.away = True
    places.save(1, 1)
    places.stop()

    def refuse(verb: str, number: int) -> None:
        if verb == "open_exclusive":
            raise StorageError("no room")

    down.storage._before = refuse
    order = disks[::-1] if swapped else disks
    leaving = NearPlaces(order, down.storage, nodes=disks, opened=False)  # type: ignore[arg-type]
    for ledger in leaving.ledgers:
        ledger.secs_left = lambda: 0.0
    leaving.ledgers[1].hurried = lambda: True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert leaving.all(lambda ledger, peers: ledger.open(peers)) == [False, False]
        leaving.all(lambda ledger, peers: ledger.drain(peers))
    leaving.close()
    assert numbers_in(far) == {"0": 0}
    again = NearPlaces(disks, far)
    assert again.newest() == Position(1) and not again.told
    again.close()
    assert numbers_in(far) == {"0": 0, "1": 1}


def test_a_part_of_another_run_begins_no_far_place(disks: list[Path], far: Path, tmp_path: Path) -> None:
    """A start with the near directory of a running job and a new far place deletes nothing of that job."""
    down = Away(far)
    places = NearPlaces(disks, down.storage)  # type: ignore[arg-type]
    places.save(0, 0)
    places.replicate()
    down.away = True
    places.save(1, 1)
    before = files(disks[1])
    with pytest.raises(UsageError, match="has only a part of the epochs of"):
        NearPlaces([disks[1], tmp_path / "host-c"], tmp_path / "new")
    with pytest.raises(UsageError, match="has only a part of the epochs of"):
        Places(disks[1], tmp_path / "new")
    assert files(disks[1]) == before and not (tmp_path / "new" / "log").exists()
    down.away = False
    places.replicate()
    places.close()
    assert numbers_in(far) == {"0": 0, "1": 1}


def test_a_rank_that_cannot_look_is_not_waited_for(disks: list[Path], far: Path) -> None:
    """Where the near directory of one host cannot be looked at all ranks hear so, as a storage that fails."""
    disks[1].mkdir()
    with pytest.raises(StorageError, match=r"the local directory .* cannot be accessed"):
        NearPlaces([disks[0], disks[1] / ("x" * 300)], far)
