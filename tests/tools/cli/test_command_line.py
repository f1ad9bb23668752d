"""The command line: quick, without torch, honest about damage, one clear line for a mistake."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from epochs import Writing, moment, parameter, value

from torchrelay.checkpoint.format.position import Facts, Key, Position, Retirement
from torchrelay.checkpoint.log.writer import tag_draft
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import StorageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.console import printable
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.tools.cli.main import main

COMMAND = [sys.executable, "-m", "torchrelay"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with epochs 0 to 2 on branch 0 and, rewound to 1, epochs 2 and 3 on branch 1."""
    directory = RunDirectory(tmp_path / "hello")
    directory.create("hello", ("val/acc", "max"), 2)
    directory.write_status("FINISHED", epoch=3)
    directory.log_event(0, "start", attempt=0)
    directory.log_event(0, "end", state="FINISHED")
    leaves = [parameter("model.weight", torch.arange(6.0)), value("total", 3)]
    with Writing(directory.checkpoints, "hello") as writing:
        for epoch in range(3):
            writing.save(epoch, leaves, nodes=2, facts=Facts(metrics={"loss": 1 / (epoch + 1)}))
        writing.log.rewind(Position(1), {"epoch": 1})
        writing.save(2, leaves, nodes=1)
        writing.save(3, leaves, nodes=1, facts=Facts(metrics={"loss": float("nan")}))
        writing.log.append_draft(tag_draft("good", Key(1, Position(3))))
    return directory.path


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(one) for one in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def shard_of(run: Path, epoch: int) -> Path:
    """The first shard of the newest try of an epoch."""
    tries = sorted(
        (run / "checkpoints/data").glob(f"e{epoch:08d}-*"), key=lambda path: path.stat().st_mtime_ns
    )
    return sorted(tries[-1].glob("*.safetensors"))[0]


def damage(file: Path) -> None:
    """Flip a bit of the last byte, which is data."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["ls", "--help"],
        ["ls", "RUN"],
        ["verify", "RUN"],
        ["ckpt", "diff", "RUN", "@2"],
        ["ckpt", "diff", "--help"],
        ["ckpt", "find-bad", "--help"],
        ["ckpt", "--help"],
        ["ckpt", "why", "RUN"],
        ["ckpt", "repair", "RUN", "--delete-orphans"],
        ["ckpt", "show", "RUN@2,branch=0"],
        ["ckpt", "du", "RUN"],
        ["ckpt", "stats", "RUN"],
        ["runs", "compare", "RUN"],
        ["completion", "bash"],
    ],
)
def test_no_verb_imports_torch_or_numpy(run: Path, arguments: list[str]) -> None:
    """Help, version and looking at runs are quick because torch and numpy stay unimported."""
    code = (
        "import sys, torchrelay.__main__ as door\n"
        "try: door.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'rich') if name in sys.modules])"
    )
    arguments = [str(run) + one.removeprefix("RUN") if one.startswith("RUN") else one for one in arguments]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_of_the_module_names_every_verb() -> None:
    """`python -m torchrelay --help` succeeds and names the verbs; without a verb it is a usage error."""
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=100, check=True)
    assert all(verb in done.stdout for verb in ("ls", "show", "verify"))
    none = subprocess.run(COMMAND, capture_output=True, text=True, timeout=100, check=False)
    assert (none.returncode, none.stdout) == (2, "")


@pytest.mark.parametrize(
    ("former", "now"),
    [
        (["stats"], ["ckpt", "stats"]),
        (["unpin"], ["ckpt", "pin", "--delete"]),
        (["compare"], ["runs", "compare"]),
    ],
)
def test_former_spellings_work_and_name_the_new_one(
    run: Path, capsys: pytest.CaptureFixture[str], former: list[str], now: list[str]
) -> None:
    """A verb of the version before ends and prints as the new one does, with one line more on stderr."""
    code, out, err = told(capsys, *now, run)
    line = f"torchrelay: `{former[0]}` is now `{' '.join(now)}`; "
    line += "the old spelling will be removed in the next version\n"
    assert told(capsys, *former, run) == (code, out, line + err)


def test_ls_shows_every_epoch(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ls has a line per epoch with branch, world size, bytes, metrics and try; abandoned ones are marked."""
    code, out, err = told(capsys, "ls", run)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["epoch", "branch", "ranks", "bytes", "state", "metrics", "directory"]
    assert [(line[0], line[1], line[2]) for line in lines[1:]] == [
        ("2", "0", "2"), ("0", "0", "2"), ("1", "0", "2"), ("2", "1", "1"), ("3", "1", "1"),
    ]  # fmt: skip
    assert "abandoned" in lines[1]
    assert "loss=0.33333" in lines[1]
    assert "tag:good" in lines[5]
    assert all(line[-1].startswith("e0000000") for line in lines[1:])


def test_ls_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ls --json is one strict JSON object, also where a metric is NaN."""
    _, out, _ = told(capsys, "ls", run / "checkpoints", "--json")
    found = json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert (found["job"], found["branch"]) == ("hello", 1)
    last = found["epochs"][-1]
    assert (last["epoch"], last["branch"], last["world_size"], last["tags"]) == (3, 1, 1, ["tag:good"])
    assert last["metrics"] == {"loss": "nan"}
    assert last["bytes"] == sum(file.stat().st_size for file in shard_of(run, 3).parent.glob("*.safetensors"))


def test_ls_of_a_run_without_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that has committed nothing yet is no error."""
    RunDirectory(tmp_path).create("hello", None, 1)
    code, out, _ = told(capsys, "ls", tmp_path)
    assert (code, out) == (0, f"no committed epochs in {tmp_path}\n")


def test_ls_survives_a_lost_manifest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An epoch whose manifest is gone is still listed, marked, without what only the manifest knows."""
    (shard_of(run, 3).parent / "manifest.json").unlink()
    code, out, _ = told(capsys, "ls", run)
    assert code == 0
    assert "manifest unreadable" in out.splitlines()[-1]


def test_show_tells_identity_status_and_events(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Show prints run.json, status.json and the last events, as many as asked for."""
    code, out, _ = told(capsys, "show", run, "--events", 1)
    assert code == 0
    assert all(word in out for word in ("hello", "FINISHED", "val/acc max", "events (1)", "end"))
    assert "tail" not in out and "trainer_0" not in out
    assert "attempt=0" not in out
    _, out, _ = told(capsys, "show", run, "--json")
    found = json.loads(out)
    assert found["run"]["job"] == "hello"
    assert found["status"]["state"] == "FINISHED"
    assert [event["kind"] for event in found["events"]] == ["start", "end"]


def test_verify_proves_all_epochs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verify proves every epoch, abandoned ones too, and ends with 0."""
    code, out, _ = told(capsys, "verify", run)
    assert code == 0
    assert [line.split("  ")[2] for line in out.splitlines()[:-1]] == [
        "verified", "verified", "verified (abandoned)", "verified", "verified"
    ]  # fmt: skip
    assert out.splitlines()[-1] == "5 of 5 epochs verified"


def test_verify_finds_one_flipped_bit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single flipped bit of data ends verify with 5 and names file and block; other epochs stay proved."""
    file = shard_of(run, 3)
    damage(file)
    code, out, _ = told(capsys, "verify", run)
    assert code == 5
    assert f"epoch 3  branch 1  damaged  {file.relative_to(run / 'checkpoints')}: block 0 of" in out
    assert out.splitlines()[-1] == "4 of 5 epochs verified"
    assert told(capsys, "verify", run, "--epoch", "2")[0] == 0
    assert told(capsys, "verify", run, "--epoch", "last")[0] == 5
    code, out, _ = told(capsys, "verify", run, "--epoch", "2,branch=0", "--json")
    assert code == 0
    assert [epoch["outcome"] for epoch in json.loads(out)["epochs"]] == ["proved"]


def test_verify_of_a_thinned_epoch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Files that retention took from an epoch on purpose are not damage."""
    leaves = [parameter("model.weight", torch.arange(6.0))]
    with Writing(tmp_path / "thin") as writing:
        entry = writing.save(1, [*leaves, moment("optimizer.m", torch.arange(6.0))])
        writing.save(2, leaves)
        writing.log.retire([Retirement(entry.attempt_name, ("optim",))])
        for file in (tmp_path / "thin/data" / entry.attempt_name).glob("*.optim.safetensors"):
            file.unlink()
    code, out, _ = told(capsys, "verify", tmp_path / "thin")
    assert (code, out.splitlines()[-1]) == (0, "2 of 2 epochs verified")
    assert "not resumable" in told(capsys, "ls", tmp_path / "thin")[1]


def test_verify_calls_unreadable_epochs_unknown(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error says nothing about an epoch: it is unknown, neither damaged nor proved."""
    bad, read, fired = shard_of(run, 3).name, LocalStorage.read_range, []

    def failing(self: LocalStorage, path: str, offset: int, length: int) -> bytes:
        if path.endswith(bad) and "e00000003" in path:
            fired.append(path)
            raise StorageError(f"cannot read {path}: Input/output error")
        return read(self, path, offset, length)

    monkeypatch.setattr(LocalStorage, "read_range", failing)
    code, out, _ = told(capsys, "verify", run)
    assert fired
    assert code == 5
    assert "epoch 3  branch 1  unknown  cannot read" in out
    assert out.splitlines()[-1] == "4 of 5 epochs verified"


def test_a_damaged_log_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged newest record is stepped over with a word on stderr; verify then never ends with 0."""
    newest = sorted((run / "checkpoints/log").glob("[0-9]*.json"))[-1]
    newest.write_bytes(newest.read_bytes()[:-5])
    code, out, err = told(capsys, "verify", run)
    assert code == 5
    assert "the log is damaged" in out
    assert newest.name in err
    assert told(capsys, "ls", run)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ls", "{tmp}/nowhere"], 2, "does not exist"),
        (["verify", "{tmp}"], 2, "it contains the run hello"),
        (["ls", "{tmp}/foreign"], 2, "is not a run and has no checkpoints"),
        (["show", "{tmp}/file"], 2, "is a file"),
        (["verify", "@2"], 2, "@2 names no run: write its path before the @"),
        (["show", "{run}@2"], 2, "this command takes a run without an epoch: use {run}"),
        (["show", "{run}/checkpoints"], 2, "torchrelay ls lists its epochs"),
        (["ls", "memory://nothing/here"], 2, "holds no checkpoints"),
        (["verify", "{run}", "--epoch", "9"], 2, "there are epochs 0 to 3"),
        (["verify", "{run}", "--epoch", "2,branch=7"], 2, "no branch 7"),
        (["verify", "{run}", "--epoch", "nine"], 2, "invalid epoch"),
        (["verify", "{run}", "--epoch", "best"], 2, "val/acc"),
        (["verify", "{run}@2", "--epoch", "2"], 2, "both name an epoch"),
        (["verify", "{run}x"], 2, "did you mean {run}?"),
        (["lst", "{run}"], 2, "unknown subcommand 'lst'; did you mean ls?"),
        (["why", "{run}"], 2, "did you mean ckpt why?"),
        (["ckpt", "shwo", "{run}"], 2, "unknown subcommand 'ckpt shwo'; did you mean show?"),
        (["verify", "{run}", "--epochs", "2"], 2, "verify has no option --epochs; did you mean --epoch?"),
        (
            ["verify", "{run}", "2"],
            2,
            "unexpected argument '2': verify takes RUN[@EPOCH] (torchrelay verify --help)",
        ),
        (["run", "-m", "c.yaml", "seed=3"], 2, "unexpected argument 'seed=3': write -o seed=3"),
        (["train", "-m", "c.yaml", "seed=3"], 2, "unexpected argument 'seed=3': write -o seed=3"),
        (["ckpt", "verify", "{run}", "--level", "header"], 2, "choose from"),
        (["ls"], 2, "required: RUN_OR_RUNS (torchrelay ls --help)"),
    ],
)
def test_mistakes_are_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    """An unknown run, a foreign directory or a wrong epoch is one line on stderr with the right exit code."""
    tmp = run.parent
    (tmp / "foreign").mkdir()
    (tmp / "file").touch()
    found = told(capsys, *(one.format(tmp=tmp, run=run) for one in arguments))
    assert found[:2] == (code, "")
    assert found[2].startswith("torchrelay: ")
    assert found[2].count("\n") == 1
    assert words.format(run=run, tmp=tmp) in found[2]


def test_damage_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the log as a whole cannot be trusted the verbs end with 5 and name the file."""
    for file in (run / "checkpoints").glob("log/[0-9]*.json"):
        file.write_bytes(b"{}")
    code, out, err = told(capsys, "ls", run)
    assert (code, out, err.count("\n")) == (5, "", 1)
    assert "log/00000000000000000000.json" in err


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"{}")])
def test_a_damaged_job_file_is_named_and_hinders_nobody(
    run: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], object]
) -> None:
    """Without job.json the verbs do their work by the log; verify ends with 5; repair writes it again."""
    path = run / "checkpoints" / "job.json"
    whole = path.read_bytes()
    harm(path)
    for verb, code in (("ls", 0), ("verify", 5), ("du", 0), ("why", 0)):
        found = told(capsys, "ckpt", verb, run)
        assert found[0] == code and found[2].count("job.json") == 1, verb
        assert "the next start or torchrelay ckpt repair writes it again" in found[2]
        assert not path.exists() or path.read_bytes() == b"{}"
    assert told(capsys, "ckpt", "repair", run)[0] == 0
    assert path.read_bytes() == whole
    assert told(capsys, "ckpt", "verify", run)[::2] == (0, "")


@pytest.mark.parametrize("verb", ["ls", "verify"])
def test_a_reader_that_goes_away_is_no_error(run: Path, verb: str) -> None:
    """`torchrelay ls | head -1` ends quietly; verify keeps its exit code."""
    damage(shard_of(run, 3))
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, verb, str(run)], stdout=write, stderr=subprocess.PIPE, timeout=100, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (5 if verb == "verify" else 0, b"")


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What a verb prints when stdout is a terminal."""
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", **environment}
    if "NO_COLOR" not in environment:
        env.pop("NO_COLOR", None)
    with subprocess.Popen([*COMMAND, *arguments], stdout=slave, stdin=slave, env=env) as process:
        os.close(slave)
        said = b""
        while True:
            try:
                more = os.read(master, 4096)
            except OSError:
                break
            if not more:
                break
            said += more
        process.wait(timeout=100)
    os.close(master)
    return said.decode()


def test_tables_and_colour_only_on_a_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal gets a table with colour, without colour where NO_COLOR is set; a pipe gets plain text."""
    assert "\x1b[" not in told(capsys, "verify", run)[1]
    assert "\x1b[32m" in on_a_terminal("verify", str(run))
    assert "\x1b[3" not in on_a_terminal("verify", str(run), NO_COLOR="1")
    table = on_a_terminal("ls", str(run), NO_COLOR="1")
    assert "──" in table
    assert "abandoned" in table


def test_a_narrow_terminal_cuts_nothing(run: Path) -> None:
    """Columns that can be spared are left out, words are folded, numbers stay whole."""
    wide, narrow = (on_a_terminal("ls", str(run), NO_COLOR="1", COLUMNS=width) for width in ("200", "60"))
    assert "e00000003-" in wide and "e00000003-" not in narrow
    assert "…" not in narrow and "loss=0.5" in narrow


def test_ls_of_runs_says_how_far_one_is_that_has_not_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While a run goes, and after it broke off, its newest saved epoch is that of its own notes."""
    directory = RunDirectory(tmp_path / "going")
    directory.create("going", None, 1)
    directory.write_status("RUNNING", epoch=3, generation=0)
    for epoch, saved in ((1, True), (2, True), (3, False)):
        directory.log_metrics(0, {"epoch": epoch, "saved": saved, "metrics": {}})
    assert json.loads(told(capsys, "ls", tmp_path, "--json")[1])["runs"][0]["epoch"] == 2


def test_names_from_files_cannot_steer_the_terminal() -> None:
    """Control characters of stored names are shown, not sent."""
    assert printable("a\x1b[2Jb\nc\x7f é") == "a\\x1b[2Jb c\\x7f é"


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "?"), (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (1_536_000, "1.54 MB"),
     (10**18, "1e+03 PB")],
)  # fmt: skip
def test_bytes_for_people(count: int | None, text: str) -> None:
    """Sizes are shown in three figures."""
    assert human_bytes(count) == text
