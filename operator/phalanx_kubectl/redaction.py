"""Removes secrets from objects and log lines before they leave the cluster.

Objects lose what may hold one: values of environment variables that are not Phalanx's own, annotations of tools, credentials
in URLs. Lines lose what looks like one. Prompts and answers are in no object and no log line.
"""

import re
from typing import Any

REDACTED = "REDACTED"
_OWN_VARIABLES = frozenset(
    {"PHALANX_POD_INDEX", "PHALANX_GROUP", "PHALANX_REVISION", "PHALANX_FLIGHT_RECORDER_DIR", "OTEL_SERVICE_NAME"}
    | {"OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_EXPORTER_OTLP_PROTOCOL"}
)
_OWN_ANNOTATIONS = ("phalanx.dev/", "deployment.kubernetes.io/")
_OWN_CONTAINERS = frozenset({"runtime", "router"})
_SECRET = r"(?:secret|token|password|passwd|credential|authorization|(?:api|access|private)[-_]?key)"
_SECRET_NAMES = re.compile(_SECRET + "$", re.IGNORECASE)
_TEXT_RULES = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL), REDACTED),
    (re.compile(r"(?i)(authorization\W{1,4})(\w+ )?[^\s\"',}]{6,}"), rf"\1{REDACTED}"),
    (re.compile(r"(?i)\b(bearer)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {REDACTED}"),
    (re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/@\"']+@"), rf"\1{REDACTED}@"),
    (re.compile(r"(?i)([?&](?:[a-z-]*(?:signature|token|credential|key)[a-z-]*|sig)=)[^\s&\"']+"), rf"\1{REDACTED}"),
    (re.compile(r"\b(?:hf|sk|ghp|gho|github_pat|glpat|xox[a-z]|nvapi|AKIA|ASIA|AIza)[-_]?[A-Za-z0-9_-]{16,}"), REDACTED),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"), REDACTED),
    (re.compile(r"((?:[a-z]-|~)[0-9a-f]{8})[0-9a-f]{24}\b"), r"\1"),
    (re.compile(r"(?<!sha256:)\b[0-9a-fA-F]{41,}\b"), REDACTED),
    (re.compile(rf"(?i)(\b\w*{_SECRET}[\"']?\s*[:=]\s*[\"']?)[^\s\"',}}]{{6,}}"), rf"\1{REDACTED}"),
)
"""Digests of images, the 40 digits of a commit and trace ids stay; the tokens of services have 64 digits, and ids that permit to
resume a stream 32."""


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
            named = {"value": REDACTED} if "value" in value and _SECRET_NAMES.search(str(value.get("name", ""))) else {}
            is_foreign = "image" in value and value.get("name") not in _OWN_CONTAINERS
            hidden = {name: REDACTED for name in ("args", "command") if is_foreign and name in value}
            fields = {name: redact_object(_field(name, field), name) for name, field in value.items() if name != "managedFields"}
            return fields | named | hidden
        case list() if key == "env":
            return [_variable(variable) for variable in value]
        case list() if key in ("args", "command"):
            return _arguments(value)
        case list():
            return [redact_object(item, key) for item in value]
        case str() if _SECRET_NAMES.search(key):
            return REDACTED
        case str():
            return redact_text(value)
        case _:
            return value


def _field(name: str, value: Any) -> Any:
    if name == "annotations" and isinstance(value, dict):
        return {key: text for key, text in value.items() if key.startswith(_OWN_ANNOTATIONS)}
    return value


def _arguments(words: list[Any]) -> list[Any]:
    """A command line without the values of flags that name a secret."""
    flags = ["", *words]
    return [
        REDACTED if _SECRET_NAMES.search(str(flag)) and str(flag).startswith("-") else redact_object(word)
        for flag, word in zip(flags, words, strict=False)
    ]


def _variable(variable: Any) -> Any:
    """An environment variable; a literal value of another owner is removed."""
    if not isinstance(variable, dict) or "value" not in variable:
        return redact_object(variable)
    is_own = variable.get("name") in _OWN_VARIABLES
    return {**variable, "value": redact_text(str(variable["value"])) if is_own else REDACTED}
