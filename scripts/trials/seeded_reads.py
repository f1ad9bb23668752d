"""Bugs of reading: what is remembered of headers, parts and files, and believed of others."""

from __future__ import annotations

from collections.abc import Iterator

from planted import Bug


def reading() -> Iterator[Bug]:
    """All of them."""
    yield Bug(
        "what the next span needs of the last block is not kept",
        "checkpoint/format/shard/reads.py",
        "                memory[: len(kept)] = kept\n",
        "",
        ["tests/checkpoint/test_passing.py"],
    )
    yield Bug(
        "a file stays open for a second look",
        "checkpoint/format/shard/reads.py",
        "        except BaseException:\n            self.close()\n",
        "        except BaseException:\n",
        ["tests/checkpoint/test_portions.py"],
    )
    yield Bug(
        "parts that were near one box are believed to be near any",
        "checkpoint/format/mesh.py",
        "form = (*self.alike(name, shape, item_bytes), tuple(wanted))",
        "form = (*self.alike(name, shape, item_bytes), ())",
        ["tests/checkpoint/test_passing.py"],
    )
    yield Bug(
        "tensors of one shape are believed to be cut alike",
        "checkpoint/state/leaf.py",
        "form = (tensor.shape, tuple(coordinate), tensor.placements, tuple(map(type, tensor.placements)))",
        "form = (tensor.shape, tuple(coordinate))",
        ["tests/checkpoint/test_targets.py"],
    )
    yield Bug(
        "headers that were not read count as verified",
        "checkpoint/load/verify.py",
        'frozenset() if level == "sizes" else holders',
        "holders",
        ["tests/checkpoint/test_vouched_headers.py"],
    )
    yield Bug(
        "an entry of a header that was vouched for is taken for a whole leaf",
        "checkpoint/format/shard/entries.py",
        "            if self._look and key in self._odd:\n",
        "            if False:\n",
        ["tests/checkpoint/test_vouched_headers.py"],
    )
    yield Bug(
        "a piece is taken for a similar one without a look at its description",
        "checkpoint/format/shard/header.py",
        'text.partition("@")[2], repr(piece))\n',
        'text.partition("@")[2])\n',
        ["tests/checkpoint/test_header_columns.py"],
    )
    yield Bug(
        "rows of a list of leaves are taken unseen",
        "checkpoint/format/shard/entries.py",
        "        if part != _BETWEEN_ROWS.join(",
        "        if not _BETWEEN_ROWS.join(",
        ["tests/checkpoint/test_listed_leaves.py"],
    )
    yield Bug(
        "what stands between the names of a header is taken unseen",
        "checkpoint/format/shard/entries.py",
        "        if [offsets for _, _, offsets in said] != [",
        "        if not [",
        ["tests/checkpoint/test_header_columns.py"],
    )
