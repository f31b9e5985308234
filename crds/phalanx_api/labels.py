"""Labels, annotations, environment variables, paths and ports that several programs share."""

DOMAIN = "phalanx.dev"

# Labels on the children of a service.
SERVICE = "phalanx.dev/service"
GROUP = "phalanx.dev/group"
REVISION = "phalanx.dev/revision"
COMPONENT = "phalanx.dev/component"  # `group` or `router`
GANG = "phalanx.dev/gang"  # gang scheduler of the StatefulSet
MANAGED_BY = "app.kubernetes.io/managed-by"  # `MANAGER`
MANAGER = "phalanx-operator"
POD_INDEX = "apps.kubernetes.io/pod-index"  # set by the StatefulSet controller; the leader's is "0"

DRAINING = "phalanx.dev/draining"
"""Annotation of a draining group: start, purpose and reason on its StatefulSet, start on its leader pod."""
RESTARTS = "phalanx.dev/restarts"
"""Annotation of a StatefulSet: its restarts."""

TOKEN_ROTATION, TOKEN_STAGE = "phalanx.dev/token-rotation", "phalanx.dev/token-stage"
"""Annotations of the Secret with the token of a service: the last rotation, its stage and the start of the stage."""

SCHEME = "phalanx.dev/scheme"
"""Annotation of a router pod whose HTTP port serves HTTPS: `https`."""

INTERNAL_TLS = "phalanx.dev/internal-tls"
"""Annotation of a pod that other pods of its service and the operator reach by mutual TLS: `true`."""

ALL_ADDRESSES = ""
"""`--host` of the pods: IPv4 and IPv6, so that they serve in clusters with either or both."""
HTTP_PORT = 8000
INTERNAL_PORT = 8443
"""Port of a router for the operator and other routers, with `INTERNAL_TLS`."""
HEALTH_PORT = 8001
"""Port of a group's pod for probes of the kubelet, with `INTERNAL_TLS`."""
RENDEZVOUS_PORT = 8100
"""Port of the leader's supervisor. Rank r listens on RENDEZVOUS_PORT + 1 + r."""

GROUP_GAUGES = "phalanx_router_group_"
"""Prefix of a router's gauges per group, which the kubectl plugin reads."""

# Paths of HTTP.
ROOT_PATH = "^/$|^(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+$"  # in front of all paths of routers
OWN_PATH = (  # of routers
    "^/(v[0-9]+|ui|tokenize|detokenize|rerank|score|classify|version|health|healthz|ping|readyz|metrics|docs|redoc|"
    "openapi[.]json|phalanx)(/.*)?$"
)

# Mount paths.
TOKEN_DIR = "/var/run/secrets/phalanx.dev"
TOKEN_FILE = TOKEN_DIR + "/token"
"""Authenticates routers, leaders and ranks to one another."""
POLICY_DIR = "/etc/phalanx"
POLICY_KEY = "policy.json"  # the `BalancePolicy` that a router starts with
API_KEYS_DIR = "/var/run/secrets/phalanx.dev-keys"  # clients' API keys
ROUTER_TLS_DIR = "/var/run/secrets/phalanx.dev-tls"  # certificate and key that routers present to clients
TLS_CERTIFICATE, TLS_KEY, TLS_AUTHORITY = "tls.crt", "tls.key", "ca.crt"  # keys of a Secret of type kubernetes.io/tls
INTERNAL_TLS_DIR = "/var/run/secrets/phalanx.dev-internal"  # a pod's own certificate and the service's authority
SHARED_PAGES_DIR = "/var/run/secrets/phalanx.dev-shared"  # a file per service that shares cached pages
BATCHES_DIR = "/var/lib/phalanx/batches"  # files and batches of the Batch API
REGISTRY_DIR = "/var/run/secrets/phalanx.dev-registry"  # credentials for an `oci://` model
DRAFT_DIR = "/draft"  # claim of a draft model
MAX_ADAPTER_SECRETS = 8
ADAPTER_SECRETS_DIR = "/var/run/secrets/phalanx.dev-adapters"  # a folder per Secret of `spec.engine.adapterSecrets`
CHAT_TEMPLATE_DIR = "/etc/phalanx-chat-template"  # ConfigMap of `spec.engine.chatTemplate`
MODEL_DIR = "/models"  # claim of `pvc://claim/path`
CACHE_DIR = "/var/cache/phalanx"  # emptyDir: downloaded models, compiled bytecode
MODEL_CACHE_DIR = "/var/cache/phalanx-models"  # claim of `spec.model.cache`

# Environment variables of a group's pods.
ENV_POD_INDEX = "PHALANX_POD_INDEX"
ENV_GROUP = "PHALANX_GROUP"
ENV_GROUP_KEY = "PHALANX_GROUP_KEY"
"""Random per StatefulSet and proved between its pods: excludes a pod of a former group of the same name."""
ENV_REVISION = "PHALANX_REVISION"
ENV_PRIVATE_SOURCES = "PHALANX_PRIVATE_SOURCES"  # hosts of model sources that may have private addresses; also of the operator
ENV_FLIGHT_RECORDER = "PHALANX_FLIGHT_RECORDER_DIR"  # also of routers
FLIGHT_RECORDER_DIR = "/tmp/phalanx-flight"  # in an emptyDir, so that it survives a restart of the container

OPERATOR_NAMESPACE = "phalanx-system"  # default
LEASE = "phalanx-operator"  # of the leader election

OPERATOR_ROLE, ROUTER_ROLE, GROUP_ROLE, METRICS_ROLE = "operator", "router", "group", "metrics"
"""Roles of the certificates of one service. Prometheus has the last."""


def peer_name(role: str, service: str, namespace: str) -> str:
    """Returns the DNS name in the certificate of a role of a service. It is not in any DNS."""
    return f"{role}.{service}.{namespace}.phalanx.internal"
