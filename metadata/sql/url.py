"""Which databases are meant by a URL, what must be installed for them, and texts without their passwords."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.errors import UsageError

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

FORMS = "sqlite:///runs.db or postgresql://user@host/database"
HIDDEN = "***"
_SECRETS = ("password", "sslpassword", "oauth_client_secret")
_IN_URL = re.compile(r"(^|(?<=//)).*@", re.DOTALL)
_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "sqlite": "sqlite"}


def parse_url(text: str) -> URL:
    """The URL of a SQLite file (made absolute) or a PostgreSQL server.

    Raises UsageError for any other, and where SQLAlchemy or the driver is not installed.
    """
    if not isinstance(text, str):
        raise UsageError(f"the database is {type(text).__name__}; give a URL, {FORMS}")
    try:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError
    except ImportError as error:
        raise UsageError(
            "a metadata database needs SQLAlchemy: pip install 'torchrelay[sql]' for SQLite, "
            "'torchrelay[postgresql]' for PostgreSQL"
        ) from error
    try:
        url = make_url(text)
        url = _with_password(url.set(drivername=_DRIVERS.get(url.drivername, url.drivername)))
        backend, is_async = url.get_backend_name(), url.get_dialect().is_async
    except (ArgumentError, NoSuchModuleError, ValueError, ImportError):
        raise UsageError(f"{hide_password(text)} is no URL of a database: give {FORMS}") from None
    if backend != "sqlite" and any("@" in (part or "") for part in (url.host, url.database)):
        raise UsageError(
            f"{hide_password(text)}: @ / : ? in a user's name or password are written %40 %2F %3A %3F, else "
            "nobody can tell where the password ends"
        )
    if backend not in ("sqlite", "postgresql") or is_async:
        raise UsageError(
            f"{masked(url)} is no database that torchrelay writes to: give {FORMS}; drivers that are "
            "asynchronous are not for it"
        )
    return _with_file(url) if backend == "sqlite" else _with_driver(url)


def _with_password(url: URL) -> URL:
    """A password among the options goes to its place, where no text of the URL shows it."""
    password = url.query.get("password")
    if password is None:
        return url
    if not isinstance(password, str):
        raise ValueError("two passwords")
    return url.difference_update_query(["password"]).set(password=password)


def _with_file(url: URL) -> URL:
    if url.query:
        raise UsageError(f"a SQLite database has no options here, such as {min(url.query)}=: give {FORMS}")
    name = url.database
    if not name or name == ":memory:" or name.startswith("file:"):
        raise UsageError(f"{masked(url)} names no file, and nobody could read it later: give {FORMS}")
    return url.set(database=str(Path(name).absolute()))


def _with_driver(url: URL) -> URL:
    try:
        url.get_dialect().import_dbapi()
    except ImportError as error:
        package = getattr(error, "name", None) or url.get_driver_name()
        raise UsageError(
            f"{masked(url)} needs {package}, which is not installed: pip install 'torchrelay[postgresql]'"
        ) from error
    return url


def masked(url: URL) -> str:
    """The URL as it may be shown: without passwords, those among its options included."""
    for key in _SECRETS:
        if key in url.query:
            url = url.update_query_dict({key: HIDDEN})
    return url.render_as_string(hide_password=True)


def secrets_of(url: URL) -> tuple[str, ...]:
    """Words that no message may have."""
    values = [url.password, *(url.query.get(key) for key in _SECRETS)]
    return tuple(value for value in values if isinstance(value, str) and value)


def without(text: str, secrets: tuple[str, ...]) -> str:
    """The text with each secret hidden; one of one or two letters would take the words apart instead."""
    for secret in secrets:
        if len(secret) > 2:
            text = text.replace(secret, HIDDEN)
    return text


def hide_password(text: str) -> str:
    """What may be shown of a text that should have been a URL and cannot be read as one."""
    return _IN_URL.sub(f"{HIDDEN}@", text).partition("?")[0][:120]
