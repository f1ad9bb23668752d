"""A real S3 server on loopback, in a process of its own, where it is installed (`torchrelay[test-s3]`)."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

BUCKET = "relay"
MISSING = [name for name in ("moto", "s3fs", "flask") if importlib.util.find_spec(name) is None]
needs_s3 = pytest.mark.skipif(
    bool(MISSING), reason=f"NOTHING IS TRIED ON S3: {', '.join(MISSING)} missing; install torchrelay[test-s3]"
)


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Serve S3 with one bucket; yields the environment variables for its clients."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    serve = "from moto.server import main; main()"
    command = [sys.executable, "-c", serve, "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(port, server)
        url = f"http://127.0.0.1:{port}"
        environment = {
            "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        _make_bucket(url)
        yield environment
    finally:
        server.kill()
        server.wait()


def _await(port: int, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and server.poll() is None:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 0.5).close()
            return
        time.sleep(0.05)
    raise AssertionError("the S3 server did not start")


def _make_bucket(url: str) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="any", aws_secret_access_key="any", region_name="us-east-1"
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()
