"""What a cluster has, from the texts of several sites and versions of SLURM."""

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.fake_slurm import FakeSlurm, silence

from allranks.errors import AllranksError
from allranks.machine.gpus import GIB, catalogue
from allranks.slurm import cluster
from allranks.slurm import commands as slurm
from allranks.slurm import queue as cluster_queue
from allranks.slurm.cluster import (
    cluster_view,
    describe_cluster,
    node_state,
    node_types,
    parse_accounts,
    parse_nodes,
    parse_partitions,
    parse_qos,
)
from allranks.slurm.cluster_screen import show_cluster, show_queue
from allranks.slurm.commands import parse_fields, parse_gres, parse_time, tres_gpus
from allranks.slurm.node_kinds import Gpus, board_of, cpu_model, resolve_gpus, suits
from allranks.slurm.queue import (
    COLUMNS,
    array_tasks,
    parse_queue,
    queue,
    queue_view,
    unix_time,
)

# SLURM 22.05, a node that works, and 20.02's form of one that does not (no CPUEfctv).
NODE_22 = (
    "NodeName=gpu01 Arch=x86_64 CoresPerSocket=64  CPUAlloc=32 CPUEfctv=128 CPUTot=128 "
    "CPULoad=3.10 AvailableFeatures=milan,a100,80gb,rack3 ActiveFeatures=milan,a100,80gb,rack3 "
    "Gres=gpu:a100:4(S:0-1) GresDrain=N/A GresUsed=gpu:a100:2(IDX:0,2) NodeAddr=10.1.0.1 "
    "NodeHostName=gpu01 Port=6818 Version=22.05.8 OS=Linux 5.14.0-162.el9.x86_64 #1 SMP "
    "PREEMPT_DYNAMIC Fri Sep 30 2022  RealMemory=515000 AllocMem=131072 FreeMem=300000 Sockets=2 "
    "Boards=1 State=MIXED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
    "Partitions=gpu,long  BootTime=2026-10-01T02:51:26 "
    "CfgTRES=cpu=128,mem=515000M,billing=128,gres/gpu=4,gres/gpu:a100=4 "
    "AllocTRES=cpu=32,mem=128G,gres/gpu=2,gres/gpu:a100=2 CapWatts=n/a"
)
NODE_20 = (
    "NodeName=gpu02 Arch=x86_64 CoresPerSocket=64 CPUAlloc=0 CPUTot=128 CPULoad=0.00 "
    "AvailableFeatures=milan,a100,80gb,rack4 ActiveFeatures=milan,a100,80gb,rack4 "
    "Gres=gpu:a100:4(S:0-1) GresDrain=N/A GresUsed=gpu:a100:0(IDX:N/A) NodeAddr=gpu02 "
    "NodeHostName=gpu02 Version=20.02.7 RealMemory=515843 State=DOWN*+DRAIN Partitions=gpu,long "
    "CfgTRES=cpu=128,mem=515843M,billing=128 AllocTRES= "
    "Reason=Not responding State=IDLE [slurm@2026-11-01T10:00:00]"
)
NODE_24 = (
    "NodeName=h01 CPUTot=192 AvailableFeatures=location=local,genoa "
    "ActiveFeatures=location=local,genoa Gres=gpu:nvidia_h100_80gb_hbm3:8(S:0-1),shard:64 "
    "GresUsed=gpu:nvidia_h100_80gb_hbm3:8(IDX:0-7),shard:nvidia_h100_80gb_hbm3:0(0/8,0/8) "
    "NodeHostName=h01 RealMemory=2063000 State=ALLOCATED+PLANNED Partitions=gpu "
    "Comment=Gres=gpu:99"
)
NODE_MIG = (
    "NodeName=m1 CPUTot=64 ActiveFeatures=(null) Gres=gpu:a100_1g.5gb:7,gpu:a100_3g.20gb:2 "
    "GresUsed=gpu:a100_1g.5gb:2(IDX:0-1),gpu:a100_3g.20gb:0(IDX:N/A) RealMemory=250000 "
    "State=MIXED Partitions=cheap"
)
NODE_CLOUD = (
    "NodeName=t1 CPUTot=48 ActiveFeatures=cascadelake Gres=gpu:t4:4 RealMemory=190000 "
    "State=IDLE+CLOUD+POWERED_DOWN Partitions=cheap AllocTRES="
)
NODE_CPU = (
    "NodeName=c001 CPUTot=64 AvailableFeatures=epyc_7742 ActiveFeatures=epyc_7742 Gres=(null) "
    "GresUsed=gpu:0 RealMemory=250000 State=IDLE~ Partitions=cpu"
)
NODES = "\n".join((NODE_22, NODE_20, NODE_24, NODE_MIG, NODE_CLOUD, NODE_CPU, "", "No nodes"))
PARTITIONS = """PartitionName=long AllowGroups=ALL AllowAccounts=bio,chem AllowQos=ALL \
Default=NO QoS=N/A DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=14-00:00:00 State=DRAIN
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL DenyAccounts=guests AllowQos=normal \
AllocNodes=ALL Default=YES QoS=part_gpu DefaultTime=01:00:00 MaxNodes=8 MaxTime=2-00:00:00 \
Nodes=gpu[01-02],h01 State=UP TotalCPUs=448 TotalNodes=3
PartitionName=cheap Default=NO MaxTime=UNLIMITED State=UP
PartitionName=cpu Default=NO MaxTime=12:00:00 State=UP
PartitionName=empty Default=NO MaxTime=30:00 State=UP
"""
CONFIG = "Configuration data as of 2026\nClusterName             = alpha\nSLURM_VERSION = 23.11.4\n"
ASSOC = (
    "alpha|bio||high,normal|normal|10||1-00:00:00||gres/gpu=16||\n"
    "beta|bio||normal||||||||\n"
    "alpha|chem|gpu|normal||||||||\n"
)
QOS = (
    "normal|0||cpu=512|||||||||\n"
    "high|1000|12:00:00||gres/gpu=4|||8||||normal|DenyOnLimit\n"
    "secret|9|||||||||||\n"
)
MACHINE: dict[str, Any] = {
    "host": "h01.alpha.example.org",
    "os": "Rocky Linux 9",
    "kernel": "5.14",
    "cpu": "AMD EPYC 9654 96-Core Processor",
    "cpus": 192,
    "cpus_allotted": 8,
    "memory_bytes": 2063000 * 2**20,
    "gpus": [{"index": i, "name": "NVIDIA H100", "memory_bytes": 80 * GIB} for i in (0, 1)],
    "gpu_link": "NVLink",
    "cuda": {
        "driver": "550.54.15",
        "driver_runs": "12.4",
        "toolkit": None,
        "torch": "2.11.0",
        "torch_cuda": "12.4",
    },
    "nccl": {"version": "2.21.5", "from": "nvidia-nccl-cu12"},
    "mpi": "mpirun (Open MPI) 4.1.4",
    "ucx": "1.15.0",
    "infiniband": [
        {
            "device": "mlx5_0",
            "port": 1,
            "state": "active",
            "rate": "200 Gb/sec (4X HDR)",
            "bits_per_second": 200e9,
            "link_layer": "InfiniBand",
            "interfaces": ["ib0"],
        }
    ],
    "network": [
        {
            "name": "ib0",
            "state": "up",
            "kind": "infiniband",
            "bits_per_second": 2e11,
            "physical": True,
        }
    ],
}


def whole_view() -> dict[str, Any]:
    view = cluster_view(CONFIG, parse_nodes(NODES), parse_partitions(PARTITIONS), MACHINE)
    accounts = parse_accounts(ASSOC, "alpha")
    return view | {"accounts": accounts, "qos": parse_qos(QOS, accounts)}


def test_the_view_of_a_cluster() -> None:
    view = json.loads(json.dumps(whole_view()))
    assert view["slurm"] == {"cluster": "alpha", "version": "23.11.4"}
    assert view["nodes"] == {
        "total": 6,
        "up": 5,
        "idle": 2,
        "mixed": 2,
        "allocated": 1,
        "reserved": 0,
        "down": 1,
    }
    assert view["gpus"] == {"total": 29, "free": 2 + 7 + 4}  # none of what is down or full
    by_name = {partition["name"]: partition for partition in view["partitions"]}
    assert next(iter(by_name)) == "gpu"  # the default comes first
    gpu = by_name["gpu"]
    assert gpu["default"] and gpu["max_seconds"] == 172800 and gpu["default_seconds"] == 3600
    assert gpu["max_nodes"] == 8 and gpu["qos"] == "part_gpu"
    assert gpu["allow_accounts"] is None and gpu["deny_accounts"] == ["guests"]
    assert gpu["nodes"]["total"] == 3
    assert by_name["long"]["state"] == "drain"
    assert by_name["long"]["allow_accounts"] == ["bio", "chem"]
    assert by_name["cheap"]["max_seconds"] is None
    assert by_name["empty"]["types"] == [] and by_name["empty"]["max_seconds"] == 1800


def test_nodes_that_are_alike_are_one_type() -> None:
    nodes = [node for node in parse_nodes(NODES) if "gpu" in node.partitions]
    hopper, ampere = node_types(nodes, {"h01": "AMD EPYC 9654"})
    assert hopper.gpus[0].model == "H100 SXM5" and hopper.gpus_per_node == 8
    assert hopper.other_gres == {"shard": 64}
    assert hopper.cpu_model == "AMD EPYC Genoa"  # features come first
    assert hopper.features == ("location=local", "genoa")
    assert ampere.gpus == (Gpus("a100", 4, "A100 SXM4 80GB", 80 * GIB, (80 * GIB,), None),)
    assert ampere.nodes["total"] == 2 and ampere.nodes["down"] == 1
    assert (ampere.gpus_total, ampere.gpus_free) == (8, 2)
    assert ampere.features == ("milan", "a100", "80gb")
    assert ampere.some_features == ("rack3", "rack4")
    assert ampere.memory_bytes == 515000 * 2**20 and ampere.cpus == 128
    assert ampere.suits == hopper.suits == "training large models"


def test_memory_and_gpus_tell_types_apart() -> None:
    lines = [
        f"NodeName=n{i} CPUTot=8 RealMemory={memory} Gres={gres} State=IDLE Partitions=p"
        for i, (memory, gres) in enumerate(
            [(100000, "gpu:2"), (103000, "gpu:2"), (200000, "gpu:2"), (100000, "gpu:4")]
        )
    ]
    types = node_types(parse_nodes("\n".join(lines)), {})
    sizes = [(kind.gpus_per_node, kind.nodes["total"]) for kind in types]
    assert sizes == [(4, 1), (2, 1), (2, 2)]


def test_the_machine_itself_tells_its_cpu_where_features_do_not() -> None:
    line = "NodeName=vm1 NodeHostName=vm1 CPUTot=2 RealMemory=9 State=IDLE Partitions=p"
    (kind,) = node_types(parse_nodes(line), {"vm1": "Some CPU"})
    assert kind.cpu_model == "Some CPU" and kind.suits == "CPU-only: trees, data preparation"
    (kind,) = node_types(parse_nodes(line), {"login": "Some CPU"})
    assert kind.cpu_model is None


def test_used_gpus_are_known_without_details_too() -> None:
    line = (
        "NodeName=n CPUTot=8 RealMemory=1 Gres=gpu:tesla:2,gpu:kepler:2 State=MIXED Partitions=p "
        "AllocTRES=cpu=2,gres/gpu:tesla=1,gres/gpu:kepler=2"
    )
    (node,) = parse_nodes(line)
    assert (node.gpus_total, node.gpus_used, node.gpus_free) == (4, 3, 1)


def test_the_first_of_a_key_wins_and_values_may_hold_spaces() -> None:
    fields = parse_fields(NODE_20)
    assert fields["State"] == "DOWN*+DRAIN" and fields["Reason"] == "Not responding"
    assert parse_fields(NODE_22)["OS"].endswith("Fri Sep 30 2022")


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("IDLE", "idle"),
        ("IDLE~", "idle"),
        ("IDLE#", "idle"),
        ("IDLE+CLOUD", "idle"),
        ("IDLE+CLOUD+POWERED_DOWN", "idle"),
        ("IDLE+POWERING_DOWN", "idle"),
        ("IDLE+PLANNED", "idle"),
        ("IDLE+DYNAMIC_NORM", "idle"),
        ("idle", "idle"),
        ("MIXED", "mixed"),
        ("MIXED-", "mixed"),
        ("MIXED+PLANNED", "mixed"),
        ("mix", "mixed"),
        ("ALLOCATED", "allocated"),
        ("IDLE+COMPLETING", "allocated"),
        ("COMPLETING", "allocated"),
        ("RESERVED", "reserved"),
        ("IDLE+RESERVED", "reserved"),
        ("MAINT", "reserved"),
        ("IDLE$", "reserved"),
        ("IDLE*", "down"),
        ("DOWN", "down"),
        ("DOWN*", "down"),
        ("DOWN*+DRAIN", "down"),
        ("IDLE+DRAIN", "down"),
        ("MIXED+DRAIN", "down"),
        ("DRAINED", "down"),
        ("IDLE+NOT_RESPONDING", "down"),
        ("IDLE+REBOOT_REQUESTED", "down"),
        ("IDLE+INVALID_REG", "down"),
        ("FAILING", "down"),
        ("UNKNOWN", "down"),
        ("ERROR", "down"),
        ("", "down"),
    ],
)
def test_states_of_nodes(text: str, state: str) -> None:
    assert node_state(text) == state


def test_a_node_that_does_not_exist_yet_is_left_out() -> None:
    assert parse_nodes("NodeName=f1 CPUTot=8 State=FUTURE Partitions=p") == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu:a100:4(S:0-1)", [("gpu", "a100", 4)]),
        ("gpu:4", [("gpu", None, 4)]),
        ("gpu", [("gpu", None, 1)]),
        ("gpu:a100", [("gpu", "a100", 1)]),
        ("gpu:nvidia_a100-sxm4-80gb:4", [("gpu", "nvidia_a100-sxm4-80gb", 4)]),
        ("gpu:tesla:2(S:0),gpu:kepler:1(S:1)", [("gpu", "tesla", 2), ("gpu", "kepler", 1)]),
        ("gpu:a100:2(IDX:0,2),nvme:1", [("gpu", "a100", 2), ("nvme", None, 1)]),
        ("gpu:(null):2(IDX:0-1)", [("gpu", None, 2)]),
        ("gpu:a100_1g.5gb:7", [("gpu", "a100_1g.5gb", 7)]),
        ("mps:no_consume:4K", [("mps", None, 4096)]),
        ("gres:gpu:2", [("gpu", None, 2)]),
        ("gres/gpu:a100:2", [("gpu", "a100", 2)]),
        ("(null)", []),
        ("N/A", []),
        ("", []),
        ("gpu:a100:4(S:0-1", [("gpu", "a100", 4)]),
    ],
)
def test_forms_of_gres(text: str, found: list[tuple[str, str | None, int]]) -> None:
    assert parse_gres(text) == found


@pytest.mark.parametrize(
    ("kind", "features", "model", "gigabytes"),
    [
        ("a100", [], "A100 SXM4", [40, 80]),
        ("a100", ["80gb"], "A100 SXM4 80GB", [80]),
        ("a100", ["gpu80"], "A100 SXM4 80GB", [80]),
        ("a100", ["gpu_mem_40"], "A100 SXM4 40GB", [40]),
        ("a100", ["GPU_MEM:80GB"], "A100 SXM4 80GB", [80]),
        ("a100", ["a100-80"], "A100 SXM4 80GB", [80]),
        ("a100", ["a100_40g", "512gb"], "A100 SXM4 40GB", [40]),
        ("a100", ["rack-80", "ib80"], "A100 SXM4", [40, 80]),
        ("a100", ["40gb", "80gb"], "A100 SXM4", [40, 80]),
        ("nvidia_a100-sxm4-80gb", [], "A100 SXM4 80GB", [80]),
        ("v100", ["32gb"], "V100 SXM2 32GB", [32]),
        ("nvidia_l40s", [], "L40S", [48]),
        (None, ["a40"], "A40", [48]),
        (None, ["GPU_SKU:A100_SXM4", "GPU_MEM:40GB"], "A100 SXM4 40GB", [40]),
        (None, ["a100", "a100-80gb"], "A100 SXM4 80GB", [80]),
        (None, ["a100", "v100"], None, []),
        (None, [], None, []),
        ("quadro_rtx_8000", ["gpu_mem:48gb"], None, [48]),
        ("madeup_12gb", [], None, [12]),
        ("p100", ["256gb"], None, []),
    ],
)
def test_boards_by_type_and_features(
    kind: str | None, features: list[str], model: str | None, gigabytes: list[int]
) -> None:
    found = resolve_gpus(kind, 4, features)
    assert (found.model, [size // GIB for size in found.memory_options]) == (model, gigabytes)
    assert found.memory_bytes == (gigabytes[0] * GIB if gigabytes else None)
    assert found.type == kind and found.count == 4 and found.slice_of is None


@pytest.mark.parametrize(
    ("kind", "gigabytes", "board"),
    [
        ("a100_1g.5gb", 5, "A100"),
        ("nvidia_a100_3g.20gb", 20, "A100"),
        ("h100_1g.10gb+me", 10, "H100"),
        ("1g.5gb", 5, "unknown"),
    ],
)
def test_slices_of_boards(kind: str, gigabytes: int, board: str) -> None:
    found = resolve_gpus(kind, 7, [])
    assert found == Gpus(kind, 7, None, gigabytes * GIB, (gigabytes * GIB,), board)
    assert suits([found], memory_bytes=0) == "notebooks, tests: slices of a GPU"


def test_every_board_of_the_catalogue_suits_something() -> None:
    for board in catalogue():
        size = board.memory_bytes
        kind = Gpus(None, 4, board.name, size, (size,), None)
        assert board_of(kind) is board
        assert suits([kind], memory_bytes=0)


@pytest.mark.parametrize(
    ("kind", "count", "words"),
    [
        ("h100", 8, "training large models"),
        ("a100-80gb", 1, "training large models on one GPU"),
        ("nvidia_h100_pcie", 4, "training large models on one GPU (no NVLink)"),
        ("mi250x", 8, "training large models"),
        ("a100", 4, "training mid-size models"),
        ("v100-32gb", 4, "training mid-size models; no bf16"),
        ("l40s", 4, "cheaper jobs: mid-size models on one GPU (no NVLink)"),
        ("rtx3090", 4, "cheaper jobs: small models, tests"),
        ("t4", 4, "cheaper jobs: small models, tests; no bf16"),
        ("made_up", 4, None),
    ],
)
def test_what_gpus_suit(kind: str, count: int, words: str | None) -> None:
    assert suits([resolve_gpus(kind, count, [])], memory_bytes=0) == words


def test_nodes_without_gpus_suit_trees() -> None:
    assert suits([], memory_bytes=2000 * GIB) == "CPU-only: trees, data preparation, large memory"


@pytest.mark.parametrize(
    ("features", "model"),
    [
        (["milan", "ib"], "AMD EPYC Milan"),
        (["amd_milan"], "AMD EPYC Milan"),
        (["CPU_GEN:RME"], None),
        (["cascadelake"], "Intel Xeon Cascade Lake"),
        (["zen3", "epyc7763"], "AMD EPYC 7763"),
        (["gold6248"], "Intel Xeon 6248"),
        (["xeon-gold-6248r"], "Intel Xeon 6248R"),
        (["e5-2680v4"], "Intel Xeon E5-2680 v4"),
        (["cpu_model:icelake"], "Intel Xeon Ice Lake"),
        (["haswell", "broadwell"], None),
        (["premium", "rack3", "a100"], None),
    ],
)
def test_cpu_models_by_features(features: list[str], model: str | None) -> None:
    assert cpu_model(features) == model


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784),
        ("7-00:00:00", 604800),
        ("1-12", 129600),
        ("02:03:04", 7384),
        ("30:00", 1800),
        ("30", 1800),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_times(text: str, seconds: int | None) -> None:
    assert parse_time(text) == seconds


def test_accounts_of_this_cluster_and_their_limits() -> None:
    bio, chem = parse_accounts(ASSOC, "alpha")
    assert bio == {
        "account": "bio",
        "partition": None,
        "qos": ["high", "normal"],
        "default_qos": "normal",
        "max_seconds": 86400,
        "limits": {"running jobs": "10", "all jobs together": "gres/gpu=16"},
    }
    assert chem["partition"] == "gpu"
    normal, high = parse_qos(QOS, [bio, chem])  # secret is not theirs
    assert normal["limits"] == {"one job": "cpu=512"}
    assert high == {
        "qos": "high",
        "priority": 1000,
        "max_seconds": 43200,
        "limits": {"one user": "gres/gpu=4", "jobs in the queue of a user": "8"},
        "preempts": ["normal"],
        "flags": ["DenyOnLimit"],
    }


LINES = st.text() | st.lists(
    st.sampled_from(
        [*NODE_22.split(), *PARTITIONS.split(), "Gres=gpu:(", "State=", "|", "\n", "NodeName=x"]
    )
).map(" ".join)


@given(LINES)
def test_parsers_never_raise(text: str) -> None:
    view = cluster_view(text, parse_nodes(text), parse_partitions(text), MACHINE)
    json.dumps(view)
    parse_qos(text, parse_accounts(text))
    json.dumps(queue_view(parse_queue(text), "me", None))
    unix_time(text), parse_time(text), array_tasks(text), tres_gpus(text), cpu_model([text])
    resolve_gpus(text, 1, [text])


def job_line(**values: str) -> str:
    known = {"state": "PENDING", "username": "me", "partition": "gpu", "numnodes": "1"}
    known["reason"] = "Priority"
    row = known | {key.replace("_", "-"): value for key, value in values.items()}
    return "".join(row.get(name, "N/A")[:width].ljust(width) for name, width in COLUMNS.items())


def jobs_text() -> str:
    return "\n".join(
        [
            job_line(
                jobarrayid="7",
                prioritylong="50",
                tres_alloc="cpu=4,node=1,gres/gpu=4",
                reason="Priority",
                timelimit="1-00:00:00",
                submittime="2026-11-15T06:16:33",
                starttime="2026-11-15T07:41:30",
            ),
            job_line(
                jobarrayid="8_[0-9%2]",
                username="you",
                prioritylong="90",
                tres_per_node="gres:gpu:a100:2",
                numnodes="2",
                reason="Resources",
            ),
            job_line(jobarrayid="9", username="you", prioritylong="99", partition="cpu"),
            job_line(jobarrayid="10", prioritylong="0", reason="JobHeldUser"),
            job_line(jobarrayid="11", username="you", prioritylong="95", reason="Dependency"),
            job_line(jobarrayid="12", prioritylong="49", tres_per_job="gres/gpu:3"),
            job_line(jobarrayid="6_4", state="RUNNING", tres_alloc="gres/gpu=2,gres/gpu:a100=2"),
            "slurm_load_jobs error: something else",
        ]
    )


def test_where_the_user_stands() -> None:
    view = json.loads(json.dumps(queue_view(parse_queue(jobs_text()), "me", None)))
    assert view["running"] == {"jobs": 1, "nodes": 1, "gpus": 2, "mine": 1}
    assert view["waiting"] == {"jobs": 15, "nodes": 25, "gpus": 4 + 10 * 4 + 3, "mine": 3}
    order = [job["job"] for job in view["jobs"]]
    assert order == ["9", "8_[0-9%2]", "7", "12", "11", "10"]  # held ones at the end
    first, second, held = view["mine"]
    assert (first["job"], first["position"], first["of"]) == ("7", 2, 3)  # 9 waits elsewhere
    assert first["ahead"] == {"jobs": 10, "nodes": 20, "gpus": 40}
    assert first["seconds"] == 86400 and first["gpus"] == 4
    assert first["expected_start"] - first["waiting_since"] == 85 * 60 - 3
    assert second["gpus"] == 3 and second["position"] == 3
    assert held["position"] is None and "held" in held["reason_words"]


def test_a_job_for_several_partitions_competes_in_all_of_them() -> None:
    text = "\n".join(
        [
            job_line(jobarrayid="1", prioritylong="9", partition="cpu"),
            job_line(jobarrayid="2", prioritylong="5", partition="gpu,cpu", username="you"),
        ]
    )
    (mine,) = queue_view(parse_queue(text), "you", None)["mine"]
    assert (mine["position"], mine["of"]) == (2, 2)


@pytest.mark.parametrize(
    ("reason", "in_line"),
    [
        ("Resources", True),
        ("ReqNodeNotAvail, UnavailableNodes:n1", True),
        ("", True),
        ("QOSMaxGRESPerUser", False),
        ("AssocMaxJobsLimit", False),
        ("JobArrayTaskLimit", False),
        ("BeginTime", False),
    ],
)
def test_who_stands_in_line(reason: str, in_line: bool) -> None:
    (job,) = parse_queue(job_line(jobarrayid="1", reason=reason))
    assert job.in_line is in_line


@pytest.mark.parametrize(
    ("job", "tasks"),
    [("12", 1), ("12_3", 1), ("12_[0-9]", 10), ("12_[1,3,5-9:2%4]", 5), ("12_[0-9,...]", 10)],
)
def test_tasks_of_an_array(job: str, tasks: int) -> None:
    assert array_tasks(job) == tasks


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """The cluster of the texts above."""
    monkeypatch.setattr(cluster, "describe_machine", lambda: MACHINE)
    made = FakeSlurm().install(monkeypatch)
    made.said |= {"show config": CONFIG, "show node": NODES, "show partition": PARTITIONS}
    made.said |= {"show assoc": ASSOC, "show qos": QOS}
    return made


def test_a_cluster_is_described_in_five_calls(fake: FakeSlurm) -> None:
    view = describe_cluster()
    assert len(fake.calls) == 5
    assert [row["account"] for row in view["accounts"]] == ["bio", "chem"]
    assert view["machine"] is MACHINE and view["notes"] == []


def test_one_partition_has_its_own_nodes_alone(fake: FakeSlurm) -> None:
    every = describe_cluster()["partitions"]
    for partition in every:
        view = describe_cluster(partition["name"])
        assert view["partitions"] == [partition]
        assert view["nodes"] == partition["nodes"]
    with pytest.raises(AllranksError, match='no partition "nope"') as refusal:
        describe_cluster("nope")
    assert every[0]["name"] in refusal.value.fix


def test_without_accounting_a_note_says_why(fake: FakeSlurm) -> None:
    fake.said["show assoc"] = slurm.SlurmError("sacctmgr", "not running a supported accounting")
    view = describe_cluster()
    assert view["accounts"] is None and view["qos"] is None
    assert "not running a supported accounting" in view["notes"][0]


def test_a_controller_that_does_not_answer_is_an_error(fake: FakeSlurm) -> None:
    fake.said["show config"] = silence("scontrol")
    with pytest.raises(slurm.SlurmError):
        describe_cluster()


def test_without_slurm_the_machine_is_described(
    fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "is_here", lambda: False)
    view = describe_cluster()
    assert view["slurm"] is None and view["partitions"] == [] and view["machine"] is MACHINE
    assert "cluster" not in shown(show_cluster, view, 80)


def test_a_partition_that_is_not_there_is_an_error(
    fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AllranksError, match='no partition "nope"'):
        queue("nope")
    assert queue()["jobs"] == [] and len(fake.calls) == 3
    fake.said["squeue"] = jobs_text()
    monkeypatch.setattr(cluster_queue, "current_user", lambda: "me")
    assert len(queue("gpu")["mine"]) == 3 and len(fake.calls) == 4


def shown(show: Any, view: dict[str, Any], width: int) -> str:
    console = Console(width=width, record=True, highlight=False, file=io.StringIO())
    show(console, json.loads(json.dumps(view)))
    return console.export_text()


def words_of(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_tables_fit_and_say_it(width: int) -> None:
    text = shown(show_cluster, whole_view(), width)
    assert max(map(len, text.splitlines())) <= width
    for words in ("alpha", "2/8", "A100 SXM4, 80 GiB", "milan", "12.4", "mlx5_0:1", "bio", "1d"):
        assert words in text, words


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_queue_fits_and_says_it(width: int) -> None:
    text = shown(show_queue, queue_view(parse_queue(jobs_text()), "me", "gpu"), width)
    assert max(map(len, text.splitlines())) <= width
    assert "7: 2 of 3 in line, before it 10 jobs on 20 nodes with 40 GPUs" in words_of(text)
    assert "10: held by its user" in text


def test_names_are_not_markup_and_nobody_waiting_is_said() -> None:
    odd = job_line(jobarrayid="1", username="[red]x[/b]", reason="[bold]")
    text = shown(show_queue, queue_view(parse_queue(odd), "me", None), 120)
    assert "[red]x[/b]" in "".join(text.split()) and "no job of me is waiting here" in text


@pytest.mark.timeout(90)
def test_a_long_queue_is_cut() -> None:
    lines = [job_line(jobarrayid=str(i), username="you") for i in range(5000)]
    text = shown(show_queue, queue_view(parse_queue("\n".join(lines)), "you", None), 80)
    assert "and 4980 more" in text
