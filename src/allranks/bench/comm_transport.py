"""Which way the bytes went: what NCCL's own log says of it, and gloo's interface. No torch."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allranks.machine.network import infiniband_ports

SYS = Path("/sys")

# What a rank asks NCCL to write while it is measured, and nothing else is.
NCCL_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH"}

# `Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM`, `... [send] via NET/IB/0(1)/GDRDMA` (by rank 1).
_CHANNEL = re.compile(r"\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via ([\w/]+(?:\(\d+\)[\w/]*)?)")
_USING = re.compile(r"NCCL INFO NET/(\w+) : Using (.*)")
_DEVICE = re.compile(r"\[(\d+)\]([^\s\[\];]+)")
_NETWORK = re.compile(r"NCCL INFO Using network (.+)")
_VERSION = re.compile(r"NCCL version (\d[\w.]*)")


def parse_nccl_log(text: str) -> dict[str, Any]:
    """What NCCL (2.x, with INFO of INIT, NET and GRAPH) says of the connections that it made."""
    via = Counter(re.sub(r"\(\d+\)", "", route) for route in _CHANNEL.findall(text))
    devices: dict[str, str] = {}
    for plugin, rest in _USING.findall(text):
        for number, name in _DEVICE.findall(rest.partition("; OOB")[0]):
            devices[f"{plugin}/{number}"] = re.sub(r":[\d.:a-f]+<\d+>$", "", name)
    networks = _NETWORK.findall(text)
    versions = _VERSION.findall(text)
    return {
        "via": dict(sorted(via.items())),
        "network": networks[-1].strip() if networks else None,
        "devices": devices,
        # In GRAPH's picture of the machine: `+ NVL[132.0] - GPU/...`
        "nvlink": bool(re.search(r"\+ NVL\[", text)),
        "nvls": "NVLS multicast support is available" in text,
        "version": versions[-1] if versions else None,
    }


def merge(logs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks of a scope saw, as one."""
    via: Counter[str] = Counter()
    devices: dict[str, str] = {}
    for log in logs:
        via.update(log["via"])
        devices |= log["devices"]
    merged: dict[str, Any] = {"via": dict(sorted(via.items())), "devices": devices}
    for key in ("network", "version"):
        merged[key] = next((log[key] for log in logs if log[key]), None)
    for key in ("nvlink", "nvls"):
        merged[key] = any(log[key] for log in logs)
    return merged


def in_words(parsed: Mapping[str, Any], link: str = "unknown") -> str:
    """One line for people; `link`: between the GPUs of a node, as NVML says (gpus.gpu_link)."""
    words = [_route_in_words(route, parsed, link) for route in parsed["via"]]
    if not words:
        return "NCCL's log does not say"
    return ", ".join(dict.fromkeys(words))


def _route_in_words(route: str, parsed: Mapping[str, Any], link: str) -> str:
    kind, _, rest = route.partition("/")
    if kind == "P2P":
        if parsed["nvlink"] or link == "NVLink":
            return f"NVLink ({route})"
        return f"PCIe ({route})" if link.startswith("PCIe") else f"GPU to GPU ({route})"
    if kind == "SHM":
        return f"host memory ({route})"
    if kind != "NET":
        return route
    plugin, _, number = rest.partition("/")
    number = number.partition("/")[0]
    family = "IB" if plugin.startswith("IB") else plugin
    device = parsed["devices"].get(f"{family}/{number}", "")
    direct = ", GPUDirect RDMA" if "GDRDMA" in route else ""
    if family == "Socket":
        return f"sockets (NET/Socket over {device or 'an interface that is not named'})"
    if family == "IB":
        name = "RoCE" if device.endswith("/RoCE") else "InfiniBand"
        port = f" over {device.rpartition('/')[0]}" if device else ""
        return f"{name} (NET/{plugin}{port}{direct})"
    return f"network plugin (NET/{plugin}{direct})"


def network_peak(parsed: Mapping[str, Any], sys_root: Path = SYS) -> float | None:
    """GB/s of the InfiniBand or RoCE ports that the channels of this rank use; None if unknown."""
    used = set()
    for route in parsed["via"]:
        match = re.match(r"NET/(IB)\w*/(\d+)", route)
        if match:
            used.add(parsed["devices"].get(f"{match[1]}/{match[2]}"))
        elif route.startswith("NET/"):
            return None
    rates = [_port_rate(device, sys_root) for device in used]
    return sum(rate for rate in rates if rate) / 1e9 if rates and all(rates) else None


def _port_rate(device: str | None, sys_root: Path) -> float | None:
    """Bytes per second of `mlx5_0:1/IB`, in the kernel's words "200 Gb/sec (4X HDR)"."""
    name = (device or "").rpartition("/")[0]
    port = next((port for port in infiniband_ports(sys_root) if port.name == name), None)
    return port.bits_per_second / 8 if port is not None and port.bits_per_second else None


def gloo_route(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The interface that gloo talks through, as torch chooses it."""
    protocol = env.get("GLOO_DEVICE_TRANSPORT", "TCP")
    interface = env.get("GLOO_SOCKET_IFNAME")
    if interface:
        return {"via": {protocol: 1}, "interface": interface}
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "an address that does not resolve"
    return {"via": {protocol: 1}, "interface": f"{address}, that of the name {name}"}


def gloo_in_words(routes: Sequence[Mapping[str, Any]]) -> str:
    protocols = "/".join(dict.fromkeys(name for route in routes for name in route["via"]))
    interfaces = ", ".join(dict.fromkeys(route["interface"] for route in routes))
    return f"{protocols} over {interfaces}"
