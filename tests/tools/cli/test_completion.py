"""The completion scripts, in the shells that they are for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from torchrelay.tools.cli.completion import SHELLS, tree_of
from torchrelay.tools.cli.main import main, whole_parser

ASK = """
source ./script
COMP_WORDS=({words}) COMP_CWORD={at}
_torchrelay
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three scripts, and two things to complete as paths."""
    folder = tmp_path_factory.mktemp("shell")
    for name, make in SHELLS.items():
        (folder / name).write_text(make(dict(tree_of(whole_parser()))))
    (folder / "script").write_text((folder / "bash").read_text())
    (folder / "my runs").mkdir()
    (folder / "my file").touch()
    return folder


def completed(folder: Path, *words: str) -> list[str]:
    """What a real bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    script = ASK.format(words=quoted, at=len(words) - 1)
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=folder, capture_output=True, text=True, timeout=100, check=True
    )
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["torchrelay", "s"], ["serve", "show", "status"]),
        (["torchrelay", "ckpt", "w"], ["why"]),
        (["torchrelay", "ckpt", "show", "--bl"], ["--blobs"]),
        (["torchrelay", "ckpt", "verify", "my runs", "--level", "f"], ["full"]),
        (["torchrelay", "verify", "--json", "--lev"], ["--level"]),
        (["torchrelay", "completion", ""], ["bash", "zsh", "fish"]),
        (["torchrelay", "ls", "my"], ["my file", "my runs"]),
        (["torchrelay", "runs", "compare", "ls", "my r"], ["my runs"]),
        (["torchrelay", "ckpt", "show", "my runs", "@", "b"], ["best"]),
        (["torchrelay", "nonsense", "--j"], []),
    ],
)
def test_bash_completes_verbs_options_choices_paths_and_selectors(
    folder: Path, words: list[str], offered: list[str]
) -> None:
    """A real bash that reads the script offers exactly what may follow; names with blanks stay whole."""
    assert sorted(completed(folder, *words)) == sorted(offered)


def test_bash_offers_all_verbs_of_the_parser(folder: Path) -> None:
    """The script is made of the parser, so no verb and no option of it is missing."""
    for verb, one in tree_of(whole_parser()):
        words = ["torchrelay", *verb.split()]
        assert set(one.options) <= set(completed(folder, *words, "-"))
        if one.verbs:
            assert completed(folder, *words, "") == list(one.verbs)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_parse(folder: Path, shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each shell that is installed reads its script without complaint; the verb prints that very text."""
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == (folder / shell).read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here: apt-get install {shell}")
    done = subprocess.run(
        [shell, "-n", str(folder / shell)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


STUBS = """
compdef() {{ }}
compadd() {{ print -rl -- "${{@[2,-1]}}" }}
_files() {{ print FILES }}
source ./zsh
words=({words}) CURRENT={at} PREFIX={last}
_torchrelay
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed: apt-get install zsh")
@pytest.mark.parametrize(
    ("words", "some"),
    [
        (["torchrelay", ""], ["ls", "ckpt", "serve"]),
        (["torchrelay", "ckpt", ""], ["why", "du"]),
        (["torchrelay", "ckpt", "verify", "--level", ""], ["headers", "full"]),
        (["torchrelay", "ls", "-"], ["--json"]),
        (["torchrelay", "ls", ""], ["FILES"]),
    ],
)
def test_zsh_runs_its_function(folder: Path, words: list[str], some: list[str]) -> None:
    """A real zsh, with what its completion system would call noted down, offers what may follow."""
    quoted = " ".join(f"'{word}'" for word in words)
    script = STUBS.format(words=quoted, at=len(words), last=f"'{words[-1]}'")
    done = subprocess.run(
        ["zsh", "-f", "-c", script], cwd=folder, capture_output=True, text=True, timeout=100, check=True
    )
    assert set(some) <= set(done.stdout.splitlines()), done


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed: apt-get install fish")
@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("torchrelay ", {"ls", "ckpt"}),
        ("torchrelay ckpt ", {"why", "du"}),
        ("torchrelay ckpt verify --level ", {"headers", "full"}),
        ("torchrelay ls --j", {"--json"}),
    ],
)
def test_fish_completes(folder: Path, line: str, some: set[str]) -> None:
    """A real fish offers verbs, options and choices."""
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source ./fish; complete -C '{line}'"],
        cwd=folder, env={"PATH": "/usr/bin:/bin", "HOME": str(folder)}, capture_output=True, text=True,
        timeout=100, check=True,
    )  # fmt: skip
    assert some <= {one.split("\t")[0] for one in done.stdout.splitlines()}, done
