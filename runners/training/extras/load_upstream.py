"""`torchrelay.load_upstream`: the configuration and source of what a run is built on, in all its starts."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.config.expressions import LINEAGE, STAGE, configuration, stage_folder
from torchrelay.jobs.runtime import local_directory, split_run
from torchrelay.metadata.code.imports import LoadedCode, load_code
from torchrelay.metadata.lineage import check_alias
from torchrelay.runners.training.extras.upstream import Upstream


class LoadedUpstream:
    """A run that another one is built on; see `load_upstream`. `path` is its directory, or the copy of it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def config(self) -> dict[str, Any]:
        """Its resolved configuration, with overrides and defaults, as a dict of its own.

        Raises UsageError for a run without a configuration: that of a plain program is in its `code`.
        """
        return copy.deepcopy(configuration(self.path))

    @cached_property
    def code(self) -> LoadedCode:
        """Its source, as `load_code` gives it; raises UsageError where that was not archived."""
        return load_code(self.path)

    def __repr__(self) -> str:
        return f"<upstream in {self.path}>"


def load_upstream(
    alias: str, run: str | os.PathLike[str], upstream: Mapping[str, Any] | None = None
) -> LoadedUpstream:
    """The configuration and source of an upstream, by one call in training, resume and deployment.

        upstream = {"low": "runs/low@best"}
        low = torchrelay.load_upstream("low", "runs/expert", upstream)
        model = low.code.import_module("net").Net(low.config["hyper_parameters"]["width"])
        JobRunner(job, "runs/expert", upstream=upstream)

    `run` is the run that is built on it, begun or not. Its copy in `lineage/` counts before the directory in
    `upstream`, which is what JobRunner is given; where that names another run than was copied, that one
    counts. A deployment leaves `upstream` out. `run` may be a directory of several runs, too: the newest copy
    in them counts, and only where the upstream is gone. `"expert/low"` is what `expert` was built on; so is
    `"low"` where `run` is the `path` of the loaded `expert`. A path in `lineage/` has only what was copied.

    Nothing is run until a module is imported from `code`; that runs the archived code with this process's
    rights. Raises UsageError where the upstream is neither there nor copied.
    """
    first, *inner = [check_alias(one) for one in str(alias).split("/")]
    if upstream is not None and (not isinstance(upstream, Mapping) or first not in upstream):
        raise UsageError(
            f"load_upstream({alias!r:.80}): upstream is {upstream!r:.80}; give what JobRunner is given, a "
            f"mapping that has {first!r}"
        )
    given = None if upstream is None else _absolute(upstream[first])
    own = [] if "://" in os.fspath(run) else [local_directory(run, "run")]
    if own and (own[0] / STAGE).is_file():
        given = None
    folder = stage_folder(first, given, own)
    for one in inner:
        folder = folder / LINEAGE / one
        if not (folder / STAGE).is_file():
            raise UsageError(f"load_upstream({alias!r:.80}): there is no stage {folder}")
    return LoadedUpstream(folder)


def _absolute(one: Any) -> str:
    """Where a run lies; `one` names it, as JobRunner takes it."""
    text = one.run if isinstance(one, Upstream) else one
    if not isinstance(text, str | os.PathLike):
        raise UsageError(f"an upstream is {text!r:.80}; give a run: 'runs/expert@best'")
    path = split_run(os.fspath(text))[0]
    return path if "://" in path else str(Path(path).absolute())
