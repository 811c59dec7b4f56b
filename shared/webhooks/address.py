"""Where a webhook may connect to: public addresses, unless a setting allows all."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

#: IPv4 seen through a translator (NAT64). *Source:* RFC 6052.
_NAT64 = IPv6Network("64:ff9b::/96")


class NotPublic(Exception):
    """A host that only this machine or its network knows."""


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is one host of the public internet.

    IPv6 addresses that stand for one of IPv4 (mapped, 6to4, Teredo, NAT64) are as public as that.
    """
    if isinstance(address, IPv6Address):
        if (inner := _inner(address)) is not None:
            return is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _inner(address: IPv6Address) -> IPv4Address | None:
    if address in _NAT64:
        return IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)


def literal(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is written as, None where it is a name.

    Short and hexadecimal forms, such as `127.1` and `0x7f000001`, count, since resolvers take them.
    """
    try:
        return ip_address(host.strip("[]"))
    except ValueError:
        pass
    try:
        return IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


def check_host(host: str) -> None:
    """Refuse a host that is not public by the way it is written. Names are looked up when a webhook is sent.

    Raises:
        NotPublic: it is the address of this machine or of a private network, or a name for this machine.
    """
    address = literal(host)
    if address is not None and not is_public(address):
        raise NotPublic(f"{host} is not a public address")
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        raise NotPublic(f"{host} is this machine")


def addresses_of(host: str, port: int, allow_private: bool) -> list[str]:
    """What a host resolves to now, for connecting to exactly that: a second look-up might give something else.

    Raises:
        NotPublic: one of the addresses is not public, and that is not allowed.
        OSError: it cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host} is no host name: {error}") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        # What stands behind a percent sign is the network interface of a link-local address.
        if not allow_private and not is_public(ip_address(address.partition("%")[0])):
            raise NotPublic(f"{host} is {address}, which is not a public address")
    return addresses
