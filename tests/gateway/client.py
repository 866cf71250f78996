"""A small HTTP client for tests: answers as (status, headers, body), never an exception for a status."""

import json
import socket
import urllib.error
import urllib.request
from typing import Any


def call(url: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], Any]:
    """POST a body (bytes as they are, else as JSON), or GET without one."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            raw, status, found = response.read(), response.status, response.headers
    except urllib.error.HTTPError as error:
        raw, status, found = error.read(), error.code, error.headers
    try:
        content = json.loads(raw)
    except ValueError:
        content = raw
    return status, {name.lower(): value for name, value in found.items()}, content


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": "hi"}], **more}


class Raw:
    """A bare connection, for clients that misbehave."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=15)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def post(self, path: str, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self.send(head.encode() + data)

    def read_until(self, mark: bytes) -> bytes:
        data = b""
        while mark not in data:
            piece = self.socket.recv(65536)
            if not piece:
                return data
            data += piece
        return data

    def read_all(self) -> bytes:
        """Until the server closes."""
        data = b""
        while piece := self.socket.recv(65536):
            data += piece
        return data

    def close(self) -> None:
        self.socket.close()
