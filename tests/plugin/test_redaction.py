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
}


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_in_lines_are_removed(name: str) -> None:
    text = redact_text(f"before {SECRETS[name]} after")
    assert "s3cr3t" not in text and REDACTED in text
    assert text.startswith("before ") and text.endswith(" after")


def test_trace_ids_and_numbers_stay() -> None:
    line = '{"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "tokens": 1234567, "token_file": "/var/run/x"}'
    assert "4bf92f3577b34da6a3ce929d0e0e4736" in redact_text(line) and "1234567" in redact_text(line)


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
                    "args": ["--api-key", "--url", "https://eve:s3cr3t@hub.test"],
                }
            ]
        },
    }
    redacted = redact_object({"items": [pod, {"kind": "Secret", "metadata": {"name": "hub"}, "data": {"token": "s3cr3t"}}]})
    text = json.dumps(redacted)
    assert "s3cr3t" not in text
    assert "chat-g-a" in text and '"phalanx.dev/draining": "now"' in text and '"name": "hub", "key": "token"' in text


LEAVES = strategies.none() | strategies.integers() | strategies.text()


@given(strategies.recursive(LEAVES, lambda v: strategies.lists(v) | strategies.dictionaries(strategies.text(), v)))
def test_any_object_is_redacted_to_one_that_json_holds(value: object) -> None:
    json.dumps(redact_object(value))
