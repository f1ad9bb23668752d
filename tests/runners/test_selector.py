"""`RUN@7`, `RUN@best`: taken apart without touching anything, and resolved by what the log says."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from epochs import Writing, parameter
from hypothesis import given
from hypothesis import strategies as st

from torchrelay import open_checkpoint
from torchrelay.checkpoint.format.position import Facts, Key, Position
from torchrelay.checkpoint.log.view import EpochQuery
from torchrelay.checkpoint.log.writer import tag_draft
from torchrelay.errors import RelayError, UnknownEpochError, UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.remote_runs.resolve import Selector, parse_selector, select

SCORES = {0: float("nan"), 1: 0.0, 2: -3.0, 3: -1.0, 4: float("nan")}
LEAVES = [parameter("w", torch.zeros(3))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Epochs 0 to 4 and a tag; then a rewind to 3, so that epoch 4 is on branch 1 too."""
    directory = RunDirectory(tmp_path_factory.mktemp("made") / "digits")
    directory.create("digits", ("score", "max"), 1)
    with Writing(directory.checkpoints, "digits") as writing:
        for epoch, score in SCORES.items():
            writing.save(epoch, LEAVES, facts=Facts(metrics={"score": score, "lr": 0.1}))
        writing.log.append_draft(tag_draft("a@b", Key(0, Position(2))))
        writing.log.rewind(Position(3), {"epoch": 3})
        writing.save(4, LEAVES, facts=Facts(metrics={"lr": 0.1}))
    return directory.path


@pytest.mark.parametrize(
    ("text", "path", "wish"),
    [
        ("runs/a", "runs/a", None),
        ("runs/a@7", "runs/a", EpochQuery(7)),
        ("runs/a@epoch=7", "runs/a", EpochQuery(7)),
        ("runs/a@epoch=7,branch=0", "runs/a", EpochQuery(7, branch=0)),
        ("runs/a@7,branch=12", "runs/a", EpochQuery(7, branch=12)),
        ("runs/a@best", "runs/a", EpochQuery(None, "best")),
        ("runs/a@last", "runs/a", EpochQuery(None, "last")),
        ("runs/a@tag=v1", "runs/a", EpochQuery(None, tag="v1")),
        ("runs/a@tag=x@y/z", "runs/a", EpochQuery(None, tag="x@y/z")),
        ("me@host/runs", "me@host/runs", None),
        ("me@host/runs@7", "me@host/runs", EpochQuery(7)),
        ("s3://bucket/run@best", "s3://bucket/run", EpochQuery(None, "best")),
        ("@7", "@7", None),
    ],
)
def test_what_people_write(text: str, path: str, wish: EpochQuery | None) -> None:
    """Every form is taken apart into a path and what is wanted of it."""
    found = parse_selector(text, lambda _: False)
    assert (found.path, found.wish) == (path, wish)


@pytest.mark.parametrize("word", ["", "nine", "-1", "1e3", "7,branch=x", "tag=", "3+1200", "Best", "epoch="])
def test_a_word_that_is_no_selector(word: str) -> None:
    """It is refused by name, as a user's mistake."""
    with pytest.raises(UsageError, match="runs/a@"):
        parse_selector(f"runs/a@{word}", lambda _: False)


@given(st.text(max_size=12), st.integers(0, 99_999_999), st.integers(0, 999))
def test_a_path_that_exists_wins(path: str, epoch: int, branch: int) -> None:
    """Whatever a path is called: it is itself where it exists, else its selector is read back as written."""
    text = f"r{path}@{epoch},branch={branch}"
    assert parse_selector(text, lambda _: True) == Selector(text)
    if "@tag=" not in text:
        found = parse_selector(text, lambda _: False)
        assert (found.path, found.wish) == (f"r{path}", EpochQuery(epoch, branch=branch))


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("", Key(1, Position(4))),
        ("@last", Key(1, Position(4))),
        ("@best", Key(0, Position(1))),
        ("@epoch=4,branch=0", Key(0, Position(4))),
        ("@2", Key(0, Position(2))),
        ("@tag=a@b", Key(0, Position(2))),
    ],
)
def test_which_epoch_is_meant(run: Path, word: str, key: Key) -> None:
    """The best epoch is the one with 0.0, which is a value; nan is none; a rewind hides what it abandoned."""
    found = select(f"{run}{word}")
    assert found.entry.key == key
    assert select(found.name).entry.key == key
    epoch = word[1:] or "last"
    assert open_checkpoint(run, epoch).entry.key == key


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("@9", ["no epoch 9 in ", "digits: there are epochs 0 to 4", "0 also 4 (write 4,branch=0)"]),
        ("@2,branch=7", ["no branch 7; the branches are: 0, 1"]),
        ("@tag=a", ["no tag 'a'", "'a@b'"]),
        ("x@2", ["does not exist"]),
    ],
)
def test_a_wrong_selector_says_what_there_is(run: Path, word: str, words: Sequence[str]) -> None:
    """One line names what could have been meant; the exit code is that of usage."""
    with pytest.raises(RelayError) as caught:
        select(f"{run}{word}")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value) and all(one in str(caught.value) for one in words)


def test_of_many_epochs_the_near_ones_are_told(tmp_path: Path) -> None:
    """Where every tenth epoch is left the message stays short, and names the neighbours."""
    with Writing(tmp_path / "thin") as writing:
        for epoch in range(0, 100, 10):
            writing.save(epoch, LEAVES)
    with pytest.raises(UnknownEpochError, match=r"0 to 90 with gaps \(10\), next to 47 there is 40 and 50$"):
        select(f"{tmp_path / 'thin'}@47")
    with pytest.raises(UnknownEpochError, match=r"next to 99 there is 90$"):
        select(f"{tmp_path / 'thin'}@99")


def test_no_best_where_nothing_says_what_it_is(run: Path, tmp_path: Path) -> None:
    """A run whose run.json has no best, and one whose epochs lack the metric, are told apart."""
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    directory = RunDirectory(copy)
    directory.create("digits", None, 1)
    with pytest.raises(UsageError, match=r"the run names none: give best="):
        select(f"{copy}@best")
    directory.create("digits", ("val/acc", "max"), 1)
    with pytest.raises(UnknownEpochError, match=r"no epoch .* metric 'val/acc' \(found: lr, score\).*best="):
        select(f"{copy}@best")


def test_a_directory_called_with_an_at_is_a_path(run: Path, tmp_path: Path) -> None:
    """`runs/exp@7` that exists is the run of that name; `runs/exp@7@2` is its epoch 2."""
    place = Path(shutil.copytree(run, tmp_path / "exp@7"))
    assert select(str(place)).entry.position == Position(4)
    assert select(f"{place}@2").entry.position == Position(2)


def test_a_store_is_selected_from_by_its_url() -> None:
    """Checkpoints at a URL are found, tags and best included; the run's own notes need not be there."""
    import fsspec

    from torchrelay.checkpoint.storage.open import storage_of

    system = fsspec.filesystem("memory")
    try:
        with Writing(storage_of("memory://selected/run/checkpoints", "the place"), "remote") as writing:
            for epoch in range(3):
                writing.save(epoch, LEAVES, facts=Facts(metrics={"score": -float(epoch)}))
        assert select("memory://selected/run").entry.position == Position(2)
        with pytest.raises(UsageError, match="the run names none"):
            select("memory://selected/run@best")
        system.pipe_file("/selected/run/run.json", b'{"best": ["score", "max"]}')
        assert select("memory://selected/run@best").entry.position == Position(0)
        with pytest.raises(UsageError, match="holds no checkpoints"):
            select("memory://selected/nowhere")
    finally:
        system.rm("/selected", recursive=True)


def test_the_former_name_of_the_module_still_imports() -> None:
    """Programs that a page once told `runners.commands.selector` go on, and are told the new name."""
    for name in ("torchrelay.runners.commands", "torchrelay.runners.commands.selector"):
        sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning, match=r"is torchrelay\.runners\.remote_runs\.resolve now"):
        selector = importlib.import_module("torchrelay.runners.commands.selector")
    assert importlib.import_module("torchrelay.runners.commands").selector is selector
    assert selector.select is select
    assert selector.parse_selector is parse_selector
