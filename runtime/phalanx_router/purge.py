"""Command `phalanx-router purge-cache`: purges the response cache of the router that runs in the same pod."""

import http.client
import json
import sys
from collections.abc import Sequence

from phalanx_router.operator_endpoint import PURGE_PATH
from phalanx_router.settings import make_parser, read_token

TIMEOUT_S = 10.0


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if the router does not answer. Raises SystemExit 2 for a bad flag."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    token = read_token(parser, args.token_file)
    connection = http.client.HTTPConnection("127.0.0.1", args.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", PURGE_PATH, headers={"authorization": f"Bearer {token}"})
        response = connection.getresponse()
        body = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"phalanx-router: the router at port {args.port} does not answer: {error}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    if response.status != 200:
        print(f"phalanx-router: {body['error']['message']}", file=sys.stderr)
        return 1
    print(body["purged"])
    return 0
