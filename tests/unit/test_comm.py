"""How bench comm counts: sizes and bandwidths as nccl-tests does, the fit, NCCL's log."""

from __future__ import annotations

import math
import random
import socket
from pathlib import Path

import pytest

from allranks.bench import comm_counts as comm
from allranks.bench import comm_ranks
from allranks.bench.comm_counts import COLLECTIVES
from allranks.errors import AllranksError
from allranks.machine.gpus import find_gpu

# nccl-tests, doc/PERFORMANCE.md and GetBw in src/*.cu, worked out by hand for 2, 4 and 8 ranks.
BUS_FACTORS = {
    "all_reduce": (1.0, 1.5, 1.75),
    "all_gather": (0.5, 0.75, 0.875),
    "reduce_scatter": (0.5, 0.75, 0.875),
    "all_to_all": (0.5, 0.75, 0.875),
    "broadcast": (1.0, 1.0, 1.0),
    "reduce": (1.0, 1.0, 1.0),
    "send_recv": (1.0, 1.0, 1.0),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_bus_bandwidth_is_that_of_nccl_tests(name: str) -> None:
    for ranks, factor in zip((2, 4, 8), BUS_FACTORS[name], strict=True):
        row = comm.row(name, 1 << 30, ranks, "node", median=0.5, p99=0.6)
        assert row["algbw_GBps"] == pytest.approx((1 << 30) / 0.5 / 1e9, rel=1e-5)
        assert row["busbw_GBps"] == pytest.approx(factor * (1 << 30) / 0.5 / 1e9, rel=1e-5)


# nccl-tests, GetCollByteCount: parts of 16 bytes, the size being that of the larger buffer.
@pytest.mark.parametrize(
    ("name", "size", "ranks", "counted"),
    [
        ("all_reduce", 1024, 3, 1024),
        ("all_reduce", 1027, 3, 1024),  # whole elements
        ("broadcast", 1024, 7, 1024),
        ("reduce", 1024, 7, 1024),
        ("send_recv", 1024, 7, 1024),
        ("all_gather", 1024, 4, 1024),
        ("all_gather", 1024, 3, 1008),  # 341 bytes a rank are 336
        ("reduce_scatter", 1024, 3, 1008),
        ("all_to_all", 1024, 3, 1008),
        ("all_to_all", 1024, 100, 0),  # 10 bytes a rank are none
    ],
)
def test_sizes_are_counted_as_nccl_tests_does(
    name: str, size: int, ranks: int, counted: int
) -> None:
    assert comm.counted_bytes(name, size, ranks) == counted


def test_the_first_keys_of_a_row_are_the_contract() -> None:
    row = comm.row("all_gather", 4096, 4, "nodes", median=1e-4, p99=2e-4)
    assert list(row)[:7] == [
        *("collective", "bytes", "ranks", "median_us", "p99_us", "algbw_GBps", "busbw_GBps")
    ]
    assert (row["median_us"], row["p99_us"], row["scope"]) == (100.0, 200.0, "nodes")


def test_ranks_that_do_the_same_are_averaged_and_roots_are_not() -> None:
    for name in COLLECTIVES:
        expected = 4.0 if name in ("broadcast", "reduce") else 3.0
        assert comm.over_ranks(name, [2.0, 4.0, 3.0]) == expected


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1KiB-1GiB", (1 << 10, 1 << 30)),
        ("1K-1G", (1 << 10, 1 << 30)),
        ("1kb - 4 MB", (1 << 10, 4 << 20)),
        ("64MiB", (64 << 20, 64 << 20)),
        ("1000-4096", (1000, 4096)),
        ("16B-32b", (16, 32)),
    ],
)
def test_sizes_are_read(text: str, sizes: tuple[int, int]) -> None:
    assert comm.parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("big", '"big" is not a size', "1KiB-1GiB"),
        ("1KiB-", '"" is not a size', "1KiB-1GiB"),
        ("1TiB", '"1TiB" is not a size', "1KiB-1GiB"),
        ("-1", '"" is not a size', "1KiB-1GiB"),
        ("1.5MiB", "is not a size", "1KiB-1GiB"),
        ("9999999999999GiB", "is not a size", "1KiB-1GiB"),
        ("1GiB-1KiB", "larger size", "--sizes 1KiB-1GiB"),
        ("0-1KiB", "below 16 bytes", "16 bytes"),
    ],
)
def test_wrong_sizes_are_answered(text: str, what: str, fix: str) -> None:
    with pytest.raises(AllranksError) as caught:
        comm.parse_sizes(text)
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_collectives_are_read() -> None:
    assert comm.parse_collectives(None) == list(COLLECTIVES)
    assert comm.parse_collectives("send/recv, alltoall,all-reduce,all_reduce") == [
        *("send_recv", "all_to_all", "all_reduce")
    ]


def test_an_unknown_collective_is_answered_with_the_closest() -> None:
    with pytest.raises(AllranksError) as caught:
        comm.parse_collectives("all_reduce,al_gather")
    assert '"al_gather"' in caught.value.what
    assert "all_gather" in caught.value.fix


def test_sizes_go_up_by_four_and_end_at_the_largest() -> None:
    sizes = comm.sizes_between(1 << 10, 1 << 30)
    assert sizes == [1 << power for power in range(10, 31, 2)]
    assert comm.sizes_between(1024, 10_000) == [1024, 4096, 10_000]
    assert comm.sizes_between(1024, 1024) == [1024]


def test_buffers_must_fit() -> None:
    assert comm.largest_fitting("all_reduce", 4, 1000) == 1000
    assert comm.largest_fitting("all_to_all", 4, 1000) == 500
    assert comm.largest_fitting("all_gather", 4, 1000) == 800


# The fit.


def points(latency: float, bandwidth: float) -> list[tuple[int, float]]:
    sizes = comm.sizes_between(1 << 10, 1 << 30)
    return [(size, latency + size / bandwidth) for size in sizes]


def test_the_fit_gives_back_an_exact_line() -> None:
    line = comm.fit_line(points(20e-6, 10e9))
    assert line is not None and line.bandwidth is not None
    assert line.latency == pytest.approx(20e-6, rel=1e-6)
    assert line.bandwidth == pytest.approx(10e9, rel=1e-6)
    assert line.error < 1e-6


@pytest.mark.parametrize("outlier", range(11))
def test_one_outlier_does_not_move_the_fit(outlier: int) -> None:
    measured = points(20e-6, 10e9)
    size, seconds = measured[outlier]
    measured[outlier] = (size, 10 * seconds)
    line = comm.fit_line(measured)
    assert line is not None and line.bandwidth is not None
    assert line.latency == pytest.approx(20e-6, rel=0.05)
    assert line.bandwidth == pytest.approx(10e9, rel=0.05)


def test_the_fit_bears_noise() -> None:
    noise = random.Random(0)
    measured = [(size, s * math.exp(noise.gauss(0, 0.05))) for size, s in points(50e-6, 2e9)]
    line = comm.fit_line(measured)
    assert line is not None and line.bandwidth is not None
    assert line.latency == pytest.approx(50e-6, rel=0.1)
    assert line.bandwidth == pytest.approx(2e9, rel=0.1)
    assert 0.005 < line.error < 0.1


def test_no_part_of_a_fit_is_negative() -> None:
    falling = comm.fit_line([(1024, 3e-5), (4096, 2e-5), (16384, 1e-5)])
    assert falling is not None and falling.bandwidth is None
    assert 1e-5 <= falling.latency <= 3e-5
    steep = comm.fit_line([(1024, 1e-6), (4096, 5e-6), (16384, 30e-6)])
    assert steep is not None and steep.latency == 0.0
    assert steep.bandwidth is not None and 16384 / 30e-6 <= steep.bandwidth <= 1024 / 1e-6


def test_a_fit_needs_two_sizes() -> None:
    assert comm.fit_line([]) is None
    assert comm.fit_line([(1024, 1e-5), (1024, 2e-5)]) is None


def test_fits_are_by_scope_and_know_the_peak() -> None:
    rates: dict[comm.Scope, float] = {"node": 100e9, "nodes": 10e9}
    rows = [
        comm.row("all_reduce", size, 4, scope, median=10e-6 + size / rate, p99=1.0)
        for scope, rate in rates.items()
        for size in comm.sizes_between(1 << 10, 1 << 30)
    ]
    node, nodes = comm.fits(rows, {"node": 300.0, "nodes": None})
    assert (node["scope"], nodes["scope"]) == ("node", "nodes")
    assert node["algbw_GBps"] == pytest.approx(100, rel=0.01)
    assert node["busbw_GBps"] == pytest.approx(150, rel=0.01)
    assert node["of_peak"] == pytest.approx(0.5, rel=0.01)
    assert nodes["busbw_GBps"] == pytest.approx(15, rel=0.01)
    assert nodes["of_peak"] is None
    assert node["latency_us"] == pytest.approx(10, rel=0.01)


def test_the_peak_is_that_of_the_link_in_use() -> None:
    sxm = find_gpu("NVIDIA H100 80GB HBM3")
    pcie = find_gpu("NVIDIA L40S")
    assert sxm is not None and pcie is not None
    assert comm.link_peak(sxm, "NVLink") == sxm.link.bytes_per_second / 1e9
    assert comm.link_peak(sxm, "PCIe") is None  # the catalogue does not have its slot
    assert comm.link_peak(pcie, "PCIe across sockets") == pcie.link.bytes_per_second / 1e9
    assert comm.link_peak(pcie, "NVLink") is None
    assert comm.link_peak(sxm, "unknown") is None
    assert comm.link_peak(None, "NVLink") is None


# NCCL's log.

NVLINK = """\
n1:812:901 [0] NCCL INFO Bootstrap : Using eth0:10.4.2.31<0>
n1:812:901 [0] NCCL INFO NCCL version 2.27.5+cuda12.9
n1:812:930 [0] NCCL INFO NET/IB : No device found.
n1:812:930 [0] NCCL INFO NET/Socket : Using [0]eth0:10.4.2.31<0> [1]ib0:10.8.2.31<0>
n1:812:930 [0] NCCL INFO Using network Socket
n1:812:930 [0] NCCL INFO === System : maxBw 370.8 totalBw 370.8 ===
n1:812:930 [0] NCCL INFO               + NVL[370.8] - NVS/0
n1:812:930 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
n1:812:930 [0] NCCL INFO Channel 00/16 : 0 1
n1:812:931 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:812:931 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:812:930 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
"""

INFINIBAND = """\
n1:5:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eno1:10.0.0.9<0>
n1:5:9 [0] NCCL INFO Using network IB
n1:5:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
n1:5:9 [0] NCCL INFO Channel 01/0 : 1[0] -> 0[0] [receive] via NET/IB/1(1)/GDRDMA
n1:5:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""

SOCKETS = """\
n1:5:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.4.2.31<0>
n1:5:9 [0] NCCL INFO Using network Socket
n1:5:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 4[0] [send] via NET/Socket/0
"""

SHARED = """\
n1:5:9 [3] NCCL INFO Channel 02 : 3[3] -> 0[0] via SHM/direct/direct
n1:5:9 [2] NCCL INFO Channel 00/0 : 2[2] -> 3[3] via P2P/IPC
"""

ROCE = """\
v:3:4 [1] NCCL INFO NET/IB : Using [0]mlx5_bond_6:1/RoCE [RO]; OOB bond0:30.159.184.22<0>
v:3:4 [1] NCCL INFO Using network NCCL RDMA Plugin v6
v:3:4 [1] NCCL INFO Channel 06/0 : 54[6] -> 38[6] [receive] via NET/IBext_v8/0
"""


def test_nvlink_is_read_from_the_log() -> None:
    parsed = comm_ranks.parse_nccl_log(NVLINK)
    assert parsed == {
        "via": {"P2P/CUMEM": 2},
        "network": "Socket",
        "devices": {"Socket/0": "eth0", "Socket/1": "ib0"},
        "nvlink": True,
        "nvls": True,
        "version": "2.27.5",
    }
    assert comm_ranks.in_words(parsed) == "NVLink (P2P/CUMEM)"


def test_infiniband_is_read_from_the_log() -> None:
    parsed = comm_ranks.parse_nccl_log(INFINIBAND)
    assert parsed["via"] == {"NET/IB/0/GDRDMA": 2, "NET/IB/1/GDRDMA": 1}
    assert parsed["devices"] == {"IB/0": "mlx5_0:1/IB", "IB/1": "mlx5_1:1/IB"}
    assert (parsed["network"], parsed["nvlink"]) == ("IB", False)
    assert comm_ranks.in_words(parsed) == (
        "InfiniBand (NET/IB over mlx5_0:1, GPUDirect RDMA), "
        "InfiniBand (NET/IB over mlx5_1:1, GPUDirect RDMA)"
    )


@pytest.mark.parametrize(
    ("log", "link", "words"),
    [
        (SOCKETS, "none", "sockets (NET/Socket over eth0)"),
        (SHARED, "PCIe", "PCIe (P2P/IPC), host memory (SHM/direct/direct)"),
        (SHARED, "NVLink", "NVLink (P2P/IPC), host memory (SHM/direct/direct)"),
        (SHARED, "unknown", "GPU to GPU (P2P/IPC), host memory (SHM/direct/direct)"),
        (ROCE, "none", "RoCE (NET/IBext_v8 over mlx5_bond_6:1)"),
        ("", "none", "NCCL's log does not say"),
    ],
)
def test_routes_in_words(log: str, link: str, words: str) -> None:
    assert comm_ranks.in_words(comm_ranks.parse_nccl_log(log), link) == words


def test_ranks_logs_are_merged() -> None:
    logs = [comm_ranks.parse_nccl_log(log) for log in (NVLINK, SHARED, "")]
    merged = comm_ranks.merge(logs)
    assert merged["via"] == {"P2P/CUMEM": 2, "P2P/IPC": 1, "SHM/direct/direct": 1}
    assert (merged["network"], merged["nvlink"], merged["version"]) == ("Socket", True, "2.27.5")


def test_the_networks_peak_is_that_of_the_ports_in_use(tmp_path: Path) -> None:
    for device, rate in (("mlx5_0", "200 Gb/sec (4X HDR)"), ("mlx5_1", "400 Gb/sec (4X NDR)")):
        folder = tmp_path / "class/infiniband" / device / "ports/1"
        folder.mkdir(parents=True)
        (folder / "rate").write_text(rate + "\n")
    infiniband = comm_ranks.parse_nccl_log(INFINIBAND)
    assert comm_ranks.network_peak(infiniband, tmp_path) == pytest.approx(75)
    one = {**infiniband, "via": {"NET/IB/0": 1}}
    assert comm_ranks.network_peak(one, tmp_path) == pytest.approx(25)
    assert comm_ranks.network_peak(infiniband, tmp_path / "elsewhere") is None
    for log in (SOCKETS, NVLINK, ROCE):
        assert comm_ranks.network_peak(comm_ranks.parse_nccl_log(log), tmp_path) is None


def test_gloo_talks_through_the_interface_it_is_told() -> None:
    assert comm_ranks.gloo_route({"GLOO_SOCKET_IFNAME": "ib0"}) == ("TCP", "ib0")
    assert comm_ranks.gloo_route({})[1].endswith(f"that of the name {socket.gethostname()}")
