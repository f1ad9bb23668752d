"""A small real job whose metadata go to a database, and all that the database has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrelay import Job, JobRunner, SqlHandler, max_epochs
from torchrelay.metadata.sql.database import MERGES, Database, Row, metadata
from torchrelay.metadata.sql.handler import parse_url


def train(
    run: Path, url: str, epochs: int, at_end_of: Callable[[int], object] = lambda epoch: None, **options: Any
) -> int:
    """Train so many epochs; `deadline_secs` and `decides` are the handler's, other options the runner's."""
    job = Job("told")
    job.init(lambda ws: ws.update(n=0))
    job.epoch(lambda ctx: (ctx.workspace.update(n=ctx.epoch), at_end_of(ctx.epoch)))
    job.stop_when(max_epochs(epochs))
    own = {name: options.pop(name) for name in ("deadline_secs", "decides") if name in options}
    return int(JobRunner(job, run, metadata_handler=SqlHandler(url, **own), **options).train())


def contents(url: str) -> dict[str, list[Row]]:
    """The rows of all tables, sorted by their keys; times are texts in UTC."""
    found = {}
    database = Database(parse_url(url), 60.0)
    for name in MERGES:
        table = metadata.tables[name]
        rows = database._read(table.select().order_by(*table.primary_key))
        found[name] = [dict(zip(table.c.keys(), map(_plain, row), strict=True)) for row in rows]
    return found


def _plain(value: Any) -> Any:
    return value.isoformat()[:26] if hasattr(value, "isoformat") else value


def query(url: str, text: str) -> list[tuple[Any, ...]]:
    """What a person gets who asks the database."""
    from sqlalchemy import text as text_of

    return Database(parse_url(url), 60.0)._read(text_of(text))


def saved(url: str) -> list[int]:
    """The epochs that the database has as saved, once per generation."""
    return [row["epoch"] for row in contents(url)["relay_epochs"]]


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
