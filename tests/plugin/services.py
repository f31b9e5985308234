"""An InferenceService and metrics of a router, as the plugin reads them."""

from typing import Any

GROUPS = [
    {
        "name": "chat-g-b",
        "revision": "r2",
        "phase": "Starting",
        "pods": 2,
        "readyPods": 1,
        "nodes": ["n1"],
        "reason": "ErrImagePull",
    },
    {"name": "chat-g-a", "revision": "r1", "phase": "Ready", "pods": 2, "readyPods": 2, "nodes": ["n1", "n2"]},
]
CONDITIONS = [
    {
        "type": "Ready",
        "status": "False",
        "reason": "RollingOut",
        "message": "1 of 2",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
    },
    {"type": "Balanced", "status": "True", "reason": "Balanced", "lastTransitionTime": "2026-01-02T03:00:00Z"},
]


def make_body(**status: Any) -> dict[str, Any]:
    """Returns service team/chat, with these fields in its status."""
    fields = {
        "observedGeneration": 3,
        "replicas": 2,
        "readyReplicas": 1,
        "updatedReplicas": 1,
        "currentRevision": "r1",
        "updateRevision": "r2",
        "url": "http://chat.team.svc",
        "groups": GROUPS,
        "conditions": CONDITIONS,
    }
    metadata = {"namespace": "team", "name": "chat", "generation": 3}
    return {"metadata": metadata, "spec": {"replicas": 2, "model": {"uri": "hf://a/b"}}, "status": fields | status}


METRICS = """# HELP phalanx_router_streams Open streams.
# TYPE phalanx_router_streams gauge
phalanx_router_streams 5.0
phalanx_router_queued_requests 2.0
phalanx_router_group_streams{group="g-a"} 5.0
phalanx_router_group_running_requests{group="g-a"} 8.0
phalanx_router_group_kv_use{group="g-a"} 0.25
phalanx_router_group_step_seconds{group="g-a"} NaN
phalanx_router_group_device_busy_ratio{group="g-a"} 0.5
phalanx_router_group_bandwidth_utilization{group="g-a"} 0.25
phalanx_router_group_flop_utilization{group="g-a"} 0.125
phalanx_router_group_incarnation{group="g-a"} 2.0
phalanx_router_group_pages{group="g-a"} 8192.0
phalanx_router_group_page_bytes{group="g-a"} 2.097152e+06
phalanx_router_group_cache_lookups{group="g-a"} 90000.0
phalanx_router_group_cache_hit_rate_half{group="g-a"} 0.3
phalanx_router_group_cache_hit_rate_now{group="g-a"} 0.41
phalanx_router_group_cache_hit_rate_twice{group="g-a"} 0.53
phalanx_router_group_cache_hit_rate_four_times{group="g-a"} 0.55
phalanx_router_group_cache_hit_rate_host{group="g-a"} 0.5
phalanx_router_group_cache_host_pages{group="g-a"} 16384.0
phalanx_router_group_cache_reuse_pages{group="g-a"} 420.0
phalanx_router_group_cache_residency_seconds{group="g-a"} 61.5
phalanx_router_group_cache_unused_ratio{group="g-a"} 0.07
phalanx_router_group_disk_compacted_bytes{group="g-a"} 1.073741824e+09
phalanx_router_group_cache_host_hit_rate_half{group="g-a"} 0.45
phalanx_router_group_cache_host_hit_rate_full{group="g-a"} 0.5
phalanx_router_group_cache_host_hit_rate_twice{group="g-a"} 0.55
phalanx_router_group_cache_host_hit_rate_four_times{group="g-a"} 0.6
phalanx_router_hotspot{cause="kv",group="g-b"} 1.0
phalanx_router_wait_seconds_bucket{le="+Inf"} +Inf
something else entirely
"""
