"""The benchmark command, as a person starts it, at a tiny size."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import REPOSITORY, clean_environment

pytestmark = pytest.mark.slow
SIZE = ["--small", "--only", "W1", "--scale", "0.0005", "--cap", "40"]


def run(where: Path, *options: str) -> subprocess.CompletedProcess[str]:
    where.mkdir(exist_ok=True)
    # A folder of the repository's disk: the system's temporary one may live in memory, without O_DIRECT.
    return subprocess.run(
        [
            sys.executable,
            REPOSITORY / "benchmarks/run",
            *SIZE,
            *("--output", where / "out"),
            *("--directory", where),
            *options,
        ],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_table_has_what_it_promises_and_a_broken_engine_is_told(tmp_path):
    """Figures of both engines with ratio and limit; who loads other bytes than it saved has failed."""
    done = run(tmp_path, "--rounds", "1", "--engines", "torchrelay file", "torch.save", "broken")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out/table.md").read_text()
    assert page in done.stdout
    for title in ("## W1", "### W1 save", "### W1 save again", "### W1 cold load", "### W1 warm load"):
        assert f"\n{title}" in page, page
    assert "| engine | median s | range | n | ratio | limit | least s | extra memory MB |" in page
    assert "The device before the rounds, GB/s: writes" in page and "Python" in page and "Linux" in page
    told = json.loads((tmp_path / "out/results.json").read_text())
    figures = {(one["action"], one["engine"]): one for one in told["figures"]}
    for action in ("save", "cold load", "warm load"):
        for engine in ("torchrelay file", "torch.save"):
            one = figures[action, engine]
            assert one["median"] > 0 and one["ratio"] > 0 and one["limit"] > 0, one
            assert one["best_peer"] == ("torch.save" if "load" in action else one["best_peer"]), one
    assert figures["save", "torchrelay file"]["bytes"] >= 200 * 4 * round((1 << 29) // 200 * 0.0005)
    broken = figures["cold load", "broken"]
    assert broken["median"] is None and "other bytes" in broken["failed"], broken
    assert "| broken | failed: RuntimeError" in page, page


def test_saves_and_loads_of_ranks_stand_beside_their_bytes_alone(tmp_path):
    """The same processes move as many bytes alone: warm ones in less time than a load of the one epoch."""
    size = ("--only", "W4", "--scale", "0.02", "--rounds", "1", "--engines", "torchrelay epoch")
    done = run(tmp_path, *size)
    assert done.returncode == 0, done.stderr
    figures = {
        one["action"]: one for one in json.loads((tmp_path / "out/results.json").read_text())["figures"]
    }
    assert 0 < figures["warm load"]["least"] < figures["warm load"]["median"], figures
    assert all(figures[action]["least"] > 0 for action in ("cold load", "save", "save again")), figures
    one = 0.02 * 2**31  # of two saves, the later is taken away before loads
    assert one / 2 < figures["save"]["bytes"] < 1.5 * one, figures


def processes_of(where: Path) -> list[str]:
    """The command lines that name a folder, of whoever runs."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if str(where) in line]


def test_who_ends_it_ends_its_ranks(tmp_path):
    """TERM in the middle of a measurement leaves no process of it, and nothing but what was measured."""
    size = ("--only", "W3", "--scale", "0.1", "--rounds", "50", "--engines", "torchrelay epoch")
    command = [sys.executable, REPOSITORY / "benchmarks/run", *SIZE, *size, "--directory", tmp_path]
    with subprocess.Popen([*command, "--output", tmp_path / "out"], env=clean_environment()) as measuring:
        try:
            end = time.monotonic() + 60
            while not any("bench.ranks" in line for line in processes_of(tmp_path)):
                assert measuring.poll() is None and time.monotonic() < end
                time.sleep(0.02)
            measuring.terminate()
            assert measuring.wait(30) == 128 + signal.SIGTERM
        finally:
            measuring.kill()
    assert processes_of(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_slips_on_the_command_line_are_told_before_anything_is_made(tmp_path):
    """Unknown engines, folders that are not there and numbers that cannot be: one line, exit code 2."""
    for slip, told in (
        (("--engines", "torch.svae"), "no engine 'torch.svae'"),
        (("--directory", str(tmp_path / "absent")), "is not a folder"),
        (("--threads", "0"), "--threads is above 0"),
        (("--output", "/proc/absent"), "cannot make --output"),
    ):
        done = run(tmp_path, *slip)
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_stopped_run_goes_on(tmp_path):
    """Finished rounds are kept and not measured again; another way of measuring is not mixed with them."""
    engines = ("--engines", "torch.save")
    assert run(tmp_path, "--rounds", "1", *engines).returncode == 0
    record = tmp_path / "out/rounds.jsonl"
    before = record.read_text()
    record.write_text(before + '{"workload": "W1", "num')  # killed while it wrote
    again = run(tmp_path, "--rounds", "2", *engines)
    assert again.returncode == 0, again.stderr
    assert "round 1 " not in again.stderr and "W1 round 2 is finished" in again.stderr
    assert record.read_text().startswith(before)
    other = run(tmp_path, "--rounds", "2", "--saves", "1", *engines)
    assert other.returncode != 0 and "measured otherwise" in other.stderr


def test_growth_leaves_lines_a_page_and_a_plot(tmp_path):
    """Every printed line is in the folder, its figures are in the page's table, the growth below it."""
    command = [sys.executable, REPOSITORY / "benchmarks/bench/growth.py", "blobs", "--small", "--saves", "1"]
    done = subprocess.run(
        [*command, "--output", tmp_path],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "growth-blobs.jsonl").read_text()
    assert lines == done.stdout
    page = (tmp_path / "growth-blobs.md").read_text()
    for line in map(json.loads, lines.splitlines()):
        figures = line.get("exponents") or {key: one for key, one in line.items() if key.endswith("_secs")}
        assert len(figures) >= 2
        for key, figure in figures.items():
            assert f"`{key}` {figure}" in page or (key in page and f"| {figure:.4f} |" in page), page
    drawn = (tmp_path / "growth-blobs.png").exists()
    assert drawn == ("(growth-blobs.png)" in page) == (importlib.util.find_spec("matplotlib") is not None)
