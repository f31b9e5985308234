"""What the programs say about themselves at `/metrics`, and whether a fleet without requests holds nothing."""

from collections import defaultdict
from collections.abc import Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

SCRAPE_TIMEOUT = aiohttp.ClientTimeout(total=2)
SERIES = "series"
"""Number of series that a program exports; one that grows forever is a leak in the program and in Prometheus."""
GROUP_GAUGES = {
    "phalanx_num_requests_running": "running",
    "phalanx_num_requests_waiting": "waiting",
    "phalanx_kv_cache_usage_perc": "kv_use",
    "phalanx_reserved_pages": "reserved_pages",
    "phalanx_cached_pages": "cached_pages",
    "phalanx_host_cached_pages": "host_pages",
    "phalanx_disk_cached_pages": "disk_pages",
    "phalanx_page_leaks_total": "page_leaks",
    "phalanx_host_loaded_pages_total": "host_loads",
    "phalanx_disk_fetched_pages_total": "disk_loads",
}
ROUTER_GAUGES = {
    "phalanx_router_streams": "streams",
    "phalanx_router_queued_requests": "queued",
    "phalanx_router_held_requests": "held",
    "phalanx_router_prefix_keys": "prefix_keys",
    "phalanx_router_replays_total": "replays",
    "phalanx_router_links_lost_total": "links_lost",
    "phalanx_router_moves_total": "moves",
}
OPERATOR_GAUGES = {
    "phalanx_operator_watch_age_seconds": "watch_age_s",
    "phalanx_operator_queue_keys": "due_services",
    "phalanx_operator_reconcile_errors_total": "reconcile_errors",
}
"""watch_age_s: sum of all watches."""
_AT_REST = ("running", "waiting", "kv_use", "reserved_pages", "streams", "queued", "held")
"""What is zero when no client asks."""


def gauges(page: str, names: Mapping[str, str]) -> dict[str, float]:
    """Returns the sums of the named metrics of a page of Prometheus, and the number of all its series."""
    sums, count = defaultdict[str, float](float), 0
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            count += 1
            if sample.name in names:
                sums[names[sample.name]] += sample.value
    return {**sums, SERIES: float(count)}


async def scrape(session: aiohttp.ClientSession, url: str, names: Mapping[str, str]) -> dict[str, float]:
    """Returns the gauges of a program; none if it does not answer."""
    try:
        async with session.get(f"{url}/metrics", timeout=SCRAPE_TIMEOUT) as response:
            return gauges(await response.text(), names) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, OSError):
        return {}


def held(values: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns a sentence for each thing that a fleet without requests holds. values: of each program."""
    return [
        f"{program} has {name} = {found[name]:g}" for program, found in values.items() for name in _AT_REST if found.get(name)
    ]


def leaks(values: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns a message for each program that reports leaked pages."""
    return [f"{program}: {found['page_leaks']:g} page leaks" for program, found in values.items() if found.get("page_leaks")]
