"""What is put into a page stays text: nothing that a file says becomes markup."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import example, given
from hypothesis import strategies as st

from torchrelay.tools.report.charts import (
    Scale,
    clock_ticks,
    number,
    scale_of,
    seconds,
    share,
    ticks,
    visible,
    whole_ticks,
)
from torchrelay.tools.report.page import _environment

NASTY = st.text(st.characters() | st.sampled_from("<>&\"'/=`;\n\t\x00\ud800"))
TEMPLATE = _environment().from_string('<span title="{{ value }}">{{ text }}</span>')
FINITE = st.floats(allow_nan=False, allow_infinity=False)


class Reader(HTMLParser):
    """All tags, attributes and texts of a page, as a browser would see them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def read(markup: str) -> Reader:
    reader = Reader()
    reader.feed(markup)
    reader.close()
    return reader


@given(NASTY, NASTY)
@example("</span><script>alert(1)</script>", '" onload="alert(1)')
@example("<!--", "]]>")
def test_texts_and_attributes_come_out_as_they_went_in(text: str, value: str) -> None:
    """Any text and any attribute value is read back whole, and makes no tag and no attribute."""
    found = read(TEMPLATE.render(text=text, value=value))
    assert found.tags == ["span"]
    assert found.text == visible(text)
    assert found.attributes == [("title", visible(value))]


@given(NASTY)
def test_what_cannot_be_shown_is_replaced(text: str) -> None:
    """Control characters and lone surrogates never reach the page, which is always valid UTF-8."""
    assert not any(ord(c) < 32 and c not in "\n\t" for c in visible(text))
    TEMPLATE.render(text=text, value=None).encode()


@given(st.lists(FINITE, min_size=1), st.booleans())
def test_every_value_has_a_place_inside_of_the_chart(values: list[float], log: bool) -> None:
    """Scales keep order and stay inside of the drawing, however large, small or alike the values are."""
    if log:
        values = [abs(value) or 1.0 for value in values]
    scale = scale_of(values, 200.0, 10.0, log=log)
    places = [scale(value) for value in sorted(values)]
    assert all(10.0 <= place <= 200.0 for place in places)
    assert places == sorted(places, reverse=True)
    assert 1 <= len(ticks(scale)) <= 60


@given(st.floats(-1e30, 1e30), st.floats(1e-30, 1e30))
def test_ticks_are_in_order_and_inside(low: float, span: float) -> None:
    """Numbers beside an axis lie on the axis, in order, each once."""
    found = ticks(Scale(low, low + span, 0, 1))
    assert found == sorted(set(found))
    slack = span * 1e-6 + abs(low) * 1e-9
    assert all(low - slack <= one <= low + span + slack for one in found)


@given(st.integers(0, 10**8), st.integers(0, 10**6))
def test_epochs_are_whole_numbers(low: int, span: int) -> None:
    """Ticks of epochs are whole numbers inside, not very many."""
    found = whole_ticks(low, low + span)
    assert all(low <= one <= low + span for one in found)
    assert len(found) <= 12


@given(st.floats(1e-9, 1e8))
def test_clock_ticks_begin_at_zero(span: float) -> None:
    """A timeline begins at 0 and has few ticks."""
    found = clock_ticks(span)
    assert found[0] == 0
    assert len(found) <= 16


def test_numbers_are_written_for_people() -> None:
    """Few figures, units that fit, and what is no number by name."""
    assert [number(one) for one in (0.99333, -2.0, float("nan"), float("inf"))] == [
        "0.9933", "\N{MINUS SIGN}2", "NaN", "\N{INFINITY}",
    ]  # fmt: skip
    assert [seconds(one) for one in (0.0042, 0.9999, 3.14159, 600, 19200, 200000)] == [
        "4.2 ms", "1 s", "3.14 s", "10 min", "5 h 20 min", "2 d 7 h",
    ]  # fmt: skip
    assert [share(*one) for one in ((0, 0), (1, 1000), (995, 1000), (1, 1))] == [
        "0 %",
        "0.1 %",
        "100 %",
        "100 %",
    ]
