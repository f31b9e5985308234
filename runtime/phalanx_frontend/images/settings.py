"""Flags of image sources."""

import argparse
import re

from phalanx_frontend.images.fetching import AllowedHosts, HttpsFetcher
from phalanx_frontend.images.source import ImageSource, NoFetcher

_ENTRY = re.compile(r"\*|(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:.]+(/[0-9]{1,3})?")


def image_hosts(text: str) -> tuple[str, ...]:
    """Returns the entries of a list with commas. Raises ArgumentTypeError for one that is no host."""
    entries = tuple(entry.strip() for entry in text.split(",") if entry.strip())
    for entry in entries:
        if not _ENTRY.fullmatch(entry):
            raise argparse.ArgumentTypeError(f"{entry!r} is no host name, *.suffix, address or network")
    return entries


def add_image_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--allowed-media-domains",
        type=image_hosts,
        default=(),
        metavar="HOST,...",
        help="hosts of images by https: names, *.suffix or * for public addresses, networks for others (default: none)",
    )


def image_source(hosts: tuple[str, ...]) -> ImageSource:
    """Returns the source of images from these hosts."""
    return ImageSource(fetcher=HttpsFetcher(AllowedHosts(hosts)) if hosts else NoFetcher())
