"""Dataclasses that are declared quickly behave as Python's own."""

from __future__ import annotations

import copy
import dataclasses
import threading
from dataclasses import field
from typing import Any

import pytest

from torchrelay.records import dataclass as ours

KINDS: list[dict[str, bool]] = [
    {},
    {"frozen": True},
    {"eq": False},
    {"frozen": True, "order": True},
    {"kw_only": True},
]


def declared(decorator: Any, options: dict[str, bool]) -> tuple[Any, Any]:
    """A class and one that derives from it, declared with that decorator."""

    @decorator(**options)
    class Base:
        """A base."""

        number: float
        names: list[str] = field(default_factory=list, compare=False)
        hidden: int = field(default=3, repr=False)
        extra: dict[str, int] = field(default_factory=dict, hash=False)

    @decorator(**options)
    class Derived(Base):
        more: tuple[int, ...] = (1, 2)
        fixed: str = field(default="fixed", init=False)

        def __post_init__(self) -> None:
            self.__dict__["hidden"] = self.hidden + 1

    return Base, Derived


@pytest.mark.parametrize("few", [0, 1000])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_objects_are_those_of_python(
    options: dict[str, bool], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields, text, comparison, hash, order, copies and refusals are those of Python's dataclasses.

    Of the first objects of a class, and of those behind them.
    """
    monkeypatch.setattr("torchrelay.records._FEW", few)

    def seen(decorator: Any) -> list[object]:
        base, derived = declared(decorator, options)
        one, two, three = (
            derived(number=1.5),
            derived(number=1.5, names=["x"]),
            derived(number=2.5, more=(7,)),
        )
        told: list[object] = [repr(base(number=0)), repr(one), repr(three), dataclasses.asdict(two)]
        told += [one == two, one == three, base(number=1.5) == one, one == copy.deepcopy(one)]
        told += [
            dataclasses.replace(three, number=8) == three,
            dataclasses.is_dataclass(base),
            base.__match_args__,
        ]
        told += [one.names is derived(number=1.5).names, [one.name for one in dataclasses.fields(derived)]]
        for act in (
            lambda: hash(one) == hash(two),
            lambda: one < three,
            lambda: base(),
            lambda: base(number=1, x=2),
            lambda: base(1, ["x"], 3, {}, 5),
            lambda: base(1, number=1),
            lambda: derived(number=1, fixed="x"),
            lambda: vars(base(1, ["x"], extra={"y": 1})),
            lambda: vars(derived(2, ["x"], more=())),
        ):
            try:
                told.append(act())
            except TypeError as error:
                told.append(str(error))
        if options.get("eq") is False:  # the hash is that of the place in memory
            told.append(derived.__hash__ is object.__hash__)
        return told

    assert seen(ours) == seen(dataclasses.dataclass)


def test_a_class_keeps_the_methods_of_its_own() -> None:
    """What a class defines itself is not replaced."""

    @ours(frozen=True)
    class Own:
        number: int

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

    assert repr(Own(1)) == "own"
    assert Own(1) == Own(2)
    assert hash(Own(3)) == 5


@pytest.mark.parametrize("few", [0, 4])
def test_first_objects_in_many_threads(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that make the first objects of a class at once all get them whole."""
    monkeypatch.setattr("torchrelay.records._FEW", few)
    for _ in range(50):
        _, derived = declared(ours, {})
        made: list[Any] = []
        start = threading.Barrier(8)

        def make(derived: Any = derived, made: list[Any] = made, start: threading.Barrier = start) -> None:
            start.wait(30)
            made.append(derived(4.0, more=(5,)))

        threads = [threading.Thread(target=make) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(30)
        assert [(one.number, one.more, one.hidden) for one in made] == [(4.0, (5,), 4)] * 8
