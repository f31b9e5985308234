"""Mutated requests as bytes on real connections, to uvicorn in a thread of this process."""

import socket
from contextlib import ExitStack
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

from bench.fuzz.mutations import mutate_bytes
from bench.fuzz.requests import Reply, Request, draw_request, judge, make_app
from bench.fuzz.targets import Defect, Outcome, Target
from tests.frontend.serving import served_in_thread

TIMEOUT_S = 60.0
"""Without a byte from the server although the request is complete."""
NOT_HTTP = b"Invalid HTTP request received."
"""Of uvicorn, to bytes that are no request; it closes the connection."""
CRLF = b"\r\n"


class Sockets(Target):
    """A server on a free port; each case has its own connection."""

    def __init__(self, folder: Path) -> None:
        self._app, self._backend = make_app(folder)
        self._stack = ExitStack()
        self._url = urlsplit(self._stack.enter_context(served_in_thread(self._app)))

    def run(self, draw: Random) -> Outcome:
        """Sends one request; the server must answer or close, and serve the next connection."""
        request = draw_request(draw)
        is_broken = draw.random() < 0.3
        sent, is_whole = _bytes_of(draw, request)
        if is_broken:
            sent, is_whole = mutate_bytes(draw, sent), False
        answer = self._exchange(sent, request.leaves or not is_whole)
        self._backend.requests.clear()
        if not answer:
            return "refused"  # the request is incomplete, or not HTTP
        reply = _parse(answer)
        if reply.status == 400 and reply.body == NOT_HTTP:
            return "refused"
        return (
            judge(Request(request.method, request.path, [], [sent[:300]], leaves=True), reply)
            if not is_broken
            else _judge_broken(reply)
        )

    def close(self) -> None:
        """Stops the server."""
        self._stack.close()

    def _exchange(self, sent: bytes, ends: bool) -> bytes:
        """Returns what the server sends until it closes. `ends`: the client ends its side first; the server may stop then."""
        answer = b""
        with socket.create_connection((str(self._url.hostname), int(self._url.port or 0)), timeout=TIMEOUT_S) as connection:
            try:
                connection.sendall(sent)
                if ends:
                    connection.shutdown(socket.SHUT_WR)
                while piece := connection.recv(1 << 16):
                    answer += piece
            except TimeoutError as error:
                raise Defect(f"no end of the answer: {sent[:300]!r} -> {answer[:200]!r}") from error
            except OSError:  # the server closed the connection
                return answer
        return answer


def _bytes_of(draw: Random, request: Request) -> tuple[bytes, bool]:
    """Returns the request as HTTP/1.1, with a length or in chunks, and whether its body is as long as its header says."""
    target = request.path + (b"?" + request.query if request.query else b"")
    headers = dict(request.headers)
    headers.setdefault(b"host", b"x")
    body = b"".join(request.pieces)
    is_whole = True
    if draw.random() < 0.3:
        headers[b"transfer-encoding"] = b"chunked"
        headers.pop(b"content-length", None)
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in request.pieces if piece) + b"0\r\n\r\n"
    else:
        length = str(len(body)).encode()
        is_whole = headers.setdefault(b"content-length", length) == length
    headers[b"connection"] = b"close"
    lines = [
        request.method.encode("latin-1") + b" " + target + b" HTTP/1.1",
        *(name + b": " + value for name, value in headers.items()),
    ]
    return CRLF.join(lines) + CRLF * 2 + body, is_whole


def _parse(answer: bytes) -> Reply:
    """Returns the first response; the chunks of a body are not joined."""
    head, _, body = answer.partition(CRLF * 2)
    status, *fields = head.split(CRLF)
    words = status.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise Defect(f"no HTTP response: {answer[:200]!r}")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in fields)}
    return Reply(int(words[1]), headers, body)


def _judge_broken(reply: Reply) -> Outcome:
    """Returns the outcome of bytes that may be no request: uvicorn answers those in plain text."""
    if reply.status >= 500 and b'"not_ready"' not in reply.body:
        raise Defect(f"{reply.status} {reply.body[:200]!r}")
    return "accepted" if reply.status < 400 else "refused"
