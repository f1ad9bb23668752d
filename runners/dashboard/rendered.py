"""Pages kept until the files behind them change, and made by one thread at a time, not too often."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from torchrelay.records import dataclass

_MOST_PAGES = 64
_PAUSE_SECS = 1.0
_SHARE = 8.0
"""A page is made anew no earlier than after so many times what it took: at most an eighth of a core."""


@dataclass(frozen=True)
class Page:
    """What a client gets: `tag` is another one whenever the content may be."""

    tag: str
    body: bytes


@dataclass
class _Kept:
    state: str
    page: Page
    not_before: float


class Rendered:
    """A cache of pages by key. `render` gets a text to put where the page is to name its own tag."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def page(self, key: str, state: str, render: Callable[[str], str]) -> Page:
        """The page of a key at a state of its files, or a slightly older one where it was made just now."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # whoever comes meanwhile gets the page that is being made
            kept = self._kept.get(key)
            began = self._clock()
            if kept is not None and (kept.state == state or began < kept.not_before):
                return kept.page
            page = _tagged(render)
            now = self._clock()
            self._keep(key, _Kept(state, page, now + max(_PAUSE_SECS, _SHARE * (now - began))))
            return page

    def _keep(self, key: str, kept: _Kept) -> None:
        with self._lock:
            self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_PAGES:
                gone, _ = self._kept.popitem(last=False)
                self._locks.pop(gone, None)


def _tagged(render: Callable[[str], str]) -> Page:
    """A page that says its own tag, which is of its content: what looks the same has the same tag."""
    here = secrets.token_hex(16)  # nothing in a run can spell it
    text = render(here)
    tag = hashlib.sha256(text.replace(here, "").encode()).hexdigest()[:32]
    return Page(f'"{tag}"', text.replace(here, f"&quot;{tag}&quot;").encode())
