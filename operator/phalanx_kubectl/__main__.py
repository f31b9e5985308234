"""`kubectl phalanx`, which kubectl finds as `kubectl-phalanx` on the PATH."""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from phalanx_api.summary import MAX_ORDERED_MOVES
from phalanx_kubectl import frame
from phalanx_kubectl.commands import Commands
from phalanx_kubectl.keys import add_key, run_key
from phalanx_kubectl.replaying import Window, window_around
from phalanx_kubectl.transport import KubectlFailed, KubectlProgram

_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_KUBECTL_FLAGS = ("context", "kubeconfig", "cluster", "user", "as")


def duration(text: str) -> float:
    """Parses a time such as 90, 60s, 5m or 1h. Raises ArgumentTypeError."""
    unit_s = _UNITS_S.get(text[-1:], 0)
    number = text[:-1] if unit_s else text
    try:
        seconds = float(number) * (unit_s or 1)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 60s, 5m or 1h")
    return seconds


def count(text: str) -> int:
    """Parses a number of streams. Raises ArgumentTypeError."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_ORDERED_MOVES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_ORDERED_MOVES}")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-n", "--namespace", help="namespace of the service; default: that of the context")
    for flag in _KUBECTL_FLAGS:
        common.add_argument(f"--{flag}", help="as kubectl's")
    parser = argparse.ArgumentParser(prog="kubectl phalanx", description="Shows inference services, drains and restarts them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[common], help=text, description=text)
        command.set_defaults(parser=command)
        return command

    status = add("status", "conditions of a service, or one line per service")
    status.add_argument("name", nargs="?", metavar="NAME")
    status.add_argument("-A", "--all-namespaces", action="store_true", help="services of all namespaces")
    for name, text in [
        ("groups", "groups of a service: revision, phase, incarnation, streams, nodes"),
        ("top", "current load of groups and routers (needs the right to get pods/proxy)"),
        ("restart", "replace all groups one by one"),
        ("rotate-token", "replace the token that routers, groups and the operator prove to one another, without restarts"),
    ]:
        add(name, text).add_argument("name", metavar="NAME")
    drain = add("drain", "drain a group and replace it")
    drain.add_argument("name", metavar="NAME")
    drain.add_argument("group", metavar="GROUP")
    _add_move(add("move", "move streams of a group to other groups (needs the right to exec into pods)"))
    _add_explain(add("explain", "what limits a service, and what to change (needs the right to exec into pods)"))
    replay = add("replay", "what happened at a time, and what other policies would have done, from the flight recorders")
    replay.add_argument("name", metavar="NAME")
    replay.add_argument("--at", metavar="TIME", help="such as 14:05 in UTC, or in RFC 3339; default: now")
    replay.add_argument("--window", type=duration, default=300.0, metavar="TIME", help="before and after it; default: 5m")
    replay.add_argument("--file", type=Path, metavar="FILE", help="a bug report or recordings to read, instead of the cluster")
    replay.add_argument("--plot", type=Path, metavar="FILE", help="write a chart of the policies as SVG")
    dump = add("dump", "write a bug report: objects, events, logs, metrics and flight recorders, without secrets and prompts")
    dump.add_argument("name", metavar="NAME")
    dump.add_argument("--file", type=Path, metavar="FILE", help="of the report; default: NAME-dump.tar.gz")
    watch = add("watch", "live view of a service, with keys to drain groups, pause a rollout and follow logs")
    watch.add_argument("name", metavar="NAME")
    watch.add_argument("--interval", type=duration, default=3.0, metavar="TIME", help="between readings; default: 3s")
    watch.add_argument("--once", action="store_true", help="print one reading and end")
    cache = add("cache", "hit rate of the prefix cache with half, the present, twice and four times the pages")
    purge = "drop all stored responses of the routers instead (needs the right to exec into pods)"
    cache.add_argument("action", nargs="?", choices=["purge"], help=purge)
    cache.add_argument("name", metavar="NAME")
    add_key(add("key", "make an API key, and the entry with its hash for spec.router.apiKeys"))
    _add_logs(add("logs", "logs of all ranks, each line with its pod"))
    return parser


def _add_logs(logs: argparse.ArgumentParser) -> None:
    logs.add_argument("name", metavar="NAME")
    logs.add_argument("--group", metavar="GROUP", help="only this group")
    logs.add_argument("-f", "--follow", action="store_true", help="stream until interrupted")
    logs.add_argument("-p", "--previous", action="store_true", help="containers before their last restart")
    logs.add_argument("--tail", type=int, default=-1, metavar="N", help="last lines of each pod; default: all")


def _add_move(move: argparse.ArgumentParser) -> None:
    move.add_argument("name", metavar="NAME")
    move.add_argument("group", metavar="GROUP")
    move.add_argument("--to", default="", metavar="GROUP", help="target; default: the groups with the fewest requests")
    move.add_argument("--count", type=count, default=1, metavar="N", help="number of streams; default: %(default)s")


def _add_explain(explain: argparse.ArgumentParser) -> None:
    explain.add_argument("name", metavar="NAME")
    explain.add_argument("-o", "--output", choices=["text", "json"], default="text", help="format; default: %(default)s")
    explain.add_argument(
        "--record",
        type=duration,
        metavar="TIME",
        help="write a trace of the last TIME, such as 60s, instead: steps of every rank, plans, copies and moves, for Perfetto",
    )
    explain.add_argument("--file", type=Path, metavar="FILE", help="of the trace; default: NAME.trace.json")


def run(options: argparse.Namespace, commands: Commands) -> int:
    """Runs a command. Returns the exit status. Raises KubectlFailed."""
    match options.command:
        case "status":
            text = commands.status(options.name, everywhere=options.all_namespaces)
        case "groups":
            text = commands.groups(options.name)
        case "top":
            text = commands.top(options.name)
        case "cache" if options.action is None:
            text = commands.cache(options.name)
        case "explain" if options.record is not None:
            text = commands.profile(options.name, options.record, options.file or Path(f"{options.name}.trace.json"))
        case "replay":
            text = commands.replay(options.name, _window(options), options.file, options.plot)
        case "dump":
            text = commands.dump(options.name, options.file or Path(f"{options.name}-dump.tar.gz"))
        case "explain":
            text = commands.explain(options.name, as_json=options.output == "json")
        case "watch" if not options.once:
            return _watch(commands, options.name, options.interval)
        case "watch":
            text = frame.text(frame.frame(commands.reading(options.name)))
        case "drain":
            text = commands.drain(options.name, options.group)
        case "move":
            text = commands.move(options.name, options.group, options.to, options.count)
        case "key":
            text = run_key(options)
        case "restart":
            text = commands.restart(options.name)
        case "rotate-token":
            text = commands.rotate_token(options.name)
        case "cache":
            text = commands.purge_cache(options.name)
        case _:
            return commands.logs(options.name, options.group, follow=options.follow, previous=options.previous, tail=options.tail)
    print(text, end="")
    return 0


def _watch(commands: Commands, name: str, interval_s: float) -> int:
    """Shows the live view. Returns the exit status."""
    try:
        from phalanx_kubectl.watch import WatchApp  # only this command needs textual
    except ImportError as error:
        raise KubectlFailed(f"watch needs {error.name}: install phalanx[watch], or use --once") from error
    app = WatchApp(commands, name, interval_s)
    app.run()
    return app.return_code or 0


def _window(options: argparse.Namespace) -> Window:
    """Returns the time to replay. Raises KubectlFailed."""
    try:
        return window_around(options.at, options.window, datetime.now(UTC))
    except ValueError as error:
        raise KubectlFailed(f"--at {options.at} is not a time such as 14:05 or 2026-01-02T14:05:00Z") from error


def kubectl_flags(options: argparse.Namespace) -> list[str]:
    """Returns the flags of every kubectl call."""
    return [f"--{flag}={value}" for flag in ("namespace", *_KUBECTL_FLAGS) if (value := getattr(options, flag))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program. Exits with 1 if kubectl fails, with 141 if nothing reads the output any more."""
    options, unknown = make_parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # with the usage of the command

    def warn(message: str) -> None:
        print(f"warning: {message}", file=sys.stderr)

    try:
        status = run(options, Commands(KubectlProgram(flags=kubectl_flags(options)), warn))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        status = 141  # as of shells after SIGPIPE
    except KubectlFailed as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    main()
