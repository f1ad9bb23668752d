"""From a file and overrides to a Config, or to one report of everything that is wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchrelay.jobs.config.config import Config
from torchrelay.jobs.config.expansion import RunPlace, expanded
from torchrelay.jobs.config.forms import At, Reading
from torchrelay.jobs.config.overrides import Overrides, overridden
from torchrelay.jobs.config.problems import ConfigError, ConfigProblem
from torchrelay.jobs.config.recovering import recovered
from torchrelay.jobs.config.references import check_references
from torchrelay.jobs.config.schema_lookup import TOP
from torchrelay.jobs.config.tracking import leaves
from torchrelay.jobs.config.tree import value_at
from torchrelay.jobs.yaml_text import yaml_content

_MISSING = " missing"


def load_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    source: Path | None = None,
    *,
    place: RunPlace | None = None,
) -> Config:
    """Read a configuration file; a relative workspace begins at its directory.

    `overrides` are texts `key.path=value`; `environ` is what `${env:NAME}` sees, the process's own if None.
    Files with classes in the workspace are taken from `source` instead, where it is given. `place` says where
    the runs lie if not where the configuration does: `${upstream...}` looks for `lineage/` there first.
    Raises ConfigError with all problems, UsageError where the file cannot be read at all.
    """
    data = yaml_content(path)
    return read_config(data, os.fspath(path), Path(path).absolute().parent, overrides, environ, source, place)


def read_config(
    data: bytes,
    name: str,
    folder: Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    source: Path | None = None,
    place: RunPlace | None = None,
) -> Config:
    """Read a text; `name` stands for it in messages, a relative workspace begins at `folder`.

    Nothing is imported and nothing written. Raises ConfigError with all problems.
    """
    given = Overrides(tuple(overrides))
    read = recovered(data, name)
    if read.tree is None:
        raise ConfigError(read.problems)
    tree, problems = overridden(read.tree, given)
    done, more = expanded(tree, folder, os.environ if environ is None else environ, place)
    read_by_names = {
        one for where in done.referred for one in leaves(value_at(done.tree.value, where), where)
    }
    reading = Reading(done.tree, done.workspace, reads=read_by_names, source=source)
    settings = TOP.take(done.tree.value, At(reading))
    check_references(reading)
    found = [*problems, *more, *reading.problems]
    told = _new(found, read.problems) if read.whole else [one for one in found if not _is_cascade(one)]
    if read.problems or told:
        raise ConfigError([*read.problems, *_new(told, read.problems)])
    return Config(name, data, settings, given, done, reading)


def _new(found: Sequence[ConfigProblem], before: Sequence[ConfigProblem]) -> list[ConfigProblem]:
    """Without those that stand where YAML was wrong already."""
    places = {str(one.origin) for one in before}
    return [one for one in found if str(one.origin) not in places]


def _is_cascade(problem: ConfigProblem) -> bool:
    """What is missing where lines were left out may have stood in them."""
    return _MISSING in problem.message
