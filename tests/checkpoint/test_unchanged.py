"""What counts as unchanged: only what was hashed in full, and little is hashed of what changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.checkpoint.format.dtypes import BLOCK, block_digests, stored_bytes
from torchrelay.checkpoint.format.shard.writer import PROBE
from torchrelay.checkpoint.save.change_detection import MANY_SMALL, SAMPLE, KnownFile, LeafRange, look


def known(tensors: dict[str, torch.Tensor], *, probes: bool = True) -> KnownFile:
    """The file that holds these tensors whole."""
    parts = tuple(LeafRange(name, 0, one.numel(), one.nbytes) for name, one in tensors.items())
    views = [stored_bytes(one, name) for name, one in tensors.items()]
    firsts = {
        part: block_digests(view[:PROBE])
        for part, view in zip(parts, views, strict=True)
        if probes and len(view) > BLOCK
    }
    return KnownFile(0, "file", 0, parts, tuple(map(block_digests, views)), firsts)


class Memory:
    """Tensors, and which of them somebody asked for."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.asked: list[str] = []

    def __call__(self, rank: int, part: LeafRange) -> torch.Tensor | None:
        self.asked.append(part.leaf)
        return self.tensors.get(part.leaf)


def many(count: int) -> dict[str, torch.Tensor]:
    return {f"w{index:05d}": torch.full((4,), float(index)) for index in range(count)}


def test_of_many_small_tensors_that_all_change_a_sample_is_looked_at() -> None:
    """The others are taken to have changed, and another turn looks at others."""
    before = known(many(5000))
    memory = Memory({name: one + 0.5 for name, one in many(5000).items()})
    seen = []
    for turn in (1, 2):
        memory.asked.clear()
        assert look([before], memory, turn).changed == set(memory.tensors)
        assert SAMPLE <= len(memory.asked) <= 2 * SAMPLE
        seen.append(set(memory.asked))
    assert not seen[0] & seen[1]


@pytest.mark.parametrize("count", [MANY_SMALL, MANY_SMALL + 1, 5000])
def test_where_a_sample_is_unchanged_all_are_looked_at(count: int) -> None:
    """Exactly those are told that changed."""
    tensors = many(count)
    changed = {name for index, name in enumerate(tensors) if index % 3 == 0}
    memory = Memory({name: one + 0.5 if name in changed else one for name, one in tensors.items()})
    assert look([known(tensors)], memory, 7).changed == changed
    assert set(memory.asked) == set(tensors)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, PROBE // 4, BLOCK // 4, BLOCK // 4 + 1, 11 * BLOCK // 4 - 3]),
    st.data(),
    st.booleans(),
)
def test_one_element_anywhere_is_a_change(count: int, data: st.DataObject, probes: bool) -> None:
    """Told digests are those of the first blocks in memory, whatever has changed."""
    tensor = torch.arange(count, dtype=torch.float32)
    file = known({"w": tensor}, probes=probes)
    at = data.draw(st.one_of(st.none(), st.integers(0, count - 1)))
    if at is not None:
        tensor[at] += 0.5
    found = look([file], Memory({"w": tensor}), 1)
    assert found.changed == ({"w"} if at is not None else set())
    told = found.digests.get((0, "w", 0, count, None), b"")
    full = block_digests(stored_bytes(tensor, "w"))
    assert full.startswith(told) and (at is not None or told == full)


def test_the_same_first_bytes_are_no_proof() -> None:
    """A probe only tells what differs."""
    tensor = torch.zeros(BLOCK)
    file = known({"w": tensor})
    assert file.probes
    tensor[-1] = 1
    assert look([file], Memory({"w": tensor}), 1).changed == {"w"}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.booleans(), st.floats(0, 1)), min_size=2, max_size=6))
def test_of_long_parts_looked_at_together_exactly_those_that_differ_are_told(
    drawn: list[tuple[int, bool, float]],
) -> None:
    """However threads share the blocks, nobody's change is another's, and digests are of first blocks."""
    tensors = {f"w{at}": torch.full((size * BLOCK // 8,), float(at)) for at, (size, *_) in enumerate(drawn)}
    file = known(tensors, probes=False)
    changed = {f"w{at}" for at, (_, changes, _) in enumerate(drawn) if changes}
    for at, (_, changes, where) in enumerate(drawn):
        if changes:
            tensors[f"w{at}"][int(where * (len(tensors[f"w{at}"]) - 1))] += 0.5
    found = look([file], Memory(tensors), 1)
    assert found.changed == changed
    for (_, name, *_), told in found.digests.items():
        full = block_digests(stored_bytes(tensors[name], name))
        assert full.startswith(told) and (name in changed or told == full)


def test_what_does_not_lie_in_order_is_compared_as_it_is_stored() -> None:
    """A transposed tensor has the bytes of its rows, not of its memory."""
    tensors = {name: torch.arange(BLOCK, dtype=torch.float32).reshape(1024, -1) for name in ("same", "other")}
    file = known({name: one.t().contiguous() for name, one in tensors.items()})
    now = {name: one.t() for name, one in tensors.items()}
    tensors["other"][3, 3] += 1
    assert look([file], Memory(now), 1).changed == {"other"}


def test_what_memory_lacks_has_changed() -> None:
    """A leaf that is gone, or shorter, or of a wider type."""
    file = known({name: torch.zeros(8) for name in ("gone", "short", "wide", "same")})
    now = {"short": torch.zeros(7), "wide": torch.zeros(8, dtype=torch.float64), "same": torch.zeros(8)}
    assert look([file], Memory(now), 1).changed == {"gone", "short", "wide"}
