"""The metadata database on a real PostgreSQL server, stopped, started, frozen and lost under real jobs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgresql import Server, needs_postgresql, postgresql
from stage import warned
from test_sql_handler import check_any_order, notes, without_times
from told_jobs import contents, query, saved, train

from torchrelay.errors import FormatError, StorageError
from torchrelay.metadata.handlers import EPOCH, HandlerEvent, Holder
from torchrelay.metadata.sql import handler as sql_handler
from torchrelay.metadata.sql.handler import SqlHandler
from torchrelay.tools.cli.main import main

pytestmark = needs_postgresql


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgresql() as running:
        yield running


def emptied(server: Server) -> str:
    """The server's URL; its tables are gone."""
    import psycopg

    with psycopg.connect(server.url) as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return server.url


@pytest.fixture
def url(server: Server) -> str:
    return emptied(server)


def test_the_server_is_stopped_and_started_between_epochs(
    server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training warns and goes on; the next success stores what was missed; a rebuilt index is the same."""

    def outage(epoch: int) -> None:
        if epoch == 2:
            server.stop()
        elif epoch == 4:
            server.start()

    monkeypatch.setattr(sql_handler, "_IMPATIENT_SECS", 60)  # this machine may be busy
    monkeypatch.setattr(sql_handler, "_SHARE_OF_RETRIES", 0.02)
    with warned() as said:
        assert train(tmp_path / "run", url, 5, outage, deadline_secs=60) == 5
    failed = [text for text in said if "the metadata handler failed at write of epoch" in text]
    assert [text.split("epoch ")[1][0] for text in failed] == ["2", "3"] and len(said) == 2
    assert "Connection refused" in failed[0] and "1 event waits" in failed[0] and "3 events wait" in failed[1]
    assert saved(url) == [0, 1, 2, 3, 4, 5]
    told = contents(url)
    assert {row["epoch"] for row in told["relay_durations"]} == {0, 1, 2, 3, 4, 5}
    again = f"sqlite:///{tmp_path / 'again.db'}"
    assert main(["runs", "index", str(tmp_path / "run"), "--database", again]) == 0
    assert without_times(contents(again)) == without_times(told)
    assert main(["runs", "index", str(tmp_path / "run"), "--database", url]) == 0
    assert without_times(contents(url)) == without_times(told)


def test_the_server_is_gone_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every epoch is saved and warned of once; the first failure costs the deadline, later ones little."""
    monkeypatch.setattr(sql_handler, "_SHARE_OF_RETRIES", 0.05)  # a live server may take its time
    with postgresql() as lost:
        url = lost.url
        began: list[float] = []

        def gone(epoch: int) -> None:
            began.append(time.monotonic())
            if epoch == 2:
                lost.stop()

        with warned() as said:
            assert train(tmp_path / "run", url, 6, gone, deadline_secs=60) == 6
    assert len(said) == 5 and all("Training continues" in text for text in said)
    took = [after - before for before, after in pairwise(began)]
    assert took[1] >= 2.5, "the first failure is tried again for its share of the deadline, 3 s"
    assert min(took[2:]) < 2.5, "later ones are not"


def test_a_frozen_server_holds_training_for_the_deadline_only(
    server: Server, url: str, tmp_path: Path
) -> None:
    """It accepts connections and never answers: the epoch goes on after the deadline, no row is lost."""
    handler = SqlHandler(url, deadline_secs=60)
    handler.set_params("/runs/x", "torchrelay", ["a"])
    handler.opened(Holder("job", "job", 1))
    handler.write(0)
    handler.deadline_secs = 0.5
    with server.frozen():
        began = time.monotonic()
        with pytest.raises(StorageError, match=r"did not answer within 0.5 s.*1 event waits"):
            handler.write(1)
        with pytest.raises(StorageError, match=r"has not answered for"):
            handler.write(2)
        assert time.monotonic() - began < 30
    end = time.monotonic() + 60
    while saved(url) != [0, 1, 2, 3] and time.monotonic() < end:
        with suppress(StorageError):
            handler.write(3)
    assert saved(url) == [0, 1, 2, 3]


def test_a_wrong_password_is_told_at_once_and_not_shown(server: Server, tmp_path: Path) -> None:
    """No second try, which may lock an account; the job goes on, the command line ends with 5."""
    wrong = server.url_with("open-sesame")
    began = time.monotonic()
    with warned() as said:
        assert train(tmp_path / "run", wrong, 1, deadline_secs=600) == 1
    assert time.monotonic() - began < 60
    assert said and all("password authentication failed" in text for text in said)
    done = subprocess.run(
        [sys.executable, "-m", "torchrelay", "runs", "index", str(tmp_path / "run"), "--database", wrong],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 5 and done.stderr.count("\n") == 1 and not done.stdout
    assert "open-sesame" not in "".join(said) + done.stderr
    with pytest.raises(StorageError, match="password authentication failed"):
        train(tmp_path / "run", wrong, 2, decides=True)


def test_a_server_that_is_starting_is_waited_for(server: Server, url: str, tmp_path: Path) -> None:
    """A start that the database decides waits for it until the deadline, and then resumes where it says."""
    train(tmp_path / "run", url, 2, decides=True)
    server.stop()
    starting = threading.Timer(0.3, server.start)
    starting.start()
    try:
        assert train(tmp_path / "run", url, 3, decides=True, deadline_secs=60) == 3
    finally:
        starting.join()
    assert query(url, "SELECT MAX(epoch) FROM relay_current_epochs") == [(3,)]


def test_two_jobs_write_at_once(url: str, tmp_path: Path) -> None:
    """Two real training processes make the tables and write at the same time: both are complete."""
    script = Path(__file__).parent.parent / "helpers/told_jobs.py"
    jobs = [
        subprocess.Popen(
            [sys.executable, script, tmp_path / name, url, "4"], stderr=subprocess.PIPE, text=True
        )
        for name in ("a", "b")
    ]
    said = [job.communicate(timeout=100)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert not any("failed" in text for text in said), said
    assert sorted(saved(url)) == sorted([*range(5), *range(5)])
    assert len({row["job"] for row in contents(url)["relay_jobs"]}) == 2


def test_tables_of_another_version_are_refused_by_name(server: Server, url: str, tmp_path: Path) -> None:
    """The message has the database, the table and both versions, and not the password."""
    import psycopg

    train(tmp_path / "run", url, 1)
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE relay_schema SET version = 7")
    with pytest.raises(
        FormatError, match=rf"127.0.0.1:{server.port}/app has tables of schema version 7"
    ) as told:
        contents(url)
    assert server.password not in str(told.value)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(told=st.lists(notes, min_size=1, max_size=8), seed=st.integers(0, 9))
def test_replays_and_repeats_give_the_same_rows(server: Server, told: list[HandlerEvent], seed: int) -> None:
    """The law of the SQLite file holds here, too: another dialect says it in other statements."""
    check_any_order(lambda name: emptied(server), told, seed)


def test_names_of_any_characters(url: str) -> None:
    """Quotes, percent signs and other alphabets are stored as they are."""
    name = 'it\'s "100%" %(x)s :y ü 中'
    handler = SqlHandler(url)
    handler.set_params("s3://bucket/" + name, "torchrelay", ["a"])
    handler.opened(Holder(name, name, 1))
    handler.write(1)
    (row,) = contents(url)["relay_jobs"]
    assert (row["job"], row["name"], row["prefix"]) == (name, name, "s3://bucket/" + name)
    assert handler._database().newest_epoch(uuid=None, prefix="s3://bucket/" + name) == 1
    assert HandlerEvent(Holder(name, name, 1), "", EPOCH, 1).key in handler._database().known(name)
