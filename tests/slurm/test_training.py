"""Jobs train on the cluster as they do on one machine, tasks and unchanged scripts alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.faults import losses
from tests.forked import run_forked
from tests.slurm.live import Cluster
from tests.slurm.runs import send

pytestmark = pytest.mark.slurm

LIGHTNING = """
import argparse
import lightning
import torch

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int)
parser.add_argument("--gpus", type=int)
wanted = parser.parse_args()
points = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(points, (points[:, 0] > 0).long())
trainer = lightning.Trainer(
    accelerator="cpu", devices=wanted.gpus, num_nodes=wanted.nodes,
    strategy="ddp" if wanted.gpus * wanted.nodes > 1 else "auto", max_epochs=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=16))
print("trained", trainer.global_rank, "of", trainer.world_size, "steps", trainer.global_step)
"""

OFTEN = pytest.mark.soak


@pytest.mark.parametrize(
    "layout",
    ["2x2", *(pytest.param(layout, marks=OFTEN) for layout in ("1x1", "1x2", "4x1"))],
)
def test_a_task_has_the_losses_that_it_has_on_one_machine(
    layout: str, cluster: Cluster, tmp_path: Path
) -> None:
    arguments = ["--layout", layout, "steps=150", "log_every=1", "preflight=false"]
    sent = send(cluster, tmp_path, *arguments)
    (tmp_path / "here").mkdir()
    here = run_forked("run", "--json", *arguments, cwd=tmp_path / "here", timeout=200)
    assert here.returncode == 0, here.stderr
    line = sent.wait_for_end(200)
    assert (line["state"], line["step"], line["layout"]) == ("finished", 150, layout)
    expected = losses(Path(json.loads(here.stdout)["run_dir"]))
    found = sent.losses()
    assert found.keys() == expected.keys()
    assert all(abs(found[s] - expected[s]) <= 1e-6 * abs(expected[s]) for s in expected)
    assert sent.jobs == line["jobs"]


@pytest.mark.parametrize(
    ("layout", "launcher"),
    [
        ("2x1", "srun"),
        *(
            pytest.param(layout, launcher, marks=OFTEN)
            for layout in ("1x1", "1x2", "4x1", "2x2")
            for launcher in ("torchrun", "srun")
        ),
    ],
)
def test_an_unchanged_lightning_script_trains(
    layout: str, launcher: str, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING)
    command = ["python", "train.py", "--nodes", "{nodes}", "--gpus", "{gpus}"]
    options = ["--layout", layout, f"launcher={launcher}", "preflight=false"]
    sent = send(cluster, tmp_path, *options, "--", *command)
    line = sent.wait_for_end(250)
    assert line["state"] == "finished", sent.log()
    nodes, gpus = (int(number) for number in layout.split("x"))
    ranks = nodes * gpus
    for rank in range(ranks):
        log = sent.run.log(0, rank).read_text()
        assert f"trained {rank} of {ranks} steps {256 // 16 // ranks}" in log
