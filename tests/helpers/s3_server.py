"""A real S3 server on loopback, in a process of its own, where it is installed (`torchrelay[test]`)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from store_servers import Served

BUCKET = "relay"
MISSING = [name for name in ("moto", "s3fs", "flask") if importlib.util.find_spec(name) is None]
needs_s3 = pytest.mark.skipif(
    bool(MISSING), reason=f"NOTHING IS TRIED ON S3: {', '.join(MISSING)} missing; install torchrelay[test]"
)


_SERVE = """
import io, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

moto, creating = DomainDispatcherApplication(create_backend_app), threading.Lock()

def served(environ, start):
    # moto looks whether there is such an object, then puts one: two of its threads may both find none.
    if "HTTP_IF_NONE_MATCH" not in environ:
        return moto(environ, start)
    environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
    with creating:
        return list(moto(environ, start))

server = make_server("127.0.0.1", 0, served, threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Serve S3 with one bucket; yields the environment variables for its clients."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())  # which it has bound itself, so nobody can be faster
        url = f"http://127.0.0.1:{port}"
        environment = {
            "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        _make_bucket(url)
        yield environment
    finally:
        server.kill()
        server.communicate()


def _make_bucket(url: str) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="any", aws_secret_access_key="any", region_name="us-east-1"
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()


@contextmanager
def moto() -> Iterator[Served]:
    """The same in the form that all servers of tests have."""
    with s3_server() as environment:
        port = int(environment["AWS_ENDPOINT_URL"].rpartition(":")[2])
        told = {**environment, "AWS_ENDPOINT_URL": "http://127.0.0.1:{port}"}
        yield Served(f"s3://{BUCKET}/", port, told)
