"""How a group gets its model."""

from dataclasses import dataclass, field, replace

from phalanx_api import labels
from phalanx_api.spec import pod_template
from phalanx_api.spec.engine import ChatTemplateSource, Speculative
from phalanx_api.spec.model import Cache, Model, SecretRef
from phalanx_operator.render.objects import Object


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The MODEL argument, flags, and the pod fields that they need."""

    argument: str
    flags: tuple[str, ...] = ()
    volumes: tuple[Object, ...] = ()
    mounts: tuple[Object, ...] = ()
    env: tuple[Object, ...] = field(default=())


def model_source(model: Model) -> ModelSource:
    """Returns how the runtime gets this model."""
    scheme, _, rest = model.uri.partition("://")
    if scheme == "file":
        return ModelSource(argument=rest)
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        volume = {"name": pod_template.MODEL_VOLUME, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        mount = {"name": pod_template.MODEL_VOLUME, "mountPath": labels.MODEL_DIR, "readOnly": True}
        return ModelSource(argument=f"{labels.MODEL_DIR}/{path}".rstrip("/"), volumes=(volume,), mounts=(mount,))
    flags = ("--revision", model.revision) if model.revision else ()
    cache = _cache_volume(model.cache)
    folder = labels.MODEL_CACHE_DIR if cache else labels.CACHE_DIR
    is_read_only = model.cache is not None and model.cache.read_only
    flags = (*flags, "--download-dir", folder, *(("--cached-only",) if is_read_only else ()))
    remote = ModelSource(argument=model.uri, flags=flags, volumes=cache, mounts=_cache_mount(cache, is_read_only))
    return _with_credentials(remote, scheme, model.secret_ref) if model.secret_ref else remote


def with_adapter_secrets(source: ModelSource, secrets: tuple[str, ...] | None) -> ModelSource:
    """Adds the Secrets that adapters may name. A missing one refuses the adapter, not the group."""
    if not secrets:
        return source
    named = dict(zip(pod_template.ADAPTER_VOLUMES, secrets, strict=False))
    volumes = [
        {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440, "optional": True}} for name, secret in named.items()
    ]
    mounts = [
        {"name": name, "mountPath": f"{labels.ADAPTER_SECRETS_DIR}/{secret}", "readOnly": True} for name, secret in named.items()
    ]
    return replace(
        source,
        flags=(*source.flags, "--lora-secrets-dir", labels.ADAPTER_SECRETS_DIR),
        volumes=(*source.volumes, *volumes),
        mounts=(*source.mounts, *mounts),
    )


def with_chat_template(source: ModelSource, template: ChatTemplateSource | None) -> ModelSource:
    """Adds the chat template; without its ConfigMap no pod starts."""
    if template is None:
        return source
    reference, file = template.config_map_key_ref, "chat_template.jinja"
    name = {"name": pod_template.CHAT_TEMPLATE_VOLUME}
    config_map = {"name": reference.name, "items": [{"key": reference.key, "path": file}]}
    return replace(
        source,
        flags=(*source.flags, "--chat-template", f"{labels.CHAT_TEMPLATE_DIR}/{file}"),
        volumes=(*source.volumes, name | {"configMap": config_map}),
        mounts=(*source.mounts, name | {"mountPath": labels.CHAT_TEMPLATE_DIR, "readOnly": True}),
    )


def with_draft(source: ModelSource, speculative: Speculative | None) -> ModelSource:
    """Adds the draft model or exit, with the model's credentials."""
    uri = None if speculative is None else speculative.draft_model or speculative.exit
    if speculative is None or uri is None:
        return source
    flag = "--speculative-draft-model" if speculative.draft_model else "--speculative-exit"
    draft = model_source(Model(uri=uri))
    name = {"name": pod_template.DRAFT_VOLUME}
    argument = draft.argument.replace(labels.MODEL_DIR, labels.DRAFT_DIR, 1) if draft.volumes else draft.argument
    return replace(
        source,
        flags=(*source.flags, flag, argument),
        volumes=(*source.volumes, *(volume | name for volume in draft.volumes)),
        mounts=(*source.mounts, *(mount | name | {"mountPath": labels.DRAFT_DIR} for mount in draft.mounts)),
    )


def _cache_volume(cache: Cache | None) -> tuple[Object, ...]:
    if cache is None or cache.type == "None":
        return ()
    if cache.type == "Shared":
        options = {"readOnly": True} if cache.read_only else {}
        claim: Object = {"persistentVolumeClaim": {"claimName": cache.claim_name} | options}
    else:
        storage = {"storageClassName": cache.storage_class_name} if cache.storage_class_name else {}
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": cache.size}}} | storage
        claim = {"ephemeral": {"volumeClaimTemplate": {"spec": spec}}}
    return ({"name": pod_template.MODEL_CACHE_VOLUME} | claim,)


def _cache_mount(volume: tuple[Object, ...], is_read_only: bool) -> tuple[Object, ...]:
    mount = {"name": pod_template.MODEL_CACHE_VOLUME, "mountPath": labels.MODEL_CACHE_DIR}
    return (mount | ({"readOnly": True} if is_read_only else {}),) if volume else ()


def _with_credentials(source: ModelSource, scheme: str, secret: SecretRef) -> ModelSource:
    """Adds variables with credentials, or the registry clients' file."""
    match scheme:
        case "s3":
            names = pod_template.S3_VARIABLES
            return replace(source, env=tuple(_variable(name, secret.name, name, name == "AWS_SESSION_TOKEN") for name in names))
        case "oci":
            item = {"key": ".dockerconfigjson", "path": "config.json"}
            content = {"secretName": secret.name, "defaultMode": 0o440, "items": [item]}
            mount = {"name": pod_template.REGISTRY_VOLUME, "mountPath": labels.REGISTRY_DIR, "readOnly": True}
            return replace(
                source,
                env=({"name": "DOCKER_CONFIG", "value": labels.REGISTRY_DIR},),
                volumes=(*source.volumes, {"name": pod_template.REGISTRY_VOLUME, "secret": content}),
                mounts=(*source.mounts, mount),
            )
        case "gs":
            return replace(source, env=(_variable("GOOGLE_OAUTH_ACCESS_TOKEN", secret.name, secret.key),))
        case _:
            return replace(source, env=(_variable("HF_TOKEN", secret.name, secret.key),))


def _variable(name: str, secret: str, key: str, optional: bool = False) -> Object:
    reference = {"name": secret, "key": key} | ({"optional": True} if optional else {})
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}
