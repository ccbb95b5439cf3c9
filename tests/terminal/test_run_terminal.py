"""Progress bars of a script under `run` in a real terminal: the screen as under plain Python."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.terminal.conftest import Terminal

from allranks.run.folder import list_runs

pytestmark = pytest.mark.terminal

TQDM = """
import sys, time
from tqdm import tqdm

print("a terminal:", sys.stdout.isatty(), sys.stderr.isatty())
for epoch in tqdm(range(2), desc="epochs"):
    for step in tqdm(range(10), desc="steps", leave=False):
        time.sleep(0.02)
    tqdm.write(f"epoch {epoch} is over")
print("caf\\u00e9, and no newline", end="")
"""
RICH = """
import os, time
from rich.console import Console
from rich.progress import track

console = Console()
console.print(f"[bold red]colours[/], {console.width} columns, {os.get_terminal_size()}")
for step in track(range(10), description="steps"):
    time.sleep(0.02)
"""
LIGHTNING = """
import warnings
warnings.simplefilter("ignore")
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=8)
lightning.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False
).fit(Model(), data)
"""


def same_but_for_numbers(text: str) -> list[str]:
    """The lines of a screen; what depends on the clock, or fills up to the margin, is left out."""
    return [re.sub(r"[\d.:?-]+|[^\x00-\x7f]+|\s+", " ", line).strip() for line in text.splitlines()]


def ended(terminal: Terminal) -> str:
    terminal.wait("left 0")
    return terminal.tmux("capture-pane", "-p", "-S", "-100")


def run_both(terminal: Terminal, other: Terminal, folder: Path, text: str) -> tuple[str, str]:
    """The screens of a script under Python alone and under `allranks run`."""
    script = folder / "train.py"
    script.write_text(text)
    terminal.start_words(sys.executable, script, width=90)
    other.start(
        "run", "--layout", "1x1", "--runs", folder / "runs", "--", "python", script, width=90
    )
    return ended(terminal), ended(other)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(TQDM, id="tqdm"),
        pytest.param(RICH, id="rich"),
        pytest.param(LIGHTNING, id="lightning", marks=pytest.mark.soak),
    ],
)
def test_bars_look_as_they_do_under_plain_python(
    terminal: Terminal, other_terminal: Terminal, tmp_path: Path, text: str
) -> None:
    plain, ours = run_both(terminal, other_terminal, tmp_path, text)
    drawn = same_but_for_numbers(plain.partition("left 0")[0])
    first = same_but_for_numbers(ours)[1:]  # without the line that says what starts
    if drawn[-1] == "":
        drawn.pop()
    assert first[: len(drawn)] == drawn
    # Its log has every line once, in its last state.
    (run,) = list_runs(tmp_path / "runs")
    log = run.log(0, 0).read_text()
    assert "\r" not in log and "\x1b" not in log
    assert len(log.splitlines()) <= len(plain.splitlines()) + 3
