"""Ceph's S3 server, with one monitor and one disk, a sparse file: radosgw, ceph-mon, ceph-osd of Debian."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from store_servers import HOST, Daemons, Served, answers, daemons, free_port, missing

BUCKET = "relay"
KEY, SECRET = "AKTEST", "SKTEST"
MISSING = missing(
    *("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "monmaptool", "ceph"), modules=("s3fs", "boto3")
)
_CONFIGURATION = """
[global]
fsid = {fsid}
mon_host = v1:{host}:{monitor}
public_network = 127.0.0.0/8
ms_bind_msgr2 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
run_dir = {home}/run
admin_socket = {home}/run/$name.$pid.asok
pid_file = {home}/run/$name.pid
log_file = {home}/run/$name.log
mon_cluster_log_file = {home}/run/cluster.log
crash_dir = {home}/run
mon_data = {home}/mon
osd_data = {home}/osd
osd_objectstore = bluestore
bluestore_block_size = 4294967296
osd_memory_target = 939524096
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
mon_data_avail_crit = 1
mon_data_avail_warn = 1
[client.rgw.a]
rgw_frontends = beast endpoint={host}:{port}
rgw_data = {home}/rgw
rgw_run_sync_thread = false
rgw_gc_obj_min_wait = 5
rgw_gc_processor_period = 5
"""


_PASSES = ("wrong fsid", "problem getting command descriptions from mon")
"""Another cluster was faster to bind a port; the monitor was asked too early (seen once)."""


@contextmanager
def rgw() -> Iterator[Served]:
    """Serve S3 with one bucket; its pools are made, so that no test waits for them."""
    with ExitStack() as kept:
        port = _started(kept)
        url = f"http://{HOST}:{port}"
        _warm_up(url)
        yield Served(
            f"s3://{BUCKET}/", port,
            {"AWS_ENDPOINT_URL": f"http://{HOST}:{{port}}", "AWS_ACCESS_KEY_ID": KEY,
             "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"},
        )  # fmt: skip


def _started(kept: ExitStack) -> int:
    """The port. Where a cluster does not begin for a reason that passes a new one is started."""
    for last in (False, False, True):
        with ExitStack() as tried:
            try:
                port = _start(tried.enter_context(daemons("rgw")))
            except RuntimeError as error:
                if last or not any(text in str(error) for text in _PASSES):
                    raise
                continue
            kept.push(tried.pop_all())
            return port
    raise AssertionError("the last one was returned, or raised")


def _start(running: Daemons) -> int:
    home, disk, fsid = running.home, str(uuid.uuid4()), str(uuid.uuid4())
    for name in ("mon", "osd", "run", "rgw"):
        (home / name).mkdir()
    monitor, port = free_port(), free_port()
    conf = home / "ceph.conf"
    conf.write_text(_CONFIGURATION.format(fsid=fsid, host=HOST, monitor=monitor, home=home, port=port))
    said = {"CEPH_CONF": str(conf)}
    _run(home, "monmaptool", "--create", "--addv", "a", f"[v1:{HOST}:{monitor}]", "--fsid", fsid, "monmap")
    _run(home, "ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap")
    running.start("ceph-mon", "-i", "a", "-f", **said)
    _run(home, "ceph", "osd", "new", disk)
    _run(home, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
    running.start("ceph-osd", "-i", "0", "-f", **said)
    running.start("radosgw", "-n", "client.rgw.a", "-f", **said)
    running.wait_until(lambda: answers(port), "Ceph's S3 server")
    user = _run(
        home, "radosgw-admin", "user", "create", "--uid=test", "--display-name=test",
        f"--access-key={KEY}", f"--secret-key={SECRET}",
    )  # fmt: skip
    assert json.loads(user)["user_id"] == "test"
    return port


def _run(home: Path, *words: str) -> str:
    env = {"PATH": "/usr/bin:/usr/sbin:/bin", "CEPH_CONF": str(home / "ceph.conf"), "HOME": str(home)}
    done = subprocess.run(words, cwd=home, env=env, capture_output=True, text=True, timeout=90, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stdout} {done.stderr}")
    return done.stdout


def _warm_up(url: str) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1"
    )
    client.create_bucket(Bucket=BUCKET)
    client.put_object(Bucket=BUCKET, Key="warm", Body=b"x")
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="warm")
    client.abort_multipart_upload(Bucket=BUCKET, Key="warm", UploadId=upload["UploadId"])
    client.delete_object(Bucket=BUCKET, Key="warm")
    client.close()
