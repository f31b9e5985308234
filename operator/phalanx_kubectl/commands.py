"""The commands: each asks kubectl, and gives the text to print."""

import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx_api import labels
from phalanx_api.spec import inference_service as api
from phalanx_kubectl import show
from phalanx_kubectl.gauges import RouterLoad, merged, read_router
from phalanx_kubectl.transport import Json, Kubectl, Refused, ask_json

KIND = f"{api.PLURAL}.{api.GROUP}"
_CONTAINER = "runtime"


def utc_now() -> str:
    """The time as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class Commands:
    """Everything that the plugin does, over one kubectl. `warn` hears what went wrong beside the answer."""

    kubectl: Kubectl
    warn: Callable[[str], None]
    now: Callable[[], str] = field(default=utc_now)

    def status(self, name: str | None, *, everywhere: bool = False) -> str:
        """One service, or all of them. Raises: Refused."""
        if name is not None:
            return show.status(self._service(name), self._operator())
        where = ["--all-namespaces"] if everywhere else []
        return show.services(ask_json(self.kubectl, "get", KIND, *where)["items"], with_namespace=everywhere)

    def groups(self, name: str) -> str:
        """The groups of a service. Raises: Refused."""
        body = self._service(name)
        return show.groups(body, merged(self._routers(body).values()))

    def top(self, name: str) -> str:
        """What groups and routers have in hand. Raises: Refused, also when no router answers."""
        body = self._service(name)
        routers = self._routers(body)
        if not routers:
            raise Refused(f"no router of {name} answers")
        return show.top(body, routers, merged(routers.values()))

    def drain(self, name: str, group: str) -> str:
        """Has a group emptied and replaced by a new one. Raises: Refused, when it is not a group of the service too."""
        found = ask_json(self.kubectl, "get", "statefulset", group)["metadata"]
        if (found.get("labels") or {}).get(labels.SERVICE) != name:
            raise Refused(f"{group} is no group of {name}")
        if labels.DRAINING in (found.get("annotations") or {}):
            raise Refused(f"{group} is being emptied already: {found['annotations'][labels.DRAINING]}")
        note = f"{self.now()} asked somebody asked for it by kubectl phalanx drain"
        patch = {"metadata": {"uid": found["uid"], "annotations": {labels.DRAINING: note}}}
        self.kubectl.ask("patch", "statefulset", group, "--type=merge", "-p", json.dumps(patch))
        return f"{group} is being emptied; it goes when its streams have moved or ended, and another one takes its place\n"

    def restart(self, name: str) -> str:
        """Has every group replaced, one after another. Raises: Refused."""
        patch = {"spec": {"rollout": {"restartId": self.now()}}}
        self.kubectl.ask("patch", KIND, name, "--type=merge", "-p", json.dumps(patch))
        return f"{name} restarts group by group; kubectl phalanx groups {name} shows how far it is\n"

    def logs(self, name: str, group: str | None, *, follow: bool = False, previous: bool = False, tail: int = -1) -> int:
        """kubectl's exit status, after the logs of all pods, and so of all ranks. Raises: Refused."""
        wanted = {labels.SERVICE: name, labels.COMPONENT: "group"} | ({labels.GROUP: group} if group else {})
        selector = ",".join(f"{key}={value}" for key, value in wanted.items())
        pods = ask_json(self.kubectl, "get", "pods", "-l", selector)["items"]
        if not pods:
            raise Refused(f"{group or name} has no pod")
        flags = ["--follow"] * follow + ["--previous"] * previous
        most = f"--max-log-requests={len(pods)}"
        return self.kubectl.pass_on("logs", "-l", selector, "-c", _CONTAINER, "--prefix", f"--tail={tail}", most, *flags)

    def _operator(self) -> str:
        """Who leads, by the Lease in the namespace where the operator mostly is, or why that is not known."""
        try:
            lease = ask_json(self.kubectl, "get", "lease", labels.LEASE, "--namespace", labels.OPERATOR_NAMESPACE)
        except Refused as error:
            return f"not known: {str(error).splitlines()[0]}"
        return show.leader(lease, self.now())

    def _service(self, name: str) -> Json:
        return ask_json(self.kubectl, "get", KIND, name)

    def _routers(self, body: Json) -> dict[str, RouterLoad]:
        """What each router says that is ready and can be reached, by the name of its pod."""
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        found = {}
        try:
            pods = ask_json(self.kubectl, "get", "pods", "-l", f"{labels.SERVICE}={name},{labels.COMPONENT}=router")["items"]
        except Refused as error:
            self.warn(str(error))
            return {}
        for pod in (pod["metadata"]["name"] for pod in pods if _is_ready(pod)):
            path = f"/api/v1/namespaces/{namespace}/pods/http:{pod}:{labels.HTTP_PORT}/proxy/metrics"
            try:
                found[pod] = read_router(self.kubectl.ask("get", "--raw", path))
            except Refused as error:
                self.warn(f"router {pod}: {error}")
        return found


def _is_ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
