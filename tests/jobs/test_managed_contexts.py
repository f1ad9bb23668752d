"""Contexts: what is current inside `with`, in which thread."""

import threading

import pytest

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.cluster import Managed


class Base(Managed):
    pass


class Derived(Base):
    pass


class Other(Managed):
    pass


def test_s1_each_thread_sees_only_what_it_entered_itself():
    """In 8 threads with 100 nested entries, `current()` is always the one that the thread entered last."""
    wrong, started = [], threading.Barrier(8, timeout=100)

    def nest(depth):
        mine = Base()
        with mine:
            if Base.current() is not mine:
                wrong.append(depth)
            if depth:
                nest(depth - 1)
            if Base.current() is not mine:
                wrong.append(depth)

    def run():
        started.wait()
        if Base.current(required=False) is not None:
            wrong.append("polluted")
        nest(99)

    with Base() as outer:
        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert Base.current() is outer
    assert wrong == []
    assert Base.current(required=False) is None


def test_s1_an_instance_is_a_decorator():
    """A decorated function runs with the instance current, and leaves nothing behind."""
    base = Base()

    @base
    def who(number):
        return Base.current(), number

    assert who(3) == (base, 3)
    assert who.__name__ == "who"
    assert Base.current(required=False) is None


def test_s1_a_subclass_is_current_for_its_bases_only():
    """Entering a Derived makes it current for Base, and for no other class."""
    with Base(), Derived() as derived:
        assert Base.current() is derived
        assert Derived.current() is derived
        assert Other.current(required=False) is None


def test_current_checks_and_returns_an_explicit_value():
    """`current(value)` returns a value of the class and refuses another."""
    base = Base()
    assert Base.current(base) is base
    with pytest.raises(UsageError, match="expected a Base"):
        Base.current(Other())


def test_outside_of_any_context_current_says_what_to_do():
    """Without a `with` block nothing is created on demand: the error names the class."""
    with pytest.raises(NotAllowedNowError, match=r"with Base\(\.\.\.\)"):
        Base.current()


def test_leaving_in_the_wrong_order_is_an_error():
    """A mis-nested exit is refused and changes no stack."""
    outer, inner = Base(), Derived()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(NotAllowedNowError, match="reverse order"):
        outer.__exit__(None, None, None)
    assert Base.current() is inner
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    with pytest.raises(NotAllowedNowError):
        outer.__exit__(None, None, None)


def test_an_error_in_the_block_still_leaves_it():
    """An exception passes through and the stack is as before."""
    with pytest.raises(ZeroDivisionError), Base():
        raise ZeroDivisionError
    assert Base.current(required=False) is None
