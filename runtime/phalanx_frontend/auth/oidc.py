"""Settings of OpenID Connect: the issuer of the tokens that clients may send in place of API keys.

`phalanx_frontend.auth.tokens` verifies the tokens; it loads libraries of 7 MiB, so it is imported only with an issuer.
"""

import argparse
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

_FLAGS = ("--oidc-audience", "--oidc-jwks-uri", "--oidc-models-claim", "--oidc-priority-claim", "--oidc-required-claim")


class OidcInvalid(Exception):
    """A flag or a URL is invalid; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcSettings:
    """The issuer, and what its tokens must contain. Names of claims are those at the top level of a token."""

    issuer: str
    audiences: tuple[str, ...]  # a token has one of them
    jwks_uri: str = ""  # empty: by discovery
    tenant_claim: str = "sub"
    models_claim: str = ""  # empty: all models
    priority_claim: str = ""  # empty: any priority
    required: tuple[tuple[str, str], ...] = ()  # claims and their values


def add_oidc_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the issuer."""
    add = parser.add_argument
    add("--oidc-issuer", default="", metavar="URL", help="issuer of tokens that clients may send in place of API keys")
    add("--oidc-audience", action="append", default=[], metavar="NAME", help="audience that tokens must have; repeatable")
    add("--oidc-jwks-uri", default="", metavar="URL", help="the issuer's key set (default: by discovery)")
    add("--oidc-tenant-claim", default="sub", metavar="CLAIM", help="claim with the name of the tenant (default %(default)s)")
    add("--oidc-models-claim", default="", metavar="CLAIM", help="claim with the models that requests may use (default: all)")
    add("--oidc-priority-claim", default="", metavar="CLAIM", help="claim with the most urgent priority (default: any)")
    required = "value that a claim must have; repeatable"
    add("--oidc-required-claim", action="append", default=[], metavar="CLAIM=VALUE", help=required)


def read_oidc(args: argparse.Namespace) -> OidcSettings | None:
    """Returns the settings of the flags, null without an issuer. Raises OidcInvalid."""
    if not args.oidc_issuer:
        given = [flag for flag in _FLAGS if getattr(args, flag.removeprefix("--").replace("-", "_"))]
        if given:
            raise OidcInvalid(f"argument {given[0]}: needs --oidc-issuer")
        return None
    if not args.oidc_audience or not all(args.oidc_audience):
        raise OidcInvalid("argument --oidc-audience: needed with --oidc-issuer: without it, tokens for other services would pass")
    if not args.oidc_tenant_claim:
        raise OidcInvalid("argument --oidc-tenant-claim: must not be empty")
    for flag, url in {"--oidc-issuer": args.oidc_issuer, "--oidc-jwks-uri": args.oidc_jwks_uri}.items():
        if url and not is_safe_url(url):
            raise OidcInvalid(f"argument {flag}: {url!r} is not an https URL (http is for addresses of this machine)")
    return OidcSettings(
        issuer=args.oidc_issuer,
        audiences=tuple(args.oidc_audience),
        jwks_uri=args.oidc_jwks_uri,
        tenant_claim=args.oidc_tenant_claim,
        models_claim=args.oidc_models_claim,
        priority_claim=args.oidc_priority_claim,
        required=_required(args.oidc_required_claim),
    )


def is_safe_url(url: str) -> bool:
    """Returns whether keys of this URL cannot be replaced on the way: https, or http of a loopback address."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    if not host or parts.username is not None or parts.fragment:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _required(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    pairs = [word.partition("=")[::2] for word in words]
    for word, (name, value) in zip(words, pairs, strict=True):
        if not name or not value:
            raise OidcInvalid(f"argument --oidc-required-claim: {word!r} is not CLAIM=VALUE")
    return tuple(pairs)
