"""What a router is told at its start: flags, else environment, else defaults. A bad value ends the program with its name."""

import argparse
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx_api import labels
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.auth.api_keys import ApiKey, KeysUnreadable, gather_keys
from phalanx_frontend.auth.key_file import KeyFile


@dataclass(frozen=True, slots=True)
class Settings:
    """One router's settings. Either `leaders` are given, or they are watched as pods of `service` in `namespace`.

    peers: other routers, of which one gets copies of this one's journals; with `service` they are watched too.
    token: the service's secret, proved to leaders. served_names: names of the model for clients; empty: the leader's.
    heartbeat_timeout_s: silence after which a leader is taken for lost; too low: streams are replayed for nothing.
    patience_s: how long a running stream waits for a group; when not told, as long as it may take to end.
    retry_after_s: what clients hear when no group is ready.
    drain_s: how long open streams may go on after SIGTERM; below the pod's grace period.
    lame_duck_s: how long a leaving router still accepts connections, for its address lives on in other nodes' tables.
    api_keys: who may use the door; none: anyone. key_file: where they are read again when it changes.
    policy: followed until the operator tells another.
    max_queued, max_queued_tokens: requests that wait here, and tokens of their prompts; too low: 429 at short bursts.
    hold_s: how long requests wait for a service to wake from zero, above its cold start; 0: they get 503. max_held: how many.
    """

    host: str
    port: int
    token: str
    leaders: tuple[str, ...]
    peers: tuple[str, ...]
    service: str
    namespace: str
    served_names: tuple[str, ...]
    heartbeat_timeout_s: float
    patience_s: float
    retry_after_s: float
    drain_s: float
    lame_duck_s: float
    log_level: str
    api_keys: tuple[ApiKey, ...] = ()
    key_file: KeyFile | None = None
    policy: BalancePolicy = field(default_factory=BalancePolicy)
    max_queued: int = 1024
    max_queued_tokens: int = 4_000_000
    hold_s: float = 0.0
    max_held: int = 1024


def read_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from a command line. Raises SystemExit 2 with the name and the value of what is wrong."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    if bool(given.leaders) == bool(given.service):
        parser.error("give either --leaders HOST:PORT,... or --service NAME with --namespace NS")
    for flag, address in [*(("--leaders", a) for a in given.leaders), *(("--peers", a) for a in given.peers)]:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            parser.error(f"argument {flag}: {address!r} is not host:port")
    namespace = given.namespace or environment.get("POD_NAMESPACE", "")
    if given.service and not namespace:
        parser.error("argument --namespace: needed with --service (or set POD_NAMESPACE)")
    try:
        token = pathlib.Path(given.token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"argument --token-file: {given.token_file!r} cannot be read: {error}")
    try:
        keys = tuple(gather_keys(given.api_key, given.api_keys_file))
    except KeysUnreadable as error:
        parser.error(f"argument --api-key, --api-keys-file: {error}")
    try:
        policy = _policy(given.policy_file)
    except (OSError, msgspec.MsgspecError) as error:
        parser.error(f"argument --policy-file: {str(given.policy_file)!r} holds no policy: {error}")
    if not token:
        parser.error(f"argument --token-file: {given.token_file!r} is empty")
    return Settings(
        host=given.host,
        port=given.port,
        token=token,
        leaders=tuple(given.leaders),
        peers=tuple(given.peers),
        service=given.service,
        namespace=namespace,
        served_names=tuple(given.served_model_name),
        heartbeat_timeout_s=given.heartbeat_timeout_s,
        patience_s=given.drain_s if given.patience_s is None else given.patience_s,
        retry_after_s=given.retry_after_s,
        drain_s=given.drain_s,
        lame_duck_s=given.lame_duck_s,
        log_level=given.log_level,
        api_keys=keys,
        key_file=KeyFile(tuple(given.api_key), given.api_keys_file) if given.api_keys_file is not None else None,
        policy=policy,
        max_queued=given.max_queued,
        max_queued_tokens=given.max_queued_tokens,
        hold_s=given.hold_s,
        max_held=given.max_held,
    )


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("phalanx-router", description="The front door of an InferenceService.")
    serve = parser.add_subparsers(required=True, metavar="COMMAND").add_parser("serve", help="serve clients over the groups")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    serve.add_argument("--port", type=_port, default=labels.HTTP_PORT, help="port to listen on (default %(default)s; 0: any)")
    serve.add_argument("--leaders", type=_list, default=[], help="leaders of the groups, HOST:PORT,...; no cluster needed")
    serve.add_argument("--peers", type=_list, default=[], help="other routers, HOST:PORT,...; with --service they are watched")
    serve.add_argument("--service", default="", help="name of the InferenceService whose leader pods are watched")
    serve.add_argument("--namespace", default="", help="namespace of the service (default: $POD_NAMESPACE)")
    serve.add_argument("--token-file", default=labels.TOKEN_FILE, help="file with the service token (default %(default)s)")
    serve.add_argument("--served-model-name", nargs="+", default=[], help="names of the model (default: those of the leader)")
    serve.add_argument("--heartbeat-timeout-s", type=_seconds, default=3.0, help="silence that loses a leader (default 3)")
    serve.add_argument("--patience-s", type=_seconds, help="wait of a running stream for a group (default: --drain-s)")
    serve.add_argument("--retry-after-s", type=_seconds, default=2.0, help="Retry-After when no group is ready (default 2)")
    serve.add_argument("--max-queued", type=_count, default=1024, help="requests that may wait here; more get 429 (default 1024)")
    serve.add_argument("--max-queued-tokens", type=_count, default=4_000_000, help="tokens of their prompts (default 4000000)")
    serve.add_argument("--hold-s", type=_seconds, default=0.0, help="wait of requests while there is no group (default 0: 503)")
    serve.add_argument("--max-held", type=_count, default=1024, help="requests that wait so at most (default 1024)")
    serve.add_argument("--drain-s", type=_seconds, default=600.0, help="longest wait for open streams at the end (default 600)")
    serve.add_argument("--lame-duck-s", type=_seconds, default=2.0, help="time to accept clients while leaving (default 2)")
    serve.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    serve.add_argument("--api-key", nargs="+", action="extend", default=[], help="who brings one of these may use the door")
    keys = "keys with names: JSON, or lines of `name key [priority] [requests_per_minute=N] [tokens_per_minute=N] [concurrent=N]`"
    serve.add_argument("--api-keys-file", type=pathlib.Path, help=f"{keys}; read again when it changes")
    serve.add_argument("--policy-file", type=pathlib.Path, help="balancing policy, JSON, until the operator tells another")
    return parser


def _policy(path: pathlib.Path | None) -> BalancePolicy:
    return msgspec.json.decode(path.read_bytes(), type=BalancePolicy) if path else BalancePolicy()


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return port


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return count


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time in seconds")
    return seconds
