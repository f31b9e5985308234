"""The flags of `phalanx-runtime fetch`. No torch here."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """A model, the exit by which it drafts, if one is asked for too, and the folder to which they are downloaded."""

    model: str
    revision: str | None
    download_dir: Path
    hf_token: str | None
    exit: str | None = None


def add_fetch_flags(add: Callable[..., object]) -> None:
    """Adds the flags to the subcommand's parser."""
    add("model", metavar="MODEL", help="org/name, or a URI of hf, s3, gs or oci")
    add("--revision", help="branch, tag or commit of a model of the hub")
    add("--exit", metavar="URI", help="what fit-exit made for the model, fetched too: a URI as MODEL's")
    add("--download-dir", type=Path, metavar="DIR", help="where it is downloaded and converted to")


def fetch_settings(flags: argparse.Namespace, download_dir: Path, hf_token: str | None) -> FetchSettings:
    """What the flags say."""
    return FetchSettings(flags.model, flags.revision, flags.download_dir or download_dir, hf_token, flags.exit)
