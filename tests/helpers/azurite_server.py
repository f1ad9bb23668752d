"""Azurite: Azure's blob service as its makers emulate it, of npm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from store_servers import AZURITE, HOST, Served, daemons, free_port, listens, missing

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that every such emulator has; the key is published and protects nothing."""
CONTAINER = "relay"
MISSING = missing("node", modules=("adlfs",), files=(AZURITE,))


@contextmanager
def azurite() -> Iterator[Served]:
    """Serve blobs, kept in memory, with one container."""
    with daemons("azurite") as running:
        port = free_port()
        running.start(
            *("node", AZURITE, "--silent", "--skipApiVersionCheck", "--inMemoryPersistence"),
            *("--disableTelemetry", "--blobHost", HOST, "--blobPort", port),
        )
        running.wait_until(lambda: listens(port), "Azurite")
        _make_container(_connection(str(port)))
        yield Served(f"az://{CONTAINER}/", port, {"AZURE_STORAGE_CONNECTION_STRING": _connection("{port}")})


def _connection(port: str) -> str:
    endpoint = f"http://{HOST}:{port}/{ACCOUNT}"
    return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"


def _make_container(connection: str) -> None:
    from azure.storage.blob import BlobServiceClient

    with BlobServiceClient.from_connection_string(connection) as client:
        client.create_container(CONTAINER)
