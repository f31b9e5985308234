"""A program for benchmarks: `serve` listens on --host and --port and has a child process; `fail` exits."""

import argparse
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class _Ready(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour", choices=["serve", "fail"])
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    if args.behaviour == "fail":
        sys.exit("no such model")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    HTTPServer((args.host, args.port), _Ready).serve_forever()


if __name__ == "__main__":
    main()
