"""What a run's status.json says of a launch, for hosts to whose launch directory rank 0 does not write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrelay.errors import RelayError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.launch.verdict import Evidence, Verdict, verdict_of


def status_at(run: str | None) -> Mapping[str, Any]:
    """The status that lies in a run directory; empty without one, for a URL, and where it cannot be read."""
    if run is None or "://" in run:
        return {}
    try:
        return RunDirectory(run).status()
    except RelayError:
        return {}


def since(before: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status that a run has got since `before` was read; empty where it is still an earlier attempt's."""
    return {} if after == before else after


def agreed(verdict: Verdict, status: Mapping[str, Any]) -> Verdict:
    """The verdict of a host, which is not 0 where the run says that it failed.

    The ranks of this host may all have ended well before one of another host failed; hosts whose codes
    differ would not all be started again.
    """
    if verdict.code == 0 and status.get("state") == "FAILED":
        return verdict_of(Evidence(False, status))
    return verdict
