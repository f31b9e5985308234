"""Routers: Deployment, permissions, policy, and the Service for clients."""

import msgspec

from phalanx_api import labels
from phalanx_api.spec import pod_template
from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.spec.observability import Tracing
from phalanx_api.spec.pod_template import PodMetadata
from phalanx_api.spec.quantities import parse_bytes
from phalanx_api.spec.router import Batches, Oidc
from phalanx_operator.decide.state.policy import PolicyInputs, router_policy
from phalanx_operator.decide.state.snapshot import RouterSchemes, router_schemes
from phalanx_operator.render import objects as names
from phalanx_operator.render import placement, services
from phalanx_operator.render.objects import (
    Images,
    Object,
    child,
    child_labels,
    container_security,
    http_probe,
    merge_overlay,
    pod_security,
)
from phalanx_operator.render.revision import revision

COMPONENT = "router"
HTTP_PORT, HTTPS_PORT = 80, 443
"""Of the Service."""
GRACE_S = 30
"""Added to the drain timeout."""
SILENT_LIMIT_S = 1800
"""Time on a silent node after which Kubernetes evicts a router, in case that no operator runs."""
MEMORY_MIB = 128
"""Memory request without stored responses."""


def specified_schemes(service: InferenceService) -> RouterSchemes:
    """Returns the scheme of the spec."""
    wants_internal = service.spec.security.tls == "Internal"
    return router_schemes((), wants_https=service.spec.router.tls is not None, wants_internal=wants_internal)


def router_objects(
    service: InferenceService, images: Images, schemes: RouterSchemes | None = None, *, watches_nodes: bool = True
) -> list[Object]:
    """Returns the routers and their objects, in order of creation.

    schemes: default: that of the spec. watches_nodes: the operator deletes pods on lost nodes; otherwise Kubernetes does,
    after 300 s.
    """
    schemes, name = schemes or specified_schemes(service), names.router(service.name)
    rbac = "rbac.authorization.k8s.io"
    watch_pods = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    subject = {"kind": "ServiceAccount", "name": name, "namespace": service.namespace}
    role = {"apiGroup": rbac, "kind": "Role", "name": name}
    return [
        child(service, "v1", "ServiceAccount", name, COMPONENT, automountServiceAccountToken=False),
        child(service, f"{rbac}/v1", "Role", name, COMPONENT, rules=watch_pods),
        child(service, f"{rbac}/v1", "RoleBinding", name, COMPONENT, roleRef=role, subjects=[subject]),
        _client_service(service, schemes),
        _policy(service),
        services.router_budget(service),
        _deployment(service, images, is_internal=schemes.is_internal, watches_nodes=watches_nodes),
    ]


def _policy(service: InferenceService) -> Object:
    """In effect before the operator's first poll. Its changes restart no router."""
    policy = router_policy(service.spec, PolicyInputs(routers=service.spec.router.replicas, revision=revision(service)))
    text = msgspec.json.encode(policy).decode()
    return child(service, "v1", "ConfigMap", names.policy(service.name), COMPONENT, data={labels.POLICY_KEY: text})


def _client_service(service: InferenceService, schemes: RouterSchemes) -> Object:
    """A port's name selects the routers that serve its scheme, which matters while routers of both schemes run."""
    target = "http" if schemes.has_https else labels.HTTP_PORT
    ports: list[Object] = []
    if schemes.has_http:
        ports.append({"name": "http", "port": HTTP_PORT, "targetPort": target, "protocol": "TCP"})
    if schemes.has_https:
        port = {"name": "https", "port": HTTPS_PORT, "targetPort": "https", "protocol": "TCP", "appProtocol": "https"}
        ports.append(port)
    spec: Object = {"type": "ClusterIP", "selector": _selector(service), "ports": ports}
    if schemes.publishes_unready:
        spec["publishNotReadyAddresses"] = True
    return child(service, "v1", "Service", names.client_service(service.name), COMPONENT, spec=spec)


def _selector(service: InferenceService) -> dict[str, str]:
    return {labels.SERVICE: service.name, labels.COMPONENT: COMPONENT}


def _deployment(service: InferenceService, images: Images, *, is_internal: bool, watches_nodes: bool) -> Object:
    """An update starts a router before it ends one."""
    overlay = service.spec.router.pod_template or pod_template.RouterPodTemplate()
    pod = merge_overlay(_pod(service, images, is_internal), overlay.overlay())
    pod = placement.tolerate_silent_nodes(pod, SILENT_LIMIT_S) if watches_nodes else pod
    spec = {
        "replicas": service.spec.router.replicas,
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": _selector(service)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {"metadata": _pod_metadata(service, overlay.metadata, is_internal), "spec": pod},
    }
    return child(service, "apps/v1", "Deployment", names.router(service.name), COMPONENT, spec=spec)


def _pod_metadata(service: InferenceService, specified: PodMetadata, is_internal: bool) -> Object:
    annotations = dict(specified.annotations) | ({labels.SCHEME: "https"} if service.spec.router.tls else {})
    annotations |= {labels.INTERNAL_TLS: "true"} if is_internal else {}
    own = child_labels(service, COMPONENT)
    return {"labels": dict(specified.labels) | own} | ({"annotations": annotations} if annotations else {})


def _pod(service: InferenceService, images: Images, is_internal: bool) -> Object:
    keys, tls = service.spec.router.api_keys, service.spec.router.tls
    return {
        "serviceAccountName": names.router(service.name),
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": service.spec.drain.timeout_seconds + GRACE_S,
        "securityContext": pod_security(),
        **images.credentials(),
        "topologySpreadConstraints": [_spread(service)],
        "containers": [_container(service, images, is_internal)],
        "volumes": [
            _secret(pod_template.TOKEN_VOLUME, names.token_secret(service.name)),
            {"name": pod_template.POLICY_VOLUME, "configMap": {"name": names.policy(service.name)}},
            {"name": pod_template.TMP_VOLUME, "emptyDir": {}},
            *([_secret(pod_template.KEYS_VOLUME, keys.name)] if keys else []),
            *([_secret(pod_template.TLS_VOLUME, tls.secret_name)] if tls else []),
            *([names.internal_volume(service, labels.ROUTER_ROLE)] if is_internal else []),
            *([_shared_pages()] if service.spec.rebalancing.share_pages else []),
            *([_batches(service.spec.router.batches)] if service.spec.router.batches.enabled else []),
        ],
    }


def _secret(volume: str, secret: str) -> Object:
    return {"name": volume, "secret": {"secretName": secret, "defaultMode": 0o440}}


def _shared_pages() -> Object:
    """Volume with the tokens of the services that share pages; it changes with them and restarts nothing."""
    volume = _secret(pod_template.SHARED_VOLUME, names.SHARED_PAGES)
    volume["secret"]["optional"] = True
    return volume


def _batches(batches: Batches) -> Object:
    """Volume with files and batches."""
    claim = batches.claim_name
    source: Object = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    return {"name": pod_template.BATCHES_VOLUME} | source


def _memory(service: InferenceService) -> str:
    """The memory request: of a router, and of the responses that it may store."""
    cache = service.spec.router.response_cache
    stored_mib = -(-parse_bytes(cache.max_bytes) >> 20) if cache.is_enabled else 0
    return f"{MEMORY_MIB + stored_mib}Mi"


def _spread(service: InferenceService) -> Object:
    """Rendered for one router too, so that scaling restarts no router."""
    return {
        "maxSkew": 1,
        "topologyKey": placement.HOST,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": _selector(service)},
        "matchLabelKeys": ["pod-template-hash"],
    }


def _container(service: InferenceService, images: Images, is_internal: bool) -> Object:
    tracing, is_https = service.spec.observability.tracing, service.spec.router.tls is not None
    return {
        "name": pod_template.ROUTER_CONTAINER,
        "image": images.router,
        "imagePullPolicy": "IfNotPresent",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "args": [*_arguments(service), *(["--internal-tls-dir", labels.INTERNAL_TLS_DIR] if is_internal else [])],
        "env": [
            {"name": labels.ENV_FLIGHT_RECORDER, "value": labels.FLIGHT_RECORDER_DIR},
            *(_tracing_variables(service, tracing) if tracing.endpoint else []),
        ],
        "ports": [
            {"name": "https" if is_https else "http", "containerPort": labels.HTTP_PORT, "protocol": "TCP"},
            *([{"name": "internal", "containerPort": labels.INTERNAL_PORT, "protocol": "TCP"}] if is_internal else []),
        ],
        "startupProbe": http_probe("/healthz", period_s=1, failures=120, is_https=is_https),
        "livenessProbe": http_probe("/healthz", period_s=10, failures=6, is_https=is_https),
        "readinessProbe": http_probe("/readyz", period_s=2, failures=2, is_https=is_https),
        "resources": {"requests": {"cpu": "100m", "memory": _memory(service)}},
        "securityContext": container_security(),
        "volumeMounts": [*_mounts(service), *([names.INTERNAL_MOUNT] if is_internal else [])],
    }


def _arguments(service: InferenceService) -> list[str]:
    router, tracing = service.spec.router, service.spec.observability.tracing
    arguments = [
        *("serve", "--host", labels.ALL_ADDRESSES, "--port", str(labels.HTTP_PORT)),
        *("--service", service.name, "--namespace", service.namespace),
        *("--token-file", labels.TOKEN_FILE),
        *("--policy-file", f"{labels.POLICY_DIR}/{labels.POLICY_KEY}"),
        *("--drain-s", str(service.spec.drain.timeout_seconds)),
        *("--served-model-name", *service.served_names),
    ]
    if router.tls:
        arguments += ["--ssl-certfile", f"{labels.ROUTER_TLS_DIR}/{labels.TLS_CERTIFICATE}"]
        arguments += ["--ssl-keyfile", f"{labels.ROUTER_TLS_DIR}/{labels.TLS_KEY}"]
    if router.api_keys:
        arguments += ["--api-keys-file", f"{labels.API_KEYS_DIR}/{router.api_keys.key}"]
    if router.oidc:
        arguments += _oidc_flags(router.oidc)
    if router.console:
        arguments.append("--console")
    if router.batches.enabled:
        arguments += ["--batches-dir", labels.BATCHES_DIR, "--batches-max-bytes", str(parse_bytes(router.batches.max_bytes))]
    if router.image_hosts:
        arguments.append(f"--allowed-media-domains={','.join(router.image_hosts)}")
    if router.expose.path != "/":
        arguments.append(f"--root-path={router.expose.path}")
    if router.allowed_origins:
        arguments.append(f"--allowed-origins={','.join(router.allowed_origins)}")
    if service.spec.observability.tenant_metrics:
        arguments.append("--tenant-metrics")
    if service.spec.rebalancing.share_pages:
        arguments += ["--shared-services-dir", labels.SHARED_PAGES_DIR]
    if tracing.endpoint:
        arguments += ["--slow-first-token-s", str(tracing.slow_first_token_seconds)]
    return arguments


def _mounts(service: InferenceService) -> list[Object]:
    mounts = [(pod_template.TOKEN_VOLUME, labels.TOKEN_DIR), (pod_template.POLICY_VOLUME, labels.POLICY_DIR)]
    optional = [
        (service.spec.router.api_keys, pod_template.KEYS_VOLUME, labels.API_KEYS_DIR),
        (service.spec.router.tls, pod_template.TLS_VOLUME, labels.ROUTER_TLS_DIR),
        (service.spec.rebalancing.share_pages, pod_template.SHARED_VOLUME, labels.SHARED_PAGES_DIR),
    ]
    mounts += [(name, path) for is_wanted, name, path in optional if is_wanted]
    writable = [(pod_template.TMP_VOLUME, "/tmp")]
    writable += [(pod_template.BATCHES_VOLUME, labels.BATCHES_DIR)] if service.spec.router.batches.enabled else []
    return [{"name": name, "mountPath": path, "readOnly": True} for name, path in mounts] + [
        {"name": name, "mountPath": path} for name, path in writable
    ]


def _oidc_flags(oidc: Oidc) -> list[str]:
    """With `=`, because a value may begin with a dash."""
    claims = {"tenant": oidc.claims.tenant, "models": oidc.claims.models, "priority": oidc.claims.priority}
    return [
        f"--oidc-issuer={oidc.issuer}",
        *(f"--oidc-audience={audience}" for audience in oidc.audiences),
        *([f"--oidc-jwks-uri={oidc.jwks_uri}"] if oidc.jwks_uri else []),
        *(f"--oidc-{kind}-claim={name}" for kind, name in claims.items() if name),
        *(f"--oidc-required-claim={name}={value}" for name, value in sorted(oidc.claims.required.items())),
    ]


def _tracing_variables(service: InferenceService, tracing: Tracing) -> list[Object]:
    """OpenTelemetry's variables. The routers also send the spans of groups."""
    pod = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    resource = f"k8s.namespace.name={service.namespace},k8s.pod.name=$(POD_NAME)"
    variables = {
        "OTEL_SERVICE_NAME": service.name,
        "OTEL_RESOURCE_ATTRIBUTES": resource,
        "OTEL_EXPORTER_OTLP_ENDPOINT": tracing.endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": tracing.protocol,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(tracing.sample_ratio),
    }
    return [pod, *({"name": name, "value": value} for name, value in variables.items())]
