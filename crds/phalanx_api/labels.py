"""Every label, annotation, environment variable, path and port that more than one program must spell the same way."""

DOMAIN = "phalanx.dev"

SERVICE = "phalanx.dev/service"
"""Label on every child: name of its InferenceService. Set by the operator, read by operator and routers."""
GROUP = "phalanx.dev/group"
"""Label on pods and StatefulSets of a group: the group's name, which is the StatefulSet's. Set by the operator."""
REVISION = "phalanx.dev/revision"
"""Label on groups and their pods: hash of what changes a pod. Set by the operator, read by operator and routers."""
COMPONENT = "phalanx.dev/component"
"""Label on every child: `group` or `router`. Set by the operator."""
POD_INDEX = "apps.kubernetes.io/pod-index"
"""Label that the StatefulSet controller sets on its pods; the leader's is "0". Read by routers and the scale subresource."""
DRAINING = "phalanx.dev/draining"
"""Annotation on a group's StatefulSet: since when, what for and why it is being emptied; and on its leader pod, for routers
that watch: only since when. Set and taken off by the operator; `kubectl phalanx drain` sets the first one too."""
GANG = "phalanx.dev/gang"
"""Label on groups: who places their pods together, as when they were made. Set and read by the operator."""
RESTARTS = "phalanx.dev/restarts"
"""Annotation on a group's StatefulSet: when it was started anew, and which pods were deleted for it last. Set and read by the
operator."""
MANAGED_BY = "app.kubernetes.io/managed-by"
"""Label on every child, with the value `MANAGER`."""
MANAGER = "phalanx-operator"

HTTP_PORT = 8000
"""Port of the HTTP process in every pod of a group, and of a router."""
RENDEZVOUS_PORT = 8100
"""Port where the leader's supervisor meets the other pods of its group. Rank r listens on RENDEZVOUS_PORT + 1 + r."""

GROUP_GAUGES = "phalanx_router_group_"
"""What the names of a router's gauges of one group begin with. Set by routers, read by the kubectl plugin."""

TOKEN_DIR = "/var/run/secrets/phalanx.dev"
"""Folder of the mounted Secret with the per-service token."""
TOKEN_FILE = TOKEN_DIR + "/token"
"""The per-service token that routers, leaders and ranks prove to one another."""
POLICY_DIR = "/etc/phalanx"
"""Folder of the mounted ConfigMap with the policy that a router starts with."""
POLICY_KEY = "policy.json"
"""Its file: a `phalanx_api.summary.BalancePolicy`."""
API_KEYS_DIR = "/var/run/secrets/phalanx.dev-keys"
"""Folder of the mounted Secret with the clients' keys, in pods of a router."""
REGISTRY_DIR = "/var/run/secrets/phalanx.dev-registry"
"""Folder of the mounted Secret with the credentials of the registry that an `oci://` model comes from, in pods of a group."""
DRAFT_DIR = "/draft"
MODEL_DIR = "/models"
"""Where a claim named by `pvc://claim/path` is mounted in pods of a group."""
CACHE_DIR = "/var/cache/phalanx"
"""Writable folder in pods of a group: downloaded models, compiled bytecode."""

MODEL_CACHE_DIR = "/var/cache/phalanx-models"
"""Where the claim of `spec.model.cache` is mounted in pods of a group: downloaded models."""

ENV_POD_INDEX = "PHALANX_POD_INDEX"
"""Ordinal of the pod in its group, from the label POD_INDEX. Set by the operator, read by the runtime's --node-rank."""
ENV_GROUP = "PHALANX_GROUP"
"""Name of the group. Set by the operator, told to routers on the link."""
ENV_GROUP_KEY = "PHALANX_GROUP_KEY"
"""Drawn by the operator for each StatefulSet that it makes: with the service's token, what its pods prove to one another. A pod
that runs on where nobody hears it is let into no later group of the same name."""
ENV_REVISION = "PHALANX_REVISION"
"""Revision of the group. Set by the operator, told to routers on the link."""

OPERATOR_NAMESPACE = "phalanx-system"
"""Where the operator is installed, if nobody says otherwise."""
LEASE = "phalanx-operator"
"""Name of the Lease, in the operator's namespace, that says which of its replicas leads."""
