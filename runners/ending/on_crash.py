"""`on_crash="save"`: what a process held when one of its tasks failed, in a file beside the epochs.

    crash/<node>.attempt_<n>.safetensors     a file of `save_blobs`; the newest start's alone stays

Nobody knows whether the failed step is done by half, so no start goes on from such a file by itself: it goes
on from its newest saved position. The file is for looking (`load_blobs`, any reader of safetensors) and for
`init_model_path` and `ctx.load_blobs`, by choice. Each process writes for itself, for the others may wait in
a collective; sharded tensors, whose rest is elsewhere, are left out and named.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from torchrelay.checkpoint.format.manifest.position import Selection
from torchrelay.checkpoint.state.checkpoint_set import members_of, select
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import Leaf, spec_of
from torchrelay.errors import RelayError, TaskFailedError, UsageError
from torchrelay.jobs.session import warn
from torchrelay.jobs.workspace import Origin, Workspace
from torchrelay.runners.journal import SaveWarning
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.run_state import RunState

OnCrash = Literal["save", "none"]
FOLDER = "crash"
FACTS = "torchrelay_crash"
"""The value in such a file that says where it was: epoch, step, attempt, error."""
_NAMED = 4


def check_on_crash(policy: Any) -> OnCrash:
    """The policy; raises UsageError for any other word."""
    if policy in ("save", "none"):
        return policy  # type: ignore[no-any-return]
    raise UsageError(f"on_crash is {policy!r:.80}; it is 'save' or 'none'")


def save_at_crash(
    run: Path, session: SessionBase, state: RunState, selection: Selection | None, error: BaseException
) -> None:
    """Write the file of each node that this process hosts, where a task of its own failed; never raises."""
    if not _own_failure(error):
        return
    facts = {"epoch": state.epoch, "step": state.step, "attempt": state.attempt, "error": str(error)}
    for place in session.local_nodes:
        path = run / FOLDER / f"{place.name}.attempt_{state.attempt}.safetensors"
        try:
            left_out = _write(session.workspace(place.name), selection, path, facts)
        except Exception as second:  # a device that failed raises anything
            _warn(f"{place}: what it held when it failed could not be saved: {second}")
        else:
            more = f"; left out, since sharded: {_some(left_out)}" if left_out else ""
            _warn(f"{place}: what it held when it failed is saved in {path}{more}")


def _own_failure(error: BaseException) -> bool:
    """Whether a task failed here by itself, not because another process did."""
    from torchrelay.runners.distributed.world import is_consequence

    ours = not isinstance(error, RelayError) or isinstance(error, TaskFailedError)
    return ours and isinstance(error, Exception) and not is_consequence(error)


def _write(workspace: Workspace, selection: Selection | None, path: Path, facts: dict[str, Any]) -> list[str]:
    """Write what is saved of a node; returns what had to be left out."""
    from torchrelay.checkpoint.files.blobs.writer import content_of, write_blob_file

    blobs = _saved(workspace)
    leaves = leaves_of(blobs)
    chosen = leaves if selection is None else select(leaves, blobs, selection)
    sharded = [leaf.name for leaf in chosen if _sharded(leaf)]
    whole = [leaf for leaf in chosen if leaf.name not in sharded]
    write_blob_file(path, content_of([*whole, *leaves_of({FACTS: facts})]), overwrite=True)
    for other in path.parent.glob(f"{workspace.node}.attempt_*.safetensors"):
        if other != path:
            with suppress(OSError):
                other.unlink()
    return sharded


def _saved(workspace: Workspace) -> dict[str, Any]:
    """The blobs of a node that its checkpoints have."""
    entries = workspace.entries()
    early = {name for name, one in entries.items() if one.origin is not Origin.LATER}
    return {name: entries[name].value for name in members_of(workspace) if name in early}


def _sharded(leaf: Leaf) -> bool:
    return spec_of(leaf).sharding is not None


def _some(names: Sequence[str]) -> str:
    more = f", {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _warn(text: str) -> None:
    warn(text, SaveWarning, stacklevel=4)
