"""Implement an fsspec file system over SFTP with complete files, exclusive creation, and range reads.

fsspec's own two implementations overwrite on creation, check before they write, or read whole files for a
range. Here a file is written under a temporary name, made durable by OpenSSH's `fsync`, and then named: by a
hard link, which the server refuses if the name exists, or by a rename that replaces. The connection is made
on demand, and again after it was lost.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import stat
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import asyncssh
from fsspec.asyn import AsyncFileSystem, sync_wrapper
from fsspec.utils import infer_storage_options

from torchrelay.checkpoint.storage.base import PRIVATE

_PIECE_BYTES = 8 << 20
_PATIENCE = {"connect_timeout": 20, "login_timeout": 20, "keepalive_interval": 10, "keepalive_count_max": 3}
"""Seconds; a server that is silent for this long is lost."""
_LOST = (asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection)


class SftpFileSystem(AsyncFileSystem):  # type: ignore[misc]  # fsspec is not annotated
    """Files of an SFTP server; `options` are those of `asyncssh.connect`.

    Host key checks stay on: the key must be in `~/.ssh/known_hosts`, or in the file `known_hosts`.
    """

    protocol = ("sftp", "ssh")
    cachable = False

    def __init__(self, host: str, **options: Any) -> None:
        super().__init__(use_listings_cache=False)
        self.host, self._options = host, {**_PATIENCE, **options}
        self._line: tuple[Any, Any] | None = None
        self._connecting: asyncio.Lock | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return infer_storage_options(path)["path"].rstrip("/")

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        """The cached connection, or a new one; raises errors of the operating system."""
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            line = self._line = self._line or await self._connect()
        try:
            yield line[1]
        except asyncssh.SFTPError as error:
            if isinstance(error, _LOST):
                self._drop(line)
            raise _as_os_error(error) from error
        except (asyncssh.Error, ConnectionError) as error:
            self._drop(line)
            raise ConnectionResetError(f"the connection to {self.host} was lost: {error}") from error

    async def _connect(self) -> tuple[Any, Any]:
        try:
            connection = await asyncssh.connect(self.host, **self._options)
            weakref.finalize(self, _close, self.loop, connection)
            return connection, await connection.start_sftp_client()
        except (asyncssh.PermissionDenied, asyncssh.HostKeyNotVerifiable) as error:
            raise PermissionError(
                f"authentication between {self.host} and this process failed: {error}"
            ) from error
        except (asyncssh.Error, TimeoutError, asyncio.TimeoutError) as error:
            raise ConnectionResetError(f"no connection to {self.host}: {error}") from error

    def _drop(self, line: tuple[Any, Any]) -> None:
        if self._line is line:
            self._line = None
        line[0].abort()

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        async with self._client() as client:
            return _described(path, await client.stat(path))

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        async with self._client() as client:
            if not stat.S_ISDIR((await client.stat(path)).permissions or 0):
                raise NotADirectoryError(path)
            found = [one for one in await client.readdir(path) if one.filename not in (".", "..")]
        files = [_described(f"{path}/{one.filename}", one.attrs) for one in found]
        return files if detail else [one["name"] for one in files]

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        first = start or 0
        async with self._client() as client, client.open(self._strip_protocol(path), "rb") as file:
            return bytes(await file.read(-1 if end is None else max(0, end - first), first))

    async def _write(
        self, path: str, pieces: Iterable[bytes], give_name: Callable[..., Awaitable[None]]
    ) -> None:
        path = self._strip_protocol(path)
        async with self._client() as client, _beside(client, path) as temporary:
            async with client.open(temporary, "xb") as file:
                at = 0
                for piece in pieces:
                    await file.write(piece, at)
                    at += len(piece)
                with suppress(
                    asyncssh.SFTPOpUnsupported
                ):  # then a server does not state when bytes are durable
                    await file.fsync()
            await give_name(client, temporary, path)

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        pieces = (value[at : at + _PIECE_BYTES] for at in range(0, len(value), _PIECE_BYTES))
        await self._write(path, pieces, _link if mode == "create" else _replace)

    async def _put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        with Path(lpath).open("rb") as source:
            await self._write(rpath, iter(partial(source.read, _PIECE_BYTES), b""), _replace)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        async with self._client() as client:
            await client.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    async def _mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        await self._makedirs(path, exist_ok=create_parents)

    async def _rm_file(self, path: str, **_: Any) -> None:
        async with self._client() as client:
            await client.remove(self._strip_protocol(path))

    async def _rmdir(self, path: str) -> None:
        async with self._client() as client:
            await client.rmdir(self._strip_protocol(path))

    async def _rm(self, path: Any, recursive: bool = False, **_: Any) -> None:
        for one in [path] if isinstance(path, str) else path:
            async with self._client() as client:
                await (client.rmtree if recursive else client.remove)(self._strip_protocol(one))

    mkdir = sync_wrapper(_mkdir)
    makedirs = sync_wrapper(_makedirs)
    rmdir = sync_wrapper(_rmdir)


@asynccontextmanager
async def _beside(client: Any, path: str) -> AsyncIterator[str]:
    """A temporary name beside a path; its file is removed afterwards."""
    temporary = str(PurePosixPath(path).with_name(f"{PRIVATE}{secrets.token_hex(8)}"))
    try:
        yield temporary
    finally:
        with suppress(asyncssh.Error, OSError):
            await client.remove(temporary)


async def _link(client: Any, temporary: str, path: str) -> None:
    """Give a file a name that is free. Servers without links use a rename that fails if it exists."""
    try:
        try:
            await client.link(temporary, path)
        except asyncssh.SFTPOpUnsupported:
            await client.rename(temporary, path)
    except asyncssh.SFTPNoSuchFile as error:  # a takeover deletes temporary files
        raise InterruptedError(errno.EINTR, f"{temporary} was removed by another process") from error
    except (asyncssh.SFTPFailure, asyncssh.SFTPFileAlreadyExists) as error:  # most say no more than that
        if await client.exists(path):
            raise FileExistsError(f"{path} exists") from error
        raise


async def _replace(client: Any, temporary: str, path: str) -> None:
    """Give a file a name, replacing its file. In two steps without the extension."""
    try:
        await client.posix_rename(temporary, path)
    except asyncssh.SFTPOpUnsupported:
        with suppress(asyncssh.SFTPNoSuchFile):
            await client.remove(path)
        await client.rename(temporary, path)


def _described(path: str, attributes: Any) -> dict[str, Any]:
    permissions = attributes.permissions or 0
    kinds = (("directory", stat.S_ISDIR), ("link", stat.S_ISLNK), ("file", stat.S_ISREG))
    kind = next((kind for kind, is_it in kinds if is_it(permissions)), "other")
    return {"name": path, "size": attributes.size, "type": kind, "mtime": attributes.mtime}


def _as_os_error(error: Exception) -> Exception:
    if isinstance(error, (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath)):
        return FileNotFoundError(str(error))
    if isinstance(error, (asyncssh.SFTPPermissionDenied, asyncssh.SFTPWriteProtect)):
        return PermissionError(str(error))
    if isinstance(error, asyncssh.SFTPFileAlreadyExists):
        return FileExistsError(str(error))
    if isinstance(error, _LOST):
        return ConnectionResetError(str(error))
    return OSError(f"the server refuses: {error}")


def _close(loop: Any, connection: Any) -> None:
    with suppress(RuntimeError):  # the loop may have ended with its program
        loop.call_soon_threadsafe(connection.abort)
