"""Flags of an issuer of tokens, which router and runtime share."""

import argparse

import pytest

from phalanx_frontend.auth.oidc import OidcInvalid, OidcSettings, add_oidc_flags, is_safe_url, read_oidc

ISSUER = ("--oidc-issuer", "https://a.example/realms/b")


def read(*flags: str) -> OidcSettings | None:
    parser = argparse.ArgumentParser()
    add_oidc_flags(parser)
    return read_oidc(parser.parse_args(flags))


def test_defaults_of_an_issuer() -> None:
    assert read() is None
    assert read(*ISSUER, "--oidc-audience", "a", "--oidc-audience", "b") == OidcSettings(
        issuer="https://a.example/realms/b", audiences=("a", "b"), tenant_claim="sub"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--oidc-audience", "a"], ["--oidc-audience", "needs --oidc-issuer"]),
        (["--oidc-required-claim", "a=b"], ["--oidc-required-claim", "needs --oidc-issuer"]),
        ([*ISSUER], ["--oidc-audience", "needed"]),
        ([*ISSUER, "--oidc-audience", ""], ["--oidc-audience", "needed"]),
        (["--oidc-issuer", "http://a.example", "--oidc-audience", "a"], ["--oidc-issuer", "'http://a.example'", "https"]),
        ([*ISSUER, "--oidc-audience", "a", "--oidc-jwks-uri", "file:///keys"], ["--oidc-jwks-uri", "'file:///keys'"]),
        ([*ISSUER, "--oidc-audience", "a", "--oidc-tenant-claim", ""], ["--oidc-tenant-claim", "empty"]),
        ([*ISSUER, "--oidc-audience", "a", "--oidc-required-claim", "hd"], ["--oidc-required-claim", "'hd'", "CLAIM=VALUE"]),
    ],
)
def test_an_invalid_flag_is_named(flags: list[str], words: list[str]) -> None:
    with pytest.raises(OidcInvalid) as caught:
        read(*flags)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("url", "is_safe"),
    [
        ("https://a.example", True),
        ("https://10.0.0.1:8443/keys?a=b", True),
        ("http://127.0.0.1:8080/keys", True),
        ("http://[::1]/keys", True),
        ("http://localhost/keys", False),
        ("http://127.0.0.1.a.example", False),
        ("http://169.254.169.254", False),
        ("https://a:b@a.example", False),
        ("https://a.example/#b", False),
        ("https://", False),
        ("https://[::1", False),
        ("ftp://a.example", False),
        ("", False),
    ],
)
def test_keys_come_over_tls_or_from_this_machine(url: str, is_safe: bool) -> None:
    assert is_safe_url(url) == is_safe
