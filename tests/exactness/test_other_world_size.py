"""Saved on 4 ranks in the middle of the data, resumed on 2, 1 and 3: nothing is lost or seen twice."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from resized_job import AS_BUILT, EPOCHS, EPOCHS_BEFORE, SEED, Ran, State, every_sample_once, run, samples_of
from state_hash import sha256_of
from torchrun import REPOSITORY, torchrun

from torchrelay import LocalSession
from torchrelay.jobs.random import RandomStreams

PROGRAM = REPOSITORY / "tests/programs/resized.py"
POLICIES = ("none", "error", "drop", "by_rank", "mean")
pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Story:
    """What every rank told: of the run saved on 4, and of those resumed, by world size and policy."""

    saved: list[Ran]
    resumed: dict[tuple[int, str], list[Ran]]
    grown: list[Ran]
    """Of 3 ranks that continue what 2 had continued and saved."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("resized")
    on_ranks(folder, 4, [(folder / "saved", "none", {"first": True})])
    copies = {
        (world, policy): shutil.copytree(folder / "saved", folder / f"{policy} on {world}")
        for world in (2, 1, 3)
        for policy in POLICIES
    }
    runs = {
        ranks: [(path, policy, {}) for (world, policy), path in copies.items() if world == ranks]
        for ranks in (2, 3)
    }
    on_ranks(folder, 2, runs[2])
    resumed = {(2, policy): told(copies[2, policy], 2) for policy in POLICIES}
    grown = copies[2, "by_rank"]
    on_ranks(folder, 3, [*runs[3], (grown, "by_rank", {"epochs": EPOCHS + 1})])
    resumed |= {(3, policy): told(copies[3, policy], 3) for policy in POLICIES}
    for policy in POLICIES:
        with LocalSession() as session:
            resumed[1, policy] = [run(session, copies[1, policy], reshard=policy)]
    return Story(told(folder / "saved", 4), resumed, told(grown, 3))


def on_ranks(folder: Path, ranks: int, runs: list[tuple[Path, str, dict[str, object]]]) -> None:
    plain = json.dumps([[str(path), policy, keywords] for path, policy, keywords in runs])
    env = {"PYTHONPATH": str(REPOSITORY / "tests/helpers")}
    done = torchrun(PROGRAM, plain, warm=True, ranks=ranks, cwd=folder, timeout_secs=120, env=env)
    assert done.rc == 0, str(done)


def told(path: Path, ranks: int) -> list[Ran]:
    found = []
    for rank in range(ranks):
        fields = json.loads(Path(f"{path}.rank-{rank}.json").read_text())
        for moment in ("begin", "end"):
            fields[moment] = State(**fields[moment]) if fields[moment] else None
        found.append(Ran(**fields))
    return found


CONTINUED = [(world, policy) for world in (2, 1, 3) for policy in ("drop", "by_rank", "mean")]


@pytest.mark.parametrize(("world", "policy"), CONTINUED)
def test_replicated_state_is_equal_on_another_number_of_ranks(story: Story, world: int, policy: str) -> None:
    """Every rank starts from the parameters, optimizer state, schedule and loader that 4 ranks had saved."""
    ranks = story.resumed[world, policy]
    assert ranks[0].begin.shared == story.saved[0].end.shared, "buffers of rank 0 included"
    assert {ran.begin.shared for ran in ranks[1:]} <= {story.saved[1].end.shared}


@pytest.mark.parametrize(("world", "policy"), CONTINUED)
def test_every_sample_is_seen_exactly_once(story: Story, world: int, policy: str) -> None:
    """The pass over the data that 4 ranks began is ended by the others, then comes a whole one."""
    ranks = story.resumed[world, policy]
    assert samples_of(story.saved, 0) == every_sample_once()
    assert 0 < len(samples_of(story.saved, 1)) < len(every_sample_once()), "the save was in the middle"
    assert samples_of([*story.saved, *ranks], 1) == every_sample_once()
    assert samples_of(ranks, 2) == every_sample_once()
    assert samples_of(ranks, 0) == samples_of(ranks, 3) == []


@pytest.mark.parametrize(("world", "policy"), CONTINUED)
def test_known_ranks_take_their_random_states(story: Story, world: int, policy: str) -> None:
    """Ranks that the checkpoint knows continue their own streams on another number of ranks."""
    found = [ran.begin.random for ran in story.resumed[world, policy]]
    assert found == [ran.end.random for ran in story.saved[:world]]


def test_new_ranks_derive_their_random_states(story: Story) -> None:
    """When 3 ranks continue what 2 have saved, the third starts from (seed, epoch, rank)."""
    saved = [ran.end.random for ran in story.resumed[2, "by_rank"]]
    new = sha256_of(RandomStreams.derive(SEED, 2, EPOCHS).encode())
    assert [ran.begin.random for ran in story.grown] == [*saved, new]
    assert samples_of(story.grown, 3) == every_sample_once()


@pytest.mark.parametrize("world", [2, 1, 3])
@pytest.mark.parametrize("policy", ["none", "error"])
def test_rank_blobs_without_a_policy_are_refused(story: Story, world: int, policy: str) -> None:
    """The error names the blob and a policy, on every rank, and no object has changed."""
    for ran in story.resumed[world, policy]:
        assert ran.error is not None
        assert "'own'" in ran.error and f"{world}" in ran.error
        assert "reshard='by_rank'" in ran.error
        assert ran.untouched and ran.begin is None


@pytest.mark.parametrize("world", [2, 1, 3])
def test_rank_blobs_follow_their_policy(story: Story, world: int) -> None:
    """`drop` leaves them as built, `by_rank` takes each rank's own, a callable sees all and where it is."""
    before = [ran.end.own for ran in story.saved]
    assert len({*before}) == 4 and all(EPOCHS_BEFORE <= own < EPOCHS_BEFORE + 1 for own in before)

    def own(policy: str) -> list[float]:
        return [ran.begin.own for ran in story.resumed[world, policy]]

    assert own("drop") == [AS_BUILT] * world
    assert own("by_rank") == before[:world]
    assert own("mean") == pytest.approx([sum(before) / 4 + 100 * rank for rank in range(world)])


def test_rank_blobs_of_new_ranks_stay_as_built(story: Story) -> None:
    """With `by_rank` a rank that the checkpoint does not know keeps what the program made."""
    known = [ran.end.own for ran in story.resumed[2, "by_rank"]]
    assert [ran.begin.own for ran in story.grown] == [*known, AS_BUILT]
