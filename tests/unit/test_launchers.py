"""Commands that start ranks themselves are found, however they are written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from allranks.launch.launchers import find_launcher, launcher_in_script
from allranks.layout import Layout


@pytest.mark.parametrize(
    ("typed", "layout", "meant"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 1", "1x2", "python train.py --lr 1"),
        ("torchrun --nproc_per_node=2 --nnodes=2 train.py", "2x2", "python train.py"),
        ("torchrun --nnodes 1:4 --standalone train.py -m 3", "4x4", "python train.py -m 3"),
        ("torchrun --nproc-per-node gpu -m pkg.train x", "1x4", "python -m pkg.train x"),
        ("torchrun --no-python ./train.bin 1", "1x4", "./train.bin 1"),
        ("torchrun --brand-new-flag train.py", "1x4", "python train.py"),
        ("/usr/bin/torchrun train.py", "1x4", "python train.py"),
        ("python -m torch.distributed.run --nproc-per-node 2 a.py", "1x2", "python a.py"),
        ("/opt/bin/python3 -u -m torch.distributed.launch a.py", "1x4", "/opt/bin/python3 a.py"),
        ("python3.11 -um torch.distributed.launch --use_env a.py", "1x4", "python3.11 a.py"),
        ("accelerate launch --num_processes 8 --num_machines 2 a.py b", "2x4", "python a.py b"),
        ("accelerate launch --multi_gpu --mixed_precision bf16 -m pkg", "1x4", "python -m pkg"),
        ("python -m accelerate.commands.launch --num_processes 2 a.py", "1x2", "python a.py"),
        ("python -m accelerate launch a.py", "1x4", "python a.py"),
        ("mpirun -np 4 -x PATH --mca btl tcp --bind-to none python a.py", "1x4", "python a.py"),
        ("mpirun -np 4 --map-by ppr:2:node python a.py", "2x2", "python a.py"),
        ("mpiexec.hydra -n 4 -ppn 2 python a.py", "2x2", "python a.py"),
        ("mpiexec -H a:2,b:2 -np 4 ./a.sh", "2x2", "./a.sh"),
        ("orterun -n 2 python -u a.py", "1x2", "python -u a.py"),
        ("srun -N2 -n 8 --mpi=pmix -l python a.py", "2x4", "python a.py"),
        ("srun --nodes=2 --ntasks-per-node 2 python a.py", "2x2", "python a.py"),
        ("deepspeed --num_gpus 2 a.py --deepspeed x", "1x2", "python a.py --deepspeed x"),
        ("horovodrun -np 4 -H a:2,b:2 --gloo python a.py", "2x2", "python a.py"),
        ("python -m lightning run model --devices=2 --strategy=ddp a.py", "1x2", "python a.py"),
        ("lightning run model --num-nodes 2 a.py", "2x4", "python a.py"),
        ("fabric run --devices 2 a.py", "1x2", "python a.py"),
        ("composer -n 2 a.py", "1x2", "python a.py"),
        ("env X=1 -u Y torchrun a.py", "1x4", "env X=1 -u Y python a.py"),
        ("X=1 nice -n 5 torchrun a.py", "1x4", "X=1 nice -n 5 python a.py"),
        ("time -p torchrun a.py", "1x4", "time -p python a.py"),
        ("numactl -N 0 --membind=0 torchrun a.py", "1x4", "numactl -N 0 --membind=0 python a.py"),
        ("taskset -c 0-3 torchrun a.py", "1x4", "taskset -c 0-3 python a.py"),
        ("timeout -s INT 5m torchrun a.py", "1x4", "timeout -s INT 5m python a.py"),
        ("uv run --with x torchrun a.py", "1x4", "uv run --with x python a.py"),
        ("poetry run accelerate launch a.py", "1x4", "poetry run python a.py"),
        ("conda run -n e torchrun a.py", "1x4", "conda run -n e python a.py"),
        ("apptainer exec --nv x.sif torchrun a.py", "1x4", "apptainer exec --nv x.sif python a.py"),
        ('bash -c "torchrun --nproc-per-node 2 a.py"', "1x2", "bash -c 'python a.py'"),
        (
            "bash -lc 'cd x && exec torchrun $OPTIONS a.py \"$HOME/a b\"; echo done'",
            "1x4",
            "bash -lc 'cd x && exec python a.py \"$HOME/a b\"; echo done'",
        ),
        (
            "srun -N 2 --ntasks-per-node=1 torchrun --nproc-per-node 3 a.py",
            "2x3",
            "python a.py",
        ),
    ],
)
def test_a_launcher_is_found_and_what_is_meant_is_told(typed: str, layout: str, meant: str) -> None:
    found = find_launcher(shlex.split(typed))
    assert found is not None
    assert shlex.join(found.command) == meant
    assert str(found.layout(Layout(1, 4))) == layout


@pytest.mark.parametrize(
    "typed",
    [
        "python train.py",
        "python -m torch.utils.bottleneck torchrun.py",
        "python torchrun.py --nproc-per-node 2",
        "python train.py torchrun a.py",
        "python -m pkg.train -m torch.distributed.run",
        "./train.sh --launcher torchrun",
        "nice -n 5 ./train.sh torchrun",
        "env X=torchrun python train.py",
        "accelerate config",
        "lightning --help",
        "bash train.sh",
        "bash -c 'echo torchrun'",
        "bash -c 'echo \"first; torchrun --nproc-per-node 2 a.py\" && python a.py'",
        "uv run train.py",
        "timeout 5m",
        "",
    ],
)
def test_other_commands_are_left_alone(typed: str) -> None:
    assert find_launcher(shlex.split(typed)) is None


def test_what_the_launcher_does_not_say_is_as_typed() -> None:
    found = find_launcher(["torchrun", "--nproc-per-node", "2", "a.py"])
    assert found is not None
    assert str(found.layout(Layout(2, 2))) == "2x2"
    assert str(found.layout(Layout.parse("1x2:tp=2"))) == "1x2:tp=2"
    found = find_launcher(["mpirun", "-np", "3", "a"])
    assert found is not None and str(found.layout(Layout(2, 2))) == "1x3"


def test_a_launcher_in_a_shell_script_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/bash\n# torchrun x\nset -e\ncd . && torchrun \\\n  --nnodes 2 a.py\n")
    found = launcher_in_script(["bash", str(script)])
    assert found is not None
    where, meant = found
    assert (where, meant.launcher, meant.command) == (str(script), "torchrun", ["python", "a.py"])
    assert meant.nodes == 2
    assert launcher_in_script(["python", "nowhere.sh", "/dev/null"]) is None
