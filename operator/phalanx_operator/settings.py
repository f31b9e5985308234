"""What the operator is told at its start: by flags, or else by the environment. Read once, frozen."""

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


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's settings."""

    runtime_image: str
    """Image of groups whose spec names none. Groups that exist keep theirs when this changes."""
    router_image: str
    """Image of all routers; they roll when this changes."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; none means all. Fewer need fewer rights."""
    lease_namespace: str = "phalanx-system"
    """Namespace of the operator and of the Lease by which one leads. Two operators over the same services need the same."""
    prometheus_namespace: str = ""
    """Namespace of the Prometheus that network policies let in; empty: any pod that is named so by its label."""
    pod_name: str = ""
    """Name of this pod, by which it leads: a container that starts again in it leads on at once. Empty: a random one."""
    port: int = 8080
    """Port of /healthz, /readyz and /metrics; 0 takes a free one."""
    workers: int = 4
    """Services looked at side by side. More hurry the API server, fewer let a slow call hold up others."""
    lease_seconds: int = 8
    """How long the Lease of a leader that fell silent holds: then another replica leads."""


class BadSetting(Exception):
    """A flag or a variable has a value that makes no sense. The message names it."""


def make_parser() -> argparse.ArgumentParser:
    """The flags of `phalanx-operator run`; each has a variable of the environment, which it names."""
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
    """The settings. A flag beats its variable. Raises: BadSetting; SystemExit for unknown flags."""
    given = make_parser().parse_args(arguments)

    def text(flag: str | None, variable: str, default: str | None = None) -> str:
        value = flag if flag is not None else environment.get(variable, default)
        if not value:
            raise BadSetting(f"{variable} is not set: give it, or its flag")
        return value

    namespaces = given.namespaces or environment.get(NAMESPACES, "").replace(",", " ").split()
    prometheus = given.prometheus_namespace or environment.get(PROMETHEUS_NAMESPACE, "")
    for variable, namespace in [*((NAMESPACES, one) for one in namespaces), (PROMETHEUS_NAMESPACE, prometheus)]:
        if not re.fullmatch(_NAMESPACE_PATTERN, namespace) and (namespace or variable == NAMESPACES):
            raise BadSetting(f"{variable}: {namespace!r} is no name of a namespace")
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
        raise BadSetting(f"{name}: {text!r} is no number from {least} to {most}")
    return int(text)
