"""Between a client and a real S3 server: nothing that was acknowledged is lost, and nothing hangs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from bad_input import Trial
from s3_server import moto, needs_s3
from store_proxy import FAULTS, Proxy, in_turn, proxy_to
from store_servers import Served
from surroundings import surroundings

from torchrelay import MultiNodeCheckpointManager, open_checkpoint
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage import object_store
from torchrelay.checkpoint.storage.base import RetryTimeouts, check_exclusion
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.errors import StorageError, UsageError
from torchrelay.tools.cli.main import main

pytestmark = needs_s3
IMPATIENT = {"FSSPEC_S3": '{"config_kwargs": {"read_timeout": 1, "connect_timeout": 5}}'}
"""A client that gives an answer up after a second; by default it is 15."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with moto() as served:
        yield served


@contextmanager
def behind(server: Served, *, patient: bool = False) -> Iterator[tuple[Proxy, str]]:
    """A proxy before the server, and the URL of an empty place there.

    `patient` clients ask nothing again because a busy machine took a second for an answer.
    """
    with proxy_to(server.port) as proxy:
        environment = server.seen_at(proxy.port) | ({} if patient else IMPATIENT)
        with surroundings(environment):
            yield proxy, f"{server.url}{secrets.token_hex(4)}"


def test_acknowledged_epochs_survive_every_fault(server: Served) -> None:
    """A job trains and resumes while each sixth request meets a fault; all that it was told is true."""
    with behind(server) as (proxy, url):
        proxy.schedule = in_turn(6)
        saved = torch.arange(200_000.0)
        for epochs in (2, 3):
            manager = MultiNodeCheckpointManager(url, reuse=False)
            run = Trial({"w": saved.clone()}, epochs=epochs).train(
                manager, resume="auto" if epochs == 2 else "must"
            )
            assert (run, run.committed) == (epochs, epochs)
        assert all(proxy.fired[fault] for fault in FAULTS), proxy.fired
        proxy.schedule = lambda asked: ""
        assert main(["verify", url, "--level", "full"]) == 0
        assert open_log(storage_of(url, "the place")).epochs() == tuple(range(4))
        assert torch.equal(open_checkpoint(url).load_tensors("w")["w"], saved)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_each_request_of_a_record(server: Served, fault: str) -> None:
    """A record whose creation meets a fault, the look at it too, is there once, and its creator knows."""
    with behind(server) as (proxy, url):
        storage = storage_of(url, "the place")
        first = proxy.count
        proxy.schedule = lambda asked: fault if asked.number - first in (0, 2) else ""
        storage.link_exclusive("log/0", b"mine")
        proxy.schedule = lambda asked: ""
        assert storage.read_range("log/0", 0, 9) == b"mine"
        with pytest.raises(FileExistsError):
            storage.link_exclusive("log/0", b"another")
        assert proxy.fired[fault] >= 1


def test_a_store_that_stays_away_is_given_up(server: Served) -> None:
    """Where every request is refused, or never answered, the patience bounds the wait; the error says so."""
    with behind(server) as (proxy, url):
        for fault in ("503", "silence"):
            proxy.schedule = lambda asked, fault=fault: fault
            storage = ObjectStorage(*_opened(url), url, patience=RetryTimeouts(0.5, 0.05, 0.1))
            begun = time.monotonic()
            with pytest.raises(StorageError, match="try again when the store answers"):
                storage.link_exclusive("log/0", b"mine")
            assert time.monotonic() - begun < 60
            assert proxy.fired[fault] >= 3


def _opened(url: str) -> tuple[object, str]:
    opened = storage_of(url, "the place")
    assert isinstance(opened, ObjectStorage)
    return opened.system, opened.root


def test_stores_that_do_not_keep_conditions_are_found(server: Served) -> None:
    """One that ignores conditions, or refuses them, is refused with the remedy, which then works."""
    with behind(server, patient=True) as (proxy, url):
        proxy.dropped = frozenset({"if-none-match"})
        with pytest.raises(UsageError, match=r"although its name is taken.*single_writer='external'"):
            check_exclusion(storage_of(url, "the place"))
        proxy.dropped = frozenset()
        proxy.schedule = lambda asked: "501" if asked.method == "PUT" and asked.conditional else ""
        with pytest.raises(UsageError, match=r"refuses to create.*single_writer='external'"):
            check_exclusion(storage_of(url, "the place"))
        manager = MultiNodeCheckpointManager(url, single_writer="external")
        assert Trial(epochs=1).train(manager) == 1
        assert [name for name in storage_of(url, "the place").list("") if name.startswith(".probe")] == []


def test_a_store_that_does_not_read_ranges_is_named(server: Served) -> None:
    """Whole objects instead of ranges are an error that says so, never wrong bytes."""
    with behind(server, patient=True) as (proxy, url):
        storage = storage_of(url, "the place")
        storage.replace("x", b"0123456789")
        proxy.dropped = frozenset({"range"})
        with pytest.raises(StorageError, match="does not read ranges"):
            storage.read_range("x", 2, 3)


def test_a_few_of_many_blobs_take_a_few_requests(server: Served, tell) -> None:
    """Neighbours come together, absent records cost one request each: 5 of 500 blobs, and all of them."""
    with behind(server, patient=True) as (proxy, url):
        many = {f"blob_{number:03}": torch.full((1000,), float(number)) for number in range(500)}
        manager = MultiNodeCheckpointManager(url)
        with proxy.counting() as saving:
            assert Trial(many, epochs=1).train(manager) == 1
        with proxy.counting() as opening:
            checkpoint = open_checkpoint(url)
        names = [f"blob_{number:03}" for number in (3, 100, 200, 350, 499)]
        with proxy.counting() as some:
            found = checkpoint.load_tensors(names)
        assert all(torch.equal(found[name], many[name]) for name in names)
        with proxy.counting() as everything:
            assert len(checkpoint.load_tensors("blob_*")) == 500
        told = {"two saves": saving, "open": opening, "5 of 500": some, "500 of 500": everything}
        tell("requests: " + "; ".join(f"{name} {dict(counts)}" for name, counts in told.items()))
        assert some.total() <= 4
        assert everything.total() <= 8
        assert opening.total() <= 25
        assert saving.total() <= 100


def test_large_files_go_in_parts_whatever_happens(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts go side by side, each is repeated by itself, and a lost answer to the last word is looked up."""
    monkeypatch.setattr(object_store, "PUT_IN_ONE_BYTES", 1 << 20)
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)
    data = secrets.token_bytes(1 << 20) * 17
    with behind(server) as (proxy, url):
        storage = storage_of(url, "the place")
        proxy.schedule = in_turn(3, [fault for fault in FAULTS if fault not in ("cut", "slow")])
        write(storage, "data/x", data)
        proxy.schedule = lambda asked: (
            "reset after" if asked.query[:8] == "uploadId" and asked.method == "POST" else ""
        )
        write(storage, "data/y", data)
        assert proxy.fired["reset after"] >= 1
        proxy.schedule = lambda asked: ""
        for name in ("x", "y"):
            got = storage.read_range(f"data/{name}", 4 << 20, 3 << 20)
            assert got == data[4 << 20 : 7 << 20]
            assert storage.stat(f"data/{name}") == len(data)
        puts = [
            one.asked for one in proxy.seen if one.asked.method == "PUT" and "partNumber" in one.asked.query
        ]
        assert max(one.nbytes for one in puts) <= (5 << 20) + 4096
        assert len({one.query.partition("partNumber=")[2][:1] for one in puts}) == 4


def test_parts_that_nobody_completes_are_given_up(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the writer whose part fails for good, and by the next one after a writer was killed."""
    monkeypatch.setattr(object_store, "PUT_IN_ONE_BYTES", 1 << 20)
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)
    with behind(server, patient=True) as (proxy, url):
        storage = storage_of(url, "the place")
        proxy.schedule = lambda asked: "501" if "partNumber=2" in asked.query else ""
        with pytest.raises(StorageError, match="cannot write"):
            write(storage, "data/x", bytes(12 << 20))
        assert (storage.unfinished("data"), storage.stat("data/x")) == ([], None)
        proxy.schedule = lambda asked: ""
        bucket, _, key = "/".join((storage.root, "data/e1/y")).partition("/")
        storage.system.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        assert [name for name, _ in storage.unfinished("data")] == [f"{bucket}/{key}"]
        assert Trial(epochs=1).train(MultiNodeCheckpointManager(url)) == 1
        assert storage.unfinished("data") == []


def write(storage: ObjectStorage, path: str, data: bytes) -> None:
    handle = storage.open_exclusive(path)
    try:
        handle.write_at(0, memoryview(data))
        handle.sync_file()
    finally:
        handle.close()
