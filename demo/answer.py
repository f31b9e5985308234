"""The demo: applies a service, waits, sends a request, deletes a pod, and shows the whole answer. Needs the cluster's network."""

import json
import sys
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from demo.kube import address, kubectl, wait_ready

QUESTION = "Tell me a story about a lighthouse keeper who finds a small boat after a storm."
DELETE_AFTER_CHUNKS = 10


def samples(url: str, name: str) -> list[float]:
    """Returns the values of a metric at a /metrics endpoint."""
    text = httpx.get(f"{url}/metrics", timeout=5).text
    return [s.value for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]


def taken_over(url: str) -> float:
    """Returns how many streams another group has continued so far: replays and moves."""
    return sum(samples(url, "phalanx_router_replays_total") + samples(url, "phalanx_router_moves_total"))


def answering_pod(namespace: str) -> str | None:
    """Returns the name of a worker pod of the group that runs a request, by its leader's metrics; `None` without one."""
    pods = json.loads(kubectl("get", "pods", "-n", namespace, "-l", "phalanx.dev/component=group", "-o", "json"))["items"]
    for pod in pods:
        if pod["metadata"]["labels"]["apps.kubernetes.io/pod-index"] != "0":
            continue
        if any(samples(f"http://{pod['status']['podIP']}:8000", "vllm:num_requests_running")):
            return str(pod["metadata"]["name"]).removesuffix("-0") + "-1"
    return None


def stream_answer(url: str, namespace: str) -> None:
    """Prints the streamed answer; deletes a pod of the answering group after DELETE_AFTER_CHUNKS."""
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
                    sys.exit("\nno group reports the request as running")
                # As an eviction may: with the full grace period the group would finish the answer itself.
                kubectl("delete", "pod", pod, "-n", namespace, "--wait=false", "--grace-period=1")
                print(f"\n   [deleted pod {pod} of the answering group]\n", flush=True)
    if finish is None:
        sys.exit("\nthe answer did not complete")
    if taken_over(url) == before:
        sys.exit("\nthe answer was complete before the group ended: run the demo again")
    print(f"\n\n   [complete: another group continued it; finish_reason {finish}, {chunks} chunks]", flush=True)


def main() -> None:
    """Runs the demo and prints further commands. Arguments: namespace, kubectl command, stop command, manifest."""
    namespace, kubectl_command, stop_command = sys.argv[1:4]
    print("== applying the service", flush=True)
    kubectl("apply", "-n", namespace, "-f", sys.argv[4])
    print(f"   Ready after {wait_ready(namespace, 'chat'):.0f} s", flush=True)
    print(kubectl("get", "infsvc", "-n", namespace))
    columns = (
        "POD:.metadata.name,GROUP:.metadata.labels.phalanx\\.dev/group,NODE:.spec.nodeName,PHASE:.status.phase,IP:.status.podIP"
    )
    print(kubectl("get", "pods", "-n", namespace, "-o", f"custom-columns={columns}"))
    url = f"http://{address(namespace, 'chat')}"
    print(f"== sending a request through the router's Service, {url}\n\n{QUESTION}\n", flush=True)
    stream_answer(url, namespace)
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
