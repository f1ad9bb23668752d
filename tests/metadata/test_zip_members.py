"""Archives: what is written is read, and what no archive of ours has is refused before it is used."""

from __future__ import annotations

import os
import stat
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.errors import DamagedError, StorageError
from torchrelay.metadata.zip_reader import open_zip

NAMES = st.from_regex(r"[a-z][a-z0-9_.]{0,8}(/[a-z][a-z0-9_]{0,8}){0,3}", fullmatch=True)


def archive(path: Path, members: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> Path:
    """An archive as Python writes it."""
    with zipfile.ZipFile(path, "w", how) as writer:
        for name, data in members.items():
            writer.writestr(zipfile.ZipInfo(name), data, compress_type=how)
    return path


@settings(max_examples=50)
@given(st.dictionaries(NAMES, st.binary(max_size=200), max_size=8))
def test_members_are_read_as_they_were_written(tmp_path_factory, members: dict[str, bytes]) -> None:
    """By name, and at the offset that is told."""
    path = archive(tmp_path_factory.mktemp("zip") / "a.zip", members)
    with open_zip(path) as found:
        assert {name: found.read(name, 200) for name in found.members} == members
        raw = path.read_bytes()
        for name, member in found.members.items():
            assert raw[member.start : member.stop] == members[name]


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/../../x",
        "a\\b",
        "C:x",
        "a//b",
        ".",
        "a/.",
        "..",
        "a/ /b",
        "a\nb",
        "\u202ex",
        "x" * 2000,
        "a/",
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    """Absolute, upward, doubled, foreign and endless names; directories too."""
    with pytest.raises(DamagedError, match="name"), open_zip(archive(tmp_path / "a.zip", {name: b""})):
        pass


def test_compressed_and_linked_members_are_refused(tmp_path: Path) -> None:
    """A ratio of a thousand cannot be, nor a link in place of a file."""
    with pytest.raises(DamagedError, match="compressed"):
        open_zip(archive(tmp_path / "a.zip", {"a": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)).__enter__()
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as writer:
        writer.writestr(info, "/etc/passwd")
    with pytest.raises(DamagedError, match="not a regular file"):
        open_zip(tmp_path / "b.zip").__enter__()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_stands_once(tmp_path: Path) -> None:
    """Of two members of a name readers would take different ones."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as writer:
        writer.writestr("a", b"1")
        writer.writestr("a", b"2")
    with pytest.raises(DamagedError, match="twice"):
        open_zip(tmp_path / "a.zip").__enter__()


def test_nothing_hides_before_between_or_behind_members(tmp_path: Path) -> None:
    """An archive behind another file, members that overlap, and a header that says something else."""
    plain = archive(tmp_path / "a.zip", {"a": b"one", "b": b"two"}).read_bytes()
    second = plain.index(b"PK\x03\x04", 4)
    directory = plain.index(b"PK\x01\x02", 4)
    there = struct.pack("<I", second)
    spoilt = {
        "before": b"#!/bin/sh\n" + plain,
        "renamed": plain.replace(b"b", b"c", 1),
        "overlap": plain[:directory] + plain[directory:].replace(there, bytes(4)),
        "encrypted": plain[:6] + b"\x01" + plain[7:],
    }
    for what, content in spoilt.items():
        (tmp_path / what).write_bytes(content)
        assert content != plain
        with pytest.raises(DamagedError):
            open_zip(tmp_path / what).__enter__()


def test_damage_is_found(tmp_path: Path) -> None:
    """Whatever bit is flipped: refused, or every member is as it was."""
    members = {"index.json": b"{}", "data/w": bytes(range(100))}
    plain = archive(tmp_path / "a.zip", members).read_bytes()
    path, refused = tmp_path / "b.zip", 0
    for at in range(len(plain) * 8):
        path.write_bytes(plain[: at // 8] + bytes([plain[at // 8] ^ 1 << at % 8]) + plain[at // 8 + 1 :])
        try:
            with open_zip(path) as found:
                for name, member in found.members.items():
                    assert found.read(name, len(member)) == members[name], at
        except DamagedError:
            refused += 1
    assert refused > 8 * sum(map(len, members.values()))
    for size in range(len(plain)):
        path.write_bytes(plain[:size])
        with pytest.raises(DamagedError), open_zip(path):
            pass


def test_other_things_than_files(tmp_path: Path) -> None:
    """A pipe is not waited for; a directory, a missing file and a missing member are named."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "none"):
        with pytest.raises(StorageError, match="cannot be read"), open_zip(tmp_path / name):
            pass
    with open_zip(archive(tmp_path / "a.zip", {"a": b"123"})) as found:
        with pytest.raises(DamagedError, match="no member 'b'"):
            found.read("b", 10)
        with pytest.raises(DamagedError, match="more than 2"):
            found.read("a", 2)


def test_a_file_that_can_no_longer_be_read_is_no_damage(tmp_path: Path) -> None:
    """A disk that fails while members are read is told as that, and no archive is called damaged for it."""
    with zipfile.ZipFile(tmp_path / "good.zip", "w") as file:
        file.writestr("a", b"x" * 1_000_000)
    with open_zip(tmp_path / "good.zip") as found:
        folder = os.open(tmp_path, os.O_RDONLY)
        os.dup2(folder, found._file.fileno())  # reads of a directory fail
        os.close(folder)
        with pytest.raises(StorageError, match=r"good.zip: cannot be read \(Is a directory\)"):
            found.read("a", 2_000_000)
