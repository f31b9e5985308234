"""Draws API keys, and prints the entry of each for the Secret of `spec.router.apiKeys`."""

import argparse
import hashlib
import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

PREFIX = "phx-"
"""Lets scanners of repositories and logs recognise a key."""
KEY_BYTES = 32
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent", "requests_per_day", "tokens_per_day")
"""Quotas of a keys file."""


def draw_key() -> str:
    """Returns a new key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def entry(key: str, name: str, fields: Mapping[str, object]) -> dict[str, object]:
    """Returns the entry of a key in the file: its hash in place of the key, and the fields that are set."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return {"name": name, "hash": f"sha256:{digest}"} | {field: value for field, value in fields.items() if value is not None}


def text(key: str, made: Mapping[str, object], *, as_json: bool) -> str:
    """Returns what the command prints, the only output that has the key."""
    if as_json:
        return json.dumps({"key": key, "entry": made}) + "\n"
    return (
        f"key, for the client, shown only now:\n  {key}\n"
        f"entry, for the JSON array in the Secret of spec.router.apiKeys:\n  {json.dumps(made)}\n"
    )


def expiry(words: str) -> str:
    """Parses a time in RFC 3339, or a number of days from now such as 90d. Raises ArgumentTypeError."""
    try:
        if words.endswith("d") and words[:-1].isdecimal():
            time = datetime.now(UTC).replace(microsecond=0) + timedelta(days=int(words[:-1]))
        else:
            time = datetime.fromisoformat(words)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{words!r} is neither days such as 90d nor a time in RFC 3339") from error
    if time.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{words!r} has no zone: write Z at its end for UTC")
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def limit(words: str) -> int:
    """Parses a quota. Raises ArgumentTypeError."""
    if not words.isdecimal() or int(words) < 1:
        raise argparse.ArgumentTypeError(f"{words!r} is not a whole number above 0")
    return int(words)


def add_key(command: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    command.add_argument("tenant", metavar="TENANT", help="name of the entry; several keys may have it")
    command.add_argument("--models", nargs="+", metavar="NAME", help="the only models that the key may use")
    command.add_argument("--expires", type=expiry, metavar="TIME", help="days such as 90d, or a time in RFC 3339; default: never")
    command.add_argument("--priority", type=int, metavar="N", help="most urgent priority of its requests; default: any")
    command.add_argument("--console", action="store_const", const="write", help="the key may move and drain in the console")
    for name in LIMITS:
        command.add_argument(f"--{name.replace('_', '-')}", type=limit, metavar="N", help="quota of the tenant")
    command.add_argument("-o", "--output", choices=["text", "json"], default="text", help="format; default: %(default)s")


def run_key(options: argparse.Namespace) -> str:
    """Returns the output of `kubectl phalanx key`."""
    key = draw_key()
    fields = {name: getattr(options, name) for name in ("models", "expires", "priority", "console", *LIMITS)}
    return text(key, entry(key, options.tenant, fields), as_json=options.output == "json")
