"""What retention takes away, and what it never does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_helpers import MemoryStorage, entry, run_of, sweep, take

from torchrelay.checkpoint.format.position import DAMAGED, Key, Position, Retirement, State, TagOrPin
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.retention import KEEP_ALL, Keeping
from torchrelay.checkpoint.log.state import retired
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import append_as_guest, pin_draft
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import UsageError


def view_of(*entries, marks=()):
    return LogView(State(entries=tuple(sorted(entries, key=lambda one: one.key)), marks=marks))


def going(view, keeping, needed=()):
    return [int(one.attempt_name[1:9]) for one in keeping.chosen(view, (), needed)]


def test_keep_last_keeps_the_newest():
    """Of epochs 0 to 5 the newest two stay."""
    assert going(view_of(*map(entry, range(6))), Keeping(2)) == [0, 1, 2, 3]


def test_places_inside_the_running_epoch_obey_keep_last():
    """Of positions inside the running epoch the newest N stay, and a damaged one behind them is evidence."""
    places = [entry(2, step=step) for step in range(1, 6)]
    view = view_of(*map(entry, range(3)), *places)

    def inside(view, count):
        return {one.attempt_name for one in Keeping(count, every=1).chosen(view)}

    assert inside(view, 2) == {one.attempt_name for one in places[:3]}
    assert not inside(view, 5) and not inside(view, 9) and not Keeping(every=1).chosen(view)
    damaged = view_of(*map(entry, range(3)), *places[:4], replace(places[4], health=DAMAGED))
    assert inside(damaged, 1) == {one.attempt_name for one in places[:3]}


def test_rules_compose():
    """What either rule wants stays."""
    assert going(view_of(*map(entry, range(7))), Keeping(1, 3)) == [1, 2, 4, 5]
    assert going(view_of(*map(entry, range(7))), KEEP_ALL) == []


def test_tagged_and_pinned_epochs_stay():
    """A tag or a pin protects its epoch."""
    marks = (TagOrPin("tag", "best", Key(0, Position(1))), TagOrPin("pin", "paper", Key(0, Position(3))))
    assert going(view_of(*map(entry, range(6)), marks=marks), Keeping(1)) == [0, 2, 4]


def test_needed_tries_stay():
    """A try that a kept entry or a save in flight refers to stays."""
    newest = entry(5, needs=(entry(2).attempt_name,))
    view = view_of(*map(entry, range(5)), newest)
    assert going(view, Keeping(1), [entry(3).attempt_name]) == [0, 1, 4]


def test_what_only_epochs_need_that_go_too_goes_with_them():
    """Epochs 1 and 2 refer to 0 and nobody else does: all three go at once, whoever is named first."""
    base = (entry(0).attempt_name,)
    view = view_of(entry(0), entry(1, needs=base), entry(2, needs=base), *map(entry, (3, 4)))
    chosen = Keeping(2).chosen(view)
    for order in (chosen, chosen[::-1]):
        after, went = retired(view.state, order)
        assert set(went) == set(chosen)
        assert [one.position.epoch for one in after.entries] == [3, 4]
    after, went = retired(view.state, chosen[:2])  # epoch 2 stays
    assert [one.position.epoch for one in after.entries] == [0, 2, 3, 4]


def test_damaged_epochs_do_not_count():
    """The rule counts epochs that a job may resume from; a damaged newest one stays as evidence."""
    view = view_of(*map(entry, range(4)), replace(entry(4), health=DAMAGED))
    assert going(view, Keeping(1)) == [0, 1, 2]


def test_as_many_epochs_stay_as_were_asked_for_however_many_are_damaged():
    """Of epochs 0 to 5, of which 4 and 5 are damaged, the rule keeps 2 and 3 to resume from."""
    whole = map(entry, range(4))
    view = view_of(*whole, *(replace(entry(number), health=DAMAGED) for number in (4, 5)))
    assert going(view, Keeping(2)) == [0, 1]


def test_a_mid_epoch_position_stays_until_its_epoch_is_over():
    """The newest position of a running epoch is never retired by a policy."""
    view = view_of(*map(entry, range(4)), entry(3, step=7))
    assert going(view, Keeping(1)) == [0, 1, 2]


def test_abandoned_epochs_go_after_the_new_branch_passed_them():
    """Epochs 3 to 5 of branch 0 stay until branch 1 is beyond each of them."""
    writer = take(run_of(range(6)))
    writer.rewind(Position(2), {"epoch": 2})
    assert going(writer.view, KEEP_ALL) == []
    writer.commit(entry(3, branch=1))
    assert going(writer.view, KEEP_ALL) == []
    writer.commit(entry(4, branch=1))
    assert going(writer.view, KEEP_ALL) == [3]
    writer.commit(entry(5, branch=1))
    writer.commit(entry(6, branch=1))
    assert going(writer.view, KEEP_ALL) == [3, 4, 5]


@settings(deadline=None, max_examples=100)
@given(data=st.data(), count=st.integers(1, 12), keep=st.integers(1, 4))
def test_the_newest_provable_epoch_always_stays(data, count, keep):
    """Whatever is damaged, marked or needed: what a job would resume from, and its references, stay."""
    entries = []
    for epoch in range(count):
        needs = data.draw(st.lists(st.sampled_from(entries), max_size=2, unique=True)) if entries else []
        health = data.draw(st.sampled_from(["ok", DAMAGED]))
        entries.append(replace(entry(epoch, needs=tuple(one.attempt_name for one in needs)), health=health))
    view = view_of(*entries)
    gone = {one.attempt_name for one in Keeping(keep).chosen(view)}
    newest = view.newest()
    assert newest is None or not gone & set(newest.tries)
    left = [one for one in entries if one.attempt_name not in gone]
    assert not gone & {name for one in left for name in one.tries}


@pytest.mark.parametrize("rule", ["last", "every"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_a_policy_that_keeps_nothing_is_refused(rule, value):
    """Keeping no epoch at all is a mistake, said at once."""
    with pytest.raises(UsageError, match="whole number from 1"):
        Keeping(**{rule: value})


def test_a_pin_that_comes_first_is_respected():
    """Retention decides in the slot where its record lands: a guest's pin before it protects the epoch."""
    storage = run_of(range(4))
    writer = take(storage)
    append_as_guest(storage, pin_draft("paper", Key(0, Position(1))))
    retired = writer.retire([Retirement(entry(epoch).attempt_name) for epoch in range(3)])
    assert [one.attempt_name for one in retired] == [entry(0).attempt_name, entry(2).attempt_name]
    assert open_log(storage).epochs() == (1, 3)


def test_a_group_can_be_retired_alone():
    """Without its optimizer files an epoch stays loadable and is no longer resumed from."""
    storage = run_of(range(3))
    writer = take(storage)
    directory = f"data/{entry(1).attempt_name}"
    names = ["a.2.optim.1.main.safetensors", "a.1.main.safetensors", "a.1.optim.safetensors"]
    names += ["a.1.optim.2.safetensors", "manifest.json"]
    storage.files.update({f"{directory}/{name}": b"x" for name in names})
    writer.retire([Retirement(entry(1).attempt_name, ("optim",))])
    sweep(writer, KEEP_ALL)
    assert storage.list(directory) == [
        "a.1.main.safetensors",
        "a.2.optim.1.main.safetensors",
        "manifest.json",
    ]
    assert not writer.view.find(1).resumable
    assert writer.view.find(1).groups == ("main",)
    assert [one.position.epoch for one in writer.view.candidates()] == [2, 0]


def test_the_newest_epoch_is_not_retired_by_hand():
    """Asking for it explicitly changes nothing."""
    writer = take(run_of(range(2)))
    slot = writer.view.slot
    assert writer.retire([Retirement(entry(1).attempt_name), Retirement("e00000009-ffffff")]) == ()
    assert writer.view.slot == slot


def test_sweeping_deletes_files_and_orphans_of_older_generations(tmp_path):
    """Retired tries and tries that never were committed go; those of this generation stay."""
    storage = LocalStorage(tmp_path)
    writer = take(storage)
    for epoch in range(3):
        storage.mkdir(f"data/{entry(epoch).attempt_name}")
        storage.link_exclusive(f"data/{entry(epoch).attempt_name}/manifest.json", b"{}")
        writer.commit(entry(epoch))
    storage.mkdir("data/e00000003-0bad00")
    storage.link_exclusive("data/e00000003-0bad00/trainer_0.3.main.safetensors", b"torn")
    storage.mkdir("data/notes-of-a-person")
    writer.release()
    writer = take(storage)
    storage.mkdir("data/e00000003-0f00d0")
    retired, deleted, orphans = sweep(writer, Keeping(1))
    assert orphans == ("e00000003-0bad00",)
    assert [one.attempt_name for one in retired] == [entry(0).attempt_name, entry(1).attempt_name]
    assert set(deleted) == set(retired)
    assert storage.list("data") == [entry(2).attempt_name, "e00000003-0f00d0", "notes-of-a-person"]
    writer.release()


def test_sweeping_an_empty_log_does_nothing():
    """A new directory has nothing to retire."""
    writer = take(MemoryStorage())
    assert sweep(writer, Keeping(1))[0] == ()
