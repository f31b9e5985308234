"""Settings from flags or environment variables."""

import argparse
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx_api import labels
from phalanx_api.command_line.config_file import add_config_flag, parse_arguments

RUNTIME_IMAGE = "PHALANX_RUNTIME_IMAGE"
ROUTER_IMAGE = "PHALANX_ROUTER_IMAGE"
NAMESPACES = "PHALANX_NAMESPACES"
LEASE_NAMESPACE = "PHALANX_LEASE_NAMESPACE"
PROMETHEUS_NAMESPACE = "PHALANX_PROMETHEUS_NAMESPACE"
POD_NAME = "POD_NAME"
PORT = "PHALANX_OPERATOR_PORT"
WORKERS = "PHALANX_OPERATOR_WORKERS"
LEASE_SECONDS = "PHALANX_LEASE_SECONDS"
CONSOLE = "PHALANX_OPERATOR_CONSOLE"
IMAGE_PULL_SECRETS = "PHALANX_IMAGE_PULL_SECRETS"
PRIVATE_SOURCES = labels.ENV_PRIVATE_SOURCES
_HOST_PATTERN = r"\*|(\*\.)?[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?"
_OBJECT_PATTERN = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_NAMESPACE_PATTERN = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the operator."""

    runtime_image: str
    """Of new groups, if the spec has no image."""
    router_image: str
    """Of all routers; a change restarts them."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets in the namespaces of services with credentials for their images, for routers and new groups."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: all."""
    lease_namespace: str = "phalanx-system"
    """Of the operator and its Lease; the same for all operators over the same services."""
    prometheus_namespace: str = ""
    """Admitted by network policies; empty: any."""
    pod_name: str = ""
    """Identity in the Lease: a restarted container leads at once. Empty: random."""
    port: int = 8080
    """Port of the HTTP endpoint; 0: a free one."""
    workers: int = 4
    """Parallel reconciles."""
    lease_seconds: int = 8
    console: bool = False
    """Serves the page of all services at /ui."""
    private_sources: tuple[str, ...] = ()
    """Hosts of model sources that may have private addresses, for new groups: names, *.suffix, addresses, networks; *: all."""


class BadSetting(Exception):
    """A flag or variable has an invalid value."""


def make_parser(parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Returns the parser of `phalanx-operator run`."""
    parser = parser_class(prog="phalanx-operator run", description="Reconciles InferenceService objects.")
    parser.add_argument("--namespace", dest="namespaces", nargs="+", action="extend", help=f"{NAMESPACES}; default: all")
    parser.add_argument("--runtime-image", help=RUNTIME_IMAGE)
    parser.add_argument("--router-image", help=ROUTER_IMAGE)
    secrets = "Secrets, in the namespaces of services, to pull the images of routers and new groups; default: none"
    parser.add_argument("--image-pull-secrets", nargs="+", action="extend", help=f"{IMAGE_PULL_SECRETS}; {secrets}")
    parser.add_argument("--lease-namespace", help=f"{LEASE_NAMESPACE}; default: phalanx-system")
    parser.add_argument("--prometheus-namespace", help=f"{PROMETHEUS_NAMESPACE}; default: any")
    parser.add_argument("--port", help=f"{PORT}; default: 8080")
    parser.add_argument("--workers", help=f"{WORKERS}; default: 4")
    parser.add_argument("--lease-seconds", help=f"{LEASE_SECONDS}; default: 8")
    sources = "hosts of model sources that may have private addresses (docs/security.md); default: none"
    parser.add_argument("--private-sources", nargs="+", action="extend", help=f"{PRIVATE_SOURCES}; {sources}")
    parser.add_argument("--console", action="store_true", help=f"serve the page of all services at /ui; {CONSOLE}=true")
    add_config_flag(parser)
    return parser


def read_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Returns the settings; flags override those of `--config`, and these variables. Raises BadSetting, or SystemExit."""
    flags = parse_arguments(make_parser, arguments, name="run")

    def text(flag: str | None, variable: str, default: str | None = None) -> str:
        value = flag if flag is not None else environment.get(variable, default)
        if not value:
            raise BadSetting(f"{variable} is not set: set it, or its flag")
        return value

    namespaces = flags.namespaces or environment.get(NAMESPACES, "").replace(",", " ").split()
    prometheus = flags.prometheus_namespace or environment.get(PROMETHEUS_NAMESPACE, "")
    for variable, namespace in [*((NAMESPACES, namespace) for namespace in namespaces), (PROMETHEUS_NAMESPACE, prometheus)]:
        if not re.fullmatch(_NAMESPACE_PATTERN, namespace) and (namespace or variable == NAMESPACES):
            raise BadSetting(f"{variable}: {namespace!r} is not a namespace name")
    secrets = flags.image_pull_secrets or environment.get(IMAGE_PULL_SECRETS, "").replace(",", " ").split()
    for secret in secrets:
        if not re.fullmatch(_OBJECT_PATTERN, secret):
            raise BadSetting(f"{IMAGE_PULL_SECRETS}: {secret!r} is not the name of a Secret")
    sources = flags.private_sources or environment.get(PRIVATE_SOURCES, "").replace(",", " ").split()
    for source in sources:
        if not re.fullmatch(_HOST_PATTERN, source) and not _is_network(source):
            raise BadSetting(f"{PRIVATE_SOURCES}: {source!r} is no host name, *.suffix, address or network")
    return Settings(
        runtime_image=text(flags.runtime_image, RUNTIME_IMAGE),
        router_image=text(flags.router_image, ROUTER_IMAGE),
        image_pull_secrets=tuple(dict.fromkeys(secrets)),
        namespaces=tuple(namespaces),
        lease_namespace=text(flags.lease_namespace, LEASE_NAMESPACE, "phalanx-system"),
        prometheus_namespace=prometheus,
        pod_name=environment.get(POD_NAME, ""),
        port=_number(text(flags.port, PORT, "8080"), PORT, 0, 65_535),
        workers=_number(text(flags.workers, WORKERS, "4"), WORKERS, 1, 64),
        lease_seconds=_number(text(flags.lease_seconds, LEASE_SECONDS, "8"), LEASE_SECONDS, 3, 300),
        private_sources=tuple(sources),
        console=flags.console or _is_true(environment.get(CONSOLE, ""), CONSOLE),
    )


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _is_true(text: str, name: str) -> bool:
    if text not in ("", "true", "false"):
        raise BadSetting(f"{name}: {text!r} is neither true nor false")
    return text == "true"


def _number(text: str, name: str, minimum: int, maximum: int) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not minimum <= int(text) <= maximum:
        raise BadSetting(f"{name}: {text!r} is not a number from {minimum} to {maximum}")
    return int(text)
