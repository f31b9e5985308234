"""What the output of a service costs, in device time."""

from phalanx_api.explain.findings import number
from phalanx_api.explain.service_load import ServiceLoad
from phalanx_api.spec.inference_service import shape_of

MAX_TENANTS = 4
"""Named; those that use most."""
UNNAMED = "requests without a tenant"


def cost(load: ServiceLoad) -> str:
    """Returns the device time per output token of the requests that ended in the last minute, and the shares of tenants."""
    output_per_s = load.traffic.output_tokens / load.traffic.window_s
    devices = len(load.groups) * shape_of(load.spec.parallelism).ranks
    if not output_per_s or not devices:
        return ""
    per_1000_s = 1000 * devices / output_per_s
    use = f"{number(per_1000_s, 's')} of device time per 1,000 tokens, {number(per_1000_s * load.busy, 's')} of it in use"
    text = f"{devices} device{'s' if devices > 1 else ''} for {number(output_per_s, 'tokens/s')} of output: {use}"
    tenants = _tenants(load)
    return f"{text}; since the start of the groups {tenants}" if tenants else text


def _tenants(load: ServiceLoad) -> str:
    """The shares of the tenants in the time that groups computed."""
    used: dict[str, float] = {}
    for group in load.groups:
        for use in group.tenants:
            name = use.tenant or UNNAMED
            used[name] = used.get(name, 0.0) + use.step_s
    total = sum(used.values())
    if not total or set(used) == {UNNAMED}:
        return ""
    largest = sorted(used.items(), key=lambda pair: -pair[1])[:MAX_TENANTS]
    return ", ".join(f"{tenant} {seconds / total:.0%}" for tenant, seconds in largest)
