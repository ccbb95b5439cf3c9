"""How bench comm counts: sizes and bandwidths as nccl-tests does, the fit, NCCL's log."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.bench import comm_counts as comm
from allranks.bench import comm_ranks
from allranks.bench.comm_counts import COLLECTIVES
from allranks.errors import AllranksError
from allranks.machine.gpus import find_gpu

Point = tuple[int, float]  # bytes and seconds

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


SIZES = comm.sizes_between(1 << 10, 1 << 30)


def points(latency: float, bandwidth: float, sizes: Sequence[int] = SIZES) -> list[Point]:
    return [(size, latency + size / bandwidth) for size in sizes]


def check_lines(measured: Sequence[Point]) -> list[comm.Line]:
    """The lines through what was measured, each of which says nothing that is not so."""
    lines = comm.fit_lines(measured)
    for line in lines:
        own = [(size, seconds) for size, seconds in measured if line.first <= size <= line.last]
        per_byte = 1 / line.bandwidth if line.bandwidth else 0.0
        misses = [abs((line.latency + size * per_byte) / seconds - 1) for size, seconds in own]
        assert max(misses) <= line.error + 1e-9 and line.error <= comm.FAR
        assert line.sizes == len(own) >= 3
        best = max(size / seconds for size, seconds in own)
        assert line.is_extrapolated == (line.bandwidth is not None and line.bandwidth > best)
        assert line.latency >= 0 and line.best == best
    assert all(one.last < other.first for one, other in pairwise(lines))
    return lines


latencies = st.floats(1e-6, 1e-3)
bandwidths = st.floats(1e7, 1e12)


@given(latencies, bandwidths, st.integers(3, 11))
def test_one_line_gives_back_what_it_was_made_of(
    latency: float, bandwidth: float, count: int
) -> None:
    (line,) = check_lines(points(latency, bandwidth, SIZES[:count]))
    assert (line.first, line.last) == (SIZES[0], SIZES[count - 1])
    if latency * bandwidth > SIZES[0]:  # in larger messages it is lost
        assert line.latency == pytest.approx(latency, rel=0.02)
    if SIZES[count - 1] > latency * bandwidth:
        assert line.bandwidth == pytest.approx(bandwidth, rel=0.02)


@given(latencies, st.integers(0, 99))
def test_noise_below_the_tolerance_leaves_one_line(latency: float, seed: int) -> None:
    noise = random.Random(seed)
    measured = [(size, s * noise.uniform(0.95, 1.05)) for size, s in points(latency, 1e9)]
    (line,) = check_lines(measured)
    assert line.bandwidth == pytest.approx(1e9, rel=0.15)


@given(st.integers(3, 6), st.floats(3.0, 30.0), st.floats(1.0, 10.0))
def test_a_switch_of_protocol_begins_another_line(at: int, slower: float, faster: float) -> None:
    """Larger messages begin later: with a handshake, say."""
    small = points(20e-6, 1e9, SIZES[:at])
    large = points(20e-6 + slower * small[-1][1], faster * 1e9, SIZES[at:])
    lines = check_lines([*small, *large])
    covered = {size for line in lines for size in SIZES if line.first <= size <= line.last}
    assert len(covered) >= len(SIZES) - 2 and lines[-1].last == SIZES[-1]
    assert lines[-1].bandwidth == pytest.approx(faster * 1e9, rel=comm.FAR)


@given(st.integers(4, 8), st.floats(2.0, 20.0))
def test_large_messages_that_are_slower_have_their_own_bandwidth(at: int, times: float) -> None:
    """As where they outgrow a cache."""
    measured = [*points(20e-6, 2e9, SIZES[:at]), *points(20e-6, 2e9 / times, SIZES[at:])]
    lines = check_lines(measured)
    assert lines[-1].last == SIZES[-1] and not lines[-1].is_extrapolated
    assert lines[-1].bandwidth == pytest.approx(2e9 / times, rel=comm.FAR)


@given(st.lists(st.floats(1e-6, 1.0), min_size=0, max_size=11))
def test_no_curve_gets_a_line_that_misses_it(seconds: list[float]) -> None:
    check_lines([*zip(SIZES, seconds, strict=False)])


def test_one_slow_size_is_on_no_line() -> None:
    measured = points(20e-6, 10e9)
    measured[5] = (SIZES[5], 10 * measured[5][1])
    assert [(line.first, line.last) for line in check_lines(measured)] == [
        (SIZES[0], SIZES[4]),
        (SIZES[6], SIZES[10]),
    ]


def test_two_sizes_are_always_on_a_line_which_says_nothing() -> None:
    assert comm.fit_lines(points(20e-6, 10e9, SIZES[:2])) == comm.fit_lines([]) == []


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
    assert (node["first_bytes"], node["last_bytes"], node["sizes"]) == (1 << 10, 1 << 30, 11)
    assert not node["extrapolated"]
    assert node["busbw_GBps"] <= node["measured_busbw_GBps"]


def test_an_extrapolated_bandwidth_has_no_share_of_the_peak() -> None:
    rows = [
        comm.row("broadcast", size, 2, "node", median=100e-6 + size / 1e9, p99=1.0)
        for size in SIZES[:6]  # to 1 MiB, which takes 1,149 µs
    ]
    (fit,) = comm.fits(rows, {"node": 2.0})
    assert fit["busbw_GBps"] == pytest.approx(1.0, rel=0.01)
    assert fit["extrapolated"] and fit["of_peak"] is None
    assert fit["measured_busbw_GBps"] == pytest.approx(1.048576e-3 / 1148.576e-6, rel=1e-3)


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
