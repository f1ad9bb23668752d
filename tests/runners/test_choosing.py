"""Where a run starts."""

from __future__ import annotations

import pytest

from torchrelay.errors import NoProvableEpochError, UsageError
from torchrelay.runners.training.plan import Choice, Past, ResumeRequest, check_epoch, choose


def start(wish: ResumeRequest, past: Past) -> tuple[str, int | None, bool]:
    choice: Choice = choose(wish, past)
    return choice.start, choice.epoch, choice.rewind


def test_automatic_resume_takes_the_newest() -> None:
    """A run directory with commits continues by itself; without commits it starts fresh."""
    assert start(ResumeRequest(), Past(commits=True)) == ("newest", None, False)
    assert start(ResumeRequest(), Past()) == ("fresh", None, False)


def test_bare_manager_starts_from_scratch_and_rewinds() -> None:
    """A bare manager without a handler never resumes by itself; old commits make that a rewind."""
    assert start(ResumeRequest(automatic=False), Past(commits=True)) == ("fresh", None, True)
    assert start(ResumeRequest(automatic=False), Past()) == ("fresh", None, False)


def test_a_handler_that_answers_none_rewinds_to_scratch() -> None:
    """A deciding handler's None means from scratch, also in a run directory with commits."""
    assert start(ResumeRequest(decided=True), Past(commits=True)) == ("fresh", None, True)


def test_explicit_epoch_rewinds_also_to_zero() -> None:
    """An explicit epoch begins a new branch; 0 is an epoch like any other."""
    assert start(ResumeRequest(epoch=2), Past(commits=True)) == ("explicit", 2, True)
    assert start(ResumeRequest(epoch=0, automatic=False), Past(commits=True)) == ("explicit", 0, True)


def test_same_request_from_a_later_process_continues() -> None:
    """After `resume_from_epoch=2` and a crash, the same command continues the branch it began."""
    past = Past(commits=True, branch_request={"epoch": 2, "process": "a"})
    assert start(ResumeRequest(epoch=2, process="b"), past) == ("newest", None, False)
    assert start(ResumeRequest(epoch=2, process="a"), past) == ("explicit", 2, True), "same process: rewinds"
    assert start(ResumeRequest(epoch=3, process="b"), past) == ("explicit", 3, True), "another request"
    assert start(ResumeRequest(epoch=2, process="b", again=True), past) == ("explicit", 2, True), "--again"
    over = Past(commits=True, branch_request={"epoch": 2, "process": "a"}, epochs_over=True)
    assert start(ResumeRequest(epoch=2, process="b"), over) == ("explicit", 2, True), "its epochs are over"


def test_must_and_never() -> None:
    """`must` needs commits, `never` starts fresh and contradicts an explicit epoch."""
    with pytest.raises(NoProvableEpochError, match="nothing was ever committed"):
        choose(ResumeRequest(resume="must"), Past())
    assert start(ResumeRequest(resume="must"), Past(commits=True)) == ("newest", None, False)
    assert start(ResumeRequest(resume="never"), Past(commits=True)) == ("fresh", None, True)
    with pytest.raises(UsageError, match="contradicts"):
        choose(ResumeRequest(resume="never", epoch=3), Past(commits=True))


@pytest.mark.parametrize("value", [True, "3", 1.5, [2]])
def test_epochs_are_whole_numbers(value: object) -> None:
    """Anything but a whole number is refused with the argument's name."""
    with pytest.raises(UsageError, match="resume_from_epoch"):
        check_epoch(value)


def test_negative_epochs_are_refused() -> None:
    """An epoch below 0 is refused; None and numpy integers pass."""
    numpy = pytest.importorskip("numpy")
    with pytest.raises(UsageError, match="start at 0"):
        check_epoch(-1)
    assert check_epoch(None) is None
    assert check_epoch(numpy.int64(4)) == 4
