"""Crashes at every changing verb: the next job finds the old state or the new one."""

from __future__ import annotations

import pytest
from log_helpers import CrashError, Fault, MemoryStorage, entry, sweep, take

from torchrelay.checkpoint.format.position import Key, Position, Retirement
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.retention import Keeping
from torchrelay.checkpoint.log.writer import tag_draft
from torchrelay.errors import StorageError


def fill(storage, epochs):
    """Tries with a manifest each, as an engine would have made them."""
    for epoch in range(epochs):
        path = f"data/{entry(epoch).attempt_name}/manifest.json"
        storage.files[path] = storage.durable[path] = b"{}"


def story(storage, states):
    """A job's life; `states` gets what was acknowledged, and what each step was about to make."""
    writer = None

    def step(work):
        before = open_log(storage).state.entries
        states.append((before, None))
        work()
        states[-1] = (writer.view.state.entries, writer.view.state.entries)

    writer = take(storage)
    fill(storage, 3)
    try:
        for epoch in range(3):
            step(lambda epoch=epoch: writer.commit(entry(epoch)))
        step(lambda: writer.append_draft(tag_draft("best", Key(0, Position(1)))))
        step(lambda: sweep(writer, Keeping(1)))
        step(lambda: writer.rewind(Position(1), {"epoch": 1}))
        step(lambda: writer.commit(entry(2, branch=1)))
        writer.release()
    finally:
        writer.close()


def changing_verbs():
    storage = MemoryStorage()
    story(storage, [])
    return storage.changes


def every_state():
    """The lists of entries that the story passes through, in order."""
    storage, states = MemoryStorage(), []
    story(storage, states)
    return [(), *[after for _, after in states]]


STATES = every_state()


@pytest.mark.parametrize("how", ["before", "after", "lose"])
@pytest.mark.parametrize("power_cut", [False, True])
def test_a_crash_anywhere_leaves_the_old_state_or_the_new_one(how, power_cut):
    """At every verb, killed or cut from power: what was acknowledged is there, the next job goes on."""
    fired = 0
    for at in range(changing_verbs()):
        storage, states = MemoryStorage(fault=Fault(at, how)), []
        try:
            story(storage, states)
        except (CrashError, StorageError):
            acknowledged = states[-1][0] if states else ()
        else:
            acknowledged = STATES[-1]
        fired += storage.fault.fired
        after = storage.copy(power_cut=power_cut)
        found = open_log(after)
        assert found.notices == ()
        allowed = STATES[STATES.index(acknowledged) :][:3]
        assert found.state.entries in allowed, (at, how)
        for one in found.entries:
            assert f"data/{one.attempt_name}/manifest.json" in after.files or one.branch == 1
        writer = take(after)
        assert writer.view.state.entries == found.state.entries
        _, deleted, _ = sweep(writer, Keeping(10))
        assert not {one.attempt_name for one in deleted} & {one.attempt_name for one in found.entries}
        assert writer.undeleted == ()
        writer.close()
    assert fired == changing_verbs()


def test_an_interrupted_deletion_is_finished_by_the_next_sweep():
    """Files of a try that is retired but not deleted yet go at the next sweep, and the list empties."""
    storage = MemoryStorage()
    writer = take(storage)
    for epoch in range(2):
        writer.commit(entry(epoch))
        for name in ("manifest.json", "trainer_0.0.main.safetensors"):
            storage.files[f"data/{entry(epoch).attempt_name}/{name}"] = b"x"
    writer.retire([Retirement(entry(0).attempt_name)])
    storage.fault = Fault(storage.changes + 1, "before")
    with pytest.raises(CrashError):
        sweep(writer, Keeping(1))
    writer.close()
    assert storage.fault.fired
    again = take(storage)
    assert sweep(again, Keeping(1))[1] == (Retirement(entry(0).attempt_name),)
    assert storage.list("data") == [entry(1).attempt_name]
    assert again.commit(entry(2)).state.retiring == ()
