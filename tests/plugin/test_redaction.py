"""What the plugin removes from a bug report."""

import json

import pytest
from hypothesis import given, strategies

from phalanx_kubectl.redaction import REDACTED, redact_object, redact_text

SECRETS = {
    "bearer": "authorization: Bearer s3cr3t-t0ken-of-a-service",
    "url": "https://eve:s3cr3t-t0ken@hub.test/model",
    "signed": "s3.test/model?X-Amz-Signature=s3cr3t-t0ken&part=1",
    "hub": "hf_s3cr3tt0kens3cr3tt0ken",
    "jwt": "eyJs3cr3tt0ken.eyJs3cr3tt0ken.s3cr3tt0ken",
    "field": '{"api_key": "s3cr3t-t0ken"}',
    "variable": "HF_TOKEN=s3cr3t-t0ken",
    "cloud": "AWS_SECRET_ACCESS_KEY=abcd/s3cr3t+ijkl",
    "scheme": "Authorization: Token s3cr3tabcdefghijk",
    "azure": "blob.test/model?sv=2020&sig=s3cr3t%3D",
    "pem": "-----BEGIN PRIVATE KEY-----\ns3cr3t\n-----END PRIVATE KEY-----",
    "github": "github_pat_s3cr3ts3cr3ts3cr3t",
    "user": "https://s3cr3t@hub.test",
}


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_in_lines_are_removed(name: str) -> None:
    text = redact_text(f"before {SECRETS[name]} after")
    assert "s3cr3t" not in text and REDACTED in text
    assert text.startswith("before ") and text.endswith(" after")


def test_trace_ids_and_numbers_stay() -> None:
    line = (
        '{"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "tokens": 1234567, "token_file": "/var/run/x", "tokenizer": "spiece"}'
    )
    assert redact_text(line) == line
    random = "0123456789abcdef" * 2
    for name in ("cmpl-", "chatcmpl-mine~"):
        assert redact_text(f"stream {name}{random} replayed") == f"stream {name}01234567 replayed"
    assert redact_text(f"00-{random}-0123456789abcdef-01") == f"00-{random}-0123456789abcdef-01"
    digest = f"registry.test/runtime@sha256:{'0123456789abcdef' * 4}"
    assert redact_text(digest) == digest


def test_objects_lose_foreign_variables_annotations_and_secrets() -> None:
    pod = {
        "kind": "Pod",
        "metadata": {
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "s3cr3t", "phalanx.dev/draining": "now"},
            "managedFields": ["s3cr3t"],
        },
        "spec": {
            "containers": [
                {
                    "env": [
                        {"name": "DATABASE", "value": "s3cr3t"},
                        {"name": "PHALANX_GROUP", "value": "chat-g-a"},
                        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
                    ],
                    "name": "runtime",
                    "args": ["--api-key", "s3cr3t", "--token-file", "/var/run/x", "--url", "https://eve:s3cr3t@hub.test"],
                },
                {"name": "sidecar", "image": "i", "args": ["s3cr3t"], "httpHeaders": [{"name": "X-Api-Key", "value": "s3cr3t"}]},
                {
                    "name": "none",
                },
            ]
        },
    }
    redacted = redact_object({"items": [pod, {"kind": "Secret", "metadata": {"name": "hub"}, "data": {"token": "s3cr3t"}}]})
    text = json.dumps(redacted)
    assert "s3cr3t" not in text
    assert (
        "/var/run/x" in text
        and "chat-g-a" in text
        and '"phalanx.dev/draining": "now"' in text
        and '"name": "hub", "key": "token"' in text
    )


LEAVES = strategies.none() | strategies.integers() | strategies.text()


@given(strategies.recursive(LEAVES, lambda v: strategies.lists(v) | strategies.dictionaries(strategies.text(), v)))
def test_any_object_is_redacted_to_one_that_json_holds(value: object) -> None:
    json.dumps(redact_object(value))
