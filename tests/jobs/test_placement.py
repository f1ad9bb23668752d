"""Placement: on which nodes a task runs."""

import pytest

from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import NodePlace, check_on, selected

PLACES = [
    NodePlace(
        f"trainer_{rank}",
        rank,
        4,
        host=f"gpu{rank // 2}",
        host_index=rank // 2,
        local_rank=rank % 2,
        role="reader" if rank == 3 else "trainer",
    )
    for rank in range(4)
]


@pytest.mark.parametrize(
    ("on", "ranks"),
    [
        ("all", [0, 1, 2, 3]),
        ("rank0", [0]),
        ("rank2", [2]),
        (1, [1]),
        ([1, 3], [1, 3]),
        ((0,), [0]),
        (range(2, 9), [2, 3]),
        ("host:1", [2, 3]),
        ("host:gpu0", [0, 1]),
        ("local_rank0", [0, 2]),
        ("role:reader", [3]),
        ("role:nobody", []),
        (lambda place: place.rank > 1, [2, 3]),
    ],
)
def test_each_form_selects_its_nodes(on, ranks):
    """Every documented form of `on=` selects exactly the nodes that it describes."""
    check_on(on)
    assert [place.rank for place in PLACES if selected(on, place)] == ranks


@pytest.mark.parametrize(
    "on", ["", "rank", "rank-1", "everywhere", "host:", "role:", -1, True, 1.5, None, [], [0, "1"], [True]]
)
def test_unknown_forms_are_refused_with_the_list(on):
    """What is no form is refused when declared and when asked, with the forms there are."""
    with pytest.raises(UsageError, match=r"local_rank0.*role:x.*callable"):
        check_on(on)
    with pytest.raises(UsageError, match="is invalid: expected"):
        selected(on, PLACES[0])
