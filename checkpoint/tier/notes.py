"""`tier.json` in a near directory: what is known of the far place, so that nothing is sent twice.

It is a note, not a proof: lost or damaged, files are sent again and every epoch counts as `local`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from torchrelay.checkpoint.format.canonical_json import seal, sealed_bytes, unseal
from torchrelay.checkpoint.log.branches import LogView
from torchrelay.checkpoint.log.job_file import read_job
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.open import NOTES as PATH
from torchrelay.errors import UsageError
from torchrelay.records import dataclass

Json = Any


@dataclass(frozen=True)
class Notes:
    """`far`: where it is. `holder`: the nonce of our writer of its log. `replicated`: tries that it has.

    `sent`: files of tries that are under way, complete and durable there: size and SHA-256 by path.
    `generation`: that of the far log when this near log was taken with it the last time. `part`: another
    place has the near log of the run since then, and what lies here is not all of any epoch.
    """

    far: str = ""
    holder: str | None = None
    replicated: frozenset[str] = frozenset()
    sent: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    generation: int = -1
    part: bool = False

    def made(self, far: LogView) -> bool:
        """Whether the far log was last taken over from this near place."""
        return self.holder is not None and far.holder.get("nonce") == self.holder


def read_notes(near: Storage) -> Notes | None:
    """None where the directory is no near place, or where its note cannot be trusted."""
    try:
        told = unseal("tier", sealed_bytes(near, PATH), PATH)
        holder = told["holder"]
        return Notes(
            str(told["far"]),
            holder if isinstance(holder, str) else None,
            frozenset(str(name) for name in told["replicated"]),
            {str(path): (int(size), str(digest)) for path, (size, digest) in told["sent"].items()},
            int(told.get("generation", -1)),
            told.get("part") is True,
        )
    except (OSError, LookupError, TypeError, ValueError, AttributeError):
        return None


def refuse_part(near: Storage) -> None:
    """Refuse to decide by a near directory that has files of some hosts' ranks only (UsageError)."""
    notes = read_notes(near)
    if notes is None and near.stat(PATH) is not None:
        raise UsageError(
            f"{near.url}/{PATH} is damaged, so nobody can tell whether the log of its epochs is on another "
            "host: start the run, which writes it anew, or do this at the far place"
        )
    if notes is not None and notes.part:
        raise UsageError(
            f"{near.url} has a part of the epochs of {notes.far} only, and their log is on another host: "
            "do this there, or at the far place"
        )


def refuse_to_begin(near: Storage, far: Storage) -> None:
    """Refuse a far place without a job for a near directory with a part of some epochs (UsageError).

    Nobody here knows what these are: all of them, perhaps of a run that lives, would pass for left over.
    """
    notes = read_notes(near)
    if notes is not None and notes.part and read_job(far) is None:
        raise UsageError(
            f"{near.url} has a part of the epochs of {notes.far} only, and nothing was begun in {far.url}: "
            "choose another near directory for this run, or that place of the checkpoints"
        )


def only_near(near: Storage, view: LogView) -> frozenset[str]:
    """Tries of a near directory that are still to be sent, and the newest that was; none of other places.

    Without a note that can be trusted everything may still have to be sent.
    """
    if near.stat(PATH) is None:
        return frozenset()
    notes, line = read_notes(near) or Notes(), view.line()
    known = [number for number, entry in enumerate(line) if entry.try_name in notes.replicated]
    return frozenset(entry.try_name for entry in line[known[-1] if known else 0 :])


def forgotten(near: Storage, notes: Notes, path: str) -> Notes:
    """The notes without a file that is about to be made anew; durable when this returns, or StorageError.

    Space is reserved first, so that one which is cut off may have the size and the note of one that was lost.
    """
    if path not in notes.sent:
        return notes
    notes = replace(notes, sent={name: one for name, one in notes.sent.items() if name != path})
    write_notes(near, notes)
    return notes


def write_notes(near: Storage, notes: Notes) -> None:
    """Replace the note. Raises StorageError."""
    sent = {path: list(one) for path, one in notes.sent.items()}
    told = {
        "far": notes.far,
        "holder": notes.holder,
        "replicated": sorted(notes.replicated),
        "sent": sent,
        "generation": notes.generation,
        "part": notes.part,
    }
    near.replace(PATH, seal("tier", told))
