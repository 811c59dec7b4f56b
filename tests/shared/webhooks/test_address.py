from __future__ import annotations

import socket
from ipaddress import ip_address
from typing import Any

import pytest

from shared.webhooks.address import NotPublic, addresses_of, check_host, is_public

PRIVATE = [
    "127.0.0.1",
    "127.255.1.2",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "169.254.169.254",
    "192.0.2.1",
    "198.18.0.1",
    "224.0.1.1",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:10.0.0.1",
    "::ffff:127.0.0.1",
    "64:ff9b::a00:1",
    "64:ff9b:1::1",
    "2002:a00:1::",
    "2002:7f00:1::1",
    "2001:0:4136:e378:8000:63bf:f5ff:fffe",
    "fc00::1",
    "fd12:3456::1",
    "fe80::1",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "2001:db8::1",
]
PUBLIC = ["93.184.216.34", "1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_of_this_machine_and_of_networks_of_its_own_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))
    with pytest.raises(NotPublic, match="not a public address"):
        check_host(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ip_address(address))
    check_host(address)


@pytest.mark.parametrize("host", ["127.1", "0x7f000001", "2130706433", "017700000001", "10.1", "0", "[::1]"])
def test_other_ways_to_write_an_address_are_understood(host: str) -> None:
    with pytest.raises(NotPublic):
        check_host(host)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "localhost.", "a.localhost"])
def test_names_for_this_machine_are_not_public(host: str) -> None:
    with pytest.raises(NotPublic, match="this machine"):
        check_host(host)


@pytest.mark.parametrize("host", ["example.com", "10.example.com", "localhost.example.com"])
def test_other_names_are_looked_up_only_when_a_webhook_is_sent(host: str) -> None:
    check_host(host)


def resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def look_up(host: str, port: int, **options: Any) -> list[Any]:
        return [(socket.AF_INET6 if ":" in a else socket.AF_INET, 1, 6, "", (a, port)) for a in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_every_address_of_a_name_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves_to(monkeypatch, "1.1.1.1", "2606:4700::1", "1.1.1.1")
    assert addresses_of("example.com", 443, allow_private=False) == ["1.1.1.1", "2606:4700::1"]


@pytest.mark.parametrize("hidden", ["10.0.0.1", "::ffff:169.254.169.254", "fe80::1%eth0"])
def test_one_address_that_is_not_public_is_enough_to_refuse_a_name(
    monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    resolves_to(monkeypatch, "1.1.1.1", hidden)
    with pytest.raises(NotPublic, match="not a public address"):
        addresses_of("example.com", 443, allow_private=False)
    assert addresses_of("example.com", 443, allow_private=True) == ["1.1.1.1", hidden]
