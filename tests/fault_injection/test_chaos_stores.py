"""`torchrelay chaos URL`: the built-in run in a store whose calls fail, lose answers or end the process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from s3_server import BUCKET, needs_s3, s3_server
from samples import sample

from torchrelay.chaos import damage
from torchrelay.chaos.builtin import BuiltIn, Wish, built_in
from torchrelay.chaos.child.store_faults import StruckFileSystem
from torchrelay.chaos.faults import Fault
from torchrelay.chaos.places import fresh_prefix
from torchrelay.chaos.scenarios import scenarios
from torchrelay.chaos.strikes import Strike, Verdict, strike
from torchrelay.errors import StorageError, UsageError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HERE = Path(__file__).resolve().parent
TRIALS = {
    "kill": sample(4, 8), "errno": sample(6, 12), "read": sample(2, 4), "stall": 2,
    "flip": sample(8, 16), "truncate": sample(4, 8),
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuiltIn]:
    """The built-in run over fsspec's local file system, below a directory that has a file already."""
    top = tmp_path_factory.mktemp("store")
    (top / "foreign").write_text("not ours")
    with built_in(Wish(seed=5), f"local://{top}") as made:
        made.wish = replace(made.wish, scenarios=scenarios(["resume"]))
        yield made
    assert [one.name for one in top.iterdir()] == ["foreign"], "what was made is gone, what was there is not"


def tried(target: BuiltIn, kind: str, trials: int, tell) -> None:
    """Trials of a kind survive, and most of the faults happened."""
    target.wish = replace(target.wish, trials=trials)
    tally = target.run(kind)
    for row in tally.rows():
        tell(f"chaos in a store, {' '.join(row)}")
    assert not tally.bad, tally.bad[:5]
    assert tally.count(kind) >= trials * 3 // 4


@pytest.mark.parametrize("kind", TRIALS)
def test_calls_to_a_store_are_struck(store: BuiltIn, kind: str, tell) -> None:
    """Whatever a store does at whatever call, acknowledged epochs are proved, and the run goes on."""
    tried(store, kind, TRIALS[kind], tell)


def test_lost_epochs_are_seen_in_a_store(store: BuiltIn) -> None:
    """An epoch that was acknowledged before its manifest was written is lost by a kill there."""
    ready = store.prepared(scenarios(["resume"]))[0]
    careless = replace(ready.scenario, program=f"{HERE / 'struck_programs.py'}:acknowledging_early")
    at = [one.number for one in ready.calls if one.path.endswith("manifest.json") and one.kind == "write"][-1]
    early = Strike(replace(ready, scenario=careless), Fault("kill", at))
    outcome = store.pool.map(strike, [early])[0]
    assert outcome.verdict is Verdict.LOST and "was acknowledged" in outcome.reason


def test_a_trial_in_a_store_is_repeated(store: BuiltIn) -> None:
    """Names mean the trial again: lost answers and damage; there is no power to cut."""
    for name, verdict in {
        "resume/ETIMEDOUT@30:after": Verdict.SURVIVED,
        "resume/truncate@3": Verdict.REFUSED,
    }.items():
        outcomes = store.repeat(name).outcomes
        assert [(one.name, one.verdict) for one in outcomes] == [(name, verdict)]
    with pytest.raises(UsageError, match="lies on no device"):
        store.repeat("resume/ext4@5")
    assert "lies on no device" in store.run("power").skipped["power ext4"]


def test_damage_is_put_back(store: BuiltIn) -> None:
    """A change of an object is the one that was drawn, and goes when it was looked at."""
    copy = store.prepared(scenarios(["resume"]))[0].copy(store.directory / "damage")
    tree = damage.tree_of(copy.place)
    path = next(one for one in tree.paths() if one.endswith("job.json"))
    whole = tree.read(path)
    with damage.done_to(copy.place, damage.Damage("flip", 0, path, 3, 1)):
        assert [a ^ b for a, b in zip(tree.read(path), whole, strict=True) if a != b] == [2]
    assert tree.read(path) == whole
    copy.remove()
    assert not tree.paths()


def test_every_call_is_counted_and_struck_once(tmp_path: Path) -> None:
    """A fault that does not last happens to one call; one that lasts to all later ones of its sort."""
    from fsspec.implementations.local import LocalFileSystem

    def errors(fault: Fault) -> list[bool]:
        system = StruckFileSystem(LocalFileSystem(), str(tmp_path), fault, tmp_path / f"log-{fault}")
        found = []
        for name in "abc":
            try:
                system.pipe_file(f"{tmp_path}/{name}", b"x")
                found.append(False)
            except OSError:
                found.append(True)
            system.isdir(str(tmp_path))
        assert (tmp_path / f"log-{fault}.struck").read_text() == "write b"
        return found

    assert errors(Fault("EIO", 3)) == [False, True, False]
    assert errors(Fault("EIO", 3, lasting=True)) == [False, True, True]


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("memory://bucket/run", UsageError, "lives in one process"),
        ("foo://bucket/run", UsageError, "cannot be opened"),
        ("local:///nowhere/at/all", UsageError, "is not a directory"),
        ("local:///proc/1", StorageError, "cannot write to local:///proc/1"),
    ],
)
def test_places_that_are_no_stores_are_refused(url: str, error: type[Exception], said: str) -> None:
    """Where trials cannot be made the reason is said, before anything runs."""
    with pytest.raises(error, match=said), fresh_prefix(url):
        raise AssertionError("it was taken")


@needs_s3
def test_a_real_server_with_conditional_writes(monkeypatch: pytest.MonkeyPatch, tell) -> None:
    """On a moto S3 server nobody needs to be told to be the single writer, and nothing is lost."""
    with s3_server() as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with built_in(Wish(seed=6, scenarios=scenarios(["resume"])), f"s3://{BUCKET}/chaos") as target:
            for kind in ("kill", "errno"):  # each trial asks the server some hundred times
                tried(target, kind, sample(1, 2), tell)
            assert target.place.options() == {"single_writer": None}
        import s3fs

        assert not s3fs.S3FileSystem(skip_instance_cache=True).find(BUCKET), "everything is removed"


def test_the_command_takes_a_url(tmp_path: Path) -> None:
    """`torchrelay chaos URL` prints the table of a store, and leaves nothing there."""
    words = [
        "--kinds",
        "kill",
        "--trials",
        "2",
        "--scenarios",
        "first",
        "--workers",
        "1",
        "--json",
        f"local://{tmp_path}",
    ]
    command = [sys.executable, "-m", "torchrelay", "chaos", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    told = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert told["kinds"]["kill"]["survived"] == 2 and not told["findings"]
    assert not list(tmp_path.iterdir())
