"""The demo itself, run where the cluster's addresses are reachable: apply, wait, ask, delete a pod, get the whole answer."""

import json
import subprocess
import sys
import time
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

QUESTION = "Tell me a story about a lighthouse keeper who finds a small boat after a storm."
READY_LIMIT_S = 240
DELETE_AFTER_CHUNKS = 10


def kubectl(*args: str, check: bool = True) -> str:
    """Standard output of kubectl."""
    return subprocess.run(["kubectl", *args], check=check, stdout=subprocess.PIPE, text=True).stdout


def wait_ready(namespace: str) -> float:
    """Seconds until the service says Ready; prints each new reason that it gives meanwhile. Exits when it takes too long."""
    began, said = time.monotonic(), ""
    while time.monotonic() - began < READY_LIMIT_S:
        service = json.loads(kubectl("get", "infsvc", "chat", "-n", namespace, "-o", "json"))
        conditions: list[dict[str, str]] = service.get("status", {}).get("conditions", [])
        ready = next(
            (c for c in conditions if c["type"] == "Ready"), {"status": "Unknown", "reason": "NotObserved", "message": ""}
        )
        if ready["status"] == "True" and service["status"].get("observedGeneration") == service["metadata"]["generation"]:
            return time.monotonic() - began
        line = f"{ready['reason']}: {ready.get('message', '')}"
        if line != said:
            print(f"   {time.monotonic() - began:4.0f} s  {line}", flush=True)
            said = line
        time.sleep(0.5)
    print(kubectl("get", "infsvc,pods", "-n", namespace, "-o", "wide"))
    print(kubectl("logs", "-n", namespace, "-l", "phalanx.dev/component=group", "--tail=20", check=False))
    sys.exit(f"not Ready within {READY_LIMIT_S} s")


def samples(url: str, name: str) -> list[float]:
    """Values of a metric at a /metrics page."""
    text = httpx.get(f"{url}/metrics", timeout=5).text
    return [s.value for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]


def taken_over(url: str) -> float:
    """How many streams went on in another group so far: replayed there, or moved with their pages."""
    return sum(samples(url, "phalanx_router_replays_total") + samples(url, "phalanx_router_moves_total"))


def answering_pod(namespace: str) -> str | None:
    """Name of a worker pod of the group that runs a request now, by its leader's metrics."""
    pods = json.loads(kubectl("get", "pods", "-n", namespace, "-l", "phalanx.dev/component=group", "-o", "json"))["items"]
    for pod in pods:
        if pod["metadata"]["labels"]["apps.kubernetes.io/pod-index"] != "0":
            continue
        if any(samples(f"http://{pod['status']['podIP']}:8000", "vllm:num_requests_running")):
            return str(pod["metadata"]["name"]).removesuffix("-0") + "-1"
    return None


def stream_answer(url: str, namespace: str) -> None:
    """Prints the answer as it comes; deletes a pod of the answering group half-way."""
    body: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": True,
        "max_tokens": 320,
        "temperature": 0,
    }
    chunks, finish, before = 0, None, taken_over(url)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                sys.exit(f"\nthe stream ended with an error: {event['error']}")
            for choice in event["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
                finish = choice["finish_reason"] or finish
            chunks += 1
            if chunks == DELETE_AFTER_CHUNKS:
                pod = answering_pod(namespace)
                if pod is None:
                    sys.exit("\nno group says that it runs the request")
                # Within a second, as an eviction may: with its whole grace period the group would finish the answer itself.
                kubectl("delete", "pod", pod, "-n", namespace, "--wait=false", "--grace-period=1")
                print(f"\n   [deleted pod {pod} of the answering group]\n", flush=True)
    if finish is None:
        sys.exit("\nthe answer did not complete")
    if taken_over(url) == before:
        sys.exit("\nthe answer was complete before the group was gone: nothing was shown")
    print(f"\n\n   [complete: another group continued it; finish_reason {finish}, {chunks} chunks]", flush=True)


def main() -> None:
    """Applies the service into a namespace, asks, and says what to try next. Arguments: namespace, how to reach kubectl."""
    namespace, kubectl_command, stop_command = sys.argv[1:4]
    print("== applying the service", flush=True)
    kubectl("apply", "-n", namespace, "-f", sys.argv[4])
    print(f"   Ready after {wait_ready(namespace):.0f} s", flush=True)
    print(kubectl("get", "infsvc", "-n", namespace))
    columns = (
        "POD:.metadata.name,GROUP:.metadata.labels.phalanx\\.dev/group,NODE:.spec.nodeName,PHASE:.status.phase,IP:.status.podIP"
    )
    print(kubectl("get", "pods", "-n", namespace, "-o", f"custom-columns={columns}"))
    address = kubectl("get", "service", "chat", "-n", namespace, "-o", "jsonpath={.spec.clusterIP}")
    print(f"== asking through the router's Service, http://{address}\n\n{QUESTION}\n", flush=True)
    stream_answer(f"http://{address}", namespace)
    print(
        f"""
== try next
{kubectl_command} get infsvc,pods -n {namespace}
{kubectl_command} scale infsvc chat -n {namespace} --replicas 3
{kubectl_command} describe infsvc chat -n {namespace}
{kubectl_command} delete infsvc chat -n {namespace}
== stop
{stop_command}"""
    )


if __name__ == "__main__":
    main()
