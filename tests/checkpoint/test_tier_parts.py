"""The parts of a near directory per host, one by one: whose log counts, what goes, what is believed."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from stores import Faulty
from tiers import Places, numbers_in

from torchrelay.checkpoint.format.canonical_json import seal
from torchrelay.checkpoint.format.position import CommittedPosition, Position, Retirement, State
from torchrelay.checkpoint.log.tiered_storage import PATH, Notes, read_notes, refuse_part, write_notes
from torchrelay.checkpoint.storage.base import RetryTimeouts
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import Tier
from torchrelay.checkpoint.tiering import hosts
from torchrelay.checkpoint.tiering.hosts import LocalLogStatus, given_up, status_of, teller
from torchrelay.checkpoint.tiering.upload import (
    PlaceReport,
    TierUploader,
    delete_parts,
    part_path,
    read_part,
    write_part,
)
from torchrelay.errors import StorageError, UsageError

ATTEMPT_NAME = "e00000001-0123456789ab"


def test_the_log_that_held_the_far_one_last_counts() -> None:
    """Of logs that are ahead and have more the newest holder's counts, then the least rank's."""
    some = [LocalLogStatus(0, 3, True, True), LocalLogStatus(1, 7, True, True), LocalLogStatus(4, 8, True)]
    some += [LocalLogStatus(2, 9, False, True, ("4",)), LocalLogStatus(3, 7, True, True, ("5",))]
    for order in itertools.permutations([*some, None]):
        assert teller(order) == some[1]
        assert {one.rank for one in given_up(order, some[1])} == {2, 3}
    assert teller([LocalLogStatus(0, 3, True), LocalLogStatus(1, 7, True)]) == LocalLogStatus(1, 7, True)
    assert teller([None, LocalLogStatus(1)]) is None
    assert [status_of(asdict(one)) for one in some] == some


def state(*kept: tuple[str, tuple[str, ...], tuple[str, ...]]) -> State:
    entries = [
        CommittedPosition(0, Position(number), name, 1, "", needs, groups)
        for number, (name, needs, groups) in enumerate(kept)
    ]
    return State(tuple(entries))


def test_what_goes_between_two_boundaries() -> None:
    """Tries that nobody needs any more go whole, groups that retention took go alone; the rest stays."""
    both = ("main", "optim")
    before = state(("a", (), both), ("b", (), both), ("c", ("b",), both), ("d", (), both))
    now = state(("b", (), ("main",)), ("c", ("b",), both), ("e", (), both))
    gone = hosts.gone_between(before, now)
    assert set(gone) == {Retirement("a"), Retirement("d"), Retirement("b", ("optim",))}
    assert hosts.gone_between(state(("b", (), both), ("c", ("b",), both)), state(("c", ("b",), both))) == ()


def test_nothing_needed_ever_goes() -> None:
    """Whatever two states of a log are, no file that the newer one needs is among what goes."""
    rng, names = random.Random(0), [f"t{number}" for number in range(6)]

    def entry(name: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        return name, tuple(rng.sample(names, rng.randrange(2))), tuple(rng.sample("xyz", rng.randrange(1, 4)))

    for _ in range(500):
        made = [state(*map(entry, rng.sample(names, rng.randrange(6)))) for _ in range(2)]
        groups = {entry.attempt_name: set(entry.groups) for entry in made[1].entries}
        for one in hosts.gone_between(made[0], made[1]):
            if one.groups is None:
                assert one.attempt_name not in made[1].tries and one.attempt_name in made[0].tries
            else:
                assert not groups[one.attempt_name] & set(one.groups)


def test_parts_are_believed_whole_only(tmp_path: Path) -> None:
    """Half of what a host tells is nothing yet; that of another start or host is somewhere else."""
    far, path = LocalStorage(tmp_path), part_path(ATTEMPT_NAME, "run", 3)
    far.mkdir(f"data/{ATTEMPT_NAME}")
    assert read_part(far, path) is None
    for part in (PlaceReport(("data/x",)), PlaceReport(damage="a flipped bit")):
        write_part(far, path, part)
        assert read_part(far, path) == part
    assert (
        read_part(far, part_path(ATTEMPT_NAME, "other", 3))
        is None
        is read_part(far, part_path(ATTEMPT_NAME, "run", 2))
    )
    whole = (tmp_path / path).read_bytes()
    (tmp_path / path).write_bytes(whole[: len(whole) // 2])
    assert read_part(far, path) is None
    delete_parts(far, ATTEMPT_NAME, "run", (2, 3))
    assert not list(tmp_path.rglob("sent.*"))


def test_a_store_that_fails_is_no_answer() -> None:
    """Where the far place cannot be asked nobody concludes that a host has sent nothing."""
    faulty = Faulty(iter(["reset"] * 100))
    far = ObjectStorage(faulty, "/b/far", "memory://b/far", patience=RetryTimeouts(0.0, 0.0, 0.0))
    with pytest.raises(StorageError):
        read_part(far, part_path(ATTEMPT_NAME, "run", 3))


def test_a_file_that_the_far_log_needs_is_left(tmp_path: Path) -> None:
    """A host that has lost its note deletes no file that was committed at the far place meanwhile."""
    places = Places(tmp_path / "near", tmp_path / "far")
    entry = places.save(0, 0)
    places.replicate()
    places.close()
    inodes = {path: path.stat().st_ino for path in (tmp_path / "far/data").rglob("*.safetensors")}
    sending = TierUploader(Tier(tmp_path / "near"), places.storage, "test")
    sending._named = lambda attempt_name: attempt_name == entry.attempt_name  # type: ignore[method-assign]
    sending.send(entry, frozenset())
    assert inodes and all(path.stat().st_ino == inode for path, inode in inodes.items())
    assert numbers_in(tmp_path / "far") == {"0": 0}


def test_notes_of_older_versions_are_read(tmp_path: Path) -> None:
    """A note without the newer fields is that of a place whose log counts, taken nobody knows when."""
    near = LocalStorage(tmp_path)
    near.replace(PATH, seal("tier", {"far": "/far", "holder": "n", "replicated": [], "sent": {}}))
    assert read_notes(near) == Notes("/far", "n")
    write_notes(near, Notes("/far", None, generation=7, part=True))
    assert read_notes(near) == Notes("/far", None, generation=7, part=True)


def test_a_damaged_note_is_no_leave_to_delete(tmp_path: Path) -> None:
    """Where it cannot be told whether a near directory has a part of epochs only, none of it is given up."""
    near = LocalStorage(tmp_path)
    refuse_part(near)
    write_notes(near, Notes("/far", None, part=True))
    with pytest.raises(UsageError, match="has only a part of the epochs of /far"):
        refuse_part(near)
    near.replace(PATH, near.read_range(PATH, 0, 1000)[:-2])
    with pytest.raises(UsageError, match="start the run, which writes it again"):
        refuse_part(near)
