"""Removes secrets from objects and log lines before they leave the cluster.

Objects lose what may hold one: values of environment variables that are not Phalanx's own, annotations of tools, credentials
in URLs. Lines lose what looks like one. Prompts and answers are in no object and no log line.
"""

import re
from typing import Any

REDACTED = "REDACTED"
_OWN_VARIABLES = ("PHALANX_", "OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OWN_ANNOTATIONS = ("phalanx.dev/", "deployment.kubernetes.io/")
_SECRET_NAMES = re.compile(r"token|secret|password|passwd|api[-_]?key|credential|authorization", re.IGNORECASE)
_TEXT_RULES = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {REDACTED}"),
    (re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/@:\"']*:[^\s/@\"']+@"), rf"\1{REDACTED}@"),
    (re.compile(r"(?i)([?&](?:[a-z-]*(?:signature|token|credential|key)[a-z-]*)=)[^\s&\"']+"), rf"\1{REDACTED}"),
    (re.compile(r"\b(?:hf|sk|ghp|gho|glpat|xoxb|AKIA|ASIA)[-_]?[A-Za-z0-9_-]{16,}"), REDACTED),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"), REDACTED),
    (re.compile(r"\b[0-9a-fA-F]{40,}\b"), REDACTED),
    (re.compile(r"(?i)((?:token|secret|password|passwd|api[-_]?key)[\"']?\s*[:=]\s*[\"']?)[^\s\"',}]{6,}"), rf"\1{REDACTED}"),
)


def redact_text(text: str) -> str:
    """Returns the text without bearer tokens, keys, passwords, signed URLs and long hexadecimal numbers."""
    for pattern, replacement in _TEXT_RULES:
        text = pattern.sub(replacement, text)
    return text


def redact_object(value: Any, key: str = "") -> Any:
    """Returns a Kubernetes object without secrets. `key`: of the field that holds the value."""
    match value:
        case dict() if value.get("kind") == "Secret":
            return {"kind": "Secret", "metadata": {"name": (value.get("metadata") or {}).get("name", "")}, "data": REDACTED}
        case dict():
            return {name: redact_object(_field(name, field), name) for name, field in value.items() if name != "managedFields"}
        case list() if key == "env":
            return [_variable(variable) for variable in value]
        case list():
            return [redact_object(item, key) for item in value]
        case str() if _SECRET_NAMES.search(key) and not key.endswith(("Name", "Ref", "name", "Path")):
            return REDACTED
        case str():
            return redact_text(value)
        case _:
            return value


def _field(name: str, value: Any) -> Any:
    if name == "annotations" and isinstance(value, dict):
        return {key: text for key, text in value.items() if key.startswith(_OWN_ANNOTATIONS)}
    return value


def _variable(variable: Any) -> Any:
    """An environment variable; a literal value of another owner is removed."""
    if not isinstance(variable, dict) or "value" not in variable:
        return redact_object(variable)
    is_own = str(variable.get("name", "")).startswith(_OWN_VARIABLES)
    return {**variable, "value": redact_text(str(variable["value"])) if is_own else REDACTED}
