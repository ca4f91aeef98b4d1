"""JSON over HTTP to a server that may be away, busy, slow, protected or something else altogether.

The standard library's client serves: the packages that bring another one with them change which one they bring.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from hfpar.errors import ConfigError, HfparError

_CHUNK = 1 << 16
_LONGEST_PAUSE = 30.0
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})


class ServerError(HfparError):
    """A server that is there, but fails, hangs or has died.

    Attributes:
        status: Of its HTTP answer, where it gave one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        """Of the line to print."""
        super().__init__(message)
        self.status = status


class RefusedError(ConfigError):
    """A request that the server won't take, however often it is sent.

    Attributes:
        status: Of its HTTP answer.
        reason: The server's own words.
    """

    def __init__(self, message: str, status: int, reason: str) -> None:
        """Of the line to print."""
        super().__init__(message)
        self.status = status
        self.reason = reason


class _Failure(Exception):
    """A try that another may mend; `error` is what to raise if none did, `pause` the seconds the server asks for."""

    def __init__(self, error: HfparError, pause: float | None = None) -> None:
        super().__init__()
        self.error = error
        self.pause = pause


def normalize_url(base_url: str) -> str:
    """The address below which `/models` and `/completions` lie: `http://host:8000` and `.../v1` are both taken.

    Raises:
        ConfigError: It isn't an http(s) address, or holds a password.
    """
    url = base_url.strip()
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    try:
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        port_is_valid = False
    if "@" in parts.netloc:
        raise ConfigError(
            "base_url holds a user name or password; put the key into a file, and name that as api_key_file"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_valid or parts.query:
        raise ConfigError(f"base_url {base_url!r} is not an address such as http://localhost:8000/v1")
    path = re.sub(r"/(chat/)?completions$", "", parts.path.rstrip("/"))
    if not any(re.fullmatch(r"v\d+\w*", segment) for segment in path.split("/")):
        path += "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


class JsonClient:
    """Sends requests and sees to retries; may be used by several threads at once."""

    def __init__(
        self, base_url: str, *, api_key: str | None, timeout: float, retries: int, backoff: float = 1.0
    ) -> None:
        """Of a server's address.

        Args:
            base_url: As `normalize_url` takes it.
            api_key: Sent as a bearer token; never part of a message.
            timeout: Seconds for a whole answer.
            retries: Further tries after a failure that may pass.
            backoff: Seconds before the first of them; each later one waits twice as long.
        """
        self.url = normalize_url(base_url)
        if timeout <= 0:
            raise ConfigError(f"request_timeout is {timeout:g}; it must be more than 0 seconds")
        if retries < 0:
            raise ConfigError(f"retries is {retries}; it must be 0 or more")
        if api_key is not None and (not api_key.isascii() or not api_key.isprintable()):
            raise ConfigError(
                "api_key_file: the key has characters that can't be sent in a header: is it whole, and on one line?"
            )
        self._api_key = api_key or None
        self._timeout = timeout
        self._retries = retries
        self._backoff = backoff
        self._has_answered = False
        self._closed = threading.Event()
        host = urllib.parse.urlsplit(self.url).hostname or ""
        # A proxy can't reach this machine's own servers, and would answer in their place.
        handlers = [urllib.request.ProxyHandler({})] if _is_loopback(host) else []
        self._opener = urllib.request.build_opener(*handlers)

    def close(self) -> None:
        """Ends waiting retries; nothing is sent any more."""
        self._closed.set()

    def get(self, path: str, retries: int | None = None) -> Any:
        """The JSON at a path below the address."""
        return self._send(path, None, self._retries if retries is None else retries)

    def post(self, path: str, body: dict[str, Any], retries: int | None = None) -> Any:
        """The JSON that answers a JSON body.

        Raises:
            RefusedError: The server says that this request can't work (most 4xx, 501).
            ConfigError: No server there, no access, or no such server.
            ServerError: It fails, hangs, or died.
        """
        return self._send(path, body, self._retries if retries is None else retries)

    def _send(self, path: str, body: dict[str, Any] | None, retries: int) -> Any:
        for attempt in range(retries + 1):
            try:
                answer = self._attempt(path, body)
                self._has_answered = True
                return answer
            except _Failure as failure:
                pause = self._backoff * 2**attempt if failure.pause is None else failure.pause
                if attempt == retries or pause > max(_LONGEST_PAUSE, self._timeout):
                    raise failure.error from None
                if self._closed.wait(min(pause, _LONGEST_PAUSE) if failure.pause is None else pause):
                    raise failure.error from None
        raise AssertionError("retries are not negative")

    def _attempt(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}{path}", data=data, headers={"Accept": "application/json"}
        )
        if data is not None:
            request.add_header("Content-Type", "application/json")
        if self._api_key is not None:
            # Unredirected: a redirect to another host must not hand the key on.
            request.add_unredirected_header("Authorization", f"Bearer {self._api_key}")
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return self._decode(
                    path, response.headers.get("Content-Type", ""), self._read(path, response)
                )
        except urllib.error.HTTPError as error:
            with error:
                raise self._explain_status(path, error) from None
        except urllib.error.URLError as error:
            reason = error.reason if isinstance(error.reason, BaseException) else error
            raise self._explain_network(path, reason) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._explain_network(path, error) from None

    def _read(self, path: str, response: Any) -> bytes:
        """The whole body; the socket's own limit would let a server that drips go on for ever."""
        deadline = time.monotonic() + self._timeout
        chunks = []
        while chunk := response.read1(_CHUNK):
            chunks.append(chunk)
            if time.monotonic() > deadline:
                raise TimeoutError
        body = b"".join(chunks)
        length = response.headers.get("Content-Length")
        if length is not None and length.isdigit() and len(body) < int(length):
            raise http.client.IncompleteRead(body, int(length) - len(body))
        return body

    def _decode(self, path: str, content_type: str, body: bytes) -> Any:
        try:
            return json.loads(body)
        except ValueError:
            if "json" in content_type.lower():
                message = f"{self.url}{path} answered with JSON that is cut off or broken ({len(body)} bytes)"
                raise _Failure(ServerError(f"{message}: see the server's own log")) from None
            kind = content_type.split(";")[0].strip() or "no content type"
            raise ConfigError(
                f"{self.url}{path} answered with {kind} instead of JSON: is base_url the address of an "
                "OpenAI-compatible server, such as http://localhost:8000/v1?"
            ) from None

    def _explain_status(self, path: str, error: urllib.error.HTTPError) -> Exception:
        status = error.code
        try:
            reason = self._shorten(_message_in(error.read()))
        except (OSError, http.client.HTTPException):
            reason = ""
        said = f"{self.url}{path} answered {status}" + (f" ({reason})" if reason else "")
        if status in (401, 403):
            missing = "name the file that holds the key as api_key_file"
            fix = missing if self._api_key is None else "the server does not accept the key in api_key_file"
            return ConfigError(f"{said}: {fix}")
        if status == 429:
            pause = _retry_after(error.headers.get("Retry-After"))
            asked = "" if pause is None else f", and asks to wait {pause:.0f} s"
            line = f"{said}{asked}: too many requests; lower request_concurrency, or run again later"
            return _Failure(ServerError(line, status), pause)
        if status in _TRANSIENT:
            line = f"{said}, tried again without success: see the server's own log"
            return _Failure(ServerError(line, status), _retry_after(error.headers.get("Retry-After")))
        if status in (301, 302, 303, 307, 308):
            return ConfigError(
                f"{said}: the server has moved to {error.headers.get('Location')}; give that as base_url"
            )
        return RefusedError(said, status, reason or f"HTTP {status}")

    def _explain_network(self, path: str, error: BaseException) -> Exception:
        where = f"{self.url}{path}"
        if isinstance(error, TimeoutError):
            return ServerError(
                f"{where} gave no whole answer within {self._timeout:g} s: the server hangs or is overloaded; "
                "raise request_timeout, or lower request_concurrency"
            )
        if isinstance(error, ssl.SSLError):
            return ConfigError(
                f"{where}: no secure connection ({self._shorten(str(error))}): is it http:// or https://?"
            )
        if isinstance(error, ConnectionRefusedError):
            if self._has_answered:
                line = f"{where} answered before and refuses connections now: the server has stopped; start it again"
                return _Failure(ServerError(line))
            return _Failure(
                ConfigError(f"nothing listens at {self.url}: start the server, or correct base_url")
            )
        if isinstance(error, socket.gaierror):
            return ConfigError(f"the host of {self.url} is not known: correct base_url")
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError):
            return ConfigError(
                f"{self.url} does not speak HTTP: correct base_url (https:// instead of http://?)"
            )
        if isinstance(error, (ConnectionError, http.client.HTTPException)):
            line = (
                f"{where} closed the connection before its answer was whole: see whether the server has died"
            )
            return _Failure(ServerError(line))
        return _Failure(
            ConfigError(f"{self.url} can't be reached ({self._shorten(str(error))}): correct base_url")
        )

    def _shorten(self, text: str) -> str:
        line = " ".join(text.split())
        if self._api_key is not None:
            line = line.replace(self._api_key, "***")
        return line if len(line) <= 300 else f"{line[:297]}..."


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _message_in(body: bytes) -> str:
    """What an error's body says: servers put it into `error.message`, `message`, `error` or `detail`."""
    try:
        answer = json.loads(body)
    except ValueError:
        text = body.decode("utf-8", errors="replace")
        return "" if text.lstrip().startswith("<") else text
    for key in ("error", "message", "detail"):
        value = answer.get(key) if isinstance(answer, dict) else None
        if isinstance(value, dict) and "message" in value:
            return str(value["message"])
        if value:
            return value if isinstance(value, str) else json.dumps(value)
    return body.decode("utf-8", errors="replace")


def _retry_after(value: str | None) -> float | None:
    """Seconds, of a header that holds seconds or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=timezone.utc)
    return max(0.0, (date - datetime.now(timezone.utc)).total_seconds())
