"""A place where two writers cannot be told apart is found out at the start, before anything is written."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from bad_input import Trial, tree
from fsspec.implementations.local import LocalFileSystem
from log_helpers import MemoryStorage, entry, run_of
from stores import QUICK, DoubleLiar, Faulty, Liar, Refusing, Terse, store_of

from torchrelay import JobRunner, MultiNodeCheckpointManager, open_checkpoint
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage import local
from torchrelay.checkpoint.storage.base import RetryTimeouts, check_exclusion
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.errors import StorageError, UsageError

LIARS = {
    Liar: "although its name is taken",
    DoubleLiar: "although its name is taken",
    Refusing: "refuses to create",
}


def refuse_links(monkeypatch, *, renames):
    """No hard links, as on FAT and some network mounts; `renames`: whether renameat2 can replace them."""

    def link(source, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def rename(source, target):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "link", link)
    if not renames:
        monkeypatch.setattr(local, "rename_without_replacing", rename)


@pytest.mark.parametrize("make", [LocalStorage, lambda _: store_of(Faulty()), lambda _: store_of(Terse())])
def test_an_honest_place_passes(make, tmp_path):
    """Where a second creation fails, in whatever words, the probe finds nothing and leaves nothing."""
    storage = make(tmp_path)
    check_exclusion(storage)
    assert storage.list("") == []


@pytest.mark.parametrize("system", LIARS)
def test_a_store_that_lies_or_refuses_is_found_out(system):
    """The message says what it does and the remedy; the probe leaves nothing behind."""
    storage = store_of(system())
    with pytest.raises(UsageError, match=rf"{LIARS[system]}.*single_writer='external'"):
        check_exclusion(storage)
    assert storage.list("") == []


@pytest.mark.parametrize("system", LIARS)
def test_with_an_external_single_writer_it_is_accepted(system):
    """Then the log works on it, and a name that is seen to be taken is refused all the same."""
    storage = store_of(system(), single_writer="external")
    check_exclusion(storage)
    run_of(range(3), storage)
    assert open_log(storage).epochs() == (0, 1, 2)
    storage.link_exclusive("x", b"first")
    with pytest.raises(FileExistsError):
        storage.link_exclusive("x", b"second")


def test_a_file_system_of_which_nothing_is_known_is_not_trusted(tmp_path):
    """Where a look may come before a write the probe would see nothing, so it is not asked."""
    storage = ObjectStorage(LocalFileSystem(), str(tmp_path), f"odd://{tmp_path}", patience=QUICK)
    with pytest.raises(UsageError, match=r"nothing is known.*single_writer='external'"):
        check_exclusion(storage)
    assert not list(tmp_path.iterdir())


def test_a_store_that_is_away_is_no_liar():
    """An outage during the probe is an error of the storage: the remedy is to try again, not a promise."""
    storage = store_of(Faulty(itertools.repeat("503")), patience=RetryTimeouts(0.05, 0.01, 0.02))
    with pytest.raises(StorageError, match="try again when"):
        check_exclusion(storage)


def test_faults_during_the_probe_convict_nobody():
    """Lost answers and overload at every place of the probe leave an honest store honest."""
    for at, kind in itertools.product(range(8), ("503", "reset", "lost")):
        system = Faulty(iter(["" for _ in range(at)] + [kind]))
        check_exclusion(store_of(system))
        assert sum(system.fired.values()) == (1 if system.calls > at else 0)


def test_the_probe_works_on_any_storage():
    """A storage that says nothing about itself is probed."""
    storage = MemoryStorage()
    check_exclusion(storage)
    assert storage.files == {}

    class Overwriting(MemoryStorage):
        def link_exclusive(self, path, data):
            try:
                super().link_exclusive(path, data)
            finally:
                self.files[path] = data

    with pytest.raises(UsageError, match="replaces what lies there"):
        check_exclusion(Overwriting())


def test_without_links_a_rename_that_never_replaces_will_do(tmp_path, monkeypatch):
    """renameat2 keeps the first file, on this very file system."""
    refuse_links(monkeypatch, renames=True)
    storage = LocalStorage(tmp_path)
    check_exclusion(storage)
    storage.link_exclusive("x", b"first")
    with pytest.raises(FileExistsError):
        storage.link_exclusive("x", b"second")
    assert storage.read_range("x", 0, 9) == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["x"]


def test_without_both_a_directory_is_refused(tmp_path, monkeypatch):
    """Neither links nor such renames: managers and run directories refuse it with the remedy, exit code 2."""
    refuse_links(monkeypatch, renames=False)
    for where in (tmp_path / "run", MultiNodeCheckpointManager(tmp_path / "prefix")):
        trial = Trial()
        with pytest.raises(UsageError, match=r"refuses to create.*single_writer='external'"):
            trial.train(where)
        assert trial.ran == [] and UsageError.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_with_an_external_single_writer_such_a_directory_works(tmp_path, monkeypatch):
    """A whole run, resumed, in a directory that can neither link nor rename without replacing."""
    refuse_links(monkeypatch, renames=False)
    assert Trial().train(tmp_path / "run", single_writer="external") == 2
    assert Trial(epochs=3).train(tmp_path / "run", single_writer="external") == 3
    storage = LocalStorage(tmp_path, single_writer="external")
    storage.link_exclusive("x", b"first")
    with pytest.raises(FileExistsError):
        storage.link_exclusive("x", b"second")
    monkeypatch.undo()
    assert open_log(LocalStorage(tmp_path / "run" / "checkpoints")).epochs() == (0, 1, 2, 3)


@pytest.mark.parametrize("given", ["yes", True, ""])
def test_the_option_is_checked(given, tmp_path):
    """Anything but 'external' is refused where the manager is made."""
    with pytest.raises(UsageError, match="invalid single_writer"):
        MultiNodeCheckpointManager(tmp_path, single_writer=given)
    with pytest.raises(UsageError, match=r"single_writer .*manager"):
        JobRunner(Trial().job, MultiNodeCheckpointManager(tmp_path), single_writer="external")


class LyingUrl(Liar):
    """A liar that can be reached by a URL; one store for all, as a bucket is."""

    protocol = ("memory", "liar")
    shared: ClassVar[dict] = {}

    def __init__(self, **options):
        super().__init__()
        self.store = self.shared

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("liar://"))


def test_a_job_on_a_lying_store(tmp_path):
    """A run on it is refused before any task; with an external single writer it trains, resumes, is read."""
    fsspec.register_implementation("liar", LyingUrl, clobber=True)
    url = "liar://bucket/run"
    trial = Trial()
    before = tree(tmp_path)
    with pytest.raises(UsageError, match=r"liar://bucket/run creates a file although.*single_writer"):
        trial.train(MultiNodeCheckpointManager(url))
    assert trial.ran == [] and LyingUrl.shared == {} and tree(tmp_path) == before
    assert Trial().train(MultiNodeCheckpointManager(url, single_writer="external")) == 2
    again = MultiNodeCheckpointManager(url, single_writer="external")
    assert Trial(epochs=4).train(again, 2) == 4
    assert open_checkpoint(url, 4).epoch == 4
    assert again.get_ckpt_db_name("trainer_0", 4) == f"{url}/trainer_0.4"
    assert again.files("trainer_0", 4)[0].startswith(f"{url}/" + "data/e00000004-")
    assert Path("liar:").exists() is False


def test_a_record_of_another_is_never_replaced():
    """Even a liar's slot is looked at first by an external single writer: what is there stays."""
    storage = store_of(Liar(), single_writer="external")
    run_of(range(2), storage)
    before = storage.read_range("log/00000000000000000001.json", 0, 1 << 20)
    with pytest.raises(FileExistsError):
        storage.link_exclusive("log/00000000000000000001.json", b"another")
    assert storage.read_range("log/00000000000000000001.json", 0, 1 << 20) == before
    assert open_log(storage).newest() == entry(1)


def test_a_store_that_is_away_is_asked_for_so_long_once(monkeypatch):
    """A store that does not answer is not asked twice for as long as a call may take, nor a third time."""
    storage = store_of(Faulty(itertools.repeat("reset")), patience=RetryTimeouts(0.0, 0.0, 0.0))
    monkeypatch.setattr(storage, "replace", lambda *_: pytest.fail("asked again"))
    monkeypatch.setattr(storage, "delete", lambda *_: pytest.fail("asked again"))
    with pytest.raises(StorageError, match="try again when the store answers"):
        check_exclusion(storage)
