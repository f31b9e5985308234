"""Every name that the operator gives to something. A service's name has at most 40 characters, so all of these fit."""

import hashlib

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_SUFFIX = 5


def groups_service(service: str) -> str:
    """The headless Service that gives the pods of all groups their DNS names."""
    return f"{service}-groups"


def groups_budget(service: str) -> str:
    """The disruption budget of all groups."""
    return f"{service}-groups"


def groups_network(service: str) -> str:
    """The network policy of all groups."""
    return f"{service}-groups"


def policy(service: str) -> str:
    """The ConfigMap with the policy that routers start with."""
    return f"{service}-policy"


def former(service: str) -> str:
    """The ConfigMap with the last revision that was rolled out whole."""
    return f"{service}-former"


def token_secret(service: str) -> str:
    """The Secret with the token that routers, leaders and ranks prove to one another."""
    return f"{service}-token"


def router(service: str) -> str:
    """The router's Deployment, ServiceAccount, Role, RoleBinding, disruption budget and network policy."""
    return f"{service}-router"


def front_door(service: str) -> str:
    """The Service that clients speak to."""
    return service


def group_names(service: str, uid: str, revision: str, count: int) -> tuple[str, ...]:
    """Names for groups of a revision, all different. They look random, yet are the same at every call."""
    found: dict[str, None] = {}
    turn = 0
    while len(found) < count:
        digest = int.from_bytes(hashlib.sha256(f"{uid}/{revision}/{turn}".encode()).digest()[:8], "big")
        turn += 1
        suffix = ""
        for _ in range(_SUFFIX):
            digest, letter = divmod(digest, len(_ALPHABET))
            suffix += _ALPHABET[letter]
        found[f"{service}-g-{suffix}"] = None
    return tuple(found)


def leader_host(service: str, namespace: str, group: str) -> str:
    """DNS name of a group's leader pod, known before the pod exists."""
    return f"{group}-0.{groups_service(service)}.{namespace}.svc"
