"""Cost of a service in API server requests: the operator program against controllers in memory."""

import pytest

from bench.control_scale import alone
from bench.frame.programs import free_port

pytestmark = pytest.mark.system
ONCE_EACH = {"configmaps": 1, "deployments": 1, "networkpolicies": 2, "poddisruptionbudgets": 2, "rolebindings": 1, "services": 2}


@pytest.mark.slow
async def test_new_service_costs_few_reconciles_and_requests() -> None:
    found = await alone.measure(services=3, rate=1.0, port=free_port())
    requests = found["requests"]
    assert {kind: requests.get(f"PATCH {kind}") for kind in ONCE_EACH} == ONCE_EACH
    assert [call for call in requests if call.startswith("GET") and call.split()[1] in ONCE_EACH] == []
    assert requests["POST statefulsets"] == 5
    assert found["reconciles"] <= 20 and requests["PATCH inferenceservices/status"] <= 12, found
