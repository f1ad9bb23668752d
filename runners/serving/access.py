"""Who may ask: this machine alone, under a name of itself; or whoever sends the token."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.records import dataclass
from torchrelay.runners.serving.refusal import RefusedError
from torchrelay.tools.report.dashboard.access import SHORTEST_TOKEN, Access, is_loopback

OPEN = ("/health", "/ready")
"""What may be asked without the token: who looks after processes asks these, and they tell nothing."""


@dataclass(frozen=True)
class Doorkeeper:
    """Without a token only requests to this machine by its own names are let in."""

    port: int
    token: str | None = None

    def refusal(self, path: str, headers: Mapping[str, str]) -> RefusedError | None:
        """Why a request is not let in; None where it is."""
        if self.token is None:
            # A page of another site that was made to lead here sends that site's name (DNS rebinding).
            fits = Access(self.port).host_fits(headers.get("host"))
            return None if fits else RefusedError(421, "this server answers to localhost alone")
        if path in OPEN:
            return None
        kind, _, said = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and same(said.strip(), self.token):
            return None
        return RefusedError(401, "send the header Authorization: Bearer TOKEN")


def same(said: str, token: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(said.encode(errors="replace"), token.encode())


def doorkeeper(host: str, port: int, token: str | None) -> Doorkeeper:
    """Raises UsageError where other machines could ask without a token."""
    if token is None and not is_loopback(host.lower()):
        raise UsageError(
            f"--host {host} lets other machines ask: give --token-file with a token that they must send, or "
            "leave --host out and come through an ssh tunnel"
        )
    return Doorkeeper(port, token)


def read_token(path: str | None) -> str | None:
    """The token in a file; raises UsageError for a file that cannot be read, and for a text that is none."""
    if path is None:
        return None
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise UsageError(f"--token-file {path} cannot be read: {why}") from None
    if len(token) < SHORTEST_TOKEN or not token.isprintable() or " " in token:
        raise UsageError(
            f"--token-file {path}: a token has at least {SHORTEST_TOKEN} signs and no spaces, for example "
            "what openssl rand -hex 16 prints"
        )
    return token
