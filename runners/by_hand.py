"""Saving outside of a train call: `JobRunner.save_checkpoints`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.checkpoint.manager_base import Manager
from torchrelay.checkpoint.position import Position

if TYPE_CHECKING:
    from torchrelay.runners.life import Life


def save_by_hand(life: Life, manager: Manager, epoch: int) -> None:
    """Save the nodes of the life's session as `epoch`; a failure is a warning."""
    ledger, run = manager.engine.ledger, life.run_directory
    within_train = ledger.holding is not None
    life.session.place(life.job.nodes())
    if not within_train:
        life.stored.begin(life.session.local_nodes[0])
    manager.bind(life.job, default_name=run.name if run else None)
    life.journal.create(life.job, life.plan.best, life.session)
    try:
        life.saver.save(life.session, Position(epoch), life.facts_now())
        life.saver.settle(life.session)
        if not within_train:
            life.stored.finish_by_hand()
    finally:
        if not within_train:
            life.stored.close()
            ledger.close()
