"""Real hangs of a job on two hosts, as network namespaces; skipped where the machine cannot make them."""

from __future__ import annotations

import random
from contextlib import ExitStack

import hosts
import pytest
from hang_hunt import FOUND_SECS, KINDS, Case, Hunt, Outcome, table
from hang_job import PHASES
from host_ranks import HostNursery
from samples import sample


@pytest.fixture(scope="module")
def hunt(tmp_path_factory):
    """Two joined hosts with a nursery each."""
    why = hosts.why_not()
    if why is not None:
        pytest.skip(why)
    with ExitStack() as stack:
        made = stack.enter_context(hosts.TwoHosts())
        nurseries = [stack.enter_context(HostNursery(host)) for host in made]
        yield Hunt(made, nurseries, tmp_path_factory.mktemp("hangs"))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case("freeze-rank", "commit", 0, 2), "state T, stopped by a signal"),
        *sample([], [(Case("one-way", "collective", 2, 2), "was silent for")]),
    ],
)
def test_a_hang_is_found_named_and_ended(hunt, case, said):
    """The frozen store and commit rank, and a link that drops one way: told within 15 s, all end with 6."""
    outcome = hunt.run(case)
    assert outcome.found_secs <= FOUND_SECS
    assert said in outcome.said and "PeerError" in outcome.said, outcome


def test_cases_are_drawn_from_everything_and_counted():
    """Every kind and phase comes; only rank 0 commits; what was missed is in the table."""
    drawn = random.Random(1)
    cases = [Case.drawn(drawn) for _ in range(300)]
    assert {case.kind for case in cases} == set(KINDS) and {case.phase for case in cases} == set(PHASES)
    assert all(case.rank == 0 for case in cases if case.phase == "commit")
    cut = [Outcome(Case("cut", "save", 1, 1), found, found + 1, "") for found in (10.0, 12.0, 11.0)]
    assert table(cut, [(Case("cut", "save", 1, 1), "never")]) == [["cut", "4", "3", "11.0", "12.0", "13.0"]]
