"""Dashboard of the groups of a service: steps, batch, pages and devices."""

from tools.dashboards.records import GROUP, GROUPS, NAMESPACE, SERVICE, Dashboard, Panel, Query, Row, rate, ratio

_LEGEND = "{{phalanx_dev_group}}"


def _gauge(name: str) -> str:
    return f"max by (phalanx_dev_group) ({name}{{{GROUPS}}})"


def _per_step(counter: str) -> str:
    return ratio(rate(counter, GROUPS, "phalanx_dev_group"), rate("phalanx_engine_steps_total", GROUPS, "phalanx_dev_group"))


def _counter(title: str, counter: str, shows: str, good: str) -> Panel:
    return Panel(title, shows, good, "ops", (Query(rate(counter, GROUPS, "phalanx_dev_group"), _LEGEND),))


_STEPS_ROW = Row(
    "Steps",
    (
        Panel(
            "Step time",
            "Time of a step, averaged over about 20 steps.",
            "equal in all groups at equal load. One slower group is a straggler: look at its devices below.",
            "s",
            (Query(_gauge("phalanx_step_seconds"), _LEGEND),),
        ),
        Panel(
            "Step time by part",
            "Parts of a mean step that are not the plain forward pass: drafting, verification of draft "
            "tokens, waits for copies from host memory.",
            "each far below the step time. Waits for copies mean a host tier that is slower than the cost model expects.",
            "s",
            (
                Query(_per_step("phalanx_speculation_draft_seconds_total"), f"{_LEGEND} draft"),
                Query(_per_step("phalanx_speculation_verify_seconds_total"), f"{_LEGEND} verify"),
                Query(_per_step("phalanx_host_wait_seconds_total"), f"{_LEGEND} host copies"),
            ),
        ),
        Panel(
            "Device busy",
            "Share of the last seconds in which the device of rank 0 computed steps.",
            "near 1 under load. Lower under load means that scheduling or the network limits.",
            "percentunit",
            (Query(_gauge("phalanx_device_busy_ratio"), _LEGEND),),
        ),
        Panel(
            "Roofline shares",
            "Bytes that steps must read as a share of the copy rate, FLOPs as a share of the matmul rate; 0 "
            "if the device's rates are unknown.",
            "one of the two above 0.5 under load: bandwidth for decodes, FLOPs for prefill.",
            "percentunit",
            (
                Query(_gauge("phalanx_model_bandwidth_utilization"), f"{_LEGEND} bandwidth"),
                Query(_gauge("phalanx_model_flop_utilization"), f"{_LEGEND} FLOPs"),
            ),
        ),
    ),
)
_BATCH_ROW = Row(
    "Batch",
    (
        Panel(
            "Requests",
            "Requests that hold pages, and requests that wait for pages or a batch slot.",
            "running below `spec.engine.maxNumSeqs`, waiting near 0.",
            "short",
            (
                Query(_gauge("phalanx_num_requests_running"), f"{_LEGEND} running"),
                Query(_gauge("phalanx_num_requests_waiting"), f"{_LEGEND} waiting"),
            ),
        ),
        Panel(
            "Tokens",
            "Output tokens and prompt tokens per second.",
            "output tokens rise with running requests until steps are limited by compute.",
            "ops",
            (
                Query(rate("vllm:generation_tokens_total", GROUPS, "phalanx_dev_group"), f"{_LEGEND} output"),
                Query(rate("vllm:prompt_tokens_total", GROUPS, "phalanx_dev_group"), f"{_LEGEND} prompt"),
            ),
        ),
        Panel(
            "Prompt tokens per step",
            "Prefill in a step, averaged over about 20 steps.",
            "below the token budget of a step; at the budget for long, prompts wait for one another.",
            "short",
            (Query(_gauge("phalanx_prompt_tokens_per_step"), _LEGEND),),
        ),
        Panel(
            "Oldest wait",
            "Wait of the request that has waited longest.",
            "below the target of the time to first token.",
            "s",
            (Query(_gauge("phalanx_oldest_wait_seconds"), _LEGEND),),
        ),
    ),
)
_PAGES_ROW = Row(
    "Pages and preemptions",
    (
        _counter(
            "Preemptions",
            "vllm:num_preemptions_total",
            "Requests per second that lost their pages and were recomputed.",
            "0. Lasting preemptions mean too many requests for the pages: lower `maxNumSeqs`, add groups, or use int8 pages.",
        ),
        _counter(
            "Recomputed tokens",
            "phalanx_recomputed_tokens_total",
            "Tokens per second that preemptions made the group compute again.",
            "0, or under 1 % of the tokens per second above.",
        ),
        _counter(
            "Evicted pages",
            "phalanx_pages_evicted_total",
            "Pages per second that the prefix cache lost to new requests.",
            "a few. If hit rates fall with evictions, more pages pay: see the hit rate by size of the service.",
        ),
        _counter(
            "Leaks",
            "phalanx_page_leaks_total",
            "Pages and batch slots unaccounted for while the engine was idle.",
            "always 0. Anything else is a bug: report it with the log of the leader.",
        ),
    ),
)
_DEVICES_ROW = Row(
    "Devices",
    (
        Panel(
            "Device memory",
            "Used memory of each device; absent without NVML.",
            "constant after the start.",
            "bytes",
            (
                Query(
                    f"max by (phalanx_dev_group, device) (phalanx_device_memory_used_bytes{{{GROUPS}}})",
                    f"{_LEGEND} {{{{device}}}}",
                ),
            ),
        ),
        Panel(
            "Throttling",
            "Devices with reduced clocks, by reason; absent without NVML.",
            "only `sw_power_cap`, normal at full load. Others make the group a straggler: see the condition `DevicesHealthy`.",
            "short",
            (Query(f"sum by (phalanx_dev_group, reason) (phalanx_device_throttled{{{GROUPS}}})", f"{_LEGEND} {{{{reason}}}}"),),
        ),
    ),
)

ENGINE = Dashboard(
    uid="phalanx-engine",
    title="Phalanx / Engine",
    description="Groups: where the time of a step goes, and whether pages suffice.",
    variables=(NAMESPACE, SERVICE, GROUP),
    rows=(_STEPS_ROW, _BATCH_ROW, _PAGES_ROW, _DEVICES_ROW),
)
