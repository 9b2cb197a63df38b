"""An OpenAI-compatible server is asked as the interface says, and failures are tried again or told plainly."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from laneformer.evaluation.completers import Decoding, NotOffered
from laneformer.evaluation.endpoint import EndpointCompleter, EndpointError


class Handler(BaseHTTPRequestHandler):
    """Answers with what was asked; first with the codes in `server.failures`."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        if self.server.failures:
            return self.reply(self.server.failures.pop(0), {"error": "busy"})
        count = min(body["n"], self.server.at_most)
        if self.path == "/v1/chat/completions":
            text = body["messages"][0]["content"].upper()
            choices = [{"message": {"role": "assistant", "content": text}}] * count
        else:
            choices = [{"text": f"{body['prompt']}!{body['seed']}.{i}"} for i in range(count)]
        self.reply(200, {"choices": choices} if not self.server.broken else {"nothing": 1})

    def reply(self, code, document):
        raw = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.failures, server.at_most, server.broken = [], [], 99, False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def client(server, path="", **more):
    made = EndpointCompleter(f"http://127.0.0.1:{server.server_port}{path}", "model-x", "TEST_KEY", **more)
    made.pause_s = 0.001
    return made


DRAW = {"max_tokens": 7, "temperature": 0.5, "seed": 3}


def test_completions_are_asked_for_with_all_settings_and_the_key(server, monkeypatch):
    monkeypatch.setenv("TEST_KEY", "secret")
    answers = client(server).complete(["a", "b"], Decoding(n=2, stop=["1", "2", "3", "4", "5"], **DRAW))
    assert answers == [["a!3.0", "a!3.1"], ["b!4.0", "b!4.1"]]
    path, body, key = server.asked[0]
    assert (path, key) == ("/v1/completions", "Bearer secret")
    assert body == {"model": "model-x", "max_tokens": 7, "temperature": 0.5, "stop": ["1", "2", "3", "4"], "n": 2,
                    "seed": 3, "prompt": "a"}  # fmt: skip


def test_chat_asks_as_a_user_and_a_url_may_end_in_v1(server):
    assert client(server, "/v1/").complete(["hi"], Decoding(n=1, stop=[], chat=True, **DRAW)) == [["HI"]]
    path, body, key = server.asked[0]
    assert path == "/v1/chat/completions" and body["messages"] == [{"role": "user", "content": "hi"}]
    assert key is None and "stop" not in body


def test_a_server_that_gives_one_choice_at_a_time_is_asked_again_with_other_seeds(server):
    server.at_most = 1
    answers = client(server).complete(["a"], Decoding(n=3, stop=[], **DRAW))[0]
    assert len(set(answers)) == 3


def test_what_may_pass_is_tried_again_and_what_may_not_is_told(server):
    server.failures = [503, 429]
    assert client(server).complete(["a"], Decoding(n=1, stop=[], **DRAW)) == [["a!3.0"]]
    assert len(server.asked) == 3
    server.failures = [401]
    with pytest.raises(EndpointError, match=r"401.*busy"):
        client(server).complete(["a"], Decoding(n=1, stop=[], **DRAW))
    assert len(server.asked) == 4
    server.failures = [500] * 2
    with pytest.raises(EndpointError, match="500"):
        client(server, tries=2).complete(["a"], Decoding(n=1, stop=[], **DRAW))
    server.broken = True
    with pytest.raises(EndpointError, match="without choices"):
        client(server).complete(["a"], Decoding(n=1, stop=[], **DRAW))


def test_a_server_that_is_not_there_and_a_url_that_is_none_are_told():
    with pytest.raises(EndpointError, match="failed"):
        absent = EndpointCompleter("http://127.0.0.1:9", "m", tries=1)
        absent.complete(["a"], Decoding(n=1, stop=[], **DRAW))
    with pytest.raises(ValueError, match="URL"):
        EndpointCompleter("localhost", "m")


def test_likelihoods_and_infilling_are_not_offered(server):
    for ask in (lambda: client(server).nats("a"), lambda: client(server).infilling_prompt("a", "b")):
        with pytest.raises(NotOffered, match="endpoint"):
            ask()
