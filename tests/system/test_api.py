"""The HTTP API of a real runtime under schemathesis and malformed requests."""

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import httpx
import pytest

from bench.frame.programs import Program, running
from tests.frontend.malformed import VALID, malformed
from tests.polling import wait_until
from tests.runtime.tiny import save_tiny

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
EXAMPLES = 20
REQUESTS = 2000
MAX_BODY_BYTES = 32 * 1024 * 1024
"""As in `phalanx_frontend.limits`."""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A runtime with a tiny model and a short context."""
    folder = tmp_path_factory.mktemp("api")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    model = save_tiny(folder / "tiny")
    flags = ["serve", str(model), "--served-model-name", "tiny", "--kv-cache-memory-bytes", "2000000", "--max-model-len", "32"]
    with running("api", "phalanx_runtime", flags, folder) as program:
        yield program


def test_schemathesis_finds_no_failure(runtime: Program, tmp_path: Path) -> None:
    # Limits of the model (context, vocabulary) are not part of the schema: a 400 for them is correct and not checked.
    environment = subprocess.run(
        [sys.executable, "tools/bootstrap.py", "api"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    ran = subprocess.run(
        [
            *(f"{environment}/bin/schemathesis", "run", f"{runtime.base_url}/openapi.json"),
            *("--max-examples", str(EXAMPLES), "--seed", "4", "--phases", "examples,fuzzing", "--no-shrink"),
            *("--exclude-checks", "positive_data_acceptance", "--request-timeout", "120", "--warnings", "off"),
        ],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8000:]
    operations = httpx.get(f"{runtime.base_url}/openapi.json").json()["paths"]
    assert set(VALID) < set(operations)
    assert f"Tested: {sum(len(methods) for methods in operations.values())}" in ran.stdout


def test_malformed_requests_get_only_4xx_and_leave_no_trace(runtime: Program) -> None:
    failures: list[str] = []
    with httpx.Client(base_url=runtime.base_url, timeout=120) as client:
        for case in islice(malformed(seed=5, max_body_bytes=MAX_BODY_BYTES), REQUESTS):
            answer = client.request(case.method, case.path, content=case.body, headers=case.headers)
            if not 400 <= answer.status_code < 500:
                failures.append(f"{answer.status_code} {case.method} {case.path}: {case.why}; {case.body[:200]!r}")
        assert failures == []
        for path, body in VALID.items():
            status = 400 if path.endswith("/classify") else 200  # the model has no head
            assert client.post(path, json=body).status_code == status, path
        health = client.get("/v1/health").json()
        assert (health["alive"], health["ready"], health["incarnation"]) == (True, True, 1)
        wait_until(lambda: 'vllm:kv_cache_usage_perc{model_name="tiny"} 0.0' in client.get("/metrics").text)
    log = runtime.log.read_text()
    assert "Traceback" not in log and "page pool is wrong" not in log
