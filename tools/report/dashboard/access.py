"""Who may look: pure decisions about addresses, Host headers and tokens."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from torchrelay.errors import UsageError
from torchrelay.records import dataclass

Headers = Mapping[str, str] | Message
COOKIE = "torchrelay"
SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class Access:
    """Without a token only this machine is served, under a name of itself; with one, whoever knows it."""

    port: int
    token: str | None = None

    def host_fits(self, host: str | None) -> bool:
        """Whether the Host header names this machine.

        A page of another site whose name was made to lead here (DNS rebinding) sends that name. With a
        token it cannot know what it would have to send.
        """
        if self.token is not None:
            return True
        name, _, port = (
            (host or "").rpartition(":")
            if (host or "").rpartition(":")[2].isdecimal()
            else (host or "", "", "80")
        )
        return is_loopback(name.strip("[]").lower()) and port == str(self.port)

    def token_fits(self, query: str, headers: Headers) -> bool:
        """Whether a request carries the token: as a bearer, a cookie, or `?token=`."""
        if self.token is None:
            return True
        return any(
            _same(one, self.token) for one in (_bearer(headers), _cookie(headers), token_in(query)) if one
        )


def checked(host: str, port: int, token: str | None) -> Access:
    """The access of a server at an address; raises UsageError where others could look without a token."""
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isalnum()):
        raise UsageError(
            f"the token is too short or has other signs than letters and digits: give at least "
            f"{SHORTEST_TOKEN} of these, for example those that openssl rand -hex 16 prints"
        )
    if token is None and not is_loopback(host.lower()):
        raise UsageError(
            f"--host {host} lets other machines look at every run: give a --token that they must know, or "
            "leave --host out and come through an ssh tunnel"
        )
    return Access(port, token)


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine, for this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_in(query: str) -> str:
    """What a query string gives as `token`; empty where it does not."""
    try:
        return parse_qs(query, max_num_fields=16).get("token", [""])[0]
    except ValueError:
        return ""


def _bearer(headers: Headers) -> str:
    kind, _, value = (headers.get("Authorization") or "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else ""


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("Cookie") or "").get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _same(said: str, token: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(said.encode(errors="replace"), token.encode())
