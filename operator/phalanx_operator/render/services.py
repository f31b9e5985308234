"""What all groups of a service share: the token, and the headless Service that gives their pods names."""

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.render import names, pods
from phalanx_operator.render.objects import Object, child


def token_secret(service: InferenceService, token: str) -> Object:
    """The Secret with the token of the service. It is made once, and never written again."""
    return child(
        service, "v1", "Secret", names.token_secret(service.name), pods.COMPONENT, type="Opaque", stringData={"token": token}
    )


def groups_service(service: InferenceService) -> Object:
    """The headless Service of all groups. Names are there before the pods are ready: that is when ranks meet."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {labels.SERVICE: service.name, labels.COMPONENT: pods.COMPONENT},
        "ports": [{"name": "http", "port": labels.HTTP_PORT, "targetPort": labels.HTTP_PORT, "protocol": "TCP"}],
    }
    return child(service, "v1", "Service", names.groups_service(service.name), pods.COMPONENT, spec=spec)
