"""Which rank plays which node."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.errors import UsageError
from torchrelay.runners.distributed.launcher import names_by_rank


@pytest.mark.parametrize(
    ("declared", "world_size", "names"),
    [
        ((), 3, ("trainer_0", "trainer_1", "trainer_2")),
        (("trainer_1",), 2, ("trainer_0", "trainer_1")),
        (("reader", "trainer_0"), 3, ("trainer_0", "reader", "trainer_2")),
        (("b", "a"), 3, ("b", "a", "trainer_2")),
        (("trainer:0",), 1, ("trainer:0",)),
        (("trainer_01",), 1, ("trainer_01",)),
    ],
)
def test_examples(declared, world_size, names):
    """Numbered trainers get their rank, others the remaining ranks in first-use order."""
    assert names_by_rank(declared, world_size) == names


@pytest.mark.parametrize(
    ("declared", "world_size", "named"),
    [(("a", "b"), 1, "2 nodes"), (("trainer_2",), 2, "rank 2"), (("a", "a"), 3, "twice")],
)
def test_what_cannot_be_placed(declared, world_size, named):
    """More nodes than ranks, a trainer without its rank, and a name twice are users' errors."""
    with pytest.raises(UsageError, match=named):
        names_by_rank(declared, world_size)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 12), st.data())
def test_every_rank_has_one_name_and_every_node_a_rank(world_size, data):
    """Names are unique, all declared nodes are placed, and a trainer's number is its rank."""
    trainers = data.draw(st.sets(st.integers(0, world_size - 1)))
    others = data.draw(st.integers(0, world_size - len(trainers)))
    declared = data.draw(
        st.permutations([f"trainer_{n}" for n in trainers] + [f"n{n}" for n in range(others)])
    )
    names = names_by_rank(declared, world_size)
    assert len(set(names)) == len(names) == world_size
    assert set(declared) <= set(names)
    assert all(name == f"trainer_{rank}" for rank, name in enumerate(names) if name.startswith("trainer_"))
    assert [name for name in names if name.startswith("n")] == [n for n in declared if n.startswith("n")]
