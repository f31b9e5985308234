"""Where the pods of a group may run: what a spec's placement adds to each of them."""

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.render.objects import Object

HOST = "kubernetes.io/hostname"
PRODUCT = "nvidia.com/gpu.product"
_WEIGHT = 100


def of_pod(service: InferenceService, group: str, avoid: tuple[str, ...] = ()) -> Object:
    """Fields of a pod's spec. `avoid`: nodes that it should not be placed on, where there are others."""
    wanted = service.spec.placement
    fields: Object = {}
    if wanted.node_selector:
        fields["nodeSelector"] = dict(wanted.node_selector)
    if wanted.tolerations:
        fields["tolerations"] = [one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in wanted.tolerations]
    names = {
        "priorityClassName": wanted.priority_class_name,
        "runtimeClassName": wanted.runtime_class_name,
        "schedulerName": wanted.scheduler_name,
    }
    fields |= {name: value for name, value in names.items() if value}
    affinity = _affinity(service, group, avoid)
    return fields | ({"affinity": affinity} if affinity else {})


def _affinity(service: InferenceService, group: str, avoid: tuple[str, ...]) -> Object:
    placement = service.spec.placement
    own = {"matchLabels": {labels.SERVICE: service.name, labels.GROUP: group}}
    others = {
        "matchLabels": {labels.SERVICE: service.name, labels.COMPONENT: "group"},
        "matchExpressions": [{"key": labels.GROUP, "operator": "NotIn", "values": [group]}],
    }
    parts = {
        "nodeAffinity": _nodes(service.spec.resources.accelerator.product, avoid),
        "podAffinity": _terms(placement.topology.mode, own, placement.topology.key),
        "podAntiAffinity": _terms(placement.spread_groups, others, HOST),
    }
    asked = placement.affinity.model_dump(mode="json", by_alias=True, exclude_none=True) if placement.affinity else {}
    both = {kind: _joined(part, asked.get(kind, {})) for kind, part in parts.items()}
    return {kind: part for kind, part in both.items() if part}


def _joined(ours: Object, theirs: Object) -> Object:
    """What both ask for. Terms of nodes are alternatives, so what we require is added to each of theirs; lists are added up."""
    joined = ours | theirs
    for wish in ours.keys() & theirs.keys():
        one, other = ours[wish], theirs[wish]
        joined[wish] = _both_nodes(one, other) if isinstance(one, dict) else [*one, *other]
    return joined


def _both_nodes(one: Object, other: Object) -> Object:
    terms = "nodeSelectorTerms"
    pairs = [(ours, theirs) for ours in one[terms] for theirs in other[terms]]
    return {terms: [{"matchExpressions": [*a["matchExpressions"], *b["matchExpressions"]]} for a, b in pairs]}


def _terms(wish: str, selector: Object, topology: str) -> Object:
    """The first pod of a group that must be near its own is placed anywhere: the scheduler lets it match itself."""
    term = {"labelSelector": selector, "topologyKey": topology}
    if wish == "Required":
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    if wish == "Preferred":
        return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": _WEIGHT, "podAffinityTerm": term}]}
    return {}


def _nodes(product: str | None, avoid: tuple[str, ...]) -> Object:
    found: Object = {}
    if product:
        has_it = {"matchExpressions": [{"key": PRODUCT, "operator": "In", "values": [product]}]}
        found["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": [has_it]}
    if avoid:
        elsewhere = {"matchExpressions": [{"key": HOST, "operator": "NotIn", "values": list(avoid)}]}
        found["preferredDuringSchedulingIgnoredDuringExecution"] = [{"weight": _WEIGHT, "preference": elsewhere}]
    return found
