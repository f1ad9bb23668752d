"""Verbs over URLs of runs, and of places with runs: as over directories, and nothing is written."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from pathlib import Path

import fsspec
import pytest
from dashboards import dashboard
from stored_jobs import Hosts, in_memory, put, train

from torchrelay.runners.remote_runs import local_copies as mirrors
from torchrelay.runners.remote_runs.download import RunFiles
from torchrelay.runners.remote_runs.local_copies import Mirror, mirror_of
from torchrelay.runners.remote_runs.names import for_a_glance, for_a_look
from torchrelay.tools.cli.main import main
from torchrelay.tools.report.server import RemoteRuns


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A place with two runs, `hello` and `other`, which are only looked at."""
    with pytest.MonkeyPatch.context() as patch:
        Hosts(tmp_path_factory.mktemp("hosts"), patch).on("one")
        url = "memory://looked-at/runs"
        train(f"{url}/hello", 3, best=("train/loss", "min"))
        train(f"{url}/other", 1)
    return url


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(list(words))
    return code, "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("ls {top}", r"hello +stored +finished +3 +train/loss=.*\n.*other +stored +finished +1"),
        ("ls {top}/hello", r"epoch +branch[\s\S]*\n3 +0 +1 "),
        ("show {top}/hello", r"state +FINISHED[\s\S]*events"),
        ("verify {top}/hello", r"4 of 4 epochs verified"),
        ("verify {top}/hello@best", r"epoch \d +branch 0 +verified"),
        ("top {top} --once", r"hello +finished +3[\s\S]*other +finished +1"),
        ("top {top}/other --once", r"other +finished +1"),
        ("runs ls {top}", r"hello +- +finished +3 [\s\S]*other"),
        (
            "runs show {top}/other",
            r"in +memory://looked-at/runs\n[\s\S]*against +memory://looked-at/runs/hello",
        ),
        ("runs show hello --runs {top}", r"run +hello"),
        ("stats {top}/hello", r"4 saves"),
        (
            "compare {top}",
            r"memory://looked-at/runs/hello +memory://looked-at/runs/other[\s\S]*epochs kept +4 +2",
        ),
        ("status {top}/hello", r"run hello: finished, newest epoch 3"),
        ("lineage {top}/hello", r"hello: job stored"),
        (
            "ckpt why {top}/hello",
            r"the next launch would train nothing: the run finished at epoch 3 of branch 0;",
        ),
        ("ckpt du {top}/hello", r"live: "),
        ("find-bad {top}/hello", r""),
        ("report {top}/hello {top}/other -o page.html", r"wrote page.html .*: hello, other"),
    ],
)
def test_verbs_that_look(
    top: str, words: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each tells of a URL what it tells of a directory, names the URL, and changes nothing there."""
    monkeypatch.chdir(tmp_path)
    before = in_memory(top)
    code, text = said(capsys, *shlex.split(words.format(top=top)))
    assert code == 0, text
    assert re.search(told, text), text
    assert "torchrelay-look" not in text, "nobody hears of directories that stand for URLs"
    assert in_memory(top) == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("show {top}", r"is not a run; it contains the runs hello, other"),
        ("ls {top}/nothing", r"holds no checkpoints"),
        ("show {top}/hello@2", r"."),
        ("runs code {top}/hello", r"memory://looked-at/runs/hello was not archived"),
        ("dashboard {top}/nothing", r"no run lies at"),
        ("train program.py --runs {top}", r"."),
    ],
)
def test_what_cannot_be_is_told_by_its_url(
    top: str, words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the remedy, and no traceback."""
    code, text = said(capsys, *shlex.split(words.format(top=top)))
    assert code == 2, text
    assert re.search(told, text), text
    assert "torchrelay-look" not in text
    assert "Traceback" not in text


def test_verbs_that_mark_write_at_the_url(hosts: Hosts, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Tags, pins and pruning work on the checkpoints where they lie."""
    train(url, 3)
    assert said(capsys, "ckpt", "tag", f"{url}@1", "paper")[0] == 0
    assert said(capsys, "ckpt", "pin", f"{url}@2", "kept")[0] == 0
    assert "kept: 1 to 3" in said(capsys, "ckpt", "prune", url, "--keep-last", "1")[1]
    assert re.search(r"tag +paper +1", said(capsys, "ckpt", "tag", url)[1])


def test_status_tells_what_a_script_wants_to_know(
    top: str, hosts: Hosts, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status URL --check` ends with 1 where the same command would go on; --json has the words."""
    assert said(capsys, "status", f"{top}/hello", "--check")[0] == 0
    train(url, 1)
    put(f"{url}/status.json", b'{"state": "PREEMPTED", "stop": ["SIGTERM"], "epoch": 1}')
    code, text = said(capsys, "status", url, "--check", "--json")
    assert (code, json.loads(text)["state"], json.loads(text)["path"]) == (1, "interrupted", url)


def test_a_second_look_brings_what_has_changed(
    hosts: Hosts, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files of the same version are not read again; changed ones are, and deleted ones are gone."""
    train(url, 2)
    put(f"{url}/config/resolved.yaml", b"a: 1\n")
    mirror = Mirror(url, tmp_path)
    read: list[str] = []
    copied = RunFiles.copy_into

    def copy_into(self: RunFiles, path: str, file: object, most: int) -> None:
        read.append(path)
        copied(self, path, file, most)  # type: ignore[arg-type]

    monkeypatch.setattr(RunFiles, "copy_into", copy_into)
    run = mirror.run(wanted=for_a_look)
    assert {"run.json", "status.json", "config/resolved.yaml"} <= set(read)
    assert not [name for name in read if name.startswith("logs/")]
    assert (run.path / "logs/attempt_0/rank_0.log").stat().st_size == 0
    read.clear()
    put(f"{url}/status.json", b'{"state": "STOPPED"}')
    fsspec.filesystem("memory").rm_file(f"/{url.partition('://')[2]}/config/resolved.yaml")
    assert mirror.run(wanted=for_a_look).status() == {"state": "STOPPED"}
    assert read == ["status.json"]
    assert not (run.path / "config/resolved.yaml").exists()
    mirror.run(wanted=for_a_look, not_older_secs=3600)
    assert read == ["status.json"], "who may see it as it was asks nothing"


def test_a_status_that_is_too_long_is_told(
    hosts: Hosts, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A status.json of 20 MB is neither believed nor taken for none; it is named by its URL."""
    train(url, 1)
    put(f"{url}/status.json", b'{"state": "' + b"x" * 20_000_000 + b'"}')
    code, text = said(capsys, "show", url)
    assert code == 0
    assert f"{url}/status.json is damaged: too large" in text
    assert said(capsys, "top", url, "--once")[0] == 0


def test_foreign_files_and_odd_names(hosts: Hosts, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of others are left alone, names that are none are told of, and a huge file is not brought."""
    train(url, 1)
    root = f"/{url.partition('://')[2]}"
    memory = fsspec.filesystem("memory")
    kind = type(memory.store[f"{root}/run.json"])
    for name in ("config/../../escaped", "config/\x1b[31mred\n"):
        memory.store[f"{root}/{name}"] = kind(memory, f"{root}/{name}", b"evil")
    put(f"{url}/somebody.bin", b"\0" * 1000)
    code, text = said(capsys, "show", url)
    assert code == 0, text
    assert "is not possible as a local file name" in text
    assert "\x1b[31m" not in text
    where = mirror_of(url).root
    assert not [one for one in where.parent.parent.rglob("*") if one.name == "escaped"]


def test_the_dashboard_of_a_store(top: str) -> None:
    """The list and the pages of runs are served by URL, and a name that leads elsewhere is none."""
    with dashboard(RemoteRuns(top)) as server:
        page = urllib.request.urlopen(server.url, timeout=60).read().decode()
        assert "hello" in page
        assert "other" in page
        assert top in page
        run = urllib.request.urlopen(f"{server.url}run/hello", timeout=60).read().decode()
        assert "FINISHED" in run
        assert f"{top}/hello" in run
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{server.url}run/..%2Fhello", timeout=60)


def test_names_of_glances() -> None:
    """A list of runs reads the notes at the top and nothing else; neither reads checkpoints or logs."""
    assert for_a_glance("status.json")
    assert not for_a_glance("config/resolved.yaml")
    assert for_a_look("config/resolved.yaml")
    assert not any(kind("checkpoints/job.json") for kind in (for_a_glance, for_a_look))
    assert mirrors.shown_place(Path("/nowhere")) == "/nowhere"
