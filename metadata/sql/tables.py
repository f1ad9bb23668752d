"""The tables of the database, told in docs/metadata.md. All names begin with `relay_`.

A change that older versions cannot live with raises VERSION.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Double,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
)

VERSION = 1
metadata = MetaData()

SCHEMA = Table("relay_schema", metadata, Column("version", BigInteger, primary_key=True, autoincrement=False))

JOBS = Table(
    "relay_jobs",
    metadata,
    Column("job", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("prefix", String, nullable=False),
    Column("generation", BigInteger, nullable=False),
)

BRANCHES = Table(
    "relay_branches",
    metadata,
    Column("job", String),
    Column("branch", BigInteger, autoincrement=False),
    Column("base", BigInteger),
    PrimaryKeyConstraint("job", "branch"),
)


def _of_an_epoch() -> tuple[Column[str], Column[int], Column[int]]:
    return (
        Column("job", String),
        Column("epoch", BigInteger, autoincrement=False),
        Column("generation", BigInteger, autoincrement=False),
    )


EPOCHS = Table(
    "relay_epochs",
    metadata,
    *_of_an_epoch(),
    Column("branch", BigInteger, nullable=False),
    Column("nodes", BigInteger, nullable=False),
    Column("saved_at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("job", "epoch", "generation"),
)

_OF_A_NODE = ("job", "epoch", "generation", "action", "node")

MOVED = Table(
    "relay_moved",
    metadata,
    *_of_an_epoch(),
    Column("action", String),
    Column("node", String),
    Column("bytes", BigInteger, nullable=False),
    PrimaryKeyConstraint(*_OF_A_NODE),
)

DURATIONS = Table(
    "relay_durations",
    metadata,
    *_of_an_epoch(),
    Column("action", String),
    Column("node", String),
    Column("phase", String),
    Column("secs", Double, nullable=False),
    PrimaryKeyConstraint(*_OF_A_NODE, "phase"),
)

CURRENT_EPOCHS = """
CREATE VIEW relay_current_epochs AS
SELECT e.job, e.epoch, MAX(e.generation) AS generation, MAX(e.branch) AS branch, MAX(e.nodes) AS nodes,
       MIN(e.saved_at) AS saved_at
FROM relay_epochs e
WHERE NOT EXISTS (
  SELECT 1 FROM relay_branches b
  WHERE b.job = e.job AND b.branch > e.branch AND (b.base IS NULL OR b.base < e.epoch)
)
GROUP BY e.job, e.epoch
"""
"""A later branch replaced what came after its base: those epochs are abandoned, the others current."""
