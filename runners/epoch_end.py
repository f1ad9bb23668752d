"""What follows an epoch, on all processes: metrics, stop conditions, the save, and who is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.checkpoint.position import Position
from torchrelay.checkpoint.reading.lookup import nearest
from torchrelay.jobs.turns import undivided
from torchrelay.runners.stopping import Verdict, ask_all

if TYPE_CHECKING:
    from torchrelay.runners.life import Life

WAITS_EPOCHS = 3
"""A stop condition may wait for its metric so many epochs without a word."""


@undivided(beyond=True)
def end_epoch(life: Life, epoch: int) -> Verdict:
    """Returns whether the run stops; raises what no later save could survive (`Saver`)."""
    metrics = life.session.reduce_metrics()
    life.onlookers.reduced(life.state, metrics)
    verdict = ask_all(life.job, life.session)
    _warn_of_waiting(life, epoch, verdict)
    life.recorder.record(epoch)
    saved = _save(life, epoch, verdict)
    life.journal.epoch_done(life.state, metrics, saved, verdict)
    life.onlookers.epoch_done(metrics)
    life.stored.look()
    life.exporting.epoch_done(metrics, saved)
    return verdict


def _warn_of_waiting(life: Life, epoch: int, verdict: Verdict) -> None:
    """A name that no epoch logs may be misspelt: warn of it once, and not before some epochs are over."""
    for condition, metric in verdict.waiting.items():
        if epoch >= WAITS_EPOCHS and life.state.first_time(f"{condition} waits"):
            life.journal.warn(
                f"the stop condition {condition} waits for the metric {metric!r}, which no epoch has logged"
                f"{nearest(metric, life.state.metrics)}"
            )


def _save(life: Life, epoch: int, verdict: Verdict) -> bool | None:
    if life.manager is None:
        return None
    life.requests.take_save()
    return life.saver.save(life.session, Position(epoch), life.facts(verdict))
