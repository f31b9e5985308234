"""Faults of a real fleet fire the alerts in Debian's Prometheus. Each expression holds for a second instead of minutes."""

import asyncio
import itertools
from pathlib import Path

import httpx
import msgspec
import pytest

from bench.frame.programs import Program
from bench.frame.prometheus import Prometheus
from phalanx_api import labels
from phalanx_api.summary import BalancePolicy, LatencyObjectives, ResponseCachePolicy
from tests.polling import during, until
from tests.prometheus import prometheus_folder, scraped
from tests.runtime.drafts import save_draft
from tests.system.runtimes import metric_of
from tests.system.scraped_fleet import ALERTS, ExercisedOperator, fleet, rule_file, served_metrics, targets

pytestmark = pytest.mark.system

BY_DRAFT = ("--speculative-control", "fixed", "--speculative-method", "draft", "--speculative-draft-model")
TIGHT = BalancePolicy(
    itl_target_s=1e-5,
    objectives=LatencyObjectives(ttft_s=1e-6, itl_s=1e-6),
    response_cache=ResponseCachePolicy(semantic=True, embedder="127.0.0.1:1"),
)
"""Targets that no token meets, and an embedder that does not answer."""
AT_LOAD = {
    "PhalanxFleetSaturated",
    "PhalanxShedding",
    "PhalanxSpeculationLost",
    "PhalanxEmbedderFailed",
    "PhalanxErrorBudgetBurnsFast",
    "PhalanxErrorBudgetBurnsSlowly",
}
OF_OPERATOR = {"PhalanxNoLeader", "PhalanxReconcileErrors", "PhalanxReconcileBacklog"}
ELSEWHERE = {"PhalanxSemanticCacheDisagrees", "PhalanxControlPlanePartitioned", "PhalanxDisruptionsHeld"}
ELSEWHERE |= {"PhalanxCertificateExpiresSoon", "PhalanxCertificateUnusable"}
"""Caused in tests/router/test_semantic_cache, as answers of this model are alike, in tests/control/decide, and in
tests/frontend/test_tls."""


async def overload(router: Program) -> None:
    """Sends more requests than the router queues, all different, again and again, until it is cancelled."""
    numbers = itertools.count()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        while True:
            prompts = [f"What is {next(numbers)}?" for _ in range(32)]
            bodies = [{"prompt": prompt, "max_tokens": 100, "ignore_eos": True} for prompt in prompts]
            posts = [http.post(f"{router.base_url}/v1/completions", json=body | {"temperature": 0}) for body in bodies]
            await asyncio.gather(*posts, return_exceptions=True)


async def fires(prometheus: Prometheus, alerts: set[str]) -> None:
    """Waits until these alerts have fired, at once or in turn."""
    missing = set(alerts)
    for _ in range(90):
        missing -= await asyncio.to_thread(prometheus.firing)
        if not missing:
            return
        await asyncio.sleep(1)
    raise AssertionError(f"did not fire: {sorted(missing)}")


def stop(program: Program) -> None:
    program.process.kill()
    program.process.wait()


async def test_faults_of_a_fleet_fire_their_alerts(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(labels.ENV_REVISION, "r1")  # responses are cached by revision
    assert set(ALERTS) == AT_LOAD | OF_OPERATOR | ELSEWHERE | {"PhalanxNoReadyGroup", "PhalanxNoRouter"}
    prometheus_folder()  # before the programs start: the test may be skipped
    operator, policy, broken = ExercisedOperator(), tmp_path / "policy.json", save_draft(model, tmp_path / "broken")
    policy.write_bytes(msgspec.json.encode(TIGHT))
    (broken / "model.safetensors").write_text("no tensors")
    await operator.start()
    groups_flags = [("--max-num-seqs", "2"), ("--max-num-seqs", "2", *BY_DRAFT, str(broken))]
    with (
        served_metrics(operator) as port,
        fleet(tmp_path, model, groups_flags, ["--policy-file", str(policy), "--max-queued", "4"]) as (groups, router),
        scraped(tmp_path, targets(groups, router, port), rule_file("1s")) as prometheus,
    ):
        await until(lambda: metric_of(router, "phalanx_router_groups_ready") == 2)
        async with during(overload(router)):
            await fires(prometheus, AT_LOAD)
        operator.fall_behind(30)
        for _ in range(100):
            await operator.exercise()
            await asyncio.sleep(0.05)
        await fires(prometheus, OF_OPERATOR)
        assert not prometheus.firing() & {"PhalanxNoReadyGroup", "PhalanxNoRouter"}
        for group in groups:
            stop(group)
        await fires(prometheus, {"PhalanxNoReadyGroup"})
        stop(router)
        await fires(prometheus, {"PhalanxNoRouter"})
