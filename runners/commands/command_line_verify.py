"""`torchrelay verify`: prove every byte of committed epochs, as a load would, without loading."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torchrelay.checkpoint.log.branches import LogView
from torchrelay.checkpoint.log.live import Entry
from torchrelay.checkpoint.reading.epoch_choice import named_entry, wanted
from torchrelay.checkpoint.reading.proof import Proof, prove
from torchrelay.errors import StorageError, UnknownEpochError, UsageError
from torchrelay.runners.commands.command_line_output import Output
from torchrelay.runners.commands.command_line_place import locate

NOT_PROVED = StorageError.exit_code


def verify(chosen: argparse.Namespace, output: Output) -> int:
    """Prove one epoch or all; returns 5 unless all are proved and the log is whole."""
    place = locate(chosen.path)
    view = place.log()
    for notice in view.notices:
        output.notice(notice)
    proofs: list[Proof] = []
    for entry in _chosen(view, chosen.epoch):
        proofs.append(prove(place.storage, entry, level="full"))
        if not output.json:
            output.line(_line(proofs[-1]), proofs[-1].outcome.value)
    proved = sum(proof.proved for proof in proofs)
    if output.json:
        output.value(_json(view, proofs))
    else:
        output.line(
            f"{proved} of {len(proofs)} epochs proved{', the log is damaged' if view.notices else ''}"
        )
    return 0 if proved == len(proofs) and not view.notices else NOT_PROVED


def _chosen(view: LogView, epoch: str | None) -> Sequence[Entry]:
    if epoch is None:
        return view.entries
    wish = wanted(epoch)
    if wish.explicit:
        return [named_entry(view, wish)]
    if wish.word != "last":
        raise UsageError(f"--epoch {epoch}: verify proves an epoch by number, last, or 7,branch=0")
    whole = [entry for entry in view.line() if entry.position.boundary]
    if not whole:
        raise UnknownEpochError("there is no last epoch: nothing is committed yet")
    return whole[-1:]


def _line(proof: Proof) -> str:
    entry = proof.entry
    said = f"epoch {entry.position}  branch {entry.branch}  {proof.outcome.value}"
    return f"{said}  {_reason(proof)}".rstrip()


def _reason(proof: Proof) -> str:
    if proof.proved and not proof.entry.healthy:
        return "(was quarantined: it is never chosen by itself)"
    return proof.reason


def _json(view: LogView, proofs: Sequence[Proof]) -> dict[str, Any]:
    epochs = [
        {
            "epoch": proof.entry.position.epoch,
            "step": proof.entry.position.step,
            "branch": proof.entry.branch,
            "try": proof.entry.try_name,
            "outcome": proof.outcome.value,
            "reason": _reason(proof),
        }
        for proof in proofs
    ]
    return {"proved": all(proof.proved for proof in proofs), "epochs": epochs, "notices": list(view.notices)}
