"""Checkpoints on a real S3 server with conditional PUTs; without `torchrelay[test]` skipped, and said."""

from __future__ import annotations

import random
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from bad_input import Trial
from s3_server import BUCKET, needs_s3, s3_server
from stores import QUICK, Faulty, store_of
from test_object_storage import story, write

from torchrelay import MultiNodeCheckpointManager, open_checkpoint
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage.base import RetryTimeouts, check_exclusion
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import open_file_system, storage_of
from torchrelay.errors import StorageError
from torchrelay.tools.cli.main import main

pytestmark = needs_s3


@pytest.fixture(scope="module", autouse=True)
def server():
    """One server for this file; clients find it by the environment."""
    with s3_server() as env, pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        yield env


def test_the_log_tells_the_same_story_as_in_memory():
    """Commits, retention, release and takeover give what they give in memory; the probe finds nothing."""
    storage = storage_of(f"s3://{BUCKET}/story/a:b c%3A", "the place")
    check_exclusion(storage)
    assert storage.list("") == []
    assert story(storage) == story(store_of(Faulty()))


def test_faults_between_us_and_the_server(server):
    """With overload before, and lost answers after, a third of the requests the story is the same."""
    from botocore.exceptions import ClientError
    from s3fs import S3FileSystem

    fired = {"503": 0, "lost": 0}

    class Flaky(S3FileSystem):
        draw = random.Random(7)

        async def _call_s3(self, method, *args, **kwargs):
            kind = self.draw.choice(("", "", "", "", "503", "lost"))
            if kind == "503":
                fired[kind] += 1
                told = {"Error": {"Code": "503"}, "ResponseMetadata": {"HTTPStatusCode": 503}}
                raise ClientError(told, method)
            answer = await super()._call_s3(method, *args, **kwargs)
            if kind == "lost":
                fired[kind] += 1
                raise ConnectionResetError("reset after the answer")
            return answer

    client = {"endpoint_url": server["AWS_ENDPOINT_URL"], "key": "any", "secret": "any"}
    system = Flaky(**client, use_listings_cache=False)
    storage = ObjectStorage(system, f"{BUCKET}/flaky", f"s3://{BUCKET}/flaky", patience=QUICK)
    assert story(storage) == story(store_of(Faulty()))
    assert min(fired.values()) > 20


def test_races_for_a_name_on_the_server():
    """Of eight clients that create a name at the same moment exactly one does, and its bytes stay."""
    races, wins = 25, []
    gate = threading.Barrier(8)

    def run(me):
        storage = storage_of(f"s3://{BUCKET}/races", "the place")
        for race in range(races):
            gate.wait()
            try:
                storage.link_exclusive(f"log/{race}", b"%d of %d" % (me, race))
            except FileExistsError:
                continue
            wins.append((race, me))

    threads = [threading.Thread(target=run, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(race for race, _ in wins) == list(range(races))
    storage = storage_of(f"s3://{BUCKET}/races", "the place")
    for race, me in wins:
        assert storage.read_range(f"log/{race}", 0, 99) == b"%d of %d" % (me, race)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_on_s3(asynchronous):
    """A job trains, resumes in another manager, is read in part; retention leaves what it should."""
    url = f"s3://{BUCKET}/runs/asynchronous-{asynchronous}"
    blobs = {"w": torch.arange(3_000_000.0), "model": torch.nn.Linear(4, 4), "n": 3}
    manager = MultiNodeCheckpointManager(url, keep_last=2, asynchronous=asynchronous)
    assert Trial(blobs, epochs=3).train(manager) == 3
    again = {"w": torch.zeros(3_000_000), "model": torch.nn.Linear(4, 4), "n": 3}
    assert Trial(again, epochs=4).train(MultiNodeCheckpointManager(url), 3) == 4
    assert torch.equal(again["w"], blobs["w"])
    checkpoint = open_checkpoint(url, 4)
    assert torch.equal(checkpoint.load_tensors("model.weight")["model.weight"], again["model"].weight)
    storage = storage_of(url, "the place")
    view = open_log(storage)
    assert {2, 3, 4} <= set(view.epochs()), "others only where these refer to them"
    needed = {name for one in view.entries for name in (one.attempt_name, *one.needs)}
    assert storage.list("data") == sorted(needed)


def test_marks_and_prune_on_s3(capsys):
    """At a URL, too, what is tagged stays and loads by its tag, and what no rule keeps goes."""
    url = f"s3://{BUCKET}/runs/pruned"
    blobs = {"w": torch.arange(30_000.0)}
    assert Trial(blobs, epochs=2).train(MultiNodeCheckpointManager(url, reuse=False)) == 2
    assert main(["ckpt", "tag", f"{url}@1", "paper"]) == main(["ckpt", "prune", url, "--keep-last", "1"]) == 0
    assert "kept: 1 to 2\n" in capsys.readouterr().out
    storage = storage_of(url, "the place")
    assert [name[:9] for name in storage.list("data")] == ["e00000001", "e00000002"]
    assert open_checkpoint(url, "tag=paper").load_tensors("w")["w"].shape == (30_000,)


def test_ends_of_files():
    """Reads at, across and beyond the end give what there is, also of an empty object."""
    storage = storage_of(f"s3://{BUCKET}/ends", "the place")
    storage.replace("x", b"abc")
    storage.replace("empty", b"")
    assert [storage.read_range("x", offset, 2) for offset in range(5)] == [b"ab", b"bc", b"c", b"", b""]
    assert (storage.read_range("empty", 0, 9), storage.stat("empty"), storage.stat("no")) == (b"", 0, None)
    with pytest.raises(FileNotFoundError):
        storage.read_range("no", 0, 1)


@pytest.mark.slow
def test_a_file_in_parts():
    """A file beyond what fsspec puts at once goes in parts, and comes back."""
    storage = storage_of(f"s3://{BUCKET}/large", "the place")
    block = random.Random(1).randbytes(1 << 20)
    write(storage, "data/x", block * 110)
    assert storage.stat("data/x") == 110 << 20
    for offset in (0, 49 << 20, (110 << 20) - 100):
        assert storage.read_range("data/x", offset + 7, 90) == block[7:97] or offset > 50 << 20


def test_a_bucket_that_is_not_there():
    """The message names the place and what to check; nothing is waited for."""
    manager = MultiNodeCheckpointManager("s3://no-such-bucket/run")
    trial = Trial()
    with pytest.warns(UserWarning, match=r"no-such-bucket/run.*does not exist; check that the bucket"):
        trial.train(manager)


def test_a_server_that_is_away():
    """Nobody answers: an error of ours at the deadline, not one of the client's."""
    system, root = open_file_system(f"s3://{BUCKET}/away", "the place")
    from s3fs import S3FileSystem

    away = S3FileSystem(
        endpoint_url="http://127.0.0.1:9", key="a", secret="b", config_kwargs={"retries": {"max_attempts": 0}}
    )
    storage = ObjectStorage(away, root, "s3://away", patience=RetryTimeouts(0.2, 0.05, 0.1))
    with pytest.raises(StorageError, match=r"cannot look at s3://away/x: .*try again when the store answers"):
        storage.stat("x")
    assert system is not away


class Overloaded(BaseHTTPRequestHandler):
    """Answers everything with 503."""

    asked = 0

    def do_HEAD(self):
        type(self).asked += 1
        self.send_response(503)
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *args):
        pass


def test_repeating_leaves_the_users_random_numbers_alone(monkeypatch):
    """An overloaded server is asked again by us alone: botocore's pauses come from Python's global stream."""
    with HTTPServer(("127.0.0.1", 0), Overloaded) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{http.server_port}")
        system, root = open_file_system(f"s3://{BUCKET}/overloaded", "the place")
        assert not system.dircache.use_listings_cache
        storage = ObjectStorage(system, root, "s3://overloaded", patience=RetryTimeouts(0.5, 0.05, 0.1))
        random.seed(3)
        before = random.getstate()
        with pytest.raises(StorageError, match="try again when"):
            storage.stat("x")
        http.shutdown()
    assert random.getstate() == before
    assert Overloaded.asked >= 3
