"""Commands `phalanx-router serve`, the router of one InferenceService, and those that call it or read its flight recorder."""

import argparse
import http.client
import json
import os
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

CALL_TIMEOUT_S = 10.0
FOLLOW_S = 600.0
"""After which `streams --every` ends: its reader may be gone without a trace, if standard input is no pipe."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 after an exception. Raises SystemExit 2 for a bad flag.

    A signal during the import exits with 0.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["purge-cache"], ["summary"], ["move"], ["streams"]):
        return call_router(arguments)
    if arguments[:1] == ["recording"]:
        return print_recording(arguments)
    before = signal.signal(signal.SIGTERM, _end_at_once)
    try:
        from phalanx_router.program import run

        return run(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def call_router(arguments: Sequence[str]) -> int:
    """Calls the router in the same pod: purges its response cache, moves streams, or prints its summary or its streams as JSON.

    Returns the exit code: 1 if the router does not answer. Raises SystemExit 2 for a bad flag.
    """
    from phalanx_api.summary import SNAPSHOT_PATH
    from phalanx_api.tls.certificates import CertificateUnusable
    from phalanx_router.operator_endpoint import MOVES_PATH, PURGE_PATH, STREAMS_PATH
    from phalanx_router.settings import make_parser, parse_flags, read_token

    args = parse_flags(arguments)
    token, order = read_token(make_parser(), args.token_file), None
    match arguments[0]:
        case "purge-cache":
            path = PURGE_PATH
        case "move":
            path, order = MOVES_PATH, json.dumps({"group": args.group, "target": args.to, "count": args.count})
        case "streams":
            path = STREAMS_PATH
        case _:
            path = SNAPSHOT_PATH
    every_s, end_s = getattr(args, "every", None), time.monotonic() + FOLLOW_S
    while True:
        try:
            body = _call(connect(args), path, order, token.current)
        except (OSError, http.client.HTTPException, ValueError, CertificateUnusable) as error:
            print(f"phalanx-router: the router at port {args.port} does not answer: {error}", file=sys.stderr)
            return 1
        if "error" in body:
            print(f"phalanx-router: {body['error']['message']}", file=sys.stderr)
            return 1
        is_read = _print_line(str(body["purged"]) if path == PURGE_PATH else json.dumps(body))
        if not is_read or every_s is None or time.monotonic() + every_s > end_s or _input_ends(every_s):
            return 0


def _call(connection: http.client.HTTPConnection, path: str, order: str | None, token: str) -> dict[str, Any]:
    """Returns the answer of the router in the same pod, an error too. Raises OSError, HTTPException or ValueError."""
    try:
        connection.request("POST", path, order, headers={"authorization": f"Bearer {token}"})
        body = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if not isinstance(body, dict):
        raise ValueError("its answer is no object")
    return body


def _print_line(line: str) -> bool:
    """Prints a line at once. Returns whether anybody reads it."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        return False
    return True


def _input_ends(seconds: float) -> bool:
    """Waits, and returns whether standard input ended, if it is a pipe.

    When the client of `kubectl exec -i` ends, the container runtime closes standard input, but not standard output: a write to
    that blocks once its pipe is full.
    """
    end_s = time.monotonic() + seconds
    if not stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        time.sleep(seconds)
        return False
    while select.select([sys.stdin], [], [], max(0.0, end_s - time.monotonic()))[0]:
        if not os.read(sys.stdin.fileno(), 4096):
            return True
    return False


def connect(args: argparse.Namespace) -> http.client.HTTPConnection:
    """Returns a connection to the router in the same pod: the loopback interface needs no proof of its name.

    Raises CertificateUnusable.
    """
    from phalanx_frontend.tls import CertificateFiles, load_certificate, unverified_context

    if args.internal_tls_dir.exists():
        context = load_certificate(CertificateFiles.in_folder(args.internal_tls_dir, is_mutual=True)).client
        assert context is not None
        context.check_hostname = False
        return http.client.HTTPSConnection("127.0.0.1", args.internal_port, timeout=CALL_TIMEOUT_S, context=context)
    if args.ssl_certfile.exists():
        return http.client.HTTPSConnection("127.0.0.1", args.port, timeout=CALL_TIMEOUT_S, context=unverified_context())
    return http.client.HTTPConnection("127.0.0.1", args.port, timeout=CALL_TIMEOUT_S)


def print_recording(arguments: Sequence[str]) -> int:
    """Prints the flight recorder of the router in the same pod.

    Returns the exit code: 1 if it cannot be read. Raises SystemExit 2 for a bad flag.
    """
    from phalanx_frontend.flight import print_recordings
    from phalanx_router.settings import flight_dir, parse_flags

    args = parse_flags(arguments)
    try:
        for line in print_recordings(flight_dir(args), pod=socket.gethostname(), seconds=args.seconds):
            print(line)
    except OSError as error:
        print(f"phalanx-router recording: {error}", file=sys.stderr)
        return 1
    return 0


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
