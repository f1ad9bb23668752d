"""The page about the format says what the code does: every table that can be compared is compared."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from torchrelay.checkpoint.format import (
    canonical_json,
    dtypes,
    mesh,
    mesh_geometry,
    names,
    value_decoding,
    values,
)
from torchrelay.checkpoint.format import dtypes as digest
from torchrelay.checkpoint.format import names as columns
from torchrelay.checkpoint.format.canonical_json import FEATURES
from torchrelay.checkpoint.format.manifest import codec, schema, validation
from torchrelay.checkpoint.format.mesh import intervals_at, placements_of
from torchrelay.checkpoint.format.mesh_geometry import describe, local_target
from torchrelay.checkpoint.format.names import DATA, GROUP, NODE, Whole, format_key
from torchrelay.checkpoint.format.position import (
    DAMAGED,
    HEALTHY,
    CommittedPosition,
    Facts,
    Position,
    State,
    facts_json,
    facts_of,
)
from torchrelay.checkpoint.format.shard import entries, header
from torchrelay.checkpoint.format.shard import header as shard
from torchrelay.checkpoint.format.shard import header as shard_parts
from torchrelay.checkpoint.format.value_decoding import _DECODERS
from torchrelay.checkpoint.load.verify import VerificationStatus
from torchrelay.checkpoint.log import chain, lease, record, view
from torchrelay.checkpoint.log import record as job_file
from torchrelay.checkpoint.state.leaf import Role
from torchrelay.jobs.blobs import Scope
from torchrelay.runners.session.mid_epoch import MidEpochPosition

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/format.md").read_text()
GOLDEN = ROOT / "tests/golden"
MIB = 1 << 20


def section(title: str) -> str:
    """The text below a heading, up to the next heading of any level."""
    return re.split(r"^#+ ", PAGE.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str, table: int = 0) -> list[list[str]]:
    """The rows of a section's table without its head, as cells, or of a list of code and what it is."""
    lines = re.findall(r"(?:^\|.*\n)+|(?:^- `.*\n)+", section(title), re.MULTILINE)[table].splitlines()
    if lines[0].startswith("|"):
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return [list(re.fullmatch(r"- ((?:`[^`]*`|[^`:])+): (.*)", line).groups()) for line in lines]


def code(text: str) -> list[str]:
    """What stands in backquotes."""
    return re.findall(r"`([^`]+)`", text)


def first_cells(title: str, table: int = 0) -> set[str]:
    return {word for row in rows(title, table) for word in code(row[0])}


def test_record_kinds() -> None:
    """The kinds of log records on the page are those of the code; guests' kinds are named as such."""
    assert first_cells("Log", 1) == record.KINDS
    guests = re.search(r"^(`tag`.*?) may come from guests", section("Log"), re.MULTILINE)
    assert guests
    assert set(code(guests[1])) == record.GUEST_KINDS


def test_record_fields() -> None:
    """The fields of a record and of an entry on the page are those that are written."""
    empty = record.Record(0, 0, "takeover", "", "", None, "", {}, State())
    assert first_cells("Log") == set(record.record_json(empty))
    said = section("Log").split("An **entry** is", 1)[1].split("The newest valid record", 1)[0]
    written = set(record.entry_json(CommittedPosition(0, Position(0), "", 0, "")))
    assert set(code(said)) == written | {HEALTHY, DAMAGED}


def test_holder_fields() -> None:
    """The identity of a writer on the page is the one in the records."""
    said = section("Taking over").split("A new writer takes", 1)[0]
    here = set(lease.WriterIdentity.here("job", {}).json())
    assert set(code(said)) - {"holder"} == here | {"nonce", "since", "created", "named"}


def test_job_file_fields() -> None:
    """The fields of job.json on the page are those of the code, and it is sealed under the stated key."""
    job = job_file.JobFile("a", "b", "c")
    written = canonical_json.unseal("job", job_file.encode_job(job), "job.json")
    assert set(written) <= set(code(section("job.json")))


def test_value_tags() -> None:
    """The tags of typed values on the page are those that can be read."""
    tables = (
        value_decoding._LEAVES,
        value_decoding._SEQUENCES,
        value_decoding._MAPPINGS,
        value_decoding._TENSORS,
    )
    others = {*_DECODERS} | {"blob", "ordered"}
    assert first_cells("Typed values") == {tag for table in tables for tag in table} | others


def test_element_types() -> None:
    """The table of element types is the code's, and the raw types below it are all of them."""
    told = {}
    for logical, stored in rows("Element types"):
        told |= dict(zip(code(logical), code(stored), strict=True))
    native = {kind.name: kind.code for kind in dtypes._BY_NAME.values() if not kind.raw}
    assert told == native
    text = section("Element types").split("Raw types", 1)[1].split("Raw elements", 1)[0]
    named = set(code(text)) - {"U8", "pieces"}
    named |= {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    assert named == set(dtypes._RAW)


def test_manifest_tables() -> None:
    """The keys, columns and facts of a manifest on the page are those of the frozen manifest."""
    frozen = json.loads((GOLDEN / "manifest_v1.json").read_bytes())
    told = {key: row[1] for row in rows("Manifest") for key in code(row[0])}
    assert set(told) == codec._KNOWN
    for table in ("blobs", "leaves", "shards", "world", "job", "position"):
        assert set(frozen[table]) <= set(code(told[table])), table
    columns = json.loads((GOLDEN / "manifest_shared.json").read_bytes())["leaves"]
    assert set(columns) - set(frozen["leaves"]) == first_cells("Optional columns")
    named = first_cells("Facts")
    facts_told = {key: row[1] for row in rows("Facts") for key in code(row[0])}
    assert set(frozen["facts"]) <= named
    referring = json.loads((GOLDEN / "manifest_referring_v1.json").read_bytes())
    optional = {"selection"}
    assert set(referring["facts"]) == set(frozen["facts"]) | optional
    made = json.loads((GOLDEN / "facts_made_by_init.json").read_bytes())
    optional.add("made_by_init")
    assert (
        set(made) == set(frozen["facts"]) | {"made_by_init"} and facts_json(facts_of(made, "facts")) == made
    )
    built = json.loads((GOLDEN / "facts_built.json").read_bytes())
    optional.add("built")
    assert set(built) == set(frozen["facts"]) | {"built"} and facts_json(facts_of(built, "facts")) == built
    assert {"settings"} <= set(code(facts_told["stop"]))
    carried = json.loads((GOLDEN / "facts_carried.json").read_bytes())
    optional.add("carried")
    assert facts_json(facts_of(carried, "facts")) == carried and facts_of(carried, "facts").carried
    assert facts_of(made, "facts").last_metrics == made["metrics"]
    assert optional <= named and set(referring["facts"]["selection"]) <= set(code(facts_told["selection"]))
    wrapper = section("Leaves").split("role `subclass`", 1)[1].split("the inner names", 1)[0]
    assert set(code(wrapper)[-1].strip("{}").replace('"', "").split(", ")) == set(referring["values"][0][1])
    assert {"places"} <= named and "gradients" in code(section("Gradients"))
    assert {"places", "gradients"} == FEATURES
    known = {one.name for one in fields(Facts)}
    assert known - {"run_id"} - optional - {"places"} | {"run"} == set(frozen["facts"])
    written = set(re.findall(r'"(\w+)"', facts_told["places"])) - {"cursors", "nodes"}
    assert set(MidEpochPosition().json()) - {"metrics"} == written
    kinds = {code(row[0])[0]: code(row[1]) for row in rows("Layouts")}
    meshes = json.loads((GOLDEN / "manifest_mesh_v1.json").read_bytes())["layouts"]
    assert set(kinds) == {layout["kind"] for layout in [*frozen["layouts"], *meshes]}
    assert {"kind", *kinds["mesh"]} == set(meshes[0])


def test_example_boxes() -> None:
    """The boxes on the page are those that the code computes."""
    told = rows("Boxes")
    assert len(told) >= 6
    for *given, boxes in told:
        shape, extents, placements, place = (json.loads(code(one)[0]) for one in given)
        intervals = intervals_at(tuple(shape), tuple(extents), placements_of(placements) or (), tuple(place))
        found = [describe(window.box) for window in local_target(intervals).windows]
        assert found == code(boxes)


def test_roles_and_scopes() -> None:
    """All roles and scopes are named."""
    said = section("Leaves").split("Roles:", 1)[1]
    roles, scopes = said.split("Scopes:", 1)
    assert set(code(roles)) == {role.value for role in Role} == set(validation.ROLES)
    registered = {scope.value for scope in Scope} - {Scope.TRANSIENT.value}
    assert set(code(scopes)) == set(validation.SCOPES) == registered


def test_shard_metadata() -> None:
    """The metadata of a shard on the page are those of the frozen shard."""
    data = (GOLDEN / "trainer_0.4.main.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 4096 == 0
    inner = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][entries.METADATA_KEY])
    assert first_cells("Shard file") == set(inner)
    assert (inner["digest"], inner["block"]) == ("xxh3-128", 1048576)
    assert set(header._RESERVED) <= set(code(section("Shard file")))
    assert format_key(Whole("__metadata__")) in code(section("Keys"))


def test_outcomes() -> None:
    """The outcomes of a verification on the page are those of the code."""
    assert first_cells("Reading and verification") == {outcome.value for outcome in VerificationStatus}


def test_names_of_files() -> None:
    """Every path in the layout's table is one that the code makes."""
    paths = {code(row[0])[0] for row in rows("Layout")}
    made = {
        job_file.JOB_PATH,
        record.slot_path(7),
        f"{record.LOG}/base-<nonce>.json",
        chain.HINT,
        lease.PATH,
        f"{DATA}/<try>/",
        f"{DATA}/<try>/<node>.<position>.<group>[.<part>].safetensors",
        f"{DATA}/<try>/manifest.json",
        f"{DATA}/<try>/stats.json",
    }
    assert paths == made
    forms = dict(re.findall(r"^- (\w+): `(.*?)`", section("Layout"), re.MULTILINE))
    assert (forms["node"], forms["group"]) == (NODE.pattern, GROUP.pattern)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("more than 128 levels", canonical_json.DEPTH_LIMIT == 128),
        ("below 2^53", canonical_json.INTEGER_LIMIT == 2**53),
        ("a multiple of 4096", shard.ALIGNMENT == 4096),
        ("Blocks are of 1 MiB", digest.BLOCK == MIB),
        ("base64 of 16 bytes per block", digest.SIZE == 16),
        ("64 GiB of data and 50,000,000 bytes of header",
         shard_parts.ShardLimits(64 << 30, 50_000_000) == shard_parts.DEFAULT_LIMITS),
        ("above 100,000,000 bytes", header.LENGTH_LIMIT == 100_000_000),
        ("multiply to more than 65536", mesh.MAX_SPLIT_FACTOR == 65536),
        ("box of at least 1 MiB", mesh_geometry.SPLIT_BYTES == MIB),
        ("**Rule 2**", mesh_geometry.RULE == 2 and {1, 2} == mesh_geometry.KNOWN),
        ("a file of at most 16 MiB", canonical_json.LIMIT_BYTES == 16 * MIB),
        ("values of at most 64 KiB", schema.VALUE_LIMIT_BYTES == 64 << 10),
        ("at most 1 MiB; kinds", values.ARRAY_LIMIT == MIB),
        ("kinds `biufcSUmM`", value_decoding.NUMPY_KINDS == "biufcSUmM"),
        ("At most 32 containers", values.LEVELS == 32),
        ("at most 4096 characters", names.LONGEST_NAME == 4096),
        ("and at most 2^22", columns.LIMIT == 1 << 22),
        ("live entries, at most 64", chain.INLINE == 64),
        ("below the newest 256", view.STRIDE == 256),
        ("one of the next three", view._PROBE == 3),
        ("for 15 seconds", lease.PATIENCE_SECS == 15),
        ("counter every second", lease.PERIOD_SECS == 1),
    ],
)  # fmt: skip
def test_numbers(words: str, value: bool) -> None:
    """Every number on the page is the code's."""
    assert words in " ".join(PAGE.split())
    assert value


def test_every_frozen_file_is_listed() -> None:
    """The test vectors in README.md are the frozen files, all of them."""
    listed = {
        name
        for one in re.findall(r"^- (.*?): ", (GOLDEN / "README.md").read_text(), re.MULTILINE)
        for name in code(one)
    }
    there = {f"{path.name}/" if path.is_dir() else path.name for path in GOLDEN.iterdir()}
    there = {name for name in there if not name.endswith((".py", ".md")) and name != "__pycache__/"}
    assert listed == there
