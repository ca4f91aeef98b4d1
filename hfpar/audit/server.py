"""Models behind any server that speaks OpenAI's `/v1/completions`: vLLM, SGLang, llama.cpp, Transformers and others.

Tokens of a given text are scored by `echo` with `logprobs`. What servers do differently, as their sources have it:

- llama.cpp's own server refuses `echo`, and Transformers' ignores it: such a server can only generate.
- llama-cpp-python takes `max_tokens` 0 as no limit at all, so one token is asked for and dropped.
- llama-cpp-python gives each token the log-probability from *behind* it when no BOS token stands before the text. So
  `CompletionServer.check` lets the server score what it wrote itself, and takes log-probabilities only if they fit.
- vLLM and SGLang take penalties from the model's `generation_config.json`, and llama-cpp-python has one of its own;
  greedy decoding needs them off.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from hfpar.audit.server_http import JsonClient, RefusedError, ServerError
from hfpar.audit.server_probe import ServerToken, SpellingError, parse_tokens, scored_text
from hfpar.config.validate import first_of
from hfpar.errors import ConfigError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_TOP = 2
"""The best token and the second, which shows near ties; OpenAI allows up to 5."""
_GREEDY = {"temperature": 0, "frequency_penalty": 0, "presence_penalty": 0}
_NO_PENALTIES = {"repetition_penalty": 1.0, "repeat_penalty": 1.0}
"""vLLM's and SGLang's name, and llama.cpp's; strict servers refuse what they don't know."""
_CHECK_PROMPTS = ("1, 2, 3, 4, 5, 6, 7,", "The days of the week are Monday, Tuesday,")
_CHECK_TOKENS = 12
_TOO_LONG = (
    "context length",
    "context window",
    "context size",
    "context_length",
    "exceed_context",
    "maximum model length",
    "max_model_len",
    "prompt is too long",
    "input is too long",
)


@dataclass(frozen=True)
class TooLong:
    """In place of a result: the text doesn't fit into the server's context; `reason` is its answer."""

    reason: str


@dataclass(frozen=True)
class ServerAbilities:
    """What a server can do for an audit."""

    models: tuple[str, ...]
    """That it lists; empty where it has no list."""
    owned_by: str | None
    """As the list says of the model: `vllm`, `sglang`, `llamacpp`, ..."""
    scores: bool
    """Whether `CompletionServer.score` works, and its log-probabilities are those of their tokens."""
    scores_reason: str | None
    """Why not."""
    adds_bos: bool | None
    """Whether the server puts a BOS token before a text, so that a rendered chat must not begin with one; None:
    it can't be seen."""
    context_length: int | None
    """In tokens, where the server tells."""
    warnings: tuple[str, ...] = ()


class HiddenError(ConfigError):
    """The server gives no log-probabilities of a given text."""


class CompletionServer:
    """A model behind an OpenAI-compatible server."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        retries: int = 3,
        concurrency: int = 8,
        backoff: float = 1.0,
    ) -> None:
        """Of an address; nothing is sent yet.

        Args:
            base_url: `http://host:port` or `http://host:port/v1`.
            model: As the server's `/v1/models` lists it.
            api_key: Sent as a bearer token, never printed.
            timeout: Seconds for one whole answer.
            retries: Further tries after an answer of 429 or 5xx, a broken answer or a lost connection. A request
                that ran out of time isn't sent again.
            concurrency: Requests at a time.
            backoff: Seconds before the first retry; each later one waits twice as long.
        """
        if concurrency < 1:
            raise ConfigError(f"request_concurrency is {concurrency}; it must be 1 or more")
        if not model:
            raise ConfigError("model_name_or_path is empty; name a model that the server lists")
        self._http = JsonClient(base_url, api_key=api_key, timeout=timeout, retries=retries, backoff=backoff)
        self._model = model
        self._concurrency = concurrency
        self._extras: dict[str, float] = dict(_NO_PENALTIES)

    @property
    def url(self) -> str:
        """The address below which `/completions` lies."""
        return self._http.url

    def check(self) -> ServerAbilities:
        """Finds out what the server can do, with about five small requests.

        Raises:
            ConfigError: No server, no access, no such model, no completions.
            ServerError: The server fails or hangs.
        """
        entry, models = self._list_models()
        warnings = []
        written = []
        for prompt in _CHECK_PROMPTS:
            try:
                written.append(self.complete_one(prompt, _CHECK_TOKENS))
            except RefusedError as error:
                if not self._extras or error.status in (404, 405):
                    raise self._no_completions(error) from None
                self._extras = {}
                try:
                    written.append(self.complete_one(prompt, _CHECK_TOKENS))
                except RefusedError as second:
                    raise self._no_completions(second) from None
                warnings.append(
                    f"{self.url} does not take {' or '.join(_NO_PENALTIES)}: a repetition penalty that the server "
                    "sets by itself would change what it writes"
                )
        reason, adds_bos = self._check_scores([str(text) for text in written])
        return ServerAbilities(
            models=models,
            owned_by=_text_or_none(entry.get("owned_by")),
            scores=reason is None,
            scores_reason=reason,
            adds_bos=adds_bos,
            context_length=_context_length(entry),
            warnings=tuple(warnings),
        )

    def score(self, texts: Sequence[str]) -> Iterator[list[ServerToken] | TooLong]:
        """The tokens of each text with what the model expected in their places: one teacher-forced pass a text.

        In the order of the texts, each as soon as it and those before it are done; `server_probe.scored_text` lays
        them over the text.

        Raises:
            ConfigError: The server hides log-probabilities, or refuses.
            ServerError: It fails, hangs, or died; all results before the failed one have been given.
        """
        return self.in_order(texts, self.score_one)

    def complete(
        self, prompts: Sequence[str], max_tokens: int | Sequence[int], stop: Sequence[str] = ()
    ) -> Iterator[str | TooLong]:
        """What the model writes after each prompt, greedily, in the order of the prompts.

        Args:
            prompts: Sent as they are.
            max_tokens: For all, or one for each.
            stop: Texts at which the server ends, themselves left out; OpenAI allows up to four.

        Raises:
            ConfigError: The server refuses.
            ServerError: It fails, hangs, or died; all results before the failed one have been given.
        """
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        work = list(zip(prompts, limits, strict=True))
        return self.in_order(work, lambda item: self.complete_one(item[0], item[1], stop))

    def close(self) -> None:
        """Ends waiting requests."""
        self._http.close()

    # Requests

    def score_one(self, text: str) -> list[ServerToken] | TooLong:
        """As `score`, of one text, in the caller's thread."""
        scored = self._score_counted(text, None)
        return scored if isinstance(scored, TooLong) else scored[0]

    def _score_counted(
        self, text: str, retries: int | None
    ) -> tuple[list[ServerToken], int | None] | TooLong:
        """A text's tokens, and how many the server counted before it wrote, where it says so."""
        body = {**_GREEDY, **self._extras, "max_tokens": 1, "echo": True, "logprobs": _TOP}
        answer = self._post(text, body, retries)
        if isinstance(answer, TooLong):
            return answer
        usage = answer.get("usage")
        counts = (
            [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
            if isinstance(usage, dict)
            else []
        )
        given, written = (count if isinstance(count, int) else None for count in counts or (None, None))
        tokens = parse_tokens(self._choice(answer), text, written or 0)
        if tokens is None:
            raise HiddenError(
                f"{self.url} hides the log-probabilities of a given text; use --method generate, or a server that "
                "takes echo with logprobs (vLLM, SGLang)"
            )
        return tokens, given

    def complete_one(self, prompt: str, max_tokens: int, stop: Sequence[str] = ()) -> str | TooLong:
        """As `complete`, of one prompt, in the caller's thread."""
        body: dict[str, Any] = {**_GREEDY, **self._extras, "max_tokens": max_tokens}
        if stop:
            body["stop"] = list(stop)
        answer = self._post(prompt, body, None)
        if isinstance(answer, TooLong):
            return answer
        text = self._choice(answer).get("text")
        if not isinstance(text, str):
            raise ConfigError(
                f"{self.url}/completions answers without the text of a completion: is it a chat server?"
            )
        return text

    def _post(self, prompt: str, body: dict[str, Any], retries: int | None) -> dict[str, Any] | TooLong:
        try:
            answer = self._http.post(
                "/completions", {"model": self._model, "prompt": prompt, **body}, retries
            )
        except RefusedError as error:
            if error.status in (400, 413, 422) and any(mark in error.reason.lower() for mark in _TOO_LONG):
                return TooLong(error.reason)
            raise
        return answer if isinstance(answer, dict) else {}

    def _choice(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            said = answer.get("error")
            said = said.get("message") if isinstance(said, dict) else said
            keys = (
                f"it says {str(said)[:200]!r}"
                if said
                else f"its keys: {', '.join(map(str, answer)) or 'none'}"
            )
            raise ServerError(
                f"{self.url}/completions answered without choices ({keys}): is it an OpenAI-compatible server?"
            )
        return choices[0]

    def in_order(self, items: Iterable[_Item], call: Callable[[_Item], _Result]) -> Iterator[_Result]:
        """Results of concurrent calls, `concurrency` at a time, begun and given in the order of the items.

        The threads end with the program: a call that hangs must not keep Ctrl-C waiting.
        """
        tasks: SimpleQueue[tuple[_Item, Future[_Result]] | None] = SimpleQueue()
        is_over = threading.Event()

        def work() -> None:
            while (task := tasks.get()) is not None and not is_over.is_set():
                item, future = task
                try:
                    future.set_result(call(item))
                except BaseException as error:  # raised again where the result is taken
                    future.set_exception(error)

        for _ in range(self._concurrency):
            threading.Thread(target=work, daemon=True).start()
        pending: deque[Future[_Result]] = deque()
        try:
            for item in items:
                future: Future[_Result] = Future()
                pending.append(future)
                tasks.put((item, future))
                # Ahead of the next result, so that a slow one doesn't leave the server idle; not without end,
                # because what lies behind a failed one is lost.
                if len(pending) >= 4 * self._concurrency:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            is_over.set()
            for _ in range(self._concurrency):
                tasks.put(None)

    # Abilities

    def _list_models(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What the server says of the model, and the names of all; empty where it has no list."""
        try:
            answer = self._http.get("/models")
        except RefusedError as error:
            if error.status in (404, 405, 501):
                return {}, ()
            raise
        data = answer.get("data") if isinstance(answer, dict) else None
        entries = [
            entry for entry in data or [] if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        ]
        for entry in entries:
            aliases = entry.get("aliases")
            if self._model == entry["id"] or (isinstance(aliases, list) and self._model in aliases):
                return entry, tuple(known["id"] for known in entries)
        if not entries:
            return {}, ()
        names = [entry["id"] for entry in entries]
        raise ConfigError(
            f"{self.url} does not serve {self._model!r}; it serves {first_of([repr(name) for name in names], 10)}: "
            "give one of these as model_name_or_path"
        )

    def _no_completions(self, error: RefusedError) -> ConfigError:
        if error.status in (404, 405):
            return ConfigError(
                f"{error}: either the model {self._model!r} is not there, or this server has no /completions "
                "(chat alone does not do)"
            )
        return error

    def _check_scores(self, written: Sequence[str]) -> tuple[str | None, bool | None]:
        """Why the server's log-probabilities can't be used (None: they can), and whether it adds a BOS token."""
        hits, shifted, total = 0, 0, 0
        adds_bos = None
        for prompt, continuation in zip(_CHECK_PROMPTS, written, strict=True):
            text = prompt + continuation
            try:
                counted = self._score_counted(text, retries=0)
                if isinstance(counted, TooLong):
                    return counted.reason, None
                tokens, given = counted
                scored = scored_text(text, tokens)
            except RefusedError as error:
                return f"the server refuses echo with logprobs ({error.reason})", None
            except ServerError as error:
                if error.status is None:
                    raise
                return f"the server fails on echo with logprobs ({error})", None
            except SpellingError as error:
                return str(error), None
            except HiddenError:
                return "the server gives no log-probabilities of a given text", None
            # llama-cpp-python counts it, but doesn't list it.
            adds_bos = len(scored.spans) < (len(tokens) if given is None else given)
            places = [i for i, (start, _) in enumerate(scored.spans) if start >= len(prompt)]
            pieces = [text[start:end] for start, end in scored.spans]
            total += len(places)
            hits += sum(scored.hits[i] for i in places)
            shifted += sum(scored.best_texts[i] == pieces[i + 1] for i in places if i + 1 < len(pieces))
        if shifted > hits or 2 * hits < total:
            return (
                f"the server's log-probabilities don't belong to their tokens: of {total} tokens that it wrote "
                f"greedily, {hits} are its first choice there"
                + (f", but {shifted} are its first choice one place earlier" if shifted > hits else "")
            ), adds_bos
        return None, adds_bos


def _context_length(entry: Mapping[str, Any]) -> int | None:
    """Tokens: vLLM and SGLang say `max_model_len`, llama.cpp `meta.n_ctx`, gateways `context_length`."""
    meta = entry.get("meta")
    places = [entry.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, dict) else None]
    for value in [*places, entry.get("context_length"), entry.get("context_window")]:
        if isinstance(value, int) and value > 0:
            return value
    return None


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None
