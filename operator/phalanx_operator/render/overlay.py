"""The user's overlay, merged over a rendered pod spec as `kubectl patch` would: maps by key, lists by the key of their items."""

from typing import Any

_LIST_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}


def merged(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """`base` with the overlay laid over it. Neither is changed; lists without a key are replaced."""
    result = dict(base)
    for key, value in overlay.items():
        former = base.get(key)
        if isinstance(former, dict) and isinstance(value, dict):
            result[key] = merged(former, value)
        elif isinstance(former, list) and isinstance(value, list) and key in _LIST_KEYS:
            result[key] = _merged_by(_LIST_KEYS[key], former, value)
        else:
            result[key] = value
    return result


def _merged_by(key: str, base: list[dict[str, Any]], overlay: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of `base` in their order, each with the overlay's item of the same key over it; then the overlay's own."""
    over = {item.get(key): item for item in overlay}
    known = {item.get(key) for item in base}
    result = [merged(item, over.get(item.get(key), {})) for item in base]
    return result + [item for item in overlay if item.get(key) not in known]
