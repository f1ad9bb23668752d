"""What all nodes need is read once in the whole job with `share_reads`, and nothing else changes by it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torchrun import REPOSITORY, torchrun

PROGRAM = REPOSITORY / "tests/programs/shared_reads.py"
CASES = {
    "plain": ":",
    "shared": "True:",
    "mixed": "mixed:",
    "flip0": "True:flip-trainer_0",
    "flip3": "True:flip-trainer_3",
    "fail0": "True:fail-0-late",
    "fail1": "True:fail-1",
    "fail2": "True:fail-2",
    "failplain": ":fail-2",
    "noise": "True:noise-1",
}
OWN = 4 * 400_000
"""Bytes that every rank has for itself."""
REPLICATED = 4 * (5_000_000 + 1_234_567 + sum(777 + index for index in range(300))) + 2 * 600_001
SLACK = 200_000
"""For the headers of all files, which every rank reads, and random states."""
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]
Told = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What the ranks tell of every case: ranks 0 and 1 are host 0, ranks 2 and 3 host 1."""
    folder = tmp_path_factory.mktemp("shared")
    cases = [f"{name}:{case}" for name, case in CASES.items()]
    done = torchrun(PROGRAM, str(folder), *cases, warm=True, ranks=4, cwd=folder, timeout_secs=150)
    assert done.rc == 0, str(done)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in CASES}


def test_each_byte_comes_from_the_storage_once(told: Told) -> None:
    """The lowest rank of each host reads half, the others only what is theirs; all have every bit."""
    shared, plain = told["shared"], told["plain"]
    assert [rank["right"] for rank in shared + plain] == [True] * 8
    assert [rank["epoch"] for rank in shared + plain] == [3] * 8
    read = [rank["bytes"][0] - OWN for rank in shared]
    assert all(rank["bytes"][0] - OWN >= REPLICATED for rank in plain)
    assert REPLICATED <= sum(read) <= REPLICATED + 4 * SLACK
    assert read[1] < SLACK and read[3] < SLACK
    assert abs(read[0] - read[2]) < (4 << 20)


def test_without_the_same_setting_everywhere_all_read_for_themselves(told: Told) -> None:
    """One rank without `share_reads` is enough; no rank waits for it."""
    for rank in told["mixed"]:
        assert rank["right"] and rank["bytes"][0] - OWN >= REPLICATED


@pytest.mark.parametrize("case", ["flip0", "flip3"])
def test_damage_in_one_hosts_share_leads_all_to_an_older_epoch(told: Told, case: str) -> None:
    """The epoch before is loaded over it on all ranks, right to the bit, and rank 0 says which block."""
    for rank in told[case]:
        assert (rank["error"], rank["epoch"], rank["right"]) == (None, 2, True)
        assert len(rank["bytes"]) == 2
    (text,) = told[case][0]["warned"]
    assert "epoch 2 is damaged" in text and "is not what was saved" in text
    assert f"trainer_{case[-1]}.2.main.safetensors: block " in text


def without_tensor(error: list[str]) -> list[str]:
    """An error's class and text without the tensor that was being read, which is another one on each rank."""
    return [error[0], re.sub(r" \(reading [^)]*\)", "", error[1])]


@pytest.mark.parametrize("case", ["fail0", "fail1", "fail2"])
def test_a_rank_that_cannot_read_ends_the_load_of_all_by_its_error(told: Told, case: str) -> None:
    """The same class and words as without sharing, but for the tensor, whoever the rank reads for."""
    failing = int(case[-1])
    like = without_tensor(told["failplain"][2]["error"])
    assert told[case][failing]["fired"] > 0 and told["failplain"][2]["fired"] > 0
    assert without_tensor(told[case][failing]["error"]) == like
    for number, rank in enumerate(told[case]):
        name, text = without_tensor(rank["error"])
        prefix = f"rank {failing}: " if number != failing and failing > 0 else ""
        assert [name, text] == [like[0], prefix + like[1]]


def test_what_changes_on_its_way_is_read_from_the_storage(told: Told) -> None:
    """Bytes of the wire are verified like those of a disk: the rank that got a wrong one reads itself."""
    noise = told["noise"]
    assert noise[1]["noise"] == 1
    assert all(rank["right"] and rank["epoch"] == 3 and rank["error"] is None for rank in noise)
    assert noise[1]["bytes"][0] > told["shared"][1]["bytes"][0] + (1 << 20)


def test_a_rank_that_leaves_the_wire_ends_the_load_of_all_in_time(tmp_path: Path) -> None:
    """The others wait no longer than the session's timeout for a collective, and all say who was lost."""
    done = torchrun(
        PROGRAM, str(tmp_path), "cut:True:cut-3", warm=True, ranks=4, cwd=tmp_path, timeout_secs=90
    )
    assert done.rc == 0, str(done)
    told = json.loads((tmp_path / "cut.json").read_text())
    assert told[3]["noise"] == 1
    assert [rank["error"][0] for rank in told] == ["PeerError"] * 4
    assert all(rank["epoch"] is None for rank in told)
