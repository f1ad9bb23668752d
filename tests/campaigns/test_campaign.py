"""The campaign takes turns, notes every round, and goes on where it was stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import campaign
import pytest
from campaign import Programme


@pytest.fixture
def programmes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Programme, ...]:
    """Two quick ones; the second is never as promised."""
    script = tmp_path / "trial.py"
    script.write_text("import sys; print(*sys.argv[1:]); sys.exit(sys.argv[1] == 'bad')")
    both = (
        Programme("good", 5, 2, (str(script), "good", "{amount}", "{seed}")),
        Programme("bad", 2, 1, (str(script), "bad", "{amount}", "{seed}")),
    )
    monkeypatch.setattr(campaign, "PROGRAMMES", both)
    return both


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["campaign", *words])
    return campaign.main()


def test_it_goes_on_where_it_was(tmp_path: Path, programmes, monkeypatch, capsys) -> None:
    """Rounds that are noted are not played again; each has its seed; the code is that of the worst."""
    state = tmp_path / "state.jsonl"
    assert run(monkeypatch, "--state", str(state), "--only", "good", "--hours", "1") == 0
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    assert [line["said"] for line in lines] == ["good 2 1", "good 2 2", "good 1 3"]
    state.write_text("".join(json.dumps(line) + "\n" for line in lines[:1]) + '{"name": "go')
    assert run(monkeypatch, "--state", str(state)) == 1
    assert "good: 5 of 5, 0 rounds" in capsys.readouterr().out
    assert len(campaign.read(state)) == 5


def test_no_programme_is_told(programmes, monkeypatch, capsys) -> None:
    """A word that fits none names those that there are."""
    with pytest.raises(SystemExit):
        run(monkeypatch, "--only", "nothing")
    assert "there are good; bad" in capsys.readouterr().err


def test_every_programme_is_there() -> None:
    """Each script of the real list exists."""
    assert all((campaign.TRIALS / one.command[0]).exists() for one in campaign.PROGRAMMES)
