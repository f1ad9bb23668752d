"""Appending: branches, guests, fencing, lost answers; a random walk against a plain model."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from log_helpers import Fault, MemoryStorage, entry, run_of, take

from torchrelay.checkpoint.format.position import Key, Position, Retirement
from torchrelay.checkpoint.log import writer as log_writer
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.lease import WriterIdentity
from torchrelay.checkpoint.log.record import decode, open_job, slot_path
from torchrelay.checkpoint.log.view import lineage_of
from torchrelay.checkpoint.log.writer import append_as_guest, pin_draft, tag_draft, unpin_draft
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import (
    DirectoryInUseError,
    FencedError,
    NotAllowedNowError,
    SaveFailedError,
    StorageError,
    UnknownEpochError,
    UsageError,
)


def kinds(storage):
    uuid = open_log(storage).job_uuid
    slots = [int(name[:20]) for name in storage.list("log") if name[:20].isdigit()]
    return [decode(storage.files[slot_path(slot)], slot=slot, job=uuid).kind for slot in sorted(slots)]


def rewound():
    """Epochs 0 to 7, back to 2, then a new 3."""
    storage = MemoryStorage()
    writer = take(storage)
    for epoch in range(8):
        writer.commit(entry(epoch))
    assert writer.rewind(Position(2), {"epoch": 2, "process": "a"}) == 1
    writer.commit(entry(3, branch=1))
    return storage, writer


def fence(storage, writer):
    """Another process takes the log although our writer's object lives."""
    other = replace(WriterIdentity.here("job"), pid_namespace="another", host="gpu09")
    writer_gone = MemoryStorage(storage.url, storage.files, storage.durable)
    log_writer._LIVE.pop(writer.nonce, None)
    return take(writer_gone, identity=other)


def test_a_new_directory_begins_with_a_takeover_in_slot_0():
    """The first record is the writer's takeover, its generation is its slot."""
    storage = MemoryStorage()
    writer = take(storage)
    assert (writer.generation, writer.view.slot, kinds(storage)) == (0, 0, ["takeover"])


def test_a_commit_is_read_by_others():
    """What was committed is what a reader finds; both see the same state."""
    storage = MemoryStorage()
    writer = take(storage)
    writer.commit(entry(0))
    view = writer.commit(entry(1))
    assert view.newest() == entry(1)
    assert open_log(storage, "job") == view


def test_reading_needs_no_directory():
    """A place where no job has begun reads as an empty log, and reading makes nothing."""
    storage = MemoryStorage()
    assert open_log(storage).empty
    assert storage.changes == 0


def test_reading_changes_nothing():
    """Readers create, replace and delete nothing."""
    storage = run_of(range(3))
    before = storage.changes
    open_log(storage)
    assert storage.changes == before


def test_repeating_a_commit_writes_nothing():
    """A commit that is in the log already is not written twice."""
    storage = MemoryStorage()
    writer = take(storage)
    writer.commit(entry(0))
    slot = writer.view.slot
    assert writer.commit(entry(0)).slot == slot


@pytest.mark.parametrize("epoch", [0, 1])
def test_epochs_rise_on_a_branch(epoch):
    """An epoch at or before the newest one of its branch is refused with the remedy."""
    writer = take(run_of(range(2)))
    with pytest.raises(UsageError, match="begin at start"):
        writer.commit(entry(epoch, nonce="abcdef"))


def test_a_commit_to_another_branch_is_refused():
    """Only the current branch grows."""
    with pytest.raises(UsageError, match="branch"):
        take(run_of(range(2))).commit(entry(2, branch=1))


def test_a_reference_to_a_try_that_is_gone_fails_the_save():
    """An entry may need only tries that are live."""
    writer = take(run_of(range(2)))
    with pytest.raises(SaveFailedError, match="not live"):
        writer.commit(entry(2, needs=("e00000009-00ff00",)))
    assert writer.commit(entry(2, needs=(entry(1).attempt_name,))).newest().needs == (entry(1).attempt_name,)


def test_lookups_after_a_rewind():
    """After a rewind to 2 and a new 3, epoch 3 is the new one and 7 of branch 0 the abandoned one."""
    storage, _ = rewound()
    view = open_log(storage)
    assert view.find(3) == entry(3, branch=1)
    assert view.find(3, branch=0) == entry(3)
    assert view.find(7) is None
    assert view.find(7, branch=0) == entry(7)
    assert view.find(2) == view.find(2, branch=1) == entry(2)
    assert view.epochs() == (0, 1, 2, 3)
    assert view.epochs(branch=0) == tuple(range(8))
    assert [one.position.epoch for one in view.abandoned()] == [3, 4, 5, 6, 7]
    assert [branch.id for branch, _ in lineage_of(view.state, view.current.id)] == [1, 0]
    assert view.begun_by == {"epoch": 2, "process": "a"}
    assert view.newest() == entry(3, branch=1)


def test_a_rewind_of_a_rewind_resolves_through_all_parents():
    """Branch 2 from epoch 1 as seen from branch 1 sees 0 and 1 of branch 0 and nothing of branch 1."""
    _, writer = rewound()
    assert writer.rewind(Position(1), {"epoch": 1}) == 2
    assert writer.view.epochs() == (0, 1)
    writer.commit(entry(2, branch=2))
    assert writer.view.find(2) == entry(2, branch=2)
    assert writer.rewind(Position(3), {"epoch": 3}, branch=1) == 3
    assert writer.view.epochs() == (0, 1, 2, 3)
    assert writer.view.find(2) == entry(2)


def test_a_fresh_start_sees_nothing():
    """A rewind to nothing begins a branch without older epochs; those stay loadable by their branch."""
    writer = take(run_of(range(3)))
    branch = writer.rewind(None, {"epoch": None})
    assert writer.view.newest() is None
    writer.commit(entry(0, branch=branch))
    assert writer.view.epochs() == (0,)
    assert writer.view.find(2, branch=0) == entry(2)


def test_a_rewind_to_an_unknown_epoch_names_those_there_are():
    """The base of a rewind must be live."""
    with pytest.raises(UnknownEpochError, match=r"0, 1, 2"):
        take(run_of(range(3))).rewind(Position(9), {})


def test_a_mid_epoch_entry_is_retired_when_its_epoch_commits():
    """(3, 1200) is the newest until (4, 0) commits; then it is gone and its files are to be deleted."""
    writer = take(run_of(range(4)))
    middle = entry(3, step=1200)
    assert writer.commit(middle).newest() == middle
    assert writer.view.newest(boundary=True) == entry(3)
    assert writer.view.epochs() == (0, 1, 2, 3)
    view = writer.commit(entry(4))
    assert view.find(3, step=1200) is None
    assert view.state.retiring == (Retirement(middle.attempt_name),)


def test_a_mid_epoch_try_stays_while_its_epoch_needs_it():
    """Files of a retired position are deleted only when no live entry refers to them any more."""
    writer = take(run_of(range(4)))
    middle = entry(3, step=1200)
    writer.commit(middle)
    writer.commit(entry(4, needs=(middle.attempt_name,)))
    assert writer.view.state.retiring == ()
    writer.commit(entry(5))
    writer.retire([Retirement(entry(4).attempt_name)])
    assert {one.attempt_name for one in writer.view.state.retiring} == {
        middle.attempt_name,
        entry(4).attempt_name,
    }


def test_a_quarantined_entry_is_not_chosen():
    """A damaged entry is never the newest; it can still be found, with its health."""
    writer = take(run_of(range(3)))
    view = writer.quarantine(Key(0, Position(2)), "block 3 of trainer_0 has another digest")
    assert view.newest() == entry(1)
    assert not view.find(2).healthy
    with pytest.raises(UnknownEpochError):
        writer.quarantine(Key(0, Position(9)), "")


def test_tags_and_pins_are_taken_over_by_the_writer():
    """A guest's record in the writer's slot is kept and the writer's own comes behind it."""
    storage = MemoryStorage()
    writer = take(storage)
    writer.commit(entry(0))
    append_as_guest(storage, tag_draft("best", Key(0, Position(0))), "job")
    append_as_guest(storage, pin_draft("paper", Key(0, Position(0))))
    view = writer.commit(entry(1))
    assert kinds(storage) == ["takeover", "commit", "tag", "pin", "commit"]
    assert view.tagged("best") == entry(0)
    assert open_log(storage) == view
    append_as_guest(storage, unpin_draft("paper"))
    assert writer.append_draft(tag_draft("best", Key(0, Position(1)))).tagged("best") == entry(1)
    assert [mark.name for mark in writer.view.state.marks] == ["best"]
    assert writer.append_draft(tag_draft("best", None)).state.marks == ()


@pytest.mark.parametrize("marks", [255, 256, 300])
def test_any_number_of_marks_between_two_records_fences_nobody(marks):
    """A healthy writer commits after hundreds of tags and unpins of guests, and keeps what they said."""
    storage, writer = MemoryStorage(), None
    writer = take(storage)
    writer.commit(entry(0))
    for index in range(marks):
        append_as_guest(
            storage, tag_draft(f"t{index % 7}", Key(0, Position(0))) if index % 2 else unpin_draft("x")
        )
        append_as_guest(storage, tag_draft(f"t{index % 7}", None))
    append_as_guest(storage, tag_draft("kept", Key(0, Position(0))))
    writer.commit(entry(1))
    assert open_log(storage).epochs() == (0, 1)
    assert [mark.name for mark in open_log(storage).state.marks] == ["kept"]


def test_a_takeover_behind_marks_is_noticed_without_an_append():
    """A writer that only looks meets the marks of guests, and the takeover behind them at the same look."""
    storage = MemoryStorage()
    writer = take(storage)
    writer.commit(entry(0))
    for index in range(5):
        append_as_guest(storage, tag_draft(f"t{index}", Key(0, Position(0))))
    writer.ask()
    assert len(writer.view.state.marks) == 5
    append_as_guest(storage, tag_draft("last", Key(0, Position(0))))
    fence(storage, writer)
    with pytest.raises(FencedError, match="gpu09"):
        writer.ask()


def test_a_guest_needs_an_epoch():
    """A guest cannot mark what is not there."""
    with pytest.raises(UnknownEpochError):
        append_as_guest(MemoryStorage(), unpin_draft("x"))
    with pytest.raises(UnknownEpochError):
        append_as_guest(run_of(range(2)), tag_draft("best", Key(0, Position(5))))


def test_a_fenced_writer_writes_nothing():
    """After another takeover the next append raises FencedError naming the new holder and writes nothing."""
    storage = MemoryStorage()
    old = take(storage)
    old.commit(entry(0))
    new = fence(storage, old)
    before = dict(storage.files)
    with pytest.raises(FencedError, match="gpu09"):
        old.commit(entry(1))
    assert storage.files == before
    with pytest.raises(FencedError):
        old.check()
    with pytest.raises(FencedError):
        old.release()
    assert new.commit(entry(1)).newest() == entry(1)


def test_a_writer_that_slept_through_a_thinning_is_fenced():
    """A slot that was filled, thinned and is free again is never taken for the end of the log."""
    storage = MemoryStorage()
    old = take(storage)
    old.commit(entry(0))
    new = fence(storage, old)
    for epoch in range(1, 600):
        new.commit(entry(epoch, nonce=f"{epoch:06x}"))
        new.retire([Retirement(f"e{epoch - 1:08d}-{epoch - 1:06x}")])
    assert slot_path(2) not in storage.files
    with pytest.raises(FencedError):
        old.commit(entry(1))
    assert slot_path(2) not in storage.files


def test_the_counter_notices_a_takeover():
    """A writer that has nothing to append learns within one period of its counter that it is fenced."""
    storage = MemoryStorage()
    old = take(storage)
    assert old._beat_now(2)
    fence(storage, old)
    assert not old._beat_now(3)
    with pytest.raises(FencedError):
        old.check()


def test_a_lost_answer_is_read_back():
    """A creation that worked although it reported an error is recognised, and nothing is written twice."""
    storage = MemoryStorage()
    writer = take(storage)
    writer.commit(entry(0))
    storage.fault = Fault(storage.changes, "lose")
    assert writer.commit(entry(1)).newest() == entry(1)
    assert storage.fault.fired
    assert kinds(storage) == ["takeover", "commit", "commit"]


def test_a_commit_whose_sync_failed_is_not_acknowledged_and_can_be_repeated():
    """The error of the log's fsync reaches the caller; the same commit again makes it durable, once."""
    storage = MemoryStorage()
    writer = take(storage)
    storage.fault = Fault(storage.changes + 1, "lose")
    with pytest.raises(StorageError, match="lost"):
        writer.commit(entry(0))
    storage.fault = None
    assert writer.commit(entry(0)).newest() == entry(0)
    assert kinds(storage) == ["takeover", "commit"]
    assert open_log(storage.copy(power_cut=True)).newest() == entry(0)


def test_a_closed_writer_says_so():
    """After release nothing is appended any more; closing twice is fine."""
    writer = take(MemoryStorage())
    writer.release()
    writer.close()
    with pytest.raises(NotAllowedNowError, match="take it again"):
        writer.commit(entry(0))


def test_another_job_is_refused():
    """A directory belongs to the job that began it; the message has the remedy."""
    storage = run_of(range(1))
    storage.url = "memory://runs/elsewhere"
    for name in ("other", None):
        with pytest.raises(UsageError, match="choose another directory"):
            open_job(storage, name)
    with pytest.raises(UsageError, match="belongs to job 'job'"):
        open_log(storage, "other")


def test_a_nameless_job_is_called_as_its_directory():
    """Without a name the directory's is used, and a moved directory still opens."""
    storage = MemoryStorage("file:///runs/mnist")
    assert open_job(storage, None).name == "mnist"
    storage.url = "file:///runs/moved"
    assert open_job(storage, None).name == "mnist"
    assert open_job(storage, "mnist").name == "mnist"


def test_two_racing_writers_make_one_history(tmp_path):
    """Of writers that start at the same moment in threads one gets the log, the others name it."""
    for attempt in range(10):
        storage = LocalStorage(tmp_path / str(attempt))
        gate, won, lost = threading.Barrier(4), [], []

        def race(storage=storage, gate=gate, won=won, lost=lost):
            gate.wait()
            try:
                writer = take(storage)
                writer.commit(entry(0))
                won.append(writer)
            except DirectoryInUseError as error:
                lost.append(error)

        threads = [threading.Thread(target=race) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 3)
        assert open_log(storage).slot == 1
        won[0].release()


def test_guests_and_a_writer_race_to_one_history(tmp_path):
    """Guests that tag while the writer commits lose nothing of either."""
    storage = LocalStorage(tmp_path)
    writer = take(storage)
    writer.commit(entry(0))

    def tags(guest):
        for index in range(10):
            append_as_guest(LocalStorage(tmp_path), tag_draft(f"{guest}-{index}", Key(0, Position(0))))

    threads = [threading.Thread(target=tags, args=(guest,)) for guest in range(3)]
    for thread in threads:
        thread.start()
    for epoch in range(1, 20):
        writer.commit(entry(epoch))
    for thread in threads:
        thread.join()
    writer.release()
    view = open_log(storage)
    assert len(view.state.marks) == 30
    assert view.epochs() == tuple(range(20))
    assert view.notices == ()
    assert view.slot == 1 + 20 + 30


class LogWalk(RuleBasedStateMachine):
    """Any order of commits, rewinds, quarantines, retirements, crashes and restarts tells one story."""

    @initialize()
    def begin(self):
        self.storage = MemoryStorage()
        self.writer = take(self.storage)
        self.lines = {0: []}
        self.current = 0
        self.branches = 1
        self.made = 0

    def line(self):
        return self.lines[self.current]

    @rule(step=st.booleans())
    def commit(self, step):
        last = self.line()[-1].position if self.line() else Position(-1)
        position = (
            Position(max(last.epoch, 0), last.step + 7) if step and self.line() else Position(last.epoch + 1)
        )
        self.made += 1
        new = replace(
            entry(position.epoch, step=position.step, branch=self.current),
            attempt_name=position.directory(f"{self.made:06x}"),
        )
        self.writer.commit(new)
        if new.position.boundary:
            seen = {one for line in self.lines.values() for one in line}
            over = {one for one in seen if one.position.step and one.position < new.position}
            self.lines = {
                branch: [one for one in line if one not in over] for branch, line in self.lines.items()
            }
        self.line().append(new)

    @precondition(lambda self: self.line())
    @rule(data=st.data())
    def rewind(self, data):
        base = data.draw(st.sampled_from(self.line()))
        self.lines[self.branches] = [one for one in self.line() if one.position <= base.position]
        assert self.writer.rewind(base.position, {"n": self.made}) == self.branches
        self.current, self.branches = self.branches, self.branches + 1

    @rule()
    def restart(self):
        self.writer.close()
        self.writer = take(self.storage)

    @rule()
    def power_cut(self):
        self.writer.close()
        self.storage = self.storage.copy(power_cut=True)
        self.writer = take(self.storage)

    @invariant()
    def readers_see_the_line(self):
        if hasattr(self, "storage"):
            view = open_log(self.storage)
            assert view.line() == tuple(self.line())
            assert view.state == self.writer.view.state
            assert view.notices == ()

    def teardown(self):
        if hasattr(self, "writer"):
            self.writer.close()


LogWalk.TestCase.settings = settings(deadline=None, max_examples=25, stateful_step_count=25)
TestLogWalk = LogWalk.TestCase
