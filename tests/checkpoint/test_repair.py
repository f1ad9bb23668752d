"""Putting a directory in order: what is derived comes back, what is needed is never touched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from epochs import Writing, moment, parameter
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from stage import warned

from torchrelay.checkpoint.format.position import Key, Position, Retirement
from torchrelay.checkpoint.inspect.repair import repair, take_inventory
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log import chain
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import decode, read_job, slot_path
from torchrelay.checkpoint.log.state import History, lost_bases, read_history
from torchrelay.checkpoint.log.writer import LogWriter, append_as_guest, pin_draft, tag_draft
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import DirectoryInUseError, UnknownEpochError
from torchrelay.tools.cli.main import main

EPOCHS = 18
INLINE = 8
"""Less than there are epochs, so that there is a base file."""
LEAVES = [parameter("w", torch.arange(6.0))]


def make(root: Path) -> Path:
    """18 epochs on two branches, a pin; an epoch and an optimizer that were retired and not deleted yet."""
    with Writing(root, "mended") as run:
        for epoch in range(EPOCHS - 5):
            run.save(epoch, [*LEAVES, moment("m", torch.arange(3.0))] if epoch == 3 else LEAVES)
        thin = run.log.view.find(3)
        assert thin is not None
        run.log.retire([Retirement(thin.attempt_name, ("optim",))], "a test")
        run.log.rewind(Position(10), {"epoch": 10})
        for epoch in range(11, EPOCHS):
            run.save(epoch, LEAVES)
        gone = run.log.view.find(4)
        assert gone is not None
        run.log.retire([Retirement(gone.attempt_name)], "a test")
    append_as_guest(LocalStorage(root), pin_draft("paper", Key(0, Position(7))))
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "INLINE", INLINE)
        patch.setattr(chain, "_REBASED_INLINE", INLINE // 2)
        return make(tmp_path_factory.mktemp("made") / "ckpt")


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "ckpt"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    data[at % len(data)] ^= 1 << at % 8
    path.write_bytes(data)


def cut(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes()[: at % max(1, path.stat().st_size)])


HARMS: dict[str, Callable[[Path, int], None]] = {
    "delete": lambda path, _: path.unlink(),
    "flip": flip,
    "cut": cut,
    "zeros": lambda path, _: path.write_bytes(bytes(path.stat().st_size)),
}


def bases(root: Path) -> list[Path]:
    return sorted(root.glob("log/base-*.json"))


def kinds(root: Path, does: str) -> list[str]:
    return sorted(one.kind for one in take_inventory(LocalStorage(root)).findings if one.does == does)


def proved(root: Path) -> list[str]:
    """Every live entry, each proved to its last byte."""
    storage = LocalStorage(root)
    found = []
    for entry in open_log(storage).entries:
        proof = verify_epoch(storage, entry, level="full")
        assert proof.verified, proof.reason
        found.append(f"{entry.key} {entry.resumable} {entry.health}")
    return found


def orphan(root: Path, nonce: str = "0bad00") -> Path:
    """A try that a crash left."""
    directory = root / f"data/e00000099-{nonce}"
    directory.mkdir()
    (directory / "trainer_0.99.main.safetensors").write_bytes(b"torn")
    return directory


def test_deletions_that_were_cut_off_are_finished_once(root: Path) -> None:
    """Retired files go, the optimizer's alone where only these were retired; a second run finds nothing."""
    before = proved(root)
    assert kinds(root, "mend") == ["deletion", "deletion"]
    done = repair(LocalStorage(root)).done
    assert [one.kind for one in done] == ["deletion", "deletion"]
    names = [path.name for path in (root / "data").glob("e00000003-*/*")]
    assert sorted(names) == ["manifest.json", "trainer_0.3.main.safetensors"]
    assert not list((root / "data").glob("e00000004-*"))
    slot = open_log(LocalStorage(root)).slot
    again = repair(LocalStorage(root), delete=True)
    assert again.before.findings == again.after.findings == () and again.done == ()
    assert open_log(LocalStorage(root)).slot == slot, "where all is in order the log is not even taken"
    assert proved(root) == before


def test_a_lost_base_file_comes_back_byte_for_byte(root: Path) -> None:
    """Without it the log is read all the same: the record before it tells what it held; repair writes it."""
    contents = {base: base.read_bytes() for base in bases(root)}
    assert len(contents) > 1
    for harm in HARMS.values():
        for at, base in enumerate(contents):
            harm(base, 10 + at)
        assert "base-" in open_log(LocalStorage(root)).notices[0]
        assert "base" in kinds(root, "mend"), "a dry look finds it, and changes nothing"
        repair(LocalStorage(root))
        assert {base: base.read_bytes() for base in bases(root)} == contents
    proved(root)


def test_a_base_file_comes_back_from_manifests(root: Path) -> None:
    """Where the record before it was thinned away the manifests tell the same, thinned epochs included."""
    storage = LocalStorage(root)
    next(root.glob("data/e00000003-*/*.optim.*")).unlink()
    job = read_job(storage)
    assert job is not None
    records = read_history(storage, job.uuid, open_log(storage).slot).records
    newest = max(
        (record for record in records if record.base is not None), key=lambda record: record.slot
    ).base
    assert newest is not None
    first = next(at for at, record in enumerate(records) if record.base and record.base.name == newest.name)
    content = (root / newest.path).read_bytes()
    assert b'"resumable":false' in content, "one lost its optimizer before"
    (root / newest.path).unlink()
    (lost,) = lost_bases(storage, History(records[first:], first))
    assert lost.data == content
    shutil.rmtree(next((root / "data").glob("e00000007-*")))
    (lost,) = lost_bases(storage, History(records[first:], first))
    assert lost.data is None, "never any bytes but those that the record states"


def test_an_epoch_whose_directory_is_gone_is_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named with the remedy and code 5; once it is quarantined there is nothing left to do for it."""
    lost = next((root / "data").glob("e00000007-*"))
    shutil.rmtree(lost)
    assert kinds(root, "keep") == ["lost epoch"]
    assert main(["ckpt", "repair", str(root), "--dry-run"]) == 5
    said = capsys.readouterr().out
    assert f"lost epoch  data/{lost.name}: gone, and needed by epoch 7 (branch 0)" in said
    assert main(["ckpt", "verify", str(root), "--quarantine"]) == 5
    assert kinds(root, "keep") == []


def test_orphans_go_only_when_told(root: Path) -> None:
    """Tries, temporary and base files that nothing refers to are listed first; foreign files stay."""
    orphan(root)
    (root / "log/.tmp-0123456789abcdef").write_bytes(b"half a rec")
    (root / "data" / bases(root)[0].name).write_bytes(b"")
    (root / "log/base-0123456789abcdef.json").write_bytes(b"{}")
    foreign = [
        root / "notes.txt",
        root / "log/README",
        root / "data/photos",
        next(root.glob("data/e00000007-*")) / "x",
    ]
    for path in foreign:
        path.write_text("mine")
    before = proved(root)
    listed = kinds(root, "delete")
    assert listed == ["orphan", "temporary", "unused base"]
    repair(LocalStorage(root))
    assert kinds(root, "delete") == ["orphan", "unused base"], "whoever takes the log sweeps what was cut off"
    repair(LocalStorage(root), delete=True)
    assert kinds(root, "delete") == [] and len(kinds(root, "keep")) == 5
    assert all(path.read_text() == "mine" for path in foreign)
    assert proved(root) == before


def test_base_files_of_old_multiples_of_256_are_no_orphans(tmp_path: Path) -> None:
    """A record that stays only as a multiple of 256 has its base file after a repair, too."""
    root = tmp_path / "ckpt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "INLINE", INLINE)
        patch.setattr(chain, "_REBASED_INLINE", INLINE // 2)
        patch.setattr(LocalStorage, "sync_dir", lambda self, path: None)
        make(root)
        with Writing(root, "mended") as run:
            while run.log.view.slot < 256:
                run.log.append_draft(tag_draft("seen", Key(1, Position(11 + run.log.view.slot % 2))))
            old = base_at(root, 256)
            for epoch in range(EPOCHS, EPOCHS + 2 * INLINE):
                run.save(epoch, LEAVES)
            while run.log.view.slot < 3 * 256:
                run.log.append_draft(tag_draft("seen", Key(1, Position(11 + run.log.view.slot % 2))))
            assert old != base_at(root, 3 * 256) and not (root / slot_path(257)).exists()
        (root / "log/base-00ff00ff.json").write_bytes(b"{}")
        live = proved(root)
        assert kinds(root, "delete") == ["unused base"]
        repaired = repair(LocalStorage(root), delete=True)
    assert [one.path for one in repaired.done if one.kind == "unused base"] == ["log/base-00ff00ff.json"]
    assert (root / old).exists() and proved(root) == live


def base_at(root: Path, slot: int) -> str:
    """The base file that a record refers to."""
    storage = LocalStorage(root)
    job = read_job(storage)
    record = decode((root / slot_path(slot)).read_bytes(), slot=slot, job=job.uuid if job else "")
    assert record.base is not None
    return record.base.path


def test_nothing_is_touched_while_a_writer_lives(root: Path) -> None:
    """A try in flight looks like an orphan; whoever does not hold the log deletes nothing."""
    writer = LogWriter.take(LocalStorage(root), "mended")
    flight = orphan(root)
    with pytest.raises(DirectoryInUseError):
        repair(LocalStorage(root), delete=True)
    assert list(flight.iterdir()) and kinds(root, "mend") == ["deletion", "deletion"]
    writer.release()
    repair(LocalStorage(root), delete=True)
    assert not flight.exists()


def test_what_came_after_our_takeover_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what lay there before the takeover is deleted: a later name may be a save of the next writer."""
    from torchrelay.checkpoint.inspect import repair as mend

    orphan(root)
    delete, late = mend.delete_orphans, []

    def slow(writer: LogWriter) -> tuple[str, ...]:
        late.append(orphan(root, "fedcba"))
        (root / "log/.tmp-fedcba9876543210").write_bytes(b"on its way")
        return delete(writer)

    monkeypatch.setattr(mend, "delete_orphans", slow)
    repair(LocalStorage(root), delete=True)
    assert late[0].exists() and (root / "log/.tmp-fedcba9876543210").exists()
    assert not list(root.glob("data/*-0bad00"))


def test_a_damaged_log_hides_what_is_an_orphan(root: Path) -> None:
    """While a record cannot be read, a try that no other one names may be a committed one: it is kept."""
    records = sorted(root.glob("log/0*.json"))
    records[-3].write_bytes(records[-3].read_bytes()[:-4])
    orphan(root)
    found = repair(LocalStorage(root), delete=True, patience_secs=0.05).after
    assert [one.kind for one in found.findings] == ["damaged record", "orphan"]
    assert {one.does for one in found.findings} == {"keep"}
    proved(root)


def test_where_there_is_nothing_there_is_nothing_to_mend(tmp_path: Path) -> None:
    """A directory without a job is refused, and stays as it was."""
    with pytest.raises(UnknownEpochError):
        repair(LocalStorage(tmp_path))
    assert list(tmp_path.iterdir()) == []


HARM = st.tuples(
    st.sampled_from(["log/HINT", "writer.json", "log/base-*.json"]),
    st.sampled_from(sorted(HARMS)),
    st.integers(0, 10**6),
)
LITTER = st.lists(
    st.sampled_from(
        [
            "log/.tmp-00",
            ".tmp-11",
            "data/.tmp-22",
            "log/base-00ff00ff.json",
            "data/e00000014-abcdef/x",
            "a.txt",
        ]
    ),
    unique=True,
)


@settings(
    deadline=None,
    max_examples=20,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(harms=st.lists(HARM, max_size=4), litter=LITTER, delete=st.booleans())
def test_whatever_happens_to_derived_files_everything_acknowledged_stays_provable(
    made: Path, tmp_path: Path, harms: list[tuple[str, str, int]], litter: list[str], delete: bool
) -> None:
    """Any derived file deleted, flipped, cut or zeroed: one repair mends all, a second finds nothing."""
    root = tmp_path / "harmed"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(made, root)
    before = proved(root)
    for pattern, harm, at in harms:
        for path in sorted(root.glob(pattern)):
            HARMS[harm](path, at)
    for name in litter:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("litter")
    with warned():
        repair(LocalStorage(root), delete=delete)
    assert proved(root) == before
    assert kinds(root, "mend") == []
    assert kinds(root, "delete") == [] or not delete
    assert (root / "a.txt").exists() == ("a.txt" in litter)
    again = repair(LocalStorage(root), delete=delete)
    assert again.done == () and again.before.findings == again.after.findings
