"""The server in a thread of this process: answers, refusals, and what becomes of clients that are gone."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load, save
from served import JSON, Held, linear, served, serving, wait_until

from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.tools.serving.handlers import TensorHandler
from torchrelay.tools.serving.web import access_at, bound_socket, read_token

TOKEN = "0123456789abcdef0123"
SIGNATURE = Signature(
    (TensorSpec("x", ("batch", 4), "float32"),), (TensorSpec("y", ("batch", 3), "float32"),)
)


def test_answers_are_those_of_the_model():
    """JSON and tensors, one sample and several: one alone in the same bits, concurrent ones each its own."""
    model = linear()
    xs = torch.randn(24, 4)
    with torch.inference_mode():
        alone = [model(x[None])[0] for x in xs]
    with serving(served(TensorHandler(model, SIGNATURE)), max_batch=8) as here:
        one = here.predict(xs[0].tolist())
        assert one.status_code == 200 and one.headers["x-torchrelay-epoch"] == "1"
        assert torch.equal(torch.tensor(one.json()["result"]), alone[0]) and one.json()["epoch"] == 1
        binary = here.client.post(
            "/predict", content=save({"x": xs}), headers={"content-type": "application/octet-stream"}
        )
        assert torch.allclose(load(binary.content)["result"], torch.stack(alone), atol=1e-6)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda x: here.predict(x.tolist()).json()["result"], xs))
        assert torch.allclose(torch.tensor(found), torch.stack(alone), atol=1e-6)
        several = here.client.post("/predict", json={"samples": xs.tolist()}).json()
        assert torch.allclose(torch.tensor(several["results"]), torch.stack(alone), atol=1e-6)
        assert here.metric("torchrelay_batch_samples_sum") == 1 + 24 * 3
    with serving(served(TensorHandler(model)), max_batch=1) as here, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda x: here.predict(x.tolist()).json()["result"], xs))
        assert torch.equal(torch.tensor(found), torch.stack(alone)), "with --max-batch 1 all have eval's bits"


def test_samples_that_wait_share_a_batch_and_bad_ones_fail_alone():
    """While a batch is computed others gather; one that does not fit is refused, its neighbours are not."""
    handler = Held()
    with serving(served(handler), max_batch=8) as here, ThreadPoolExecutor(4) as pool:
        first = pool.submit(here.predict, [0.0] * 4)
        assert handler.begun.wait(60)
        sent = [pool.submit(here.client.post, "/predict", json={"samples": [[0.1] * 4, [0.2] * 4]})]
        wait_until(lambda: len(here.running._computing._queue) == 2)
        sent.append(pool.submit(here.client.post, "/predict", json={"samples": [[0.3] * 4, [0.3] * 5]}))
        wait_until(lambda: len(here.running._computing._queue) == 4)
        handler.free.set()
        assert first.result().status_code == 200
        good, bad = (one.result() for one in sent)
        assert good.status_code == 200 and handler.sizes[:2] == [1, 3]
        assert bad.status_code == 422 and "RuntimeError" in bad.json()["error"]
        assert here.metric("torchrelay_refused_samples_total") == 1


class Poisoned(TensorHandler):
    """Raises for a batch that has a negative sample; gives too little for one that begins with 9."""

    def predict(self, samples):
        if any(float(one[""].min()) < 0 for one in samples):
            raise AttributeError("no negatives")
        found = list(super().predict(samples))
        return found[1:] if float(samples[0][""][0]) == 9 else found


def test_whose_fault_it_was_is_told(capsys: pytest.CaptureFixture[str]):
    """An error for a sample is a 422; answers that are none are a 500, counted and written to the log."""
    with serving(served(Poisoned(linear()))) as here:
        many = here.client.post("/predict", json={"samples": [[1.0] * 4, [-1.0] * 4]})
        assert many.status_code == 422 and "no negatives" in many.json()["error"]
        faulty = here.predict([9.0] * 4)
        assert faulty.status_code == 500 and "0 results for 1" in faulty.json()["error"]
        assert here.metric("torchrelay_faults_total") == 1
        assert here.predict([1.0] * 4).status_code == 200
    assert "0 results for 1" in capsys.readouterr().err


def test_too_much_at_once_is_refused_with_a_time_to_come_again():
    """A full queue is a 429, a request that is not answered in time a 503; both say Retry-After."""
    handler = Held()
    with (
        serving(served(handler), queue=2, max_batch=1, secs=2.0) as here,
        ThreadPoolExecutor(4) as pool,
    ):
        waiting = [pool.submit(here.predict, [0.0] * 4)]
        assert handler.begun.wait(60)
        waiting.append(pool.submit(here.client.post, "/predict", json={"samples": [[0.0] * 4] * 2}))
        wait_until(lambda: len(here.running._computing._queue) == 2)
        full = here.predict([0.0] * 4)
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        for one in waiting:
            assert one.result().status_code == 503 and one.result().headers["retry-after"]
        stuck = here.client.get("/ready")
        assert stuck.status_code == 503 and here.client.get("/health").status_code == 200
        handler.free.set()
        wait_until(lambda: here.client.get("/ready").status_code == 200)
        assert here.predict([0.0] * 4).status_code == 200
        assert handler.sizes == [1, 1], "what was given up was not computed"


def test_a_client_that_is_gone_leaves_nothing():
    """Its request ends, its sample is not computed, its bytes are given back."""
    handler = Held()
    with serving(served(handler), max_batch=1) as here, ThreadPoolExecutor(1) as pool:
        first = pool.submit(here.predict, [0.0] * 4)
        assert handler.begun.wait(60)
        body = b'{"sample": [0, 0, 0, 0]}'
        head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:{here.port}\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", here.port)) as gone:
            gone.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: len(here.running._computing._queue) == 1)
        wait_until(
            lambda: here.metric("torchrelay_requests_in_progress") == 2
        )  # the held one, and this question
        assert here.running._predicting._budget.held == 4 * len(b'{"sample":[0.0,0.0,0.0,0.0]}')
        handler.free.set()
        assert first.result().status_code == 200
        assert here.predict([0.0] * 4).status_code == 200
        assert handler.sizes == [1, 1] and here.running._predicting._budget.held == 0


def test_limits_hold_before_anything_is_read():
    """Bodies that say that they are too long, or turn out to be, are a 413; all of them have a budget."""
    with serving(served(TensorHandler(linear())), body_bytes=1000, json_bytes=500) as here:
        assert here.client.post("/predict", content=b"[" * 600, headers=JSON).status_code == 413

        def pieces() -> Any:
            yield from [b" " * 100] * 8

        assert here.client.post("/predict", content=pieces(), headers=JSON).status_code == 413
        assert here.predict([0.0] * 4).status_code == 200
    with serving(served(TensorHandler(linear())), held_bytes=100) as here:
        assert here.predict([0.0] * 4).status_code == 429


def test_surplus_connections_are_refused():
    """Connections beyond the limit get a 503."""
    with serving(served(TensorHandler(linear())), connections=2) as here:
        assert here.client.get("/health").status_code == 200
        with socket.create_connection(("127.0.0.1", here.port), timeout=60) as idle:
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % here.port)
            assert b" 200 " in idle.recv(1000)
            with socket.create_connection(("127.0.0.1", here.port), timeout=60) as third:
                third.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % here.port)
                assert b" 503 " in third.recv(1000)


def test_looking_needs_nothing_else():
    """Health, readiness, metadata, metrics, the document and its page, which loads nothing."""
    with serving(served(TensorHandler(linear(), SIGNATURE), signature=SIGNATURE, code_id="c0de")) as here:
        assert here.client.get("/health").json() == {"status": "ok"}
        assert here.client.get("/ready").json() == {"status": "ready", "epoch": 1}
        told = here.client.get("/metadata").json()
        assert told["run"] == "a run" and told["epoch"] == 1 and told["code_id"] == "c0de"
        assert told["signature"] == SIGNATURE.to_json()
        here.predict([0.0] * 4)
        counted = 'torchrelay_requests_total{code="200",path="/predict"} 1.0'
        assert counted in here.client.get("/metrics").text
        document = here.client.get("/openapi.json").json()
        assert document["openapi"].startswith("3.") and set(document["paths"]) == {
            "/predict", "/health", "/ready", "/metadata", "/metrics",
        }  # fmt: skip
        page = here.client.get("/")
        assert "POST /predict" in page.text and "x: float32 of shape (4)" in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "<script" not in page.text and "src=" not in page.text
        assert here.client.head("/ready").status_code == 200
        assert (
            here.client.get("/predict").status_code == 405 and here.client.get("/nothing").status_code == 404
        )


def test_only_this_machine_or_who_has_the_token():
    """Without a token other hosts' names are refused; with one all but health and readiness need it."""
    with serving(served(TensorHandler(linear()))) as here:
        assert here.client.get("/metadata", headers={"host": "evil.example"}).status_code == 421
    with serving(served(TensorHandler(linear())), token=TOKEN) as here:
        assert here.client.get("/health").status_code == here.client.get("/ready").status_code == 200
        for headers in ({}, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": f"Basic {TOKEN}"}):
            refused = here.client.get("/metadata", headers=headers)
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        assert here.predict([0.0] * 4).status_code == 401
        assert here.predict([0.0] * 4, headers={"authorization": f"bearer {TOKEN}"}).status_code == 200
    with pytest.raises(UsageError, match="--token-file"):
        access_at("0.0.0.0", 80, None)


@pytest.mark.parametrize("text", ["short", "with space in the middle", "\x7f" * 20, "ä" * 20])
def test_a_token_is_a_token(text: str, tmp_path):
    """A file that has none is refused, one that is not there too."""
    (tmp_path / "token").write_text(text, encoding="utf-8")
    for name in ("token", "nothing"):
        with pytest.raises(UsageError, match="--token-file"):
            read_token(None, str(tmp_path / name))
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert read_token(None, str(tmp_path / "token")) == TOKEN


def test_leaving_finishes_what_was_asked_and_is_bounded():
    """What is being computed is answered; a batch that does not end is not waited for longer than told."""
    handler = Held()
    with serving(served(handler), max_batch=1) as here, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(here.predict, [0.0] * 4), pool.submit(here.predict, [0.0] * 4)]
        wait_until(lambda: len(here.running._computing._queue) == 1 and handler.begun.is_set())
        here.running.stop()
        wait_until(lambda: here.running.holder.draining)
        handler.free.set()
        assert [one.result().status_code for one in waiting] == [200, 200]
    handler = Held()
    with serving(served(handler), max_batch=1, drain_secs=0.3) as here, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(here.predict, [0.0] * 4), pool.submit(here.predict, [0.0] * 4)]
        wait_until(lambda: len(here.running._computing._queue) == 1 and handler.begun.is_set())
        here.running.stop()
        here.thread.join(60)
        assert not here.thread.is_alive()
        outcomes = []
        for one in waiting:
            try:
                outcomes.append(one.result().status_code)
            except httpx.HTTPError:
                outcomes.append(0)
        assert 200 not in outcomes and 503 in outcomes
        handler.free.set()


def test_an_address_that_is_taken_is_one_line():
    """Before anything is loaded."""
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(UsageError, match="choose another --port"):
            bound_socket("127.0.0.1", taken.getsockname()[1])


def test_threads_end_with_their_server():
    """A server that was stopped leaves no thread that computes."""
    with serving(served(TensorHandler(linear()))) as here:
        here.predict([0.0] * 4)
        computing = here.running._computing._thread
        assert computing.is_alive()
    computing.join(60)
    assert not computing.is_alive()


class Picky(TensorHandler):
    """Understands no sample, in the words of any exception that a program may raise."""

    def decode(self, sent):
        raise {1: AttributeError, 2: RuntimeError, 3: KeyError, 4: AssertionError}[sent["x"]]("not this")


@pytest.mark.parametrize(
    ("sent", "name"), [(1, "AttributeError"), (2, "RuntimeError"), (3, "KeyError"), (4, "Assert")]
)
def test_a_sample_that_cannot_be_decoded_is_the_clients(
    sent: int, name: str, capsys: pytest.CaptureFixture[str]
):
    """Whatever `decode` raises of what was sent is a 422 with its text, and no traceback in the log."""
    with serving(served(Picky(linear()))) as here:
        answer = here.predict({"x": sent})
        assert (
            answer.status_code == 422
            and name in answer.json()["error"]
            and "not this" in answer.json()["error"]
        )
        assert here.metric("torchrelay_faults_total") == 0
    assert "Traceback" not in capsys.readouterr().err
