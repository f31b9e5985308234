"""Objects of the Prometheus operator, applied only if its CRDs exist."""

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.render import burn_rates
from phalanx_operator.render import objects as names
from phalanx_operator.render.objects import Object, child

API_VERSION = "monitoring.coreos.com/v1"
COMPONENT = "monitoring"
INTERVAL = "15s"
MAX_DISAGREEMENT = 0.1
"""Share of re-checked semantic hits with another answer, above which an alert fires."""
MIN_LIFETIME_LEFT = 0.2
"""Share of a certificate's lifetime below which an alert fires."""
_SERVICE_LABEL = "phalanx_dev_service"
"""`phalanx.dev/service` in Prometheus."""


def objects(service: InferenceService) -> list[Object]:
    """Returns the ServiceMonitor and the PrometheusRule. A certificate for clients names no pod, so it is not verified."""
    endpoint = {"port": "http", "path": "/metrics", "interval": INTERVAL}
    https = endpoint | {"port": "https", "scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    monitor = {
        "selector": {"matchLabels": {labels.SERVICE: service.name}},
        "targetLabels": [labels.SERVICE],
        "podTargetLabels": [labels.COMPONENT, labels.GROUP, labels.REVISION],
        "endpoints": [endpoint, *([https] if service.spec.router.tls else []), *_certified_endpoints(service, endpoint)],
    }
    group = {
        "name": f"phalanx-{service.namespace}-{service.name}",
        "rules": _labelled(service, _rules(service) + _certificate_rules(service) + _objectives(service)),
    }
    rules = {"groups": [group]}
    return [
        child(service, API_VERSION, "ServiceMonitor", service.name, COMPONENT, spec=monitor),
        child(service, API_VERSION, "PrometheusRule", service.name, COMPONENT, spec=rules),
    ]


def _certified_endpoints(service: InferenceService, endpoint: Object) -> list[Object]:
    """Groups with certificates answer Prometheus by that of its role."""
    if service.spec.security.tls != "Internal":
        return []
    secret = names.role_certificate(service.name, labels.METRICS_ROLE)
    tls = {
        "ca": {"secret": {"name": secret, "key": labels.TLS_AUTHORITY}},
        "cert": {"secret": {"name": secret, "key": labels.TLS_CERTIFICATE}},
        "keySecret": {"name": secret, "key": labels.TLS_KEY},
        "serverName": labels.peer_name(labels.GROUP_ROLE, service.name, service.namespace),
    }
    return [endpoint | {"port": "internal", "scheme": "https", "tlsConfig": tls}]


def _labelled(service: InferenceService, rules: list[Object]) -> list[Object]:
    """Adds the labels of the service: alerts of different services must differ, and are routed by namespace."""
    own = {"namespace": service.namespace, _SERVICE_LABEL: service.name}
    return [rule | {"labels": own | rule.get("labels", {})} for rule in rules]


def _rules(service: InferenceService) -> list[Object]:
    own = _own(service)
    selector = f"{{{own}}}"
    known, ready = f"max(phalanx_router_groups_known{selector})", f"max(phalanx_router_groups_ready{selector})"
    wanted = f'max(phalanx_service_spec_replicas{{namespace="{service.namespace}",service="{service.name}"}})'
    name = f"{service.namespace}/{service.name}"
    return [
        _rule(
            "PhalanxNoReadyGroup",
            f"({known} > 0 or {wanted} > 0) and {ready} == 0",
            "critical",
            f"no group of {name} takes requests",
        ),
        _rule("PhalanxNoRouter", f"absent(phalanx_router_groups_known{selector})", "critical", f"no router of {name} is scraped"),
        _rule(
            "PhalanxFleetSaturated",
            f"max(phalanx_router_fleet_saturated{selector}) == 1",
            "warning",
            f"more than half of the groups of {name} are in trouble",
        ),
        _rule(
            "PhalanxShedding",
            f'sum(rate(phalanx_router_shed_total{{{own},why!~"quota_.*"}}[5m])) > 0',
            "warning",
            f"{name} answers 429 for want of room",
        ),
        _rule(
            "PhalanxSpeculationLost",
            f"max(phalanx_speculation_lost{selector}) == 1",
            "info",
            f"a group of {name} drafts no more and serves without: its log says why",
        ),
        _rule(
            "PhalanxSemanticCacheDisagrees",
            f"{_rechecks(own, 'disagreed')} / {_rechecks(own, 'agreed|disagreed')} > {MAX_DISAGREEMENT}",
            "warning",
            f"responses to similar questions differ from computed ones at {name}: raise spec.router.responseCache.similarity",
        ),
        _rule(
            "PhalanxEmbedderFailed",
            f"max(phalanx_router_response_cache_embedder_failed{selector}) == 1",
            "warning",
            f"questions to {name} get no embeddings, so similar requests are computed: the label why says the reason",
        ),
    ]


def _certificate_rules(service: InferenceService) -> list[Object]:
    """Alerts on certificates. cert-manager renews with a third of the lifetime left, the operator with half."""
    if service.spec.router.tls is None and service.spec.security.tls == "None":
        return []
    selector, name = f"{{{_own(service)}}}", f"{service.namespace}/{service.name}"
    end, start = (f"phalanx_tls_certificate_not_{edge}_timestamp_seconds{selector}" for edge in ("after", "before"))
    return [
        _rule(
            "PhalanxCertificateExpiresSoon",
            f"min(({end} - time()) / ({end} - {start})) < {MIN_LIFETIME_LEFT}",
            "critical",
            f"a certificate of {name} is not renewed (spec.router.tls or spec.security.tls): less than "
            f"{MIN_LIFETIME_LEFT:.0%} of its lifetime is left",
        ),
        _rule(
            "PhalanxCertificateUnusable",
            f"max(phalanx_tls_certificate_reload_failed{selector}) == 1",
            "warning",
            f"pods of {name} keep the former certificate, because the new one in its Secret is unusable",
        ),
    ]


def _objectives(service: InferenceService) -> list[Object]:
    """Burn rates of the error budgets, and their alerts."""
    slo, name, own = service.spec.slo, f"{service.namespace}/{service.name}", _own(service)
    if slo is None:
        return []
    bad = f"{name} misses its objective for {{{{ $labels.objective }}}}"
    fast, slow = burn_rates.burn_expression(burn_rates.FAST, own), burn_rates.burn_expression(burn_rates.SLOW, own)
    return [
        *burn_rates.recordings(slo, own),
        _rule(
            "PhalanxErrorBudgetBurnsFast",
            fast,
            "critical",
            f"{bad} so often that its error budget is spent in five days or less",
            for_="2m",
        ),
        _rule(
            "PhalanxErrorBudgetBurnsSlowly",
            slow,
            "warning",
            f"{bad} so often that the error budget of {burn_rates.PERIOD} is spent early",
            for_="1h",
        ),
    ]


def _own(service: InferenceService) -> str:
    return f'namespace="{service.namespace}",{_SERVICE_LABEL}="{service.name}"'


def _rechecks(own_labels: str, outcomes: str) -> str:
    """Re-checks of semantic hits in the last hours with these outcomes."""
    return f'sum(increase(phalanx_router_response_cache_rechecks_total{{{own_labels},outcome=~"{outcomes}"}}[6h]))'


def _rule(name: str, expression: str, severity: str, summary: str, *, for_: str = "10m") -> Object:
    """An alert that fires once its expression has held for `for_`."""
    return {
        "alert": name,
        "expr": expression,
        "for": for_,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "runbook": f"docs/runbooks.md#{name.lower()}"},
    }
