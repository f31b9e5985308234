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
"""Annotation on a group's StatefulSet: since when and why it is being emptied before it goes; and on its leader pod, for routers
that watch: only since when. Set and taken off by the operator."""
MANAGED_BY = "app.kubernetes.io/managed-by"
"""Label on every child, with the value `MANAGER`."""
MANAGER = "phalanx-operator"

HTTP_PORT = 8000
"""Port of the HTTP process in every pod of a group, and of a router."""
RENDEZVOUS_PORT = 8100
"""Port where the leader's supervisor meets the other pods of its group. Rank r listens on RENDEZVOUS_PORT + 1 + r."""

TOKEN_DIR = "/var/run/secrets/phalanx.dev"
"""Folder of the mounted Secret with the per-service token."""
TOKEN_FILE = TOKEN_DIR + "/token"
"""The per-service token that routers, leaders and ranks prove to one another."""
MODEL_DIR = "/models"
"""Where a claim named by `pvc://claim/path` is mounted in pods of a group."""
CACHE_DIR = "/var/cache/phalanx"
"""Writable folder in pods of a group: downloaded models, compiled bytecode."""

ENV_POD_INDEX = "PHALANX_POD_INDEX"
"""Ordinal of the pod in its group, from the label POD_INDEX. Set by the operator, read by the runtime's --node-rank."""
ENV_GROUP = "PHALANX_GROUP"
"""Name of the group. Set by the operator, told to routers on the link."""
ENV_REVISION = "PHALANX_REVISION"
"""Revision of the group. Set by the operator, told to routers on the link."""
