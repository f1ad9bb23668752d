"""The metadata database in a SQLite file: what is stored, made again, refused, and never shown."""

from __future__ import annotations

import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event
from stage import RecordingHandler, warned
from told_jobs import contents, query, saved, train

from torchrelay import Job, JobRunner, LocalSession, MultiNodeCheckpointManager, SqlHandler, max_epochs
from torchrelay.errors import (
    FormatError,
    NotAllowedNowError,
    StorageError,
    UnknownEpochError,
    UsageError,
    install_command,
)
from torchrelay.metadata.handlers import (
    EPOCH,
    FILE_NAME,
    HandlerEvent,
    Holder,
    MetadataHandler,
    NodeStats,
    NodeTimes,
    notes_of_file,
)
from torchrelay.metadata.sql.database import Database
from torchrelay.metadata.sql.handler import BoundedCalls, Pending, parse_url
from torchrelay.tools.cli.main import main

SAVE = "checkpoint_save"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'runs.db'}"


def without_times(found: dict) -> dict:
    """The rows but for `saved_at`, which two handlers are told milliseconds apart."""
    return {**found, "relay_epochs": [{**row, "saved_at": ""} for row in found["relay_epochs"]]}


# What is stored


def test_a_job_is_in_the_database(tmp_path: Path, url: str) -> None:
    """One row per job, epoch, generation, node and phase; a replayed write of a start adds its generation."""
    assert train(tmp_path / "run", url, 2) == 2
    assert train(tmp_path / "run", url, 3) == 3
    found = contents(url)
    (job,) = found["relay_jobs"]
    assert (job["name"], job["prefix"]) == ("told", str(tmp_path / "run/checkpoints"))
    assert [row["epoch"] for row in found["relay_epochs"]] == [0, 1, 2, 2, 3]
    assert [row["nodes"] for row in found["relay_epochs"]] == [1] * 5
    first, second = sorted({row["generation"] for row in found["relay_epochs"]})
    phases = {(row["action"], row["generation"], row["phase"]) for row in found["relay_durations"]}
    assert {phase for action, generation, phase in phases if action == SAVE and generation == first} == {
        "stage", "plan", "hash", "write", "fsync", "commit",
    }  # fmt: skip
    assert ("checkpoint_load", second, "read") in phases and ("checkpoint_load", first, "read") not in phases
    assert all(row["secs"] >= 0 for row in found["relay_durations"])
    assert all(row["bytes"] > 0 for row in found["relay_moved"] if row["action"] == SAVE)


def test_rewinds_abandon_epochs(tmp_path: Path, url: str) -> None:
    """`relay_current_epochs` has what the log calls current, while all that was ever saved stays a row."""
    run = tmp_path / "run"
    train(run, url, 4)
    train(run, url, 3, resume_from_epoch=1)
    now = query(url, "SELECT epoch, branch FROM relay_current_epochs ORDER BY epoch")
    assert now == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert saved(url) == [0, 1, 2, 2, 3, 3, 4]
    with warned():
        train(run, url, 1, resume="never")
    assert query(url, "SELECT epoch FROM relay_current_epochs ORDER BY epoch") == [(0,), (1,)]


@pytest.mark.parametrize("lost", ["nothing", FILE_NAME])
def test_the_index_is_made_again(tmp_path: Path, url: str, lost: str, capsys: pytest.CaptureFixture) -> None:
    """`torchrelay index` fills an empty database with the same rows, and a second time changes nothing.

    Without the handler's notes what the epochs' own files know comes back: all but the loads.
    """
    run, again = tmp_path / "run", f"sqlite:///{tmp_path / 'again.db'}"
    train(run, url, 3)
    train(run, url, 3, resume_from_epoch=1)
    (run / lost).unlink(missing_ok=True)
    for _ in range(2):
        assert main(["runs", "index", str(run), "--database", again]) == 0
        made, told = without_times(contents(again)), without_times(contents(url))
        if lost != "nothing":
            told = {
                name: [row for row in rows if row.get("action", SAVE) == SAVE] for name, rows in told.items()
            }
        assert made == told
    assert "6 saved epochs, 7 saves and loads" in capsys.readouterr().out or lost == FILE_NAME


def test_a_bare_directory_of_checkpoints_is_indexed(tmp_path: Path, url: str) -> None:
    """A job with a manager of its own has no run directory: its log and its epochs' files tell the saves."""
    live = f"sqlite:///{tmp_path / 'live.db'}"
    job = Job("bare")
    job.epoch(lambda ctx: ctx.workspace.update(n=ctx.epoch))
    job.stop_when(max_epochs(2))
    JobRunner(job, MultiNodeCheckpointManager(tmp_path / "c", SqlHandler(live))).train()
    assert main(["runs", "index", str(tmp_path / "c"), "--database", url]) == 0
    assert without_times(contents(url)) == without_times(contents(live))


numbers = st.integers(0, 3)
notes = st.builds(
    lambda generation, base, name, kind, epoch, time, secs: HandlerEvent(
        Holder("job", name, generation, generation // 2, base), "/" + name, kind, epoch, time, epoch,
        () if kind == EPOCH else tuple(NodeTimes(f"n{i}", "", i, {"write": s}) for i, s in enumerate(secs)),
    ),
    numbers, st.none() | numbers, st.sampled_from(["a", "b"]), st.sampled_from([EPOCH, SAVE]), numbers,
    st.floats(0, 1e9), st.lists(st.floats(0, 9), max_size=2),
)  # fmt: skip


def rows_told_in_turn(database_url: str, batches: list[list[HandlerEvent]]) -> dict:
    """What a new database has when these were told one after the other."""
    database = Database(parse_url(database_url), 5.0)
    for batch in batches:
        database.store(batch)
    return contents(database_url)


def check_any_order(database_url_of, told: list[HandlerEvent], seed: int) -> None:
    """The rows of any repetitions in any order are those of telling everything once."""
    draw = random.Random(seed)
    again = [draw.choices(told, k=draw.randint(1, 4)) for _ in range(3)]
    again += [[one] for one in draw.sample(told, len(told))]
    draw.shuffle(again)
    expected = rows_told_in_turn(database_url_of("once"), [told])
    assert rows_told_in_turn(database_url_of("often"), again) == expected


@settings(max_examples=12, deadline=None)
@given(st.lists(notes, min_size=1, max_size=8), st.integers(0, 9))
def test_replays_and_repeats_give_the_same_rows(
    tmp_path_factory, told: list[HandlerEvent], seed: int
) -> None:
    """Whatever is told again, in any order, and even if it differs: the rows follow from the set alone."""
    folder = tmp_path_factory.mktemp("any")
    check_any_order(lambda name: f"sqlite:///{folder / name}.db", told, seed)


def test_jobs_write_at_once(tmp_path: Path, url: str) -> None:
    """Processes that make the tables and write to one file at the same moment lose nothing, never fail."""
    code = (
        "import sys\n"
        "from torchrelay.metadata.handlers import Holder\n"
        "from torchrelay.metadata.handlers import NodeStats, NodeTimes\n"
        "from torchrelay.metadata.sql.handler import SqlHandler\n"
        "handler = SqlHandler(sys.argv[1], deadline_secs=30)\n"
        "handler.set_params('/runs/x', 'torchrelay', ['a'])\n"
        "handler.opened(Holder(sys.argv[2], 'job', 1))\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for epoch in range(15):\n"
        "    handler.write(epoch)\n"
        "    times = NodeTimes('a', f'p/a.{epoch}', 1, {'write': 0.5})\n"
        "    handler.report('checkpoint_save', NodeStats([times]))\n"
    )
    jobs = [
        subprocess.Popen([sys.executable, "-c", code, url, f"job {i}"], stdin=-1, stdout=-1, text=True)
        for i in range(2)
    ]
    assert [job.stdout.readline() for job in jobs if job.stdout] == ["ready\n"] * 2
    for job in jobs:
        assert job.stdin
        job.stdin.write("go\n")
        job.stdin.flush()
    for job in jobs:
        job.communicate(timeout=100)
    assert [job.returncode for job in jobs] == [0, 0]
    assert saved(url) == list(range(15)) * 2
    assert len(contents(url)["relay_durations"]) == 30


# What is refused, and what only degrades


@contextmanager
def tells_degraded(*texts: str) -> Iterator[None]:
    """The block warns of the handler, with these texts, and of nothing else."""
    with warned() as said:
        yield
    assert said and all("the metadata handler failed" in one for one in said), said
    for text in texts:
        assert any(text in one for one in said), (text, said)


@pytest.mark.parametrize("damage", ["no database", "no permission", "folder gone", "is a folder"])
def test_a_file_that_cannot_be_used(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture) -> None:
    """Training goes on with warnings; the command line says it in one line, with 5."""
    file = tmp_path / "runs.db"
    if damage == "no database":
        file.write_bytes(b"these are other bytes than those of a database " * 100)
    elif damage == "no permission":
        file = Path("/proc/version")
    elif damage == "folder gone":
        file = tmp_path / "gone/runs.db"
    else:
        file.mkdir()
    with tells_degraded(str(file), "Training continues"):
        assert train(tmp_path / "run", f"sqlite:///{file}", 1) == 1
    capsys.readouterr()
    assert main(["runs", "index", str(tmp_path / "run"), "--database", f"sqlite:///{file}"]) == 5
    said = capsys.readouterr().err
    assert said.startswith(f"torchrelay: the database sqlite:///{file}") and said.count("\n") == 1


def test_tables_of_another_version_are_refused(tmp_path: Path, url: str) -> None:
    """Named with both versions and the way on; nothing is written to them, and training goes on."""
    train(tmp_path / "before", url, 1)
    with sqlite3.connect(tmp_path / "runs.db") as connection:
        connection.execute("UPDATE relay_schema SET version = 2")
    connection.close()
    with tells_degraded("schema version 2 in relay_schema", "writes version 1"):
        assert train(tmp_path / "run", url, 1) == 1
    with pytest.raises(FormatError, match="version 2"):
        contents(url)


def test_a_full_disk_degrades_and_is_made_good(tmp_path: Path, url: str) -> None:
    """A file that cannot grow takes nothing by halves; when it can again, all that waited is stored."""
    handler = SqlHandler(url)
    handler.set_params("/runs/x", "torchrelay", ["a"])
    handler.opened(Holder("job", "job", 1))
    handler.write(0)
    engine = handler._database()._engine
    limit = 1

    @event.listens_for(engine, "connect")
    def full(connection, _record) -> None:
        connection.execute(f"PRAGMA max_page_count = {limit}")

    big = NodeStats([NodeTimes(f"node {i}", f"p/node {i}.1", 1, {"write": 1.0}) for i in range(2000)])
    with pytest.raises(StorageError, match=r"full.*1 event waits"):
        handler.report(SAVE, big)
    assert contents(url)["relay_moved"] == []
    limit = 10**6
    handler.write(1)
    assert len(contents(url)["relay_moved"]) == 2000 and saved(url) == [0, 1]


def test_what_an_earlier_process_could_not_tell_comes_with_the_next_start(tmp_path: Path, url: str) -> None:
    """A job ended while the database was away: the next start stores what its run directory tells."""
    run, file = tmp_path / "run", tmp_path / "runs.db"
    file.mkdir()
    with tells_degraded():
        train(run, url, 2)
    file.rmdir()
    train(run, url, 3)
    assert saved(url) == [0, 1, 2, 2, 3]
    assert {row["epoch"] for row in contents(url)["relay_moved"] if row["action"] == SAVE} == {0, 1, 2, 3}


def test_one_handler_for_two_runs_keeps_them_apart(tmp_path: Path, url: str) -> None:
    """What waits from a run is stored during the next one as the first one's."""
    handler, file = SqlHandler(url), tmp_path / "runs.db"
    file.mkdir()
    for name in ("a", "b"):
        job = Job(name)
        job.epoch(lambda ctx: ctx.workspace.update(n=ctx.epoch))
        job.stop_when(max_epochs(1))
        with warned() as said:
            JobRunner(job, tmp_path / name, metadata_handler=handler).train()
        assert any("metadata handler failed" in text for text in said) == (name == "a")
        with suppress(FileNotFoundError, NotADirectoryError):
            file.rmdir()
    per_job = "FROM relay_jobs j JOIN relay_epochs e ON e.job = j.job GROUP BY j.name, j.prefix ORDER BY 1"
    told = query(url, f"SELECT j.name, j.prefix, COUNT(*) {per_job}")
    assert told == [(name, str(tmp_path / name / "checkpoints"), 2) for name in ("a", "b")]


def test_what_waits_is_bounded() -> None:
    """The oldest notes are forgotten and counted; stored ones are let go by identity, not by value."""
    pending = Pending(most_rows=10)
    told = [HandlerEvent(Holder("job", "job", 1), "/p", EPOCH, epoch) for epoch in range(25)]
    pending.add(told)
    assert pending.all() == tuple(told[-10:]) and pending.given_up == 15
    pending.stored(told[-10:-1])
    assert pending.all() == (told[-1],)
    huge = HandlerEvent(
        told[0].holder, "/p", SAVE, 1, times=tuple(NodeTimes(str(i), "", 0, {}) for i in range(99))
    )
    pending.add([huge])
    assert pending.all() == (huge,)


def test_a_call_that_hangs_is_left_behind() -> None:
    """The caller goes on after its time, nothing else is called meanwhile, and the next call works again."""
    from threading import Event

    calls, go = BoundedCalls("the database"), Event()
    with pytest.raises(StorageError, match=r"did not answer within 0\.05 s"):
        calls.make(lambda: go.wait(60), 0.05)
    with pytest.raises(StorageError, match="has not answered for"):
        calls.make(lambda: 1, 0.05)
    running = calls._running
    go.set()
    assert running is not None and running.result(60)
    assert calls.make(lambda: 2, 60) == 2
    with pytest.raises(ZeroDivisionError):
        calls.make(lambda: 1 // 0, 60)


# Who decides


def test_by_default_the_database_decides_nothing(tmp_path: Path, url: str) -> None:
    """Beside a run directory a handler that does not say `decides` changes no start, whatever it answers."""
    run = tmp_path / "run"
    train(run, url, 2)
    (tmp_path / "runs.db").unlink()
    assert train(run, url, 3) == 3
    assert saved(url) == [0, 1, 2, 2, 3], "made again on the way"
    job = Job("told")
    job.epoch(lambda ctx: ctx.workspace.update(n=ctx.epoch))
    job.stop_when(max_epochs(4))
    handler = RecordingHandler(last=0)
    assert JobRunner(job, run, metadata_handler=handler).train() == 4
    assert handler.written == [3, 4]


def test_it_decides_where_it_is_told_to(tmp_path: Path, url: str) -> None:
    """The newest current epoch of the database, or the user's; epochs that it does not know are abandoned."""
    run = tmp_path / "run"
    assert train(run, url, 3, decides=True) == 3
    with sqlite3.connect(tmp_path / "runs.db") as connection:
        connection.execute("DELETE FROM relay_epochs WHERE epoch > 1")
    connection.close()
    ran: list[int] = []
    assert train(run, url, 3, ran.append, decides=True) == 3
    assert ran == [2, 3]
    assert train(run, url, 3, ran.append, decides=True, resume_from_epoch=2) == 3
    assert ran == [2, 3, 3]


def test_where_it_decides_and_cannot_the_start_ends(tmp_path: Path, url: str) -> None:
    """A guess would be worse: a database that cannot be read, or lost the run, ends the start."""
    run, file = tmp_path / "run", tmp_path / "runs.db"
    train(run, url, 1, decides=True)
    file.unlink()
    with pytest.raises(UsageError, match=r"has no epoch of it, while the run has epoch 1.*index"):
        train(run, url, 2, decides=True)
    file.write_bytes(b"no database" * 999)
    with pytest.raises(StorageError, match="not a database"):
        train(run, url, 2, decides=True)
    file.unlink()
    assert main(["runs", "index", str(run), "--database", url]) == 0
    assert train(run, url, 2, decides=True) == 2


def test_an_epoch_that_only_the_database_knows_is_no_start(tmp_path: Path, url: str) -> None:
    """What is not committed is never resumed from, whoever says it."""
    train(tmp_path / "run", url, 1)
    with sqlite3.connect(tmp_path / "runs.db") as connection:
        connection.execute("UPDATE relay_epochs SET epoch = 9 WHERE epoch = 1")
    connection.close()
    with pytest.raises(UnknownEpochError):
        train(tmp_path / "run", url, 2, decides=True)


def test_a_manager_of_the_users_own(tmp_path: Path, url: str) -> None:
    """As in Caffe2: a bare manager resumes where its handler decides, and else starts from scratch."""
    ran: list[int] = []

    def run(epochs: int) -> int:
        job = Job("bare")
        job.epoch(lambda ctx: (ctx.workspace.update(n=ctx.epoch), ran.append(ctx.epoch)))
        job.stop_when(max_epochs(epochs))
        manager = MultiNodeCheckpointManager(tmp_path / "c", SqlHandler(url, decides=True))
        return int(JobRunner(job, manager).train())

    assert (run(2), run(3)) == (2, 3)
    assert ran == [1, 2, 3]


# What a person types


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mysql://me:secret1@host/db", "is no"),
        ("postgresql+asyncpg://me:secret1@host/db", "is no"),
        ("me:secret1@host/db", "is not a database URL"),
        ("://me:secret1@host/db", "is not a database URL"),
        ("postgresql://me:secret1@host:port/db", "is not a database URL"),
        ("sqlite://", "has no file name"),
        ("sqlite:///:memory:", "has no file name"),
        ("sqlite:///x.db?key=secret1", "are not supported for SQLite"),
        ("", "is not a database URL"),
    ],
)
def test_urls_that_are_refused(tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture) -> None:
    """One line with the right form, exit 2, before anything happens, and never with the password."""
    with pytest.raises(UsageError, match=said) as found:
        SqlHandler(text)
    assert "secret1" not in str(found.value)
    assert text == "" or main(["runs", "index", str(tmp_path), "--database", text]) == 2
    assert "secret1" not in capsys.readouterr().err


def test_passwords_are_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the handler, not in warnings or lines of a job, whose database nobody serves."""
    monkeypatch.setattr("torchrelay.metadata.sql.handler._SHARE_OF_RETRIES", 0.0)
    hidden = "correct-horse"
    for url in (
        f"postgresql://app:{hidden}@127.0.0.1:9/app",
        f"postgresql://127.0.0.1:9/app?user=app&password={hidden}",
    ):
        assert hidden not in repr(SqlHandler(url)) + str(vars(SqlHandler(url)))
        run = tmp_path / f"run{len(url)}"
        with warned() as said:
            train(run, url, 1, deadline_secs=60)
        assert any("Connection refused" in one for one in said)
        noted = "".join(path.read_text() for path in run.glob("*.json*"))
        assert hidden not in "".join(said) + noted


@pytest.mark.parametrize("deadline", [0, -1, float("inf"), float("nan"), "5", True, None])
def test_deadlines_that_are_refused(deadline: object) -> None:
    """Seconds above 0 and up to ten minutes."""
    with pytest.raises(UsageError, match="deadline_secs"):
        SqlHandler("sqlite:///x.db", deadline_secs=deadline)  # type: ignore[arg-type]


def test_handlers_that_are_none(tmp_path: Path) -> None:
    """A class, or an object without the five methods, is refused; a manager is given its handler itself."""
    for wrong in (SqlHandler, "sqlite:///x.db"):
        with pytest.raises(UsageError, match="invalid metadata_handler"):
            JobRunner(Job("told"), tmp_path / "run", metadata_handler=wrong)  # type: ignore[arg-type]
    handler = SqlHandler("sqlite:///x.db")
    assert isinstance(handler, MetadataHandler)
    with pytest.raises(UsageError, match="pass it to the manager"):
        JobRunner(Job("told"), MultiNodeCheckpointManager(tmp_path), metadata_handler=handler)


def test_outside_of_a_run(tmp_path: Path, url: str) -> None:
    """A write without a job is refused, a report left out; saves by hand and loaded blobs are stored."""
    handler = SqlHandler(url)
    with pytest.raises(NotAllowedNowError, match="outside of a run"):
        handler.write(1)
    handler.report(SAVE, NodeStats([]))
    job = Job("hand")
    job.init(lambda ws: ws.update(n=0))
    job.epoch(lambda: None)
    job.stop_when(max_epochs(1))
    runner, session = JobRunner(job, tmp_path / "run", metadata_handler=handler), LocalSession()
    runner.train(session)
    runner.save_checkpoints(5, session)
    assert saved(url) == [0, 1, 5]
    assert runner.load_blobs_from_checkpoints(["n"], 5, session)
    loads = [row for row in contents(url)["relay_moved"] if row["action"] == "checkpoint_partial_load"]
    assert [row["epoch"] for row in loads] == [5]


def test_index_needs_a_database(tmp_path: Path, url: str, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    """By option or variable; an unknown run ends with 2, a damaged one with 5 after the others were done."""
    train(tmp_path / "good", url, 1)
    train(tmp_path / "bad", url, 1)
    (tmp_path / "bad/checkpoints/job.json").write_bytes(b"{}")
    for record in (tmp_path / "bad/checkpoints/log").glob("0*.json"):
        record.write_bytes(b"{}")
    (tmp_path / "runs.db").unlink()
    assert main(["runs", "index", str(tmp_path / "good")]) == 2
    assert "no database given: use --database" in capsys.readouterr().err
    monkeypatch.setenv("TORCHRELAY_DATABASE", url)
    assert main(["runs", "index", str(tmp_path / "nowhere")]) == 2
    assert main(["runs", "index", str(tmp_path / "bad"), str(tmp_path / "good"), "--json"]) == 5
    said = capsys.readouterr()
    assert json.loads(said.out)["failed"] == 1 and len(json.loads(said.out)["done"]) == 1
    assert "job.json" in said.err and saved(url) == [0, 1]


def test_notes_that_nobody_wrote(tmp_path: Path, url: str) -> None:
    """Garbage among the notes is left out of the index: wrong types, NUL, numbers that no column holds."""
    run = tmp_path / "run"
    train(run, url, 1)
    file = run / FILE_NAME
    whole = [json.loads(line) for line in file.read_text().splitlines()]
    odd = ["x", None, -1, 2**63, 10**400, 1.5, [], {}, "\0", "\ud800", True, float("1e400")]
    draw = random.Random(7)
    with file.open("a") as lines:
        for _ in range(300):
            line = dict(draw.choice(whole))
            for key in draw.sample(sorted(line), 2):
                line[key] = draw.choice(odd)
            lines.write(json.dumps(line) + "\n")
    again = f"sqlite:///{tmp_path / 'again.db'}"
    assert main(["runs", "index", str(run), "--database", again]) == 0
    assert {row["epoch"] for row in contents(again)["relay_epochs"]} >= {0, 1}
    assert notes_of_file(file, Holder("another job", "told", 0), "/p") == []
    assert len(notes_of_file(file, Holder(whole[0]["job"], "told", 0), "/p", limit=2)) == 2


# What it costs to import


def python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env={**os.environ, **env}
    )
    return done.stdout + done.stderr


def test_a_database_needs_no_torch_and_nothing_needs_a_database() -> None:
    """A handler with its database imports no torch, and without one nothing imports SQLAlchemy."""
    code = (
        "import sys\nfrom torchrelay import SqlHandler\nprint('sqlalchemy' in sys.modules)\n"
        "SqlHandler('sqlite:///x.db')._database()\nprint('sqlalchemy' in sys.modules, 'torch' in sys.modules)"
    )
    assert python(code) == "False\nTrue False\n"


@pytest.mark.parametrize(
    ("missing", "url", "extra"),
    [("sqlalchemy", "sqlite:///x.db", "sql"), ("psycopg", "postgresql://me:secret1@host/db", "postgresql")],
)
def test_a_missing_package_is_told_with_its_remedy(missing: str, url: str, extra: str) -> None:
    """One line with the pip command, and no password."""
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from torchrelay.tools.cli.main import main\n"
        f"main(['runs', 'index', 'x', '--database', {url!r}])"
    )
    said = python(code)
    assert re.fullmatch(rf"torchrelay: .* {re.escape(install_command(extra))}\n", said), said
    assert "secret1" not in said


def test_warnings_are_ours(tmp_path: Path, url: str) -> None:
    """A whole run with its database warns of nothing, closed connections and threads included."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "run", url, 1)
