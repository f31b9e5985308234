"""Settings of a router from flags and environment."""

import argparse
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx_api import labels
from phalanx_api.command_line.config_file import add_config_flag, parse_arguments
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.auth.api_keys import ApiKey, KeysUnreadable, gather_keys
from phalanx_frontend.auth.key_file import KeyFile
from phalanx_frontend.auth.oidc import OidcInvalid, OidcSettings, add_oidc_flags, read_oidc
from phalanx_frontend.auth.origins import add_origin_flag
from phalanx_frontend.auth.service_token import ServiceToken, open_token
from phalanx_frontend.images.source import add_image_flags
from phalanx_frontend.logs import LOG_FORMAT_HELP, LOG_FORMATS, LogFormat
from phalanx_frontend.tls import CertificateFiles
from phalanx_frontend.tracing.otlp import TracingSettingInvalid, TracingSettings, read_tracing
from phalanx_router.root_path import root_path

PURGE_COMMAND, SUMMARY_COMMAND, MOVE_COMMAND = "purge-cache", "summary", "move"
STREAMS_COMMAND, RECORDING_COMMAND = "streams", "recording"
MIN_INTERVAL_S = 0.1
MIN_SILENCE_S = 2.0
"""An idle leader sends a frame every second."""
PATIENCE_S = 600.0
"""Least wait of a started stream for a group, without a flag: a group that loads a large model takes minutes."""
_PATIENCE_HELP = "wait of a started stream for a group (default: 600, or --drain-s if longer)"
_FLIGHT_HELP = "folder of the flight recorder, 8 MiB (default: $PHALANX_FLIGHT_RECORDER_DIR, else none)"


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Where files and batches are stored."""

    folder: pathlib.Path
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values of the flags. Either `leaders` is set, or the pods of `service` in `namespace` are watched."""

    host: str
    port: int
    token: ServiceToken
    leaders: tuple[str, ...]
    peers: tuple[str, ...]
    service: str
    namespace: str
    served_names: tuple[str, ...]  # empty: those of the leader
    heartbeat_timeout_s: float
    patience_s: float
    retry_after_s: float
    drain_s: float  # for open streams; less than the pod's grace period
    lame_duck_s: float  # until other nodes drop the address
    log_level: str
    log_format: LogFormat = "auto"
    api_keys: tuple[ApiKey, ...] = ()  # with `oidc` null and none of these: no authentication
    key_file: KeyFile | None = None
    tls: CertificateFiles | None = None  # null: HTTP
    internal_tls: CertificateFiles | None = None  # of this router; null: other pods reach it at `port` without a certificate
    internal_port: int = labels.INTERNAL_PORT
    oidc: OidcSettings | None = None
    policy: BalancePolicy = field(default_factory=BalancePolicy)  # until the operator sends one
    max_queued: int = 1024
    max_queued_tokens: int = 4_000_000
    hold_s: float = 0.0  # 0: by policy
    max_held: int = 1024
    tracing: TracingSettings | None = None
    shared_services_dir: pathlib.Path | None = None  # see `links.holders`
    flight_dir: pathlib.Path | None = None  # of the flight recorder; null: none
    has_console: bool = False
    has_tenant_metrics: bool = False
    batches: BatchSettings | None = None  # null: no Batch API
    image_hosts: tuple[str, ...] = ()  # of images by https; empty: data: URLs only
    root_path: str = ""  # in front of all paths, of an Ingress
    allowed_origins: tuple[str, ...] = ()  # of web pages; empty: browsers let none read responses


def read_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Reads a command line. Raises SystemExit 2 for an invalid flag."""
    parser = make_parser()
    args = parse_flags(arguments)
    _check_addresses(parser, args)
    namespace = _namespace(parser, args, environment)
    token, policy = read_token(parser, args.token_file), _policy(parser, args.policy_file)
    keys = _keys(parser, args)
    try:
        tracing = read_tracing(environment, args.service or "phalanx", args.slow_first_token_s)
        oidc = read_oidc(args)
    except (TracingSettingInvalid, OidcInvalid) as error:
        parser.error(str(error))
    return Settings(
        host=args.host,
        port=args.port,
        token=token,
        leaders=tuple(args.leaders),
        peers=tuple(args.peers),
        service=args.service,
        namespace=namespace,
        served_names=tuple(args.served_model_name),
        heartbeat_timeout_s=args.heartbeat_timeout_s,
        patience_s=max(PATIENCE_S, args.drain_s) if args.patience_s is None else args.patience_s,
        retry_after_s=args.retry_after_s,
        drain_s=args.drain_s,
        lame_duck_s=args.lame_duck_s,
        log_level=args.log_level,
        log_format=args.log_format,
        api_keys=keys,
        key_file=KeyFile(tuple(args.api_key), args.api_keys_file) if args.api_keys_file is not None else None,
        tls=_certificate_files(parser, args),
        internal_tls=CertificateFiles.in_folder(args.internal_tls_dir, is_mutual=True) if args.internal_tls_dir else None,
        internal_port=args.internal_port,
        oidc=oidc,
        policy=policy,
        max_queued=args.max_queued,
        max_queued_tokens=args.max_queued_tokens,
        hold_s=args.hold_s,
        max_held=args.max_held,
        tracing=tracing,
        shared_services_dir=args.shared_services_dir,
        flight_dir=flight_dir(args, environment),
        has_console=args.console,
        has_tenant_metrics=args.tenant_metrics,
        batches=BatchSettings(args.batches_dir, args.batches_max_bytes) if args.batches_dir is not None else None,
        image_hosts=args.allowed_media_domains,
        root_path=args.root_path,
        allowed_origins=args.allowed_origins,
    )


def _namespace(parser: argparse.ArgumentParser, args: argparse.Namespace, environment: Mapping[str, str]) -> str:
    namespace: str = args.namespace or environment.get("POD_NAMESPACE", "")
    if args.service and not namespace:
        parser.error("argument --namespace: needed with --service (or set POD_NAMESPACE)")
    return namespace


def _keys(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[ApiKey, ...]:
    try:
        return tuple(gather_keys(args.api_key, args.api_keys_file))
    except KeysUnreadable as error:
        parser.error(f"argument --api-key, --api-keys-file: {error}")


def flight_dir(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> pathlib.Path | None:
    """Folder of the flight recorder, by flag or as the operator sets it."""
    folder = environment.get(labels.ENV_FLIGHT_RECORDER)
    return args.flight_recorder_dir or (pathlib.Path(folder) if folder else None)


def _check_addresses(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if bool(args.leaders) == bool(args.service):
        parser.error("give either --leaders HOST:PORT,... or --service NAME with --namespace NS")
    for flag, address in [*(("--leaders", a) for a in args.leaders), *(("--peers", a) for a in args.peers)]:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            parser.error(f"argument {flag}: {address!r} is not host:port")


def _certificate_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> CertificateFiles | None:
    if (args.ssl_certfile is None) != (args.ssl_keyfile is None):
        parser.error("give --ssl-certfile and --ssl-keyfile together")
    return CertificateFiles(args.ssl_certfile, args.ssl_keyfile) if args.ssl_certfile is not None else None


def read_token(parser: argparse.ArgumentParser, path: str) -> ServiceToken:
    """The service token. Raises SystemExit 2."""
    try:
        return open_token(pathlib.Path(path))
    except (OSError, ValueError) as error:
        parser.error(f"argument --token-file: {path!r} cannot be read: {error}")


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the flags of a command line and of its `--config`. Raises SystemExit 2 for an invalid flag."""
    name = arguments[0] if arguments else ""
    if name not in _commands(argparse.ArgumentParser):
        return make_parser().parse_args(arguments)
    return parse_arguments(lambda kind: _commands(kind)[name], arguments[1:], name=name)


def _commands(parser_class: type[argparse.ArgumentParser]) -> Mapping[str, argparse.ArgumentParser]:
    parser = make_parser(parser_class)
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def make_parser(parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The argument parser."""
    parser = parser_class("phalanx-router", description="Router of an InferenceService.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    purge = commands.add_parser(PURGE_COMMAND, help="purge the response cache of the router on this machine")
    summary = commands.add_parser(SUMMARY_COMMAND, help="print the summary of the router on this machine as JSON")
    move = commands.add_parser(MOVE_COMMAND, help="move streams of a group, of those that the router on this machine has")
    move.add_argument("group", metavar="GROUP")
    move.add_argument("--to", default="", metavar="GROUP", help="target (default: those with the fewest requests)")
    move.add_argument("--count", type=_count, default=1, help="number of streams (default %(default)s)")
    streams = commands.add_parser(STREAMS_COMMAND, help="print open streams of the router on this machine as JSON, without text")
    streams.add_argument("--every", type=_interval, metavar="SECONDS", help="print them again after this time, for ten minutes")
    for call in (purge, summary, move, streams):
        call.add_argument("--port", type=_port, default=labels.HTTP_PORT, help="port of the router (default %(default)s)")
        call.add_argument("--token-file", default=labels.TOKEN_FILE, help="file with the service token (default %(default)s)")
        certificate = pathlib.Path(labels.ROUTER_TLS_DIR, labels.TLS_CERTIFICATE)
        help_text = "certificate of the router; it is called by HTTPS if the file exists (default %(default)s)"
        call.add_argument("--ssl-certfile", type=pathlib.Path, default=certificate, help=help_text)
        folder = pathlib.Path(labels.INTERNAL_TLS_DIR)
        help_text = "certificate of the pod; if the folder exists, the router is called at --internal-port (default %(default)s)"
        call.add_argument("--internal-tls-dir", type=pathlib.Path, default=folder, help=help_text)
        call.add_argument("--internal-port", type=_port, default=labels.INTERNAL_PORT, help="default %(default)s")
    recording = commands.add_parser(RECORDING_COMMAND, help="print the flight recorder of the router as JSON")
    recording.add_argument("--seconds", type=_seconds, help="entries of the last seconds (default: all)")
    serve = commands.add_parser("serve", help="serve clients over the groups")
    for command in (recording, serve):
        command.add_argument("--flight-recorder-dir", type=pathlib.Path, help=_FLIGHT_HELP)
    _add_serve(serve)
    for command in commands.choices.values():
        add_config_flag(command)
    return parser


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; empty: all, IPv4 and IPv6 (default %(default)s)"
    )
    serve.add_argument("--port", type=_port, default=labels.HTTP_PORT, help="port to listen on (default %(default)s; 0: any)")
    serve.add_argument("--leaders", type=_list, default=[], help="leaders of the groups, HOST:PORT,...; no cluster needed")
    serve.add_argument("--peers", type=_list, default=[], help="other routers, HOST:PORT,...; watched with --service")
    serve.add_argument("--service", default="", help="name of the InferenceService whose leader pods are watched")
    serve.add_argument("--namespace", default="", help="namespace of the service (default: $POD_NAMESPACE)")
    serve.add_argument("--token-file", default=labels.TOKEN_FILE, help="file with the service token (default %(default)s)")
    serve.add_argument("--served-model-name", nargs="+", default=[], help="names of the model (default: those of the leader)")
    serve.add_argument(
        "--heartbeat-timeout-s", type=_silence, default=3.0, help="silence after which a leader is lost (default 3, at least 2)"
    )
    serve.add_argument("--patience-s", type=_seconds, help=_PATIENCE_HELP)
    serve.add_argument("--retry-after-s", type=_seconds, default=2.0, help="Retry-After when no group is ready (default 2)")
    serve.add_argument("--max-queued", type=_count, default=1024, help="maximum queued requests; more get 429 (default 1024)")
    serve.add_argument(
        "--max-queued-tokens", type=_count, default=4_000_000, help="maximum prompt tokens queued (default 4000000)"
    )
    serve.add_argument("--hold-s", type=_seconds, default=0.0, help="wait of requests while no group exists (default: by policy)")
    serve.add_argument("--max-held", type=_count, default=1024, help="maximum requests in that wait (default 1024)")
    serve.add_argument("--drain-s", type=_seconds, default=600.0, help="time for open streams at shutdown (default 600)")
    serve.add_argument("--lame-duck-s", type=_seconds, default=2.0, help="time to accept clients during shutdown (default 2)")
    serve.add_argument(
        "--slow-first-token-s",
        type=_seconds,
        default=10.0,
        help="time to the first token above which a request's trace is exported in any case (default 10)",
    )
    _add_logs(serve)
    serve.add_argument("--ssl-certfile", type=pathlib.Path, help="certificate and intermediates, PEM; reloaded on change")
    internal = "folder with tls.crt, tls.key and ca.crt: leaders, other routers and the operator are reached by mutual TLS"
    serve.add_argument("--internal-tls-dir", type=pathlib.Path, help=internal)
    port_help = "port for the operator and other routers with --internal-tls-dir (default %(default)s; 0: any)"
    serve.add_argument("--internal-port", type=_port, default=labels.INTERNAL_PORT, help=port_help)
    serve.add_argument("--ssl-keyfile", type=pathlib.Path, help="key of the certificate, PEM")
    _add_callers(serve)
    serve.add_argument(
        "--shared-services-dir",
        type=pathlib.Path,
        help="a file per service that shares cached pages: its token for pages, and leaders where none are watched",
    )
    _add_content(serve)
    serve.add_argument("--console", action="store_true", help="serve the console at /ui (default: no)")
    serve.add_argument(
        "--tenant-metrics", action="store_true", help="count by tenant at /metrics, which needs no key (default: no)"
    )
    serve.add_argument("--policy-file", type=pathlib.Path, help="balancing policy, JSON, in force until the operator sends one")


def _add_callers(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--api-key", nargs="+", action="extend", default=[], help="API keys of clients")
    keys = "keys with names (docs/security.md): a JSON array, or lines of `name key [priority] [field=value ...]`"
    serve.add_argument("--api-keys-file", type=pathlib.Path, help=f"{keys}; reloaded when it changes")
    add_oidc_flags(serve)
    add_origin_flag(serve)
    serve.add_argument(
        "--root-path", type=root_path, default="", help="prefix of all paths; paths without it are served too (default: none)"
    )


def _add_content(serve: argparse.ArgumentParser) -> None:
    add_image_flags(serve)
    help_text = "folder of the Batch API's files, which routers may share (default: no Batch API)"
    serve.add_argument("--batches-dir", type=pathlib.Path, metavar="DIR", help=help_text)
    serve.add_argument(
        "--batches-max-bytes", type=_count, default=4 << 30, metavar="N", help="bytes of all its files (default 4294967296)"
    )


def _add_logs(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    serve.add_argument("--log-format", choices=LOG_FORMATS, default="auto", help=LOG_FORMAT_HELP)


def _policy(parser: argparse.ArgumentParser, path: pathlib.Path | None) -> BalancePolicy:
    try:
        return msgspec.json.decode(path.read_bytes(), type=BalancePolicy) if path else BalancePolicy()
    except (OSError, msgspec.MsgspecError) as error:
        parser.error(f"argument --policy-file: {str(path)!r} is not a valid policy: {error}")


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: use 0 to 65535")
    return port


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1: use a positive integer")
    return count


def _silence(text: str) -> float:
    seconds = _seconds(text)
    if seconds < MIN_SILENCE_S:
        raise argparse.ArgumentTypeError(f"{text} is too short: an idle leader sends a frame a second, so use at least 2 seconds")
    return seconds


def _interval(text: str) -> float:
    seconds = _seconds(text)
    if seconds < MIN_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text} is too short: use at least {MIN_INTERVAL_S:g} seconds")
    return seconds


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a duration in seconds: use a finite number of at least 0")
    return seconds
