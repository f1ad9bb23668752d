"""What a runner does outside of a train call: `save_checkpoints` and `load_best`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.checkpoint.load.open import place_of, proved_entry
from torchrelay.checkpoint.log.view import wanted
from torchrelay.checkpoint.manager_base import Manager
from torchrelay.errors import UsageError
from torchrelay.jobs.session import decide
from torchrelay.runners.session.stop import Verdict

if TYPE_CHECKING:
    from torchrelay.runners.life import Life


def save_by_hand(life: Life, manager: Manager, epoch: int) -> bool:
    """Save the nodes of the life's session as `epoch`; a failure is a warning. Returns whether it is.

    Raises UsageError on all processes where they were given different epochs.
    """
    told = life.session.peers.exchange("epoch to save", epoch)
    if differing := [f"{one} on rank {rank}" for rank, one in enumerate(told) if one != told[0]]:
        raise UsageError(
            f"the ranks would save different epochs, {told[0]} on rank 0 and {differing[0]}: give "
            "all the same number"
        )
    ledger, run = manager.engine.ledger, life.run_directory
    within_train = ledger.holding is not None
    life.session.place(life.job.nodes())
    if not within_train:
        life.stored.begin(life.session.local_nodes[0])
    manager.bind(life.job, default_name=run.name if run else None)
    life.journal.create(life.job, life.plan.best, life.session)
    try:
        life.saver.save(life.session, Position(epoch), life.facts(Verdict()))
        life.saver.settle(life.session)
        if not within_train:
            life.stored.finish_by_hand()
    finally:
        if not within_train:
            life.stored.close()
            ledger.close()
    return life.saver.newest_saved == epoch


def load_best(life: Life, manager: Manager) -> int:
    """Load the best epoch into the objects of the life's job; return its number.

    A session that holds them not yet is set up first, as by any start. Random states and gradients stay.
    """
    session, engine, run, best = life.session, manager.engine, life.run_directory, life.plan.best
    if best is None:
        raise UsageError("load_best needs to know what is best: give JobRunner best=('val/acc', 'max')")
    session.place(life.job.nodes())
    manager.bind(life.job, default_name=run.name if run else None)

    def choose() -> int:
        place = place_of(engine.storage)
        proof = proved_entry(place, engine.ledger.view(), wanted("best"), best, life.journal.warn)
        return proof.entry.position.epoch

    engine.ledger.look(session.peers)  # where hosts have logs of their own this finds the one that counts
    epoch = int(decide(session.peers, "best epoch", choose, by=engine.ledger.reader))
    target = engine.ledger.prove(session.peers, epoch, whole=False)
    engine.say = life.journal.say
    session.begin(life.state)
    try:
        spaces = [session.workspace(place.name) for place in session.local_nodes]
        held = all(space.registered(blob) for space in spaces for blob in life.job.blobs)
        if not all(session.peers.exchange("load best: objects", held)):
            life.set_up(target)
        session.run(manager.go_on_at(life.nodes, target))
        engine.take_streams(), engine.take_gradients()
    finally:
        life.recorder.close()
        engine.say = None
        session.end()
    lost = ", ".join(sorted(target.lost_blobs & {blob.name for blob in life.job.blobs}))
    gone = f"; {lost} stays as it is, because keep_optimizer_last removed its state" if lost else ""
    life.journal.say(f"loaded epoch {epoch}, the best by {best[0]}{gone}")
    return epoch
