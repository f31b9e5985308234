"""kubectl for the demo and the show. They run in the cluster's network, with KUBECONFIG."""

import json
import subprocess
import sys
import time

from tools.errors import Failed

READY_LIMIT_S = 240


def kubectl(*args: str, check: bool = True) -> str:
    """Returns the standard output of kubectl. Raises Failed with its error, unless `check` is false."""
    done = subprocess.run(["kubectl", *args], capture_output=True, text=True)
    if check and done.returncode:
        raise Failed(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


def wait_ready(namespace: str, name: str) -> float:
    """Returns the seconds until the service is Ready; prints each new reason. Exits after READY_LIMIT_S."""
    began, said = time.monotonic(), ""
    while time.monotonic() - began < READY_LIMIT_S:
        service = json.loads(kubectl("get", "infsvc", name, "-n", namespace, "-o", "json"))
        conditions: list[dict[str, str]] = service.get("status", {}).get("conditions", [])
        ready = next(
            (c for c in conditions if c["type"] == "Ready"), {"status": "Unknown", "reason": "NotObserved", "message": ""}
        )
        if ready["status"] == "True" and service["status"].get("observedGeneration") == service["metadata"]["generation"]:
            return time.monotonic() - began
        line = ": ".join(part for part in (ready["reason"], ready.get("message")) if part)
        if line != said:
            print(f"   {time.monotonic() - began:4.0f} s  {line}", flush=True)
            said = line
        time.sleep(0.5)
    print(kubectl("get", "infsvc,pods", "-n", namespace, "-o", "wide"))
    print(kubectl("logs", "-n", namespace, "-l", "phalanx.dev/component=group", "--tail=20", check=False))
    sys.exit(f"not Ready within {READY_LIMIT_S} s")


def address(namespace: str, name: str) -> str:
    """Returns the address of the service's endpoint."""
    return kubectl("get", "service", name, "-n", namespace, "-o", "jsonpath={.spec.clusterIP}")
