"""HTTP by hand over asyncio, because a good client library refuses to send what is wrong."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

NOTHING = 0
"""The status of a connection that ended without an answer."""


@dataclass(frozen=True)
class Reply:
    """Names of headers are in small letters."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


class Client:
    """One connection, opened again where the server closed it."""

    def __init__(self, port: int, patience_secs: float = 60.0) -> None:
        self.port, self.patience_secs = port, patience_secs
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
        """A whole request and its answer; a connection that ended while it was idle is opened again, once."""
        told = {"Host": f"127.0.0.1:{self.port}", "Content-Length": str(len(body))}
        told |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        return await self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)

    async def predict(self, sample: Any) -> Reply:
        """Ask for one sample, as JSON."""
        return await self.ask(
            "POST", "/predict", json.dumps({"sample": sample}).encode(), Content_Type="application/json"
        )

    async def send(self, data: bytes, *, end: bool = False) -> Reply:
        """Bytes as they are, and what is answered; `end` closes this side behind them."""
        idle = self._writer is not None
        reply = await asyncio.wait_for(self._once(data, end), self.patience_secs)
        if reply.status == NOTHING and idle:
            reply = await asyncio.wait_for(self._once(data, end), self.patience_secs)
        return reply

    async def _once(self, data: bytes, end: bool) -> Reply:
        try:
            if self._writer is None:
                self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
            self._writer.write(data)
            if end:
                self._writer.write_eof()
            reply = await self._read()
        except (
            OSError,
            EOFError,
            ValueError,
            IndexError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ):
            reply = Reply(NOTHING)
        if reply.status == NOTHING or reply.headers.get("connection") == "close" or end:
            self.close()
        return reply

    async def _read(self) -> Reply:
        assert self._reader is not None
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.split(":", 1) for line in lines[1:] if line)
        headers = {name.lower(): value.strip() for name, value in pairs}
        if "content-length" in headers:
            body = await self._reader.readexactly(int(headers["content-length"]))
        else:
            body = await self._reader.read()
        return Reply(int(lines[0].split()[1]), headers, body)

    def close(self) -> None:
        """Let the connection go."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None
