"""Kinds of network addresses, and lists of hosts that an administrator allows."""

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
METADATA_ADDRESSES = tuple(map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254")))
"""Metadata services with addresses that are not link-local."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All IPv6 addresses of the Internet (RFC 4291); `is_global` also accepts site-local and IPv4-compatible ones."""
_EVERYTHING = "*"


def embedded(address: Address) -> Address:
    """Returns the IPv4 address embedded in an IPv6 address: mapped, 6to4, Teredo or NAT64 (RFC 4291, 3056, 4380, 6052)."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else address)


def is_public(address: Address) -> bool:
    """Returns whether an address belongs to the Internet (RFC 6890): it is not private, shared, loopback, multicast, reserved."""
    target = embedded(address)
    if isinstance(target, ipaddress.IPv6Address) and target not in _GLOBAL_UNICAST:
        return False
    return target.is_global and not target.is_multicast and target not in METADATA_ADDRESSES


def is_metadata(address: Address) -> bool:
    """Returns whether an address is link-local, as most metadata services of clouds, or one of the others."""
    target = embedded(address)
    return target.is_link_local or target in METADATA_ADDRESSES


def network_of(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Returns the network or the single address of an entry; none if it is a name."""
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None


def matches_name(entry: str, host: str) -> bool:
    """Returns whether an entry names a host: `*`, a name, or `*.suffix`."""
    name, wanted = host.rstrip(".").lower(), entry.lower()
    return wanted in (_EVERYTHING, name) or (wanted.startswith("*.") and name.endswith(wanted[1:]))
