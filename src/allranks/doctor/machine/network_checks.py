"""Interfaces, InfiniBand, the machine's own name and torch's port: pure functions of facts."""

from __future__ import annotations

import ipaddress

from allranks.doctor.machine.check import Check, failed, not_here, passed, warned
from allranks.doctor.machine.facts import DEFAULT_PORT, Facts


def network_checks(facts: Facts) -> list[Check]:
    return [interfaces(facts), infiniband(facts), own_name(facts), default_port(facts)]


def interfaces(facts: Facts) -> Check:
    real = [each for each in facts.interfaces if not each.is_loopback]
    if not real:
        return not_here("interfaces", "no interface is up but the loopback: one machine alone")
    words = ", ".join(f"{each.name} ({each.address})" for each in real)
    return passed("interfaces", words)


def infiniband(facts: Facts) -> Check:
    if not facts.ports:
        return not_here("infiniband", "no InfiniBand or RoCE device: NCCL uses sockets")
    active = [port for port in facts.ports if port.state == "ACTIVE"]
    down = [port for port in facts.ports if port.state != "ACTIVE"]
    words = ", ".join(f"{port.name} is {port.state}" for port in down)
    if not active:
        fix = "tell the site (ibstat); until then export NCCL_IB_DISABLE=1: sockets are slower"
        return failed("infiniband", f"no port is active: {words}", fix)
    value = ", ".join(f"{port.name} {port.rate}" for port in active)
    if down:
        names = ",".join(port.name for port in active)
        return warned("infiniband", f"{value}; but {words}", f"export NCCL_IB_HCA=={names}")
    return passed("infiniband", value)


def own_name(facts: Facts) -> Check:
    outward = next((each for each in facts.interfaces if not each.is_loopback), None)
    through = f"export GLOO_SOCKET_IFNAME={outward.name}" if outward else ""
    if facts.host_address is None:
        fix = through or f"add '127.0.1.1 {facts.host}' to /etc/hosts"
        return warned("own name", f"{facts.host} stands for no address", fix)
    value = f"{facts.host} is {facts.host_address}"
    if ipaddress.ip_address(facts.host_address).is_loopback and outward is not None:
        value += ", a loopback address: other machines that are told it reach themselves"
        # On one machine alone nothing is wrong with it.
        if facts.num_nodes > 1:
            return failed("own name", value, f"{through}; and --master {outward.address}:29500")
        return passed("own name", f"{value}; {through} for several machines")
    return passed("own name", value)


def default_port(facts: Facts) -> Check:
    if facts.default_port_taken:
        fix = f"torchrun --master-port=0 or another number; ss -ltnp 'sport = :{DEFAULT_PORT}' "
        value = f"{DEFAULT_PORT}, where torch's ranks meet by default, is in use"
        return warned("port", value, f"{fix}shows whose it is. allranks takes a free one itself")
    return passed("port", f"{DEFAULT_PORT} is free")
