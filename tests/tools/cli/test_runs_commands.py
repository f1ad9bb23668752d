"""`torchrelay runs`: mistakes are one line, damage is told, nothing is written where it should not be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from source_trees import fill, train

from torchrelay.tools.cli.main import main
from torchrelay.tools.cli.runs.compare import captured_otherwise


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two files."""
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "run", [fill(tmp_path / "source", {"pkg/a.py": "1\n", "b.py": "2\n"})])
    return Path("run")


def said(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """The one line that a verb says on stderr when it ends with this code."""
    capsys.readouterr()
    assert main(["runs", *words]) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    return told.err


def test_files_are_written_over_only_if_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that is not empty is refused; with --force what else lies there stays."""
    fill(Path("out"), {"b.py": "mine", "c.py": "mine too"})
    assert "out is not empty" in said(capsys, 2, "code", "run", "-o", "out")
    assert Path("out/b.py").read_text() == "mine"
    assert main(["runs", "code", "run", "-o", "out", "--force"]) == 0
    assert [Path("out", name).read_text() for name in ("b.py", "c.py", "pkg/a.py")] == [
        "2\n",
        "mine too",
        "1\n",
    ]


def test_nothing_is_written_through_links(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is a link is not followed, a file that is one is replaced."""
    for folder in ("out", "away"):
        Path(folder).mkdir()
    Path("away/b.py").write_text("not ours")
    Path("out/pkg").symlink_to("../away")
    assert "out/pkg exists and is not a directory" in said(capsys, 5, "code", "run", "-o", "out", "--force")
    Path("out/pkg").unlink()
    Path("out/b.py").unlink(missing_ok=True)
    Path("out/b.py").symlink_to("../away/b.py")
    assert main(["runs", "code", "run", "-o", "out", "--force"]) == 0
    assert Path("out/b.py").read_text() == "2\n"
    assert {path.name: path.read_text() for path in Path("away").iterdir()} == {"b.py": "not ours"}


@pytest.mark.parametrize(
    ("record", "code", "words"),
    [
        (None, 2, "has no records of its launches"),
        ("{", 5, "is damaged"),
        ('{"code": 7}', 2, "was not archived"),
        ('{"code": {"id": "../../x"}}', 5, "is not a code id"),
        (json.dumps({"code": {"id": "0" * 64}}), 5, f"code/{'0' * 64}.zip: cannot be read"),
    ],
)
def test_records_that_are_damaged_or_missing(
    run: Path, capsys: pytest.CaptureFixture[str], record: str | None, code: int, words: str
) -> None:
    """Whatever a record says, the verbs end with one line, and write nothing."""
    path = run / "captured.0.json"
    path.unlink() if record is None else path.write_text(record)
    assert words in said(capsys, code, "code", "run", "-o", "out")
    assert not Path("out").exists()


def test_a_damaged_archive_is_not_extracted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every byte is verified before the first file is written."""
    (archive,) = (run / "code").iterdir()
    data = archive.read_bytes()
    archive.write_bytes(data.replace(b"2\n", b"3\n"))
    assert "files/b.py" in said(capsys, 5, "code", "run", "-o", "out")
    assert not Path("out").exists()


def test_the_verbs_need_no_torch(run: Path) -> None:
    """Looking at source is quick: neither torch nor pickle is imported."""
    code = (
        "import sys\nfrom torchrelay.tools.cli.main import main\n"
        "assert main(['runs', 'diff', 'run', 'run', '--json']) == main(['runs', 'code', 'run']) == 0\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'pickle')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_a_difference_of_hosts_names_those_that_differ() -> None:
    """Ranks by host are told where they differ, three at most; equal counts of entries would say nothing."""
    one = {"world": {"hosts": {"a": 1, "b": 4}, "processes": 5}}
    other = {"world": {"hosts": {"a": 2, "b": 4}, "processes": 6}}
    assert dict(captured_otherwise(one, other)) == {
        "world hosts": ("a=1", "a=2"),
        "world processes": ("5", "6"),
    }
    many = {"world": {"hosts": {f"n{number}": 8 for number in range(5)}}}
    assert dict(captured_otherwise(one, many)) == {
        "world hosts": ("a=1, b=4", "n0=8, n1=8, n2=8, 2 more"),
        "world processes": ("5", "none"),
    }
