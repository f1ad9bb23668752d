"""How a call's arguments and results are put together: tensors by number, within lists, tuples and dicts.

`{"leaf": 0}` is the first tensor, `{"list": [...]}`, `{"tuple": [...]}`, `{"dict": [[key, tree], ...]}` hold
others, `{"value": ...}` is a constant (`format/values.py`). A named tuple is stored as the tuple that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.errors import BlobError, DamagedError, UsageError

Tree = Json
_DEPTH = 32


def tree_of(value: Any, is_leaf: Callable[[Any], bool], what: str) -> tuple[Tree, list[tuple[str, Any]]]:
    """The tree of a value, and its leaves with what they are called (`what`, `what_0`, `what_key`).

    Raises BlobError for what it cannot hold.
    """
    leaves: list[tuple[str, Any]] = []

    def walk(one: Any, name: str, depth: int) -> Tree:
        if depth > _DEPTH:
            raise BlobError(f"{what} is nested deeper than {_DEPTH} levels")
        if is_leaf(one):
            leaves.append((name, one))
            return {"leaf": len(leaves) - 1}
        if isinstance(one, (list, tuple)):
            kind = "list" if isinstance(one, list) else "tuple"
            return {kind: [walk(item, _inside(name, at), depth + 1) for at, item in enumerate(one)]}
        if isinstance(one, Mapping):
            if not all(type(key) is str for key in one):
                raise BlobError(f"{name} is a dict with keys that are no strings")
            return {"dict": [[key, walk(item, _inside(name, key), depth + 1)] for key, item in one.items()]}
        return {"value": values.encode(one, name)}

    return walk(value, what, 0), leaves


def _inside(name: str, key: int | str) -> str:
    return f"{name}_{key}" if name else str(key)


def built(tree: Tree, leaves: Sequence[Any]) -> Any:
    """The value of a tree with these leaves."""
    match tree:
        case {"leaf": int(at)}:
            return leaves[at]
        case {"list": [*items]}:
            return [built(item, leaves) for item in items]
        case {"tuple": [*items]}:
            return tuple(built(item, leaves) for item in items)
        case {"dict": [*pairs]}:
            return {key: built(item, leaves) for key, item in pairs}
        case {"value": json}:
            return values.decode(json)
    raise DamagedError(f"a call is described by {str(tree)[:100]}")


def check_tree(tree: Tree, count: int, depth: int = 0) -> None:
    """Raise DamagedError for what is no tree of leaves below `count`."""
    if depth <= _DEPTH:
        match tree:
            case {"leaf": int(at)} if 0 <= at < count:
                return
            case {"list": [*items]} | {"tuple": [*items]}:
                for item in items:
                    check_tree(item, count, depth + 1)
                return
            case {"dict": [*pairs]}:
                for pair in pairs:
                    match pair:
                        case [str(), item]:
                            check_tree(item, count, depth + 1)
                        case _:
                            raise DamagedError(f"a call is described by {str(pair)[:100]}")
                return
            case {"value": json}:
                values.decode(json)
                return
    raise DamagedError(f"a call is described by {str(tree)[:100]}")


def leaves_in(tree: Tree, value: Any, what: str) -> Iterator[tuple[int, Any]]:
    """The leaves of a value by number; raises UsageError where it is not put together as the tree says."""
    match tree:
        case {"leaf": int(at)}:
            yield at, value
        case {"list": [*items]} | {"tuple": [*items]}:
            if not isinstance(value, (list, tuple)) or len(value) != len(items):
                raise UsageError(f"{what} must be a sequence of {len(items)}, not {_shown(value)}")
            for number, (item, inside) in enumerate(zip(items, value, strict=True)):
                yield from leaves_in(item, inside, f"{what}[{number}]")
        case {"dict": [*pairs]}:
            keys = [key for key, _ in pairs]
            if not isinstance(value, Mapping) or set(value) != set(keys):
                raise UsageError(f"{what} must be a dict of {', '.join(keys)}, not {_shown(value)}")
            for key, item in pairs:
                yield from leaves_in(item, value[key], f"{what}[{key!r}]")
        case {"value": json}:
            if values.encode(value, what) != json:
                raise UsageError(
                    f"{what} was {values.decode(json)!r} when the program was made and is part of it; "
                    f"it cannot be {_shown(value)} now"
                )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"[:200]
    return (
        f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else repr(value)[:80]
    )
