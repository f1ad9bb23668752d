"""The state file of a crash, with `on_crash="save"`.

    crash/<node>.attempt_<n>.safetensors     a file of `save_blobs`; only that of the newest attempt is kept

The failed step may be half done, so no launch resumes from this file. It is for inspection (`load_blobs`, any
reader of safetensors), `init_model_path` and `ctx.load_blobs`. Each process writes alone, as others may wait
in a collective; sharded tensors are left out and named.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.files.blob_files import content_of, write_blob_file
from torchrelay.checkpoint.format.position import Selection
from torchrelay.checkpoint.state.checkpoint_set import members_of, select
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import spec_of
from torchrelay.errors import RelayError, TaskFailedError
from torchrelay.jobs.session import warn
from torchrelay.jobs.workspace import Origin, Workspace
from torchrelay.runners.distributed.world import is_consequence
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.training.journal import SaveWarning

FOLDER = "crash"
FACTS = "torchrelay_crash"
"""The value in such a file with epoch, step, attempt and error."""
_NAMED = 4


def save_at_crash(
    run: Path, session: SessionBase, state: RunState, selection: Selection | None, error: BaseException
) -> None:
    """Write the file of each node of this process in which a task failed; never raises."""
    theirs = not isinstance(error, RelayError) or isinstance(error, TaskFailedError)
    if not theirs or not isinstance(error, Exception) or is_consequence(error):
        return
    facts = {"epoch": state.epoch, "step": state.step, "attempt": state.attempt, "error": str(error)}
    for place in session.local_nodes:
        path = run / FOLDER / f"{place.name}.attempt_{state.attempt}.safetensors"
        try:
            left_out = _write(session.workspace(place.name), selection, path, facts)
        except Exception as second:  # a failed device may raise any error
            outcome = f"could not be saved: {second}"
        else:
            some = ", ".join(
                [*left_out[:_NAMED], *([f"{len(left_out) - _NAMED} more"] if left_out[_NAMED:] else [])]
            )
            outcome = f"is saved in {path}" + (f"; left out, since sharded: {some}" if left_out else "")
        warn(f"{place}: its state at the failure {outcome}", SaveWarning, stacklevel=3)


def _write(workspace: Workspace, selection: Selection | None, path: Path, facts: dict[str, Any]) -> list[str]:
    """Write the state of a node; returns what was left out."""
    entries = workspace.entries()
    early = {name for name, one in entries.items() if one.origin is not Origin.LATER}
    blobs = {name: entries[name].value for name in members_of(workspace) if name in early}
    leaves = leaves_of(blobs)
    chosen = leaves if selection is None else select(leaves, blobs, selection)
    sharded = [leaf.name for leaf in chosen if spec_of(leaf).sharding is not None]
    whole = [leaf for leaf in chosen if leaf.name not in sharded]
    write_blob_file(path, content_of([*whole, *leaves_of({FACTS: facts})]), overwrite=True)
    for other in path.parent.glob(f"{workspace.node}.attempt_*.safetensors"):
        if other != path:
            with suppress(OSError):
                other.unlink()
    return sharded
