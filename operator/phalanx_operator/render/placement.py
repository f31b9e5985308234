"""Placement of a group's pods."""

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.render.objects import Object

HOST = "kubernetes.io/hostname"
PRODUCT = "nvidia.com/gpu.product"
_WEIGHT = 100
SILENT_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Of nodes that are silent to the control plane. `decide.groups.lost_nodes` decides what becomes of their groups."""


def pod_placement(service: InferenceService, group: str, avoid_nodes: tuple[str, ...] = ()) -> Object:
    """Returns fields of a pod's spec. `avoid_nodes` have lower preference."""
    placement = service.spec.placement
    fields: Object = {}
    if placement.node_selector:
        fields["nodeSelector"] = dict(placement.node_selector)
    if placement.tolerations:
        fields["tolerations"] = [t.model_dump(mode="json", by_alias=True, exclude_none=True) for t in placement.tolerations]
    names = {
        "priorityClassName": placement.priority_class_name,
        "runtimeClassName": placement.runtime_class_name,
        "schedulerName": placement.scheduler_name,
    }
    fields |= {name: value for name, value in names.items() if value}
    affinity = _affinity(service, group, avoid_nodes)
    return fields | ({"affinity": affinity} if affinity else {})


def tolerate_silent_nodes(pod: Object, seconds: int | None = None) -> Object:
    """Returns the pod's spec with tolerations that keep it on silent nodes, for these seconds.

    Without them Kubernetes evicts the pod after 300 s.
    A toleration of the pod for such a taint applies instead, with its `tolerationSeconds`.
    """
    limit = {} if seconds is None else {"tolerationSeconds": seconds}
    specified = pod.get("tolerations", [])
    kept = {toleration.get("key") for toleration in specified if toleration.get("effect", "NoExecute") == "NoExecute"}
    added = [] if None in kept else [taint for taint in SILENT_TAINTS if taint not in kept]
    silent = [{"key": taint, "operator": "Exists", "effect": "NoExecute"} | limit for taint in added]
    return pod | {"tolerations": [*specified, *silent]}


def _affinity(service: InferenceService, group: str, avoid_nodes: tuple[str, ...]) -> Object:
    placement = service.spec.placement
    own = {"matchLabels": {labels.SERVICE: service.name, labels.GROUP: group}}
    others = {
        "matchLabels": {labels.SERVICE: service.name, labels.COMPONENT: "group"},
        "matchExpressions": [{"key": labels.GROUP, "operator": "NotIn", "values": [group]}],
    }
    parts = {
        "nodeAffinity": _nodes(service.spec.resources.accelerator.product, avoid_nodes),
        "podAffinity": _terms(placement.topology.mode, own, placement.topology.key),
        "podAntiAffinity": _terms(placement.spread_groups, others, HOST),
    }
    specified = placement.affinity.model_dump(mode="json", by_alias=True, exclude_none=True) if placement.affinity else {}
    joined = {kind: _join(part, specified.get(kind, {})) for kind, part in parts.items()}
    return {kind: part for kind, part in joined.items() if part}


def _join(rendered: Object, specified: Object) -> Object:
    """Node terms are alternatives, so rendered ones are added to each."""
    joined = rendered | specified
    for rule in rendered.keys() & specified.keys():
        left, right = rendered[rule], specified[rule]
        joined[rule] = _join_node_terms(left, right) if isinstance(left, dict) else [*left, *right]
    return joined


def _join_node_terms(left: Object, right: Object) -> Object:
    terms = "nodeSelectorTerms"
    pairs = [(a, b) for a in left[terms] for b in right[terms]]
    return {terms: [{"matchExpressions": [*a["matchExpressions"], *b["matchExpressions"]]} for a, b in pairs]}


def _terms(mode: str, selector: Object, topology: str) -> Object:
    """The first pod of a group may match itself."""
    term = {"labelSelector": selector, "topologyKey": topology}
    if mode == "Required":
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    if mode == "Preferred":
        return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": _WEIGHT, "podAffinityTerm": term}]}
    return {}


def _nodes(product: str | None, avoid_nodes: tuple[str, ...]) -> Object:
    fields: Object = {}
    if product:
        has_it = {"matchExpressions": [{"key": PRODUCT, "operator": "In", "values": [product]}]}
        fields["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": [has_it]}
    if avoid_nodes:
        names = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in avoid_nodes]
        elsewhere = {"matchFields": names}  # by name: the label of the host may differ from it
        fields["preferredDuringSchedulingIgnoredDuringExecution"] = [{"weight": _WEIGHT, "preference": elsewhere}]
    return fields
