"""Settings of the operator from flags, else environment variables; read once at start."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RUNTIME_IMAGE = "PHALANX_RUNTIME_IMAGE"
ROUTER_IMAGE = "PHALANX_ROUTER_IMAGE"
NAMESPACES = "PHALANX_NAMESPACES"
LEASE_NAMESPACE = "PHALANX_LEASE_NAMESPACE"
PROMETHEUS_NAMESPACE = "PHALANX_PROMETHEUS_NAMESPACE"
POD_NAME = "POD_NAME"
PORT = "PHALANX_OPERATOR_PORT"
WORKERS = "PHALANX_OPERATOR_WORKERS"
LEASE_SECONDS = "PHALANX_LEASE_SECONDS"
_NAMESPACE_PATTERN = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The operator's settings."""

    runtime_image: str
    """Image of groups whose spec names no image. Existing groups keep theirs."""
    router_image: str
    """Image of all routers; a change rolls them."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty means all. Fewer namespaces need fewer permissions."""
    lease_namespace: str = "phalanx-system"
    """Namespace of the operator and of its Lease. Two operators over the same services need the same."""
    prometheus_namespace: str = ""
    """Namespace of the Prometheus that network policies admit; empty: any pod with its label."""
    pod_name: str = ""
    """Identity of this pod in the Lease, so a restarted container leads again at once. Empty: a random identity."""
    port: int = 8080
    """Port of /healthz, /readyz and /metrics; 0 takes a free port."""
    workers: int = 4
    """Services reconciled in parallel. More load the API server; with fewer a slow call delays other services."""
    lease_seconds: int = 8
    """Duration of an unrenewed Lease; then another replica leads."""


class BadSetting(Exception):
    """A flag or variable has an invalid value. The message names it."""


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of `phalanx-operator run`; the help of each flag names its environment variable."""
    parser = argparse.ArgumentParser(prog="phalanx-operator run", description="Reconciles InferenceService objects.")
    parser.add_argument("--namespace", dest="namespaces", nargs="+", action="extend", help=f"{NAMESPACES}; default: all")
    parser.add_argument("--runtime-image", help=RUNTIME_IMAGE)
    parser.add_argument("--router-image", help=ROUTER_IMAGE)
    parser.add_argument("--lease-namespace", help=f"{LEASE_NAMESPACE}; default: phalanx-system")
    parser.add_argument("--prometheus-namespace", help=f"{PROMETHEUS_NAMESPACE}; default: any")
    parser.add_argument("--port", help=f"{PORT}; default: 8080")
    parser.add_argument("--workers", help=f"{WORKERS}; default: 4")
    parser.add_argument("--lease-seconds", help=f"{LEASE_SECONDS}; default: 8")
    return parser


def read_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Returns the settings. A flag overrides its variable. Raises BadSetting; SystemExit for unknown flags."""
    given = make_parser().parse_args(arguments)

    def text(flag: str | None, variable: str, default: str | None = None) -> str:
        value = flag if flag is not None else environment.get(variable, default)
        if not value:
            raise BadSetting(f"{variable} is not set: set it, or its flag")
        return value

    namespaces = given.namespaces or environment.get(NAMESPACES, "").replace(",", " ").split()
    prometheus = given.prometheus_namespace or environment.get(PROMETHEUS_NAMESPACE, "")
    for variable, namespace in [*((NAMESPACES, one) for one in namespaces), (PROMETHEUS_NAMESPACE, prometheus)]:
        if not re.fullmatch(_NAMESPACE_PATTERN, namespace) and (namespace or variable == NAMESPACES):
            raise BadSetting(f"{variable}: {namespace!r} is not a namespace name")
    return Settings(
        runtime_image=text(given.runtime_image, RUNTIME_IMAGE),
        router_image=text(given.router_image, ROUTER_IMAGE),
        namespaces=tuple(namespaces),
        lease_namespace=text(given.lease_namespace, LEASE_NAMESPACE, "phalanx-system"),
        prometheus_namespace=prometheus,
        pod_name=environment.get(POD_NAME, ""),
        port=_number(text(given.port, PORT, "8080"), PORT, 0, 65_535),
        workers=_number(text(given.workers, WORKERS, "4"), WORKERS, 1, 64),
        lease_seconds=_number(text(given.lease_seconds, LEASE_SECONDS, "8"), LEASE_SECONDS, 3, 300),
    )


def _number(text: str, name: str, least: int, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not least <= int(text) <= most:
        raise BadSetting(f"{name}: {text!r} is not a number from {least} to {most}")
    return int(text)
