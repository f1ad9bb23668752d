"""Values from the command line: `runner.train1.epochs=3` puts a value of YAML in place of another."""

from __future__ import annotations

import copy
from dataclasses import field
from typing import Any

from torchrelay.jobs.config.forms import Form
from torchrelay.jobs.config.nearest import hint, nearest
from torchrelay.jobs.config.problems import COMMAND_LINE, ConfigProblem, Origin, Source
from torchrelay.jobs.config.schema_lookup import form_at, form_below
from torchrelay.jobs.config.section_forms import Named, Section
from torchrelay.jobs.config.tree import Missing, Tree, find, value_at
from torchrelay.jobs.yaml_text import Findings, Place, Where, read_findings
from torchrelay.records import dataclass

_WORKSPACE = "{workspace}"


@dataclass(frozen=True)
class Overrides:
    """Overrides as they were typed, in order; of two for one key the later one holds."""

    texts: tuple[str, ...] = ()

    @property
    def source(self) -> Source:
        """The text in which their places are."""
        return Source(COMMAND_LINE, self.texts)


def overridden(tree: Tree, overrides: Overrides) -> tuple[Tree, list[ConfigProblem]]:
    """A tree in which the overrides stand, and what is wrong with those that do not."""
    work = _Work(copy.deepcopy(tree.value), dict(tree.origins), dict(tree.keys), set(tree.broken), overrides)
    for index, text in enumerate(overrides.texts):
        work.take(index, text)
    return Tree(work.value, work.origins, work.keys, frozenset(work.broken)), work.problems


@dataclass
class _Work:
    """A tree that is being changed."""

    value: dict[str, Any]
    origins: dict[Where, Origin]
    keys: dict[Where, Origin]
    broken: set[Where]
    overrides: Overrides
    problems: list[ConfigProblem] = field(default_factory=list)

    def take(self, index: int, text: str) -> None:
        """Put one override in its place, or complain."""
        given, equals, written = text.partition("=")
        key = given.strip().removeprefix("+")
        if not equals or not key:
            self._wrong(index, 1, key, "an override is key.path=value, such as runner.train1.epochs=3")
            return
        found = _read(written)
        begins = len(given) + 1
        for problem in found.problems:
            remedy = (
                "" if "quote" in problem.message else "; put a text in quotes, for the shell and for YAML"
            )
            self._wrong(index, begins + problem.place.column, key, problem.message + remedy)
        where = self._where(index, key, len(given.rstrip()), adds=given.strip().startswith("+"))
        if where is not None and not found.problems:
            self._put(where, found, index, begins)

    def _where(self, index: int, key: str, ends: int, *, adds: bool) -> Where | None:
        """The place that a key means, whether something stands there or may; None after a complaint."""
        place = find(self.value, key)
        if not isinstance(place, Missing):
            return place
        message, near = self._refusal(place, key, adds=adds)
        if message is None:
            return (*place.where, *place.rest)
        self._wrong(index, ends - len(".".join(place.rest)) + 1, key, message, near)
        return None

    def _refusal(self, missing: Missing, key: str, *, adds: bool) -> tuple[str | None, str | None]:
        """Why a key that is not there yet may not be put there; None if it may."""
        if missing.leaf and value_at(self.value, missing.where) is not None:
            return f"`{'.'.join(map(str, missing.where))}` is a single value, there is nothing below it", None
        form = form_at(missing.where)
        for at, word in enumerate(missing.rest):
            known = {
                *(missing.known if at == 0 else ()),
                *(form.spec.keys if isinstance(form, Section) else ()),
            }
            if isinstance(form, Section) and word in form.spec.refused:
                return f"`{word}` is not supported: {form.spec.refused[word]}", None
            if isinstance(form, Section) and word in form.spec.keys:
                form = form_below(form, word)
                continue
            if _is_open(form, value_at(self.value, missing.where)):
                return (None, None) if adds else (_not_there(word, known, key), nearest(word, known))
            return f"unknown name `{word}`; {hint(word, known) or 'nothing lies below'}", nearest(word, known)
        return None, None

    def _put(self, where: Where, found: Findings, index: int, begins: int) -> None:
        here: Any = self.value
        origin = Origin(self.overrides.source, Place(index + 1, 1))
        for at, one in enumerate(where[:-1]):
            if isinstance(here, dict) and here.get(one) is None:
                here[one] = {}
                self._forget(where[: at + 1])
                self.origins[where[: at + 1]] = self.keys[where[: at + 1]] = origin
            here = here[one]
        self._forget(where)
        here[where[-1]] = found.top
        self.keys[where] = self.origins[where] = origin
        for inner, place in found.values.items():
            self.origins[(*where, *inner)] = self._at(index, begins + place.column)
        for inner, place in found.keys.items():
            self.keys[(*where, *inner)] = self._at(index, begins + place.column)

    def _forget(self, where: Where) -> None:
        """What stood at a place and below it."""
        for places in (self.origins, self.keys):
            for one in [one for one in places if one[: len(where)] == where]:
                del places[one]
        self.broken = {one for one in self.broken if one[: len(where)] != where}

    def _at(self, index: int, column: int) -> Origin:
        return Origin(self.overrides.source, Place(index + 1, column))

    def _wrong(self, index: int, column: int, key: str, message: str, near: str | None = None) -> None:
        self.problems.append(ConfigProblem(self._at(index, column), key, message, near))


def _is_open(form: Form | None, value: Any) -> bool:
    """Whether the user chooses the keys here."""
    if isinstance(form, Section):
        return form.spec.free is not None
    return isinstance(form, Named) or (form is None and isinstance(value, dict))


def _not_there(word: str, known: set[str], key: str) -> str:
    near = hint(word, known)
    return f"`{word}` is not in the configuration; {near}{' ' if near else ''}(+{key}=... adds it)"


def _read(written: str) -> Findings:
    """The value; what begins with `{workspace}` is a text, as nobody means that mapping."""
    if written.startswith(_WORKSPACE):
        return Findings(written, {(): Place(1, 1)}, {}, (), frozenset())
    found = read_findings(written.encode("utf-8", "surrogatepass"))
    return found if found.values else Findings(None, {(): Place(1, 1)}, {}, found.problems, found.broken)
