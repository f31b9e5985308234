"""The plugin's commands: each calls kubectl and returns the text to print."""

import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx_api import labels
from phalanx_api.spec import inference_service as api
from phalanx_kubectl import show
from phalanx_kubectl.gauges import RouterLoad, merged, read_router
from phalanx_kubectl.transport import Json, Kubectl, KubectlFailed, ask_json

KIND = f"{api.PLURAL}.{api.GROUP}"
_CONTAINER = "runtime"


def utc_now() -> str:
    """Returns the current time in RFC 3339, as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands over one kubectl. `warn` receives errors that do not end the command."""

    kubectl: Kubectl
    warn: Callable[[str], None]
    now: Callable[[], str] = field(default=utc_now)

    def status(self, name: str | None, *, everywhere: bool = False) -> str:
        """Returns the status of one service, or of all. Raises KubectlFailed."""
        if name is not None:
            return show.status(self._service(name), self._operator())
        where = ["--all-namespaces"] if everywhere else []
        return show.services(ask_json(self.kubectl, "get", KIND, *where)["items"], with_namespace=everywhere)

    def groups(self, name: str) -> str:
        """Returns the groups of a service. Raises KubectlFailed."""
        body = self._service(name)
        return show.groups(body, merged(self._routers(body).values()))

    def top(self, name: str) -> str:
        """Returns the current load of groups and routers. Raises KubectlFailed, also if no router answers."""
        body = self._service(name)
        routers = self._routers(body)
        if not routers:
            raise KubectlFailed(f"no router of {name} answers")
        return show.top(body, routers, merged(routers.values()))

    def drain(self, name: str, group: str) -> str:
        """Drains a group and has it replaced. Raises KubectlFailed, also if the service has no such group."""
        found = ask_json(self.kubectl, "get", "statefulset", group)["metadata"]
        if (found.get("labels") or {}).get(labels.SERVICE) != name:
            raise KubectlFailed(f"{group} is not a group of {name}")
        if labels.DRAINING in (found.get("annotations") or {}):
            raise KubectlFailed(f"{group} is draining already: {found['annotations'][labels.DRAINING]}")
        note = f"{self.now()} asked somebody asked for it by kubectl phalanx drain"
        patch = {"metadata": {"uid": found["uid"], "annotations": {labels.DRAINING: note}}}
        self.kubectl.ask(*("patch", "statefulset", group, "--type=merge", "-p", json.dumps(patch)))
        return f"{group} is draining; it is deleted when its streams have moved or ended, and a new group replaces it\n"

    def restart(self, name: str) -> str:
        """Has all groups replaced one by one. Raises KubectlFailed."""
        patch = {"spec": {"rollout": {"restartId": self.now()}}}
        self.kubectl.ask(*("patch", KIND, name, "--type=merge", "-p", json.dumps(patch)))
        return f"{name} restarts group by group; kubectl phalanx groups {name} shows the progress\n"

    def logs(self, name: str, group: str | None, *, follow: bool = False, previous: bool = False, tail: int = -1) -> int:
        """Prints the logs of all pods. Returns kubectl's exit status. Raises KubectlFailed."""
        wanted = {labels.SERVICE: name, labels.COMPONENT: "group"} | ({labels.GROUP: group} if group else {})
        selector = ",".join(f"{key}={value}" for key, value in wanted.items())
        pods = ask_json(self.kubectl, "get", "pods", "-l", selector)["items"]
        if not pods:
            raise KubectlFailed(f"{group or name} has no pods")
        flags = ["--follow"] * follow + ["--previous"] * previous
        most = f"--max-log-requests={len(pods)}"
        return self.kubectl.pass_on("logs", *("-l", selector, "-c", _CONTAINER, "--prefix", f"--tail={tail}", most), *flags)

    def _operator(self) -> str:
        """Returns the leader from the Lease in the operator's default namespace, or why it is unknown."""
        try:
            lease = ask_json(*(self.kubectl, "get", "lease", labels.LEASE, "--namespace", labels.OPERATOR_NAMESPACE))
        except KubectlFailed as error:
            return f"unknown: {str(error).splitlines()[0]}"
        return show.leader(lease, self.now())

    def _service(self, name: str) -> Json:
        return ask_json(self.kubectl, "get", KIND, name)

    def _routers(self, body: Json) -> dict[str, RouterLoad]:
        """Returns the load reported by each ready and reachable router, by pod name."""
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        found = {}
        try:
            pods = ask_json(self.kubectl, "get", "pods", "-l", f"{labels.SERVICE}={name},{labels.COMPONENT}=router")["items"]
        except KubectlFailed as error:
            self.warn(str(error))
            return {}
        for pod in (pod["metadata"]["name"] for pod in pods if _is_ready(pod)):
            path = f"/api/v1/namespaces/{namespace}/pods/http:{pod}:{labels.HTTP_PORT}/proxy/metrics"
            try:
                found[pod] = read_router(self.kubectl.ask("get", "--raw", path))
            except KubectlFailed as error:
                self.warn(f"router {pod}: {error}")
        return found


def _is_ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
