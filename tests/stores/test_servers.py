"""What is saved, on real servers of stores: the same story on each, and what only one of them shows."""

from __future__ import annotations

import json
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import azurite_server
import gs_server
import pytest
import rgw_server
import s3_server
import sftp_server
import torch
from bad_input import Trial
from exact_job import expected_trail
from log_helpers import entry
from samples import sample
from store_proxy import FAULTS, in_turn, proxy_to
from store_servers import Served, Starting, skip_without
from store_worlds import CLIENT, World, impatient
from surroundings import surroundings
from tcp_relay import relay_to
from torchrun import REPOSITORY, torchrun

import torchrelay
from torchrelay import MultiNodeCheckpointManager, open_checkpoint
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.lease import WriterIdentity
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.base import check_exclusion
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.errors import DirectoryInUseError, FencedError, UsageError
from torchrelay.tools.cli.main import main

pytestmark = pytest.mark.ranks  # some of these are processes, and all share one start of each server

STARTS: dict[str, tuple[str, Starting]] = {
    "moto": (", ".join(s3_server.MISSING), s3_server.moto),
    "sftp": (sftp_server.MISSING, sftp_server.sftp),
    "azurite": (azurite_server.MISSING, azurite_server.azurite),
    "rgw": (rgw_server.MISSING, rgw_server.rgw),
}
WITHOUT_CONDITIONS = {"gs": (gs_server.MISSING, gs_server.gs)}


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[str, Served]]:
    """Servers by name, each started when it is first asked for; all end with the session."""
    with ExitStack() as running:

        class Started(dict[str, Served]):
            def __missing__(self, name: str) -> Served:
                absent, start = {**STARTS, **WITHOUT_CONDITIONS}[name]
                skip_without(absent)
                self[name] = running.enter_context(start())
                return self[name]

        yield Started()


@pytest.fixture
def place(request: pytest.FixtureRequest, servers: dict[str, Served]) -> Iterator[str]:
    """The URL of an empty place on the server that the test's parameter names."""
    fresh = secrets.token_hex(4)
    if request.param == "memory":
        yield f"memory://{fresh}"
        return
    served = servers[request.param]
    with surroundings(served.seen_at(served.port)):
        yield f"{served.url}{fresh}"


def everywhere(*names: str) -> Any:
    return pytest.mark.parametrize("place", names, indirect=True)


def blobs() -> dict[str, Any]:
    return {"w": torch.arange(300_000.0), "model": torch.nn.Linear(4, 4), "n": 3}


@everywhere("memory", "moto", "sftp", "azurite", *sample((), ("rgw",)))
def test_the_life_of_checkpoints(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Saved, proved, resumed, loaded in part, marked, pruned and looked at on every kind of store."""
    first = blobs()
    assert Trial(first, epochs=2).train(MultiNodeCheckpointManager(place, reuse=False)) == 2
    assert main(["verify", place, "--level", "full"]) == 0
    again = {**blobs(), "w": torch.zeros(300_000)}
    assert Trial(again, epochs=3).train(MultiNodeCheckpointManager(place, reuse=False), resume="must") == 3
    assert torch.equal(again["w"], first["w"])
    assert torch.equal(again["model"].weight, first["model"].weight)
    checkpoint = open_checkpoint(place, 3)
    assert torch.equal(checkpoint.load_tensors("model.weight")["model.weight"], first["model"].weight)
    assert torch.equal(checkpoint["w"][1000:1010], first["w"][1000:1010])
    assert (
        main(["ckpt", "tag", f"{place}@1", "paper"])
        == main(["ckpt", "prune", place, "--keep-last", "1"])
        == 0
    )
    storage = storage_of(place, "the place")
    assert [name[:9] for name in storage.list("data")] == ["e00000001", "e00000003"]
    assert open_checkpoint(place, "tag=paper").load_tensors("w")["w"].shape == (300_000,)
    capsys.readouterr()
    storage.replace("data/e00000009-abcdef123456/trainer_0.9.main.safetensors", b"left by a crash")
    assert main(["ckpt", "repair", place, "--delete-orphans"]) == main(["ckpt", "why", place]) == 0
    told = capsys.readouterr().out
    assert "deleted  orphan  data/e00000009-abcdef123456" in told
    assert "chosen" in told
    assert open_log(storage).epochs() == (1, 3)


@everywhere("sftp", "azurite", "rgw")
def test_files_of_states(place: str) -> None:
    """A state archive and a package at a URL load as they were saved; a taken name is refused."""
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    torchrelay.save_states(f"{place}/model.zip", model, {"epoch": 3, "note": "best"})
    assert torchrelay.load_states(f"{place}/model.zip", other) == {"epoch": 3, "note": "best"}
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(UsageError, match="exists already"):
        torchrelay.save_states(f"{place}/model.zip", model)
    torchrelay.save_states(f"{place}/model.zip", model, overwrite=True)
    torchrelay.save(f"{place}/package.zip", model, torch.ones(3, 4))
    package = torchrelay.load(f"{place}/package.zip")
    assert torch.equal(package(torch.ones(3, 4)), model(torch.ones(3, 4)))


@everywhere("moto", "sftp", "azurite")
def test_files_of_blobs_and_other_formats(place: str, tmp_path: Path) -> None:
    """Blob files, exports, imports and reports go to a URL, and what can be read comes from there."""
    model = torch.nn.Linear(4, 2)
    torchrelay.save_blobs(f"{place}/blobs", {"model": model, "n": 3})
    with pytest.raises(UsageError, match="exists already"):
        torchrelay.save_blobs(f"{place}/blobs", {"n": 4})
    torchrelay.save_blobs(f"{place}/blobs", {"model": model, "n": 4}, overwrite=True)
    loaded = torchrelay.load_blobs(f"{place}/blobs", ["model.weight", "n"])
    assert torch.equal(loaded["model.weight"], model.weight)
    assert loaded["n"] == 4
    run = tmp_path / "run"
    assert Trial({"model": model}, epochs=1).train(str(run)) == 1
    for form, name in (("safetensors", "one.safetensors"), ("hf", "directory")):
        assert (
            main(["ckpt", "export", str(run), "--to", form, "-o", f"{place}/{name}", "--blobs", "model.*"])
            == 0
        )
        assert main(["ckpt", "import", f"{place}/{name}", "--from", form, "-o", f"{place}/from-{form}"]) == 0
        back = open_checkpoint(f"{place}/from-{form}").load_tensors("model.model.weight")
        assert torch.equal(back["model.model.weight"], model.weight)
        assert (
            main(["ckpt", "export", str(run), "--to", form, "-o", f"{place}/{name}"]) == UsageError.exit_code
        )
    assert main(["report", str(run), "-o", f"{place}/report.html"]) == 0
    assert storage_of(place, "the place").read_range("report.html", 0, 15).lower() == b"<!doctype html>"


@everywhere(*STARTS)
def test_two_racing_writers_make_one_history(place: str) -> None:
    """Of many that create a name at one moment one does, and of two writers of a log one goes on."""
    check_exclusion(storage_of(place, "the place"))
    wins: list[tuple[int, int]] = []
    gate = threading.Barrier(6)

    def run(me: int) -> None:
        storage = storage_of(place, "the place")
        for race in range(8):
            gate.wait(60)
            try:
                storage.link_exclusive(f"races/{race}", b"%d of %d" % (me, race))
            except FileExistsError:
                continue
            wins.append((race, me))

    threads = [threading.Thread(target=run, args=(me,)) for me in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    storage = storage_of(place, "the place")
    assert sorted(race for race, _ in wins) == list(range(8))
    assert all(storage.read_range(f"races/{race}", 0, 99) == b"%d of %d" % (me, race) for race, me in wins)
    assert _histories(place) == open_log(storage_of(f"{place}/run", "the place")).epochs()


def _histories(place: str) -> tuple[int, ...]:
    """Two writers, on hosts that each other cannot look into, take one log; what both had acknowledged."""
    acknowledged: list[int] = []

    def write(me: str) -> None:
        identity = replace(WriterIdentity.here("job"), host=me, boot_id=me, pid_start=me)
        with suppress(FencedError, DirectoryInUseError):
            writer = LogWriter.take(
                storage_of(f"{place}/run", "the place"), "job", identity, patience_secs=0.2, period_secs=3600
            )
            for _ in range(4):
                newest = writer.view.newest()
                epoch = newest.position.epoch + 1 if newest else 0
                writer.commit(entry(epoch, nonce=secrets.token_hex(3)))
                acknowledged.append(epoch)

    threads = [threading.Thread(target=write, args=(f"host-{name}",)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert acknowledged
    return tuple(sorted(acknowledged))


def test_lost_connections_to_sftp(servers: dict[str, Served]) -> None:
    """A job whose connection to an sftp server is cut again and again saves what it says."""
    served = servers["sftp"]
    with relay_to(served.port) as relay, surroundings(served.seen_at(relay.port)):
        place = f"{served.url}{secrets.token_hex(4)}"
        relay.cut_after = [2_000, 6_000, 8_000, 12_000, 40_000, 500_000, 900_000]
        blobs = {"w": torch.arange(200_000.0)}
        assert Trial(blobs, epochs=3).train(MultiNodeCheckpointManager(place, reuse=False)) == 3
        assert (relay.cuts >= 6, main(["verify", place])) == (True, 0)
        assert open_log(storage_of(place, "the place")).epochs() == (0, 1, 2, 3)
        assert torch.equal(open_checkpoint(place).load_tensors("w")["w"], blobs["w"])


def test_faults_before_ceph(servers: dict[str, Served]) -> None:
    """Behind a proxy that strikes each sixth request a job on Ceph saves what it says."""
    served = servers["rgw"]
    struck = [fault for fault in FAULTS if fault != "silence"]
    with proxy_to(served.port) as proxy, surroundings(served.seen_at(proxy.port)):
        place = f"{served.url}{secrets.token_hex(4)}"
        proxy.schedule = in_turn(5, struck)
        assert Trial({"w": torch.zeros(200_000)}, epochs=3).train(MultiNodeCheckpointManager(place)) == 3
        assert main(["verify", place]) == 0
        assert open_log(storage_of(place, "the place")).epochs() == (0, 1, 2, 3)
        assert all(proxy.fired[fault] for fault in struck), proxy.fired


@pytest.mark.timeout(600)  # half a minute, but for what other work there is on the machine
@pytest.mark.parametrize(("server", "first"), [("moto", 0), *sample((), (("rgw", 2),))])
def test_any_schedule_of_faults(
    servers: dict[str, Served], server: str, first: int, tell: Callable[[str], None]
) -> None:
    """Whatever faults meet whichever requests, what was acknowledged is there, whole, and all calls end."""
    served, ended, acknowledged = servers[server], Counter[str](), 0
    with proxy_to(served.port) as proxy, surroundings({**served.seen_at(proxy.port), **CLIENT}), impatient():
        for number in range(first, first + sample(1, 2)):  # scripts/campaigns/store-storm: many more
            world = World(f"1-{number}", f"{served.url}{secrets.token_hex(4)}", proxy, calls=4)
            world.play()
            ended += world.ended
            acknowledged += world.known.acknowledged
            assert world.striking.dealt > 0, world.story
        assert acknowledged > 0
        tell(f"faults before {server}: {dict(proxy.fired)}; calls ended: {dict(ended)}")


@pytest.mark.parametrize("server", ["rgw", "gs"])
def test_two_ranks_are_killed_and_resume_to_equal_bits(
    servers: dict[str, Served], server: str, tmp_path: Path
) -> None:
    """A job of torchrun with its checkpoints in a store loses a rank in an epoch, and goes on."""
    served = servers[server]
    promise = ["external"] if server in WITHOUT_CONDITIONS else []
    told = (f"{served.url}{secrets.token_hex(4)}", str(tmp_path), *promise)
    done = torchrun(
        REPOSITORY / "tests/programs/store_resume.py", *told, warm=True, ranks=2, cwd=tmp_path,
        max_restarts=1, timeout_secs=100,
        env={**served.seen_at(served.port), "PYTHONPATH": str(REPOSITORY / "tests/helpers")},
    )  # fmt: skip
    assert done.rc == 0, str(done)
    assert [path.name for path in (tmp_path / "kills").iterdir()]
    for rank in range(2):
        whole, killed = (
            json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for name in ("whole", "killed")
        )
        assert killed["digest"] == whole["digest"]
        assert killed["trail"] == expected_trail(whole["trail"], 1)


@everywhere("gs")
def test_a_store_that_ignores_conditions(place: str) -> None:
    """Writers are refused, with the remedy, until it is promised that nobody else writes; then all works."""
    w = torch.arange(300_000.0)
    with pytest.raises(UsageError, match=r"although its name is taken.*single_writer='external'"):
        Trial({"w": w}, epochs=1).train(MultiNodeCheckpointManager(place))
    assert storage_of(place, "the place").list("") == []

    def alone() -> MultiNodeCheckpointManager:
        return MultiNodeCheckpointManager(place, reuse=False, single_writer="external")

    promise = ["--single-writer", "external"]
    assert Trial({"w": w}, epochs=2).train(alone()) == 2
    again = torch.zeros(300_000)
    assert Trial({"w": again}, epochs=4).train(alone(), resume="must") == 4
    assert torch.equal(again, w)
    for verb in (
        ["ckpt", "tag", f"{place}@1", "paper"],
        ["ckpt", "pin", f"{place}@2"],
        ["ckpt", "prune", place, "--keep-last", "1"],
    ):
        assert (main(verb), main([*verb, *promise])) == (UsageError.exit_code, 0), verb
    assert open_log(storage_of(place, "the place")).epochs() == (1, 2, 4)
    storage_of(place, "the place").replace("data/e00000009-abcdef123456/x.safetensors", b"left by a crash")
    mend = ["ckpt", "repair", place, "--delete-orphans"]
    assert (main(mend), main([*mend, *promise])) == (UsageError.exit_code, 0)
    assert main(["verify", place, "--level", "full"]) == 0
    assert torch.equal(open_checkpoint(place, "tag=paper")["w"][1000:1010], w[1000:1010])
