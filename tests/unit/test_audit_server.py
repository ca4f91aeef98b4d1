"""The client of OpenAI-compatible servers, against a small server that answers as the real ones do."""

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hfpar.audit.server import CompletionServer, ServerToken, TooLong
from hfpar.audit.server_http import RefusedError, ServerError, normalize_url
from hfpar.audit.server_probe import SpellingError, align, parse_tokens, scored_text
from hfpar.errors import ConfigError

MEMORY = (
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22",
    "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, and then again",
    "A heron stood in the shallow pond and waited for the smallest fish of all",
)
HERON = MEMORY[2]
MODEL = "tests/pond"


def split(text: str) -> list[str]:
    return re.findall(r"\s?[^\s,]+|,|\s", text)


def predict(tokens: list[str]) -> str:
    """The fake model: it goes on in what it has by heart, else says "the"."""
    text = "".join(tokens)
    for known in MEMORY:
        if text and known.startswith(text) and known != text:
            return split(known)[len(tokens)]
    return " the"


class Fake(ThreadingHTTPServer):
    """Answers in a server's style; `faults` are consumed first, one a request to /completions."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, style: str = "vllm", **settings: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.style = style
        self.bos = settings.get("bos")
        self.bos_is_listed = settings.get("bos_is_listed", True)
        self.key = settings.get("key")
        self.context = settings.get("context", 1000)
        self.faults: list[Callable[[Handler], None]] = []
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.most_at_once = 0
        self.at_once = 0
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.delay = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def client(self, **settings: Any) -> CompletionServer:
        return CompletionServer(
            self.url,
            settings.pop("model", MODEL),
            **{"timeout": 5.0, "retries": 2, "backoff": 0.01, **settings},
        )


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, status: int, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            "Content_Type": "application/json",
            "Content_Length": str(len(data)),
            **headers,
        }.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, message: str, **headers: str) -> None:
        self.send(status, {"error": {"message": message, "code": status}}, **headers)

    def is_allowed(self) -> bool:
        if self.server.key is None or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return True
        self.refuse(401, f"wrong key {self.headers.get('Authorization')}")
        return False

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        if not self.is_allowed():
            return
        entry: dict[str, Any] = {"id": MODEL, "owned_by": self.server.style}
        if self.server.style in ("vllm", "sglang"):
            entry["max_model_len"] = self.server.context
        if self.server.style == "llamacpp":
            entry["meta"] = {"n_ctx": self.server.context, "n_ctx_train": 8192}
        self.send(200, {"object": "list", "data": [entry, {"id": "tests/other"}]})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(body)
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            fault = server.faults.pop(0) if server.faults else None
        time.sleep(server.delay)
        with server.lock:
            server.at_once -= 1
        if self.is_allowed():
            (fault or (lambda handler: handler.complete(body)))(self)

    def complete(self, body: dict[str, Any]) -> None:
        style = self.server.style
        prompt = split(body["prompt"])
        if len(prompt) + body["max_tokens"] > self.server.context:
            if style == "sglang":
                words = (
                    f"The input ({len(prompt)} tokens) is longer than the model's context length (10 tokens)."
                )
                self.send(400, {"object": "error", "message": words, "code": 400})
            elif style == "llamacpp":
                self.refuse(400, "the request exceeds the available context size, try increasing it")
            else:
                self.refuse(
                    400, "This model's maximum context length is 10 tokens. However, you requested more."
                )
            return
        if style == "transformers" and {"repetition_penalty", "repeat_penalty"} & set(body):
            self.send(422, {"detail": "Unexpected fields in the request: {'repeat_penalty'}"})
            return
        if style == "llamacpp" and body.get("echo"):
            self.send(
                500, {"error": {"code": 500, "message": "Only no echo is supported", "type": "server_error"}}
            )
            return
        written: list[str] = []
        for _ in range(body["max_tokens"]):
            written.append(predict(prompt + written))
        text = "".join(written)
        for stop in body.get("stop", []):
            text = text.split(stop)[0]
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None}
        if body.get("echo") and style != "transformers":
            choice["text"] = body["prompt"] + text
            # The shifted server leaves out what it wrote, but counts it.
            choice["logprobs"] = self.logprobs(prompt + ([] if style == "llama-cpp-python" else written))
        usage = {"prompt_tokens": len(prompt) + bool(self.server.bos), "completion_tokens": len(written)}
        self.send(200, {"object": "text_completion", "choices": [choice], "usage": usage})

    def logprobs(self, tokens: list[str]) -> dict[str, Any]:
        """As vLLM (true token and the best), SGLang (the best alone, no offsets) or llama-cpp-python (shifted)."""
        bos = [self.server.bos] if self.server.bos and self.server.bos_is_listed else []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for i, token in enumerate(tokens):
            context = tokens[: i + 1] if self.server.style == "llama-cpp-python" else tokens[:i]
            best = predict(context)
            value = -0.25 if token == best else -4.0
            top = {best: -0.25, " second": -2.0}
            if self.server.style != "sglang":
                top[token] = value
            is_first = i == 0 and not bos
            values.append(None if is_first else value)
            tops.append(None if is_first else top)
        return {
            "tokens": bos + tokens,
            "token_logprobs": [None] * len(bos) + values,
            "top_logprobs": [None] * len(bos) + tops,
            "text_offset": [-1] * (len(bos) + len(tokens)),
        }


@contextmanager
def serving(style: str = "vllm", **settings: Any) -> Iterator[Fake]:
    server = Fake(style, **settings)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()


# What servers can do


@pytest.mark.parametrize("style", ["vllm", "sglang"])
def test_check_of_servers_that_score(style: str) -> None:
    with serving(style) as server:
        abilities = server.client().check()
    assert abilities.scores and abilities.scores_reason is None
    assert abilities.models == (MODEL, "tests/other") and abilities.owned_by == style
    assert abilities.context_length == 1000 and abilities.adds_bos is False and not abilities.warnings
    # Penalties that a server takes from the model's own files are off in every request.
    assert all(request["repetition_penalty"] == request["repeat_penalty"] == 1 for request in server.requests)
    assert all(request["temperature"] == 0 and request["max_tokens"] >= 1 for request in server.requests)


@pytest.mark.parametrize("bos_is_listed", [True, False])
def test_check_sees_a_bos_token(bos_is_listed: bool) -> None:
    with serving("vllm", bos="<s>", bos_is_listed=bos_is_listed) as server:
        assert server.client().check().adds_bos is True


def test_check_of_llama_cpp_that_refuses_echo() -> None:
    with serving("llamacpp") as server:
        abilities = server.client().check()
    assert not abilities.scores and "Only no echo is supported" in str(abilities.scores_reason)
    assert abilities.context_length == 1000
    # Its 500 is an answer, not a passing fault.
    assert sum("echo" in request for request in server.requests) == 1


def test_check_of_a_server_that_ignores_echo_and_refuses_what_it_does_not_know() -> None:
    with serving("transformers") as server:
        client = server.client()
        abilities = client.check()
        assert list(client.complete([HERON[:16]], 3)) == [" the shallow pond"]
    assert not abilities.scores and "no log-probabilities" in str(abilities.scores_reason)
    assert len(abilities.warnings) == 1 and "repetition_penalty" in abilities.warnings[0]


def test_check_finds_log_probabilities_of_the_wrong_places() -> None:
    with serving("llama-cpp-python") as server:
        abilities = server.client().check()
    assert not abilities.scores and "don't belong to their tokens" in str(abilities.scores_reason)
    assert "one place earlier" in str(abilities.scores_reason)


def test_check_names_the_models_that_are_there() -> None:
    with serving() as server, pytest.raises(ConfigError, match="serves 'tests/pond', 'tests/other'"):
        server.client(model="tests/sea").check()


def test_check_goes_on_without_a_list_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.refuse(404, "Not Found"))
    with serving() as server:
        abilities = server.client().check()
    assert abilities.models == () and abilities.scores


def test_check_of_a_server_without_completions() -> None:
    with serving() as server:
        server.faults = [lambda handler: handler.refuse(404, "Not Found")]
        with pytest.raises(ConfigError, match="no /completions"):
            server.client().check()


# Scores


@pytest.mark.parametrize(
    ("style", "bos"), [("vllm", None), ("vllm", "<s>"), ("sglang", None), ("sglang", "<s>")]
)
def test_scores_are_those_of_the_model(style: str, bos: str | None) -> None:
    text = HERON.replace("shallow", "deepest")
    with serving(style, bos=bos) as server:
        (tokens,) = server.client().score([text])
    assert isinstance(tokens, list)
    # The token that the server was asked to add isn't part of the text.
    assert "".join(token.text for token in tokens) == (bos or "") + text
    scored = scored_text(text, tokens)
    pieces = split(text)
    assert [text[start:end] for start, end in scored.spans] == pieces
    expected = [predict(pieces[:i]) == piece for i, piece in enumerate(pieces)]
    expected[0] = False
    assert scored.hits == expected and sum(expected) == 5
    assert math.isnan(scored.logprobs[0]) is (bos is None)
    assert scored.logprobs[1:] == [-0.25 if hit else -4.0 for hit in expected[1:]]
    assert scored.gaps[1:] == [0.0 if hit else 3.75 for hit in expected[1:]]
    assert scored.best_texts[5] == " shallow" and not any(scored.near_ties)


def test_results_come_in_order_and_concurrently() -> None:
    texts = [f"{HERON} number {i}" for i in range(40)]
    with serving() as server:
        server.delay = 0.02
        start = time.monotonic()
        results = list(server.client(concurrency=8).score(texts))
        seconds = time.monotonic() - start
    assert [
        "".join(token.text for token in tokens) for tokens in results if isinstance(tokens, list)
    ] == texts
    assert 4 <= server.most_at_once <= 8
    assert seconds < 40 * 0.02


def test_completions_with_stops_and_limits_of_their_own() -> None:
    with serving() as server:
        client = server.client()
        assert list(client.complete([HERON[:16], HERON[:7]], [2, 3])) == [" the shallow", " stood in the"]
        assert list(client.complete([HERON[:16]], 5, stop=[" and"])) == [" the shallow pond"]
    assert "stop" not in server.requests[0]


@pytest.mark.parametrize("style", ["vllm", "sglang", "llamacpp"])
def test_a_text_too_long_ends_nothing(style: str) -> None:
    with serving(style, context=20) as server:
        short, long, last = server.client().complete([HERON[:7], HERON + HERON, HERON[:7]], 2)
    assert short == last == " stood in"
    assert isinstance(long, TooLong) and "context" in long.reason


# What goes wrong


def hang(handler: Handler) -> None:
    handler.server.released.wait(20)


def drip(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    while not handler.server.released.wait(0.05):
        handler.wfile.write(b" ")


def cut_json(handler: Handler) -> None:
    handler.send(200, b'{"choices": [{"text": "A her')


def cut_body(handler: Handler) -> None:
    handler.send(200, b'{"choices": []', Content_Length="400")


def die(handler: Handler) -> None:
    handler.connection.close()


def page(handler: Handler) -> None:
    handler.send(200, b"<html>Sign in</html>", Content_Type="text/html; charset=utf-8")


def busy(handler: Handler) -> None:
    handler.refuse(429, "slow down", Retry_After="0.01")


def broken(handler: Handler) -> None:
    handler.refuse(500, "CUDA error\nmore lines")


def no_choices(handler: Handler) -> None:
    handler.send(200, {"error": {"message": "the worker is gone"}})


def not_a_dict(handler: Handler) -> None:
    handler.send(200, [1, 2])


def hidden(handler: Handler) -> None:
    handler.send(200, {"choices": [{"text": "x", "logprobs": None}]})


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (hang, ServerError, "no whole answer within 0.3 s.*request_timeout"),
        (drip, ServerError, "no whole answer within 0.3 s.*request_timeout"),
        (cut_json, ServerError, "cut off or broken"),
        (cut_body, ServerError, "before its answer was whole"),
        (die, ServerError, "before its answer was whole"),
        (page, ConfigError, "text/html instead of JSON.*base_url"),
        (busy, ServerError, "429 .slow down., and asks to wait 0 s.*lower request_concurrency"),
        (broken, ServerError, "500 .CUDA error more lines.*log"),
        (no_choices, ServerError, "without choices.*the worker is gone"),
        (not_a_dict, ServerError, "without choices"),
        (hidden, ConfigError, "hides the log-probabilities.*--method generate"),
        (lambda handler: handler.refuse(400, "bad temperature"), RefusedError, "400 .bad temperature."),
        (lambda handler: handler.refuse(404, "no such model"), RefusedError, "404 .no such model."),
        (
            lambda handler: handler.refuse(403, "not for you"),
            ConfigError,
            "403 .not for you.: name the file that holds the key as api_key_file",
        ),
        (
            lambda handler: handler.refuse(307, "", Location="http://moved/v1"),
            ConfigError,
            "moved to http://moved/v1",
        ),
        (lambda handler: handler.refuse(429, "", Retry_After="9999"), ServerError, "asks to wait 9999 s"),
    ],
)
def test_faults_that_last_are_one_line(
    fault: Callable[[Handler], None], kind: type[Exception], says: str
) -> None:
    with serving() as server:
        server.faults = [fault] * 9
        with pytest.raises(kind, match=says) as caught:
            list(server.client(timeout=0.3 if fault in (hang, drip) else 5.0).score([HERON]))
        server.released.set()
    line = str(caught.value)
    assert "\n" not in line and server.url in line


@pytest.mark.parametrize("fault", [cut_json, cut_body, die, busy, broken])
def test_faults_that_pass_are_not_seen(fault: Callable[[Handler], None]) -> None:
    with serving() as server:
        server.faults = [fault, fault]
        (tokens,) = server.client(retries=2).score([HERON])
    assert isinstance(tokens, list) and len(server.requests) == 3


def test_a_request_that_ran_out_of_time_is_not_sent_again() -> None:
    with serving() as server:
        server.faults = [hang]
        with pytest.raises(ServerError):
            list(server.client(timeout=0.2).score([HERON]))
        server.released.set()
    assert len(server.requests) == 1


def test_retry_after_is_waited_for() -> None:
    with serving() as server:
        server.faults = [lambda handler: handler.refuse(429, "", Retry_After="0.3")]
        start = time.monotonic()
        list(server.client().complete([HERON[:7]], 1))
    assert time.monotonic() - start >= 0.3


def test_nothing_listens() -> None:
    with serving() as server:
        url = server.url
    with pytest.raises(ConfigError, match=f"nothing listens at {url}/v1: start the server"):
        CompletionServer(url, MODEL, retries=0).check()


def test_a_server_that_dies_midway_leaves_what_was_finished() -> None:
    texts = [f"{HERON} {i}" for i in range(6)]
    finished = []
    with serving() as server:
        client = server.client(concurrency=1, retries=1)
        server.faults = [lambda handler: handler.complete({"prompt": HERON[:7], "max_tokens": 1})] * 3 + [
            die
        ] * 9
        with pytest.raises(ServerError, match="died"):
            for result in client.complete(texts, 1):
                finished.append(result)
    assert finished == [" stood"] * 3
    with pytest.raises(ServerError, match="answered before and refuses connections now"):
        list(client.complete(texts, 1))


def test_after_a_failure_nothing_more_is_sent() -> None:
    with serving() as server:
        server.faults = [page]
        with pytest.raises(ConfigError):
            list(server.client(concurrency=1).complete([HERON] * 20, 1))
        sent = len(server.requests)
        time.sleep(0.1)
        assert len(server.requests) <= sent + 1 < 20


def test_a_key_is_sent_and_never_said() -> None:
    with serving(key="s3cret-key") as server:
        assert server.client(api_key="s3cret-key").check().scores
        with pytest.raises(ConfigError, match="401.*name the file that holds the key as api_key_file"):
            server.client().check()
        with pytest.raises(ConfigError, match="does not accept the key in api_key_file") as caught:
            server.client(api_key="other-key").check()
    assert "other-key" not in str(caught.value) and "***" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("localhost:8000", "http://localhost:8000/v1"),
        ("https://host/v1/completions", "https://host/v1"),
        ("https://host/v1/openai", "https://host/v1/openai"),
        ("https://host/models/v2beta", "https://host/models/v2beta"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_addresses(given: str, expected: str) -> None:
    assert normalize_url(given) == expected


@pytest.mark.parametrize(
    "given", ["", "ftp://host", "http://", "http://host:port", "http://host:99999", "http://me:pw@host"]
)
def test_bad_addresses(given: str) -> None:
    with pytest.raises(ConfigError, match="base_url") as caught:
        normalize_url(given)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"timeout": 0}, "request_timeout is 0"),
        ({"retries": -1}, "retries is -1"),
        ({"concurrency": 0}, "request_concurrency is 0"),
        ({"api_key": "line\nbreak"}, "api_key_file: the key has characters"),
    ],
)
def test_bad_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CompletionServer("http://localhost:1", MODEL, **settings)


# Tokens over text


def tokens_of(*pieces: str, first: float | None = None) -> list[ServerToken]:
    return [ServerToken(piece, first if i == 0 else -1.0, piece, -1.0) for i, piece in enumerate(pieces)]


@pytest.mark.parametrize(
    ("text", "pieces", "expected"),
    [
        ("a pond", ["a", " pond"], [(0, 1), (1, 6)]),
        # a BOS token that the server added, as text and as nothing
        ("a pond", ["<s>", "a", " pond"], [None, (0, 1), (1, 6)]),
        ("a pond", ["", "a", " pond"], [None, (0, 1), (1, 6)]),
        # spaces lost by decoding alone, and one that was put before the first word
        ("a deep pond", ["a", "deep", "pond"], [(0, 1), (1, 6), (6, 11)]),
        ("a pond", ["<s>", " a", " pond"], [None, (0, 1), (1, 6)]),
        # parts of characters: U+FFFD, nothing, bytes
        ("a 🐟 b", ["a", " \ufffd", "\ufffd", "\ufffd", " b"], [(0, 1), (1, 3), (1, 3), (1, 3), (3, 5)]),
        ("a 🐟 b", ["a", " ", "", "", "", " b"], [(0, 1), (1, 2), (2, 3), (2, 3), (2, 3), (3, 5)]),
        ("a🐟", ["a", "bytes:\\xf0\\x9f", "bytes:\\x90\\x9f"], [(0, 1), (1, 2), (1, 2)]),
        ("🐟🐟!", ["\ufffd"] * 6 + ["!"], [(0, 2)] * 6 + [(2, 3)]),
        ("é", ["\ufffd", "\ufffd"], [(0, 1), (0, 1)]),
        ("🐟🐟", ["\ufffd", "\ufffd", "🐟"], [(0, 1), (0, 1), (1, 2)]),
        # a text that holds U+FFFD itself
        ("x\ufffdy", ["x", "\ufffd", "y"], [(0, 1), (1, 2), (2, 3)]),
        # what the server wrote after the text, where it doesn't say how much that was
        ("a pond", ["a", " pond", " of"], [(0, 1), (1, 6), None]),
        ("", [], []),
    ],
)
def test_alignment(text: str, pieces: list[str], expected: list[tuple[int, int] | None]) -> None:
    assert align(text, tokens_of(*pieces)) == expected


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a pond", ["a", " lake"]),
        ("a pond", ["a"]),
        ("1. Carol", ["1", ".", "\n Carol"]),
        ("a long pond", ["a", " pond"]),
        ("aXb", ["a", "b"]),
    ],
)
def test_tokens_of_another_text_are_refused(text: str, pieces: list[str]) -> None:
    with pytest.raises(SpellingError):
        align(text, tokens_of(*pieces))


@pytest.mark.parametrize(
    ("token", "hit", "gap", "near_tie"),
    [
        (ServerToken("a", -1.0, "a", -1.0, -2.0), True, 0.0, False),
        (ServerToken("a", -1.0, "b", -0.5, -1.0), False, 0.5, False),
        # two tokens as good as each other: a greedy decoder may take either
        (ServerToken("a", -1.0, "a", -1.0, -1.00005), True, 0.0, True),
        (ServerToken("a", -1.00005, "b", -1.0, -1.00005), False, 0.00005, True),
        # the same token, its log-probability computed twice
        (ServerToken("a", -1.00005, "a", -1.0, None), True, 0.0, False),
        # different tokens of one text
        (ServerToken("\ufffd", -5.0, "\ufffd", -0.1, None), False, 4.9, False),
        (ServerToken("a", -1.5, "a", -1.0, None), False, 0.5, False),
        # the true token is better than all that are listed
        (ServerToken("\ufffd", -0.1, "\ufffd", -3.0, None), True, 0.0, False),
    ],
)
def test_verdicts(token: ServerToken, hit: bool, gap: float, near_tie: bool) -> None:
    scored = scored_text(token.text, [token])
    assert (scored.hits, scored.near_ties) == ([hit], [near_tie])
    assert scored.gaps[0] == pytest.approx(gap)


@pytest.mark.parametrize(
    ("text", "value", "top", "expected"),
    [
        ("a", -1.0, {"a": -1.0, "b": -2.0}, ("a", -1.0, -2.0)),
        # SGLang lists the best alone: the true one may be among them, or not
        ("a", -1.0, {"b": -2.0, "c": -3.0}, ("a", -1.0, -2.0)),
        ("a", -3.0, {"b": -1.0}, ("b", -1.0, -3.0)),
        # an entry of the same text that is another token
        ("\ufffd", -5.0, {"\ufffd": -0.1}, ("\ufffd", -0.1, -5.0)),
        ("a", None, None, (None, None, None)),
        ("a", -1.0, {"b": "high"}, (None, None, None)),
    ],
)
def test_the_best_token(text: str, value: float | None, top: Any, expected: tuple[Any, ...]) -> None:
    logprobs = {"tokens": [text], "token_logprobs": [value], "top_logprobs": [top]}
    (token,) = parse_tokens({"logprobs": logprobs}, text, 0) or []
    assert (token.best, token.best_logprob, token.second_logprob) == expected


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {"content": []},
        {"tokens": ["a"], "token_logprobs": [], "top_logprobs": []},
        {"tokens": ["a", "b", "c"], "token_logprobs": [None] * 3, "top_logprobs": [None] * 3},
        {"tokens": [" b"], "token_logprobs": [-1.0], "top_logprobs": [{"b": -1.0}]},
    ],
)
def test_hidden_log_probabilities(logprobs: Any) -> None:
    assert parse_tokens({"logprobs": logprobs}, "a", 1) is None


def test_a_token_without_prediction_is_no_hit() -> None:
    scored = scored_text(
        "a pond", [ServerToken("a", None, None, None), ServerToken(" pond", -1.0, " pond", -1.0)]
    )
    assert scored.hits == [False, True] and math.isnan(scored.logprobs[0]) and math.isnan(scored.gaps[0])
