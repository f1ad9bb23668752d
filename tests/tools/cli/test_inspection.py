"""Looking at runs: every verb that reads, on local paths and in stores, for people and for programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from epochs import Writing, moment, parameter, value
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrun import torchrun

from torchrelay import Job, JobRunner, LocalSession, max_epochs, open_checkpoint
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.position import Facts
from torchrelay.checkpoint.load import info
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.retention import Keeping, delete_left
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.local import LocalStorage, LocalWriteHandle
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.errors import UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.tools.cli.completion import tree_of
from torchrelay.tools.cli.main import main, whole_parser

READING = [
    ["ls"], ["show"], ["ckpt", "stats"], ["runs", "compare"], ["verify"],
    ["ckpt", "ls"], ["ckpt", "show"], ["ckpt", "verify"], ["ckpt", "why"], ["ckpt", "du"],
]  # fmt: skip
"""Verbs that only read, and take a run."""
CHANGING = {"ckpt repair", "ckpt export", "ckpt import", "chaos", "", "ckpt", "completion"}
LEAVES = [parameter("model.w", torch.arange(6.0)), moment("optimizer.m", torch.ones(6)), value("total", 3)]


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(one) for one in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    code, out, _ = told(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


def tied() -> torch.nn.Module:
    """Two layers that share one weight; the same on every node."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def train(run: Path, epochs: int, nodes: int = 3, metric: float = 1.0, **options: Any) -> None:
    """A real run: a module with tied weights, its optimizer, a value, on some nodes of one process."""
    blobs = {
        "model": lambda ctx: tied(),
        "optimizer": lambda ctx: torch.optim.Adam(ctx["model"].parameters()),
        "total": 0,
    }
    job = Job("looked-at", blobs=blobs)

    @job.epoch
    def train(ctx: Any) -> None:
        ctx["total"] += 1
        ctx.log("val/acc", metric if ctx.epoch == 2 else 0.0)

    job.stop_when(max_epochs(epochs))
    with LocalSession([f"trainer_{rank}" for rank in range(nodes)]) as session:
        JobRunner(job, run, **options).train(session)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the runs `one` (3 epochs) and `two` (2 epochs, another configuration)."""
    runs = tmp_path_factory.mktemp("runs")
    for name, epochs, lr in (("one", 3, 0.1), ("two", 2, 0.2)):
        train(runs / name, epochs)
        (runs / name / "config").mkdir()
        (runs / name / "config/resolved.yaml").write_text(f"optimizer: {{lr: {lr}, beta: 0.9}}\nseed: 7\n")
    return runs


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


# ls of a directory of runs


def test_ls_of_a_store_has_a_line_for_each_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Name, job, state, epoch, best metric with its epoch; one damaged run hides no other."""
    code, out, err = told(capsys, "ls", runs)
    lines = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "") and lines[0] == ["run", "job", "state", "epoch", "best", "updated"]
    assert lines[1][:7] == ["one", "looked-at", "finished", "3", "val/acc=1", "(epoch", "2)"]
    (runs / "one/status.json").write_text("{")
    code, out, err = told(capsys, "ls", runs)
    assert code == 0 and err.startswith("torchrelay: one: ") and err.count("\n") == 1
    assert "unreadable" in out.splitlines()[1] and "finished" in out.splitlines()[2]
    found = as_json(capsys, "ls", runs)["runs"]
    assert [one["run"] for one in found] == ["one", "two"]
    assert (found[1]["best"], found[1]["best_epoch"], found[1]["epoch"]) == (1.0, 2, 2)


NAMES = st.text(max_size=9) | st.sampled_from([',"shards":{', '"facts":{', "shards", "world", "format"])


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(NAMES, st.floats(), max_size=3),
    st.dictionaries(NAMES, st.just({"stop": True, "world": {}}), max_size=2),
    st.text(max_size=20) | st.just(',"world":{"nodes":["x"]}'),
    st.integers(1, 3),
)
def test_a_glance_sees_what_reading_sees(
    metrics: dict[str, float], stop: dict[str, Any], said: str, nodes: int
) -> None:
    """Whatever metrics, conditions and values are called, the text search finds the very same facts."""
    storage = storage_of("memory://glance/one", "the place")
    try:
        with Writing(storage) as writing:
            writing.save(0, [*LEAVES, value("world", {"facts": said, "shards": {}})], nodes=nodes)
            (manifest,) = writing.manifests.values()
    finally:
        fsspec.filesystem("memory").rm("/glance", recursive=True)
    try:
        data = codec.encode(replace(manifest, facts=Facts(metrics=metrics, stop=stop, total_steps=7)))
    except UsageError:  # a lone surrogate, which no manifest can hold
        return
    seen, read = info._seen_in(data.decode(), "it"), codec.decode(data)
    assert repr(seen.facts) == repr(read.facts)
    assert seen.nodes == len(read.world.nodes)
    assert seen.own_bytes == sum(shard.nbytes for shard in read.shards if shard.source == 0)


def test_large_manifests_are_listed_by_the_notes_of_their_saves(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is the same, and no manifest is read but where notes are lost; a lost manifest still shows."""
    plain = told(capsys, "ls", runs / "one")
    monkeypatch.setattr(info, "LARGE_BYTES", 900)
    read: list[str] = []
    whole = codec.read_bytes
    monkeypatch.setattr(
        codec,
        "read_bytes",
        lambda storage, entry: (read.append(entry.attempt_name), whole(storage, entry))[1],
    )
    assert told(capsys, "ls", runs / "one") == plain and not read
    notes = sorted((runs / "one/checkpoints/data").glob("*/stats.json"))
    notes[0].write_text("[1")
    assert told(capsys, "ls", runs / "one") == plain and read == [notes[0].parent.name]
    (notes[1].parent / "manifest.json").unlink()
    assert "manifest unreadable" in told(capsys, "ls", runs / "one")[1].splitlines()[2]


# ckpt show


def test_ckpt_show_tells_the_blobs_that_open_checkpoint_tells(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kind, scope, type, shape and bytes of every blob and leaf are those of the reader, aliases included."""
    found = as_json(capsys, "ckpt", "show", f"{runs / 'one'}@best")
    opened = open_checkpoint(runs / "one", "best")
    assert found["epoch"] == opened.epoch == 2
    assert [one["name"] for one in found["blobs"]] == list(opened.blobs)
    for one in found["blobs"]:
        blob = opened.blobs[one["name"]]
        assert (one["kind"], one["scope"], one["bytes"]) == (blob.kind, blob.scope, blob.bytes)
        assert one["leaves"] == len(blob.leaves)
    leaves = as_json(capsys, "ckpt", "show", f"{runs / 'one'}@best", "--leaves", "--blobs", "model.*")
    asked = {leaf.name: leaf for leaf in opened.leaves if leaf.name.startswith("model.")}
    assert {one["name"] for one in leaves["blobs"]} == set(asked) and len(asked) == 4
    for one in leaves["blobs"]:
        leaf = asked[one["name"]]
        assert (one["shape"], one["dtypes"]) == (list(leaf.shape), [leaf.dtype])
        assert one["bytes"] == (0 if leaf.alias_of else leaf.bytes)


def test_of_very_many_blobs_the_largest_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand are shown, the rest is counted; --all shows them, a pattern without meaning is refused."""
    leaves = [parameter(f"p{number:04d}.w", torch.zeros(1 + number % 7)) for number in range(1100)]
    with Writing(tmp_path / "many") as writing:
        writing.save(1, leaves)
    lines = told(capsys, "ckpt", "show", tmp_path / "many")[1].splitlines()
    assert lines[2] == "1100 blobs, 17.6 kB on one node"
    assert len(lines) == 1005 and lines[-1].startswith("... and 100 smaller ones (400 B); --all")
    assert len(told(capsys, "ckpt", "show", tmp_path / "many", "--all")[1].splitlines()) == 1104
    code, out, err = told(capsys, "ckpt", "show", tmp_path / "many", "--blobs", "p00001")
    assert (code, out, err.count("\n")) == (2, "", 1) and "did you mean 'p0001'" in err


# ckpt du


def test_du_says_what_lies_there_and_what_retention_would_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums are those of the files; what keep_last=1 frees is what a real retention then frees."""
    root = tmp_path / "ckpt"
    with Writing(root) as writing:
        writing.save(1, LEAVES)
        first = next(iter(writing.manifests.values()))
        writing.save(2, LEAVES)
        writing.save(3, LEAVES, referenced=(first, ["model.w"]))
    orphan = root / "data/e00000009-abcdef"
    orphan.mkdir()
    (orphan / "trainer_0.9.main.safetensors").write_bytes(b"x" * 1000)
    files = {path: path.stat().st_size for path in (root / "data").rglob("*") if path.is_file()}
    found = as_json(capsys, "ckpt", "du", root)
    assert found["orphan_bytes"] == 1000
    assert found["live_bytes"] == sum(files.values()) - 1000
    one, two, three, lost = found["tries"]
    assert (one["needed_by"], one["frees_bytes"], two["frees_bytes"]) == (1, 0, two["bytes"])
    assert found["shared_bytes"] == one["bytes"] and lost["standing"] == "orphan"
    assert set(three["groups"]) == {"optim", "notes"}  # its only value lies in the manifest
    assert found["largest_blobs"]["model"] == 24
    lines = told(capsys, "ckpt", "du", root)[1].splitlines()
    assert lines[-1].startswith("orphans: 1 kB; torchrelay ckpt repair --delete-orphans")
    writer = LogWriter.take(LocalStorage(root), "test")
    Keeping(last=1).retire(writer)
    delete_left(writer)
    writer.release()
    after = sum(path.stat().st_size for path in (root / "data").rglob("*") if path.is_file())
    freed = sum(files.values()) - after - found["orphan_bytes"]  # whoever takes the log sweeps these too
    assert freed == found["keep_last_1_frees_bytes"] == two["bytes"]


# stats


@pytest.mark.parametrize("slow", ["trainer_1", None])
def test_stats_names_the_slowed_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, slow: str | None
) -> None:
    """A node whose disk is slow is named with how much longer it takes and in which phase; else none is."""
    import time

    sync = LocalWriteHandle.sync_file

    def slowly(self: LocalWriteHandle) -> None:
        # A disk, not a wait for luck; long against what a busy machine adds.
        time.sleep(0.25 if slow is not None and f"/{slow}." in self.path else 0.05)
        sync(self)

    monkeypatch.setattr(LocalWriteHandle, "sync_file", slowly)
    train(tmp_path / "run", 3)
    train(tmp_path / "run", 4)
    found = as_json(capsys, "ckpt", "stats", tmp_path / "run")
    assert found["load"]["actions"] == 1 and len(found["load"]["nodes"]) == 3
    found = found["save"]
    assert found["dominates"] == slow and found["actions"] == 5
    assert sum(found["shares"].values()) == pytest.approx(1)
    said = told(capsys, "ckpt", "stats", tmp_path / "run")[1].splitlines()
    last = said[said.index("1 load, seconds: median (longest)") - 1]
    if slow is None:
        assert last.startswith("no node dominates: the slowest is trainer_")
    else:
        assert last.startswith("trainer_1 dominates: ") and "most of it in fsync; slowest in" in last
        assert found["slowest"]["ratio"] > 1.5
    assert as_json(capsys, "ckpt", "stats", f"{tmp_path / 'run'}@2")["save"]["actions"] == 1
    assert as_json(capsys, "ckpt", "stats", tmp_path / "run", "--epoch", "last")["save"]["actions"] == 1


SLOW_RANK = """
import os, sys, time
import torch
from torchrelay import Job, JobRunner, max_epochs
from torchrelay.checkpoint.storage.local import LocalWriteHandle

if os.environ["RANK"] == "2":
    whole = LocalWriteHandle.sync_file
    def slowly(self):
        time.sleep(0.3)
        whole(self)
    LocalWriteHandle.sync_file = slowly
job = Job("slow", blobs=dict(w=torch.zeros(100_000)))
job.epoch(lambda ctx: ctx["w"].add_(1))
job.stop_when(max_epochs(int(sys.argv.pop())))
JobRunner(job, "run").main()
"""


@pytest.mark.ranks
def test_stats_names_the_slow_rank_of_a_torchrun_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three real ranks the one with the slow disk is named, although all wait for it."""
    assert torchrun(SLOW_RANK, "2", warm=True, ranks=3, cwd=tmp_path).rc == 0
    found = as_json(capsys, "ckpt", "stats", tmp_path / "run")
    assert found["save"]["dominates"] == "trainer_2" and found["save"]["slowest"]["phase"] == "fsync"
    assert found["save"]["slowest"]["slowest_in"] == found["save"]["actions"] == 3


# compare


def test_compare_puts_runs_side_by_side(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Identity, configuration, epochs and metrics are rows; --only-changed leaves out what is the same."""
    found = as_json(capsys, "runs", "compare", runs / "one", runs / "two")
    assert found["runs"] == [str(runs / "one"), str(runs / "two")]
    rows = found["rows"]
    assert rows["config.optimizer.lr"] == [0.1, 0.2] and rows["config.optimizer.beta"] == [0.9, 0.9]
    assert rows["epochs kept"] == [4, 3] and rows["final val/acc"] == [0.0, 1.0]
    assert rows["best val/acc"] == [1.0, 1.0] and rows["best epoch"] == [2, 2]
    changed = as_json(capsys, "runs", "compare", runs / "one", runs / "two", "--only-changed")["rows"]
    assert changed == {name: row for name, row in rows.items() if row[0] != row[1]}
    assert "config.optimizer.lr" in changed and "job" not in changed and "config.seed" not in changed
    code, out, _ = told(capsys, "runs", "compare", runs / "one", runs / "one", "--only-changed")
    assert (code, out) == (0, "nothing differs in 2 runs\n")


# every verb


def test_every_verb_is_known_here() -> None:
    """A verb is tested as one that reads, or is listed as one that does not; each of them takes --json."""
    tree = dict(tree_of(whole_parser()))
    assert {" ".join(verb) for verb in READING} <= set(tree)
    assert all("--json" in one.options for verb, one in tree.items() if not one.verbs or verb == "completion")


@pytest.mark.parametrize("verb", READING, ids=" ".join)
def test_every_reading_verb_prints_one_json_object(
    made: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    """What --json prints is one object and nothing else, and the same the second time: nothing changed."""
    found = as_json(capsys, *verb, made / "one")
    assert isinstance(found, dict) and found
    assert as_json(capsys, *verb, made / "one") == found


@pytest.mark.parametrize("verb", READING, ids=" ".join)
@pytest.mark.parametrize(
    ("case", "code"),
    [("nowhere", 2), ("file", 2), ("foreign", 2), ("epoch", 2), ("damaged", 5), ("url", 2), ("word", 2)],
)
def test_bad_input_is_one_line(
    runs: Path, capsys: pytest.CaptureFixture[str], verb: list[str], case: str, code: int
) -> None:
    """Unknown, foreign and damaged places and wrong selectors: one line, 2 or 5, whatever the verb."""
    (runs / "foreign").mkdir()
    (runs / "file").touch()
    for file in (runs / "one/checkpoints/log").glob("0*.json"):
        file.write_bytes(b"{}")
    (runs / "one/status.json").write_text("[]")
    text = {
        "epoch": f"{runs / 'two'}@99", "word": f"{runs / 'two'}@nine",
        "damaged": f"{runs / 'one'}", "url": "memory://nothing/here",
    }.get(case, str(runs / case))  # fmt: skip
    found = told(capsys, *verb, text)
    if (verb[-1], case) == ("why", "epoch"):  # it explains what never was
        assert found[0] == 0 and "never committed" in found[1]
        return
    if verb == ["show"] and case == "damaged":  # it shows what else is known
        assert found[0] == 0 and "status.json is damaged" in found[2]
        return
    assert found[0] == code and found[1] == "", found
    assert found[2].startswith("torchrelay: ") and found[2].count("\n") == 1
    assert "Traceback" not in found[2]


@pytest.fixture
def remote(made: Path) -> Iterator[str]:
    """The checkpoints of a run, copied into a store."""
    system = fsspec.filesystem("memory")
    system.put(str(made / "one/checkpoints"), "/looked/at", recursive=True)
    yield "memory://looked/at"
    system.rm("/looked", recursive=True)


@pytest.mark.parametrize(
    "verb", [one for one in READING if one not in (["runs", "compare"], ["show"])], ids=" ".join
)
def test_a_store_is_looked_at_by_its_url(
    made: Path, remote: str, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    """What is said of checkpoints in a store is what is said of them on the disk."""
    local = as_json(capsys, *verb, made / "one/checkpoints")
    assert as_json(capsys, *verb, remote) == local


def test_the_metrics_of_a_rewound_run_are_read_in_one_pass(tmp_path: Path) -> None:
    """A later start that logs epoch k replaces all from k on; 20,000 lines take no quadratic time."""
    import time

    run = RunDirectory(tmp_path)
    for generation, first in ((0, 0), (9, 15_000)):
        lines = [json.dumps({"epoch": epoch, "metrics": {}}) for epoch in range(first, 20_000)]
        (tmp_path / f"metrics.{generation}.jsonl").write_text("\n".join(lines) + "\n")
    begin = time.process_time()
    found = run.metrics()
    assert time.process_time() - begin < 5  # the square of 20,000 takes a minute
    assert [line["epoch"] for line in found] == list(range(20_000))
    assert [line["generation"] for line in found] == [0] * 15_000 + [9] * 5_000
    assert open_log(LocalStorage(tmp_path)).empty
