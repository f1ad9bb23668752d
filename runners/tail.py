"""After the loop: upload, download, exit.

Each part is recorded as done, so that a run that dies or leaves here resumes at the first part that is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.headway import headway
from torchrelay.jobs.peers import together
from torchrelay.runners.ending.boundaries import go_on

if TYPE_CHECKING:
    from torchrelay.runners.life import Life


def run_tail(life: Life) -> None:
    """Run the parts that are left. The upload gets the newest committed epoch."""
    holding = life.manager.engine.ledger.holding if life.manager is not None else None
    branch = holding.branch if holding else 0
    epoch = life.state.epoch
    parts = {"upload": _upload, "download": _download, "exit": _exit}
    for part in life.journal.tail_left(branch, epoch):
        go_on(life.session.peers, life.requests)
        parts[part](life)
        life.journal.tail_part_done(branch, epoch, part)


def _upload(life: Life) -> None:
    if life.upload_builder is not None:
        saved = life.saver.newest_saved
        epoch = life.state.epoch if saved is None else saved
        built: list[Any] = []
        build = life.upload_builder.build
        together(life.session.peers, "upload", lambda: built.append(build(epoch, life.manager)))
        with headway(f"uploading epoch {epoch}"):
            life.session.run(built[0])


def _download(life: Life) -> None:
    life.session.run(life.job.download_group)


def _exit(life: Life) -> None:
    life.session.run(life.job.exit_group)
