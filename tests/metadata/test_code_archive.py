"""Archives of source: the same source is the same bytes under the same id, anything else is another."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_trees import fill

from torchrelay.errors import DamagedError, StorageError
from torchrelay.metadata.code.archive import (
    SourceManifest,
    archive_bytes,
    decode,
    member_name,
    open_archive,
    write_archive,
)
from torchrelay.metadata.code.snapshot import Sources, take

CHARACTERS = st.characters(codec="utf-8", exclude_characters="/\\\0")
PARTS = st.text(CHARACTERS, min_size=1, max_size=6)
NAMES = (
    st.lists(PARTS.map(lambda part: f"f{part}"), min_size=1, max_size=3)
    .map("/".join)
    .map(lambda n: n + ".py")
)
TREES = st.dictionaries(NAMES, st.binary(max_size=40), min_size=1, max_size=5)


def written(files: dict[str, bytes], where: str, *, backwards: bool) -> tuple[str, bytes]:
    """The code id and archive of files that were made in this order, at other times."""
    root = Path(where) / ("deep/er" if backwards else "here")
    for number, (name, data) in enumerate(sorted(files.items(), reverse=backwards)):
        fill(root, {name: data})
        os.utime(root / name, ns=(number, 10**18 + number * (3 if backwards else 7)))
        (root / name).chmod(0o755 if backwards else 0o640)
    found = take(Sources([root]))
    return found.manifest.code_id, archive_bytes(found.manifest, found.contents)


@settings(max_examples=15, deadline=None)
@given(TREES, st.data())
def test_equal_source_is_equal_bytes_and_any_other_has_another_id(
    files: dict[str, bytes], data: st.DataObject
) -> None:
    """Order, times, permissions and place do not count; a changed byte, a changed name and a new file do."""
    name = data.draw(st.sampled_from(sorted(files)))
    others = [
        {**files, name: files[name] + b"#"},
        {**{n: b for n, b in files.items() if n != name}, f"g{name}": files[name]},
        {**files, "one_more.py": b""},
    ]
    with TemporaryDirectory() as one, TemporaryDirectory() as two:
        first = written(files, one, backwards=False)
        assert first == written(files, two, backwards=True)
    for other in others:
        with TemporaryDirectory() as three:
            assert written(other, three, backwards=False)[0] != first[0]


@settings(max_examples=30, deadline=None)
@given(TREES, st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_archive_never_gives_other_source(files: dict[str, bytes], at: int, flip: int) -> None:
    """Whatever byte is changed, what is read is what was archived, or the damage is told."""
    with TemporaryDirectory() as where:
        fill(Path(where) / "source", files)
        found = take(Sources([Path(where) / "source"]))
        path = write_archive(Path(where) / "code", found.manifest, found.contents)
        with open_archive(path) as archive:
            assert archive.read_all() == files
        damaged = bytearray(path.read_bytes())
        damaged[at % len(damaged)] ^= flip
        path.write_bytes(damaged)
        try:
            with open_archive(path) as archive:
                assert archive.read_all() == files
        except StorageError:
            pass
        write_archive(Path(where) / "code", found.manifest, found.contents)
        with open_archive(path) as archive:  # the next start mends it
            assert archive.read_all() == files


@pytest.mark.parametrize(
    "name", ["../x.py", "/x.py", "a//b.py", "./x.py", "a/../../x.py", "a\\b.py", "", "a\0b"]
)
def test_a_list_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """An archive made by somebody else cannot name a place outside of itself."""
    for manifest in (
        SourceManifest({name: take_one(tmp_path)}, {}),
        SourceManifest({}, {"a.py": "../" + name}),
    ):
        with pytest.raises(DamagedError, match="leads outside"):
            decode(manifest.encode(), "it")


def take_one(tmp_path: Path) -> object:
    fill(tmp_path / "one", {"a.py": "x"})
    return take(Sources([tmp_path / "one"])).manifest.files["a.py"]


def test_an_archive_with_another_list_than_its_name_promises_is_refused(tmp_path: Path) -> None:
    """A list and files that fit each other are not enough: the code id is the digest of the list."""
    fill(tmp_path / "a", {"a.py": "x"})
    found = take(Sources([tmp_path / "a"]))
    path = write_archive(tmp_path / "code", found.manifest, found.contents)
    other = path.rename(path.with_name(f"{'0' * 64}.zip"))
    with pytest.raises(DamagedError, match="does not match its name"), open_archive(other):
        pass


def test_ordinary_tools_read_an_archive(tmp_path: Path) -> None:
    """Ordinary names stand in it as they are, so unzip does."""
    fill(tmp_path / "a", {"pkg/net-1.py": "x", "schön.py": "y", "a=b.py": "z"})
    found = take(Sources([tmp_path / "a"]))
    path = write_archive(tmp_path / "code", found.manifest, found.contents)
    with zipfile.ZipFile(path) as archive:
        assert archive.read("files/pkg/net-1.py") == b"x"
        assert archive.testzip() is None
    assert member_name("schön.py") == "files/sch=C3=B6n.py"
    assert member_name("a=b.py") == "files/a=3Db.py"
