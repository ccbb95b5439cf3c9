"""The probe finds the steps, samples and phases of scripts of every kind, and changes nothing."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest
from tests.commandline import run_allranks
from tests.forked import run_forked
from tests.scripts import MODEL, Recorded, run, run_script

from allranks.run.folder import RunDir, list_runs
from allranks.run.record import samples_per_epoch
from allranks.timing.steps import timing

pytestmark = pytest.mark.ranks

# What a step is, and on how many samples.


def test_a_plain_loop_with_a_validation_between_its_epochs(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        for epoch in range(3):
            for x, y in DataLoader(data, batch_size=16):
                train(x, y)
            with torch.no_grad():
                for x, y in DataLoader(data, batch_size=5):
                    model(x)
        """,
    )
    assert found.samples() == [16, 16, 8] * 3
    assert samples_per_epoch(found.run) == 40
    assert [event["step"] for event in found.steps()] == list(range(1, 10))
    seen = found.events("batch")
    assert {event["content"] for event in seen if event["samples"] == 8}


def test_gradient_accumulation(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        for n, (x, y) in enumerate(DataLoader(data, batch_size=4), start=1):
            mse_loss(model(x), y).backward()
            if n % 5 == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
    )
    assert found.samples() == [20, 20]


def test_all_micro_batches_of_a_step_fetched_before_the_first(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        loader = iter(DataLoader(data, batch_size=4))
        for _ in range(2):
            for x, y in [next(loader) for _ in range(5)]:
                mse_loss(model(x), y).backward()
            optimizer.step()
        """,
    )
    assert found.samples() == [20, 20]


def test_a_batch_fetched_ahead(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        loader = iter(DataLoader(data, batch_size=12))
        ahead = next(loader)
        while ahead is not None:
            batch, ahead = ahead, next(loader, None)
            train(*batch)
        """,
    )
    assert found.samples() == [12, 12, 12, 4]


def test_two_optimizers_make_one_step(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        critic = nn.Linear(8, 1)
        second = torch.optim.SGD(critic.parameters(), lr=0.1)
        for x, y in DataLoader(data, batch_size=4):
            mse_loss(critic(x), y).backward()
            mse_loss(critic(-x), y).backward()
            second.step()
            train(x, y)
        """,
    )
    assert found.samples() == [4] * 10


def test_an_optimizer_for_every_parameter_steps_in_the_backward_pass(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(10)])
        own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for p in own:
            p.register_post_accumulate_grad_hook(lambda p: own[p].step())
        for x, y in DataLoader(data, batch_size=4):
            model(x).sum().backward()
        """,
    )
    assert found.samples() == [4] * 10
    # In the middle: a machine that does something else for a moment does so in any phase.
    shares = [event["other"] / event["seconds"] for event in found.steps()[1:]]
    assert statistics.median(shares) < 0.3


def test_a_scaler_that_skips_a_step(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        scaler = torch.amp.GradScaler("cpu")
        for n, (x, y) in enumerate(DataLoader(data, batch_size=8)):
            with torch.autocast("cpu", enabled=False):  # not every CPU may compute in bf16
                loss = mse_loss(model(x), y) * (float("inf") if n == 1 else 1)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
    )
    assert found.samples() == [8, 16, 8, 8]


def test_a_closure_that_computes_the_gradients_several_times(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        for x, y in DataLoader(data, batch_size=10):
            def closure():
                optimizer.zero_grad()
                loss = mse_loss(model(x), y)
                loss.backward()
                return loss
            optimizer.step(closure)
        """,
    )
    assert found.samples() == [10] * 4


def test_workers_that_stay_and_a_last_batch_that_is_shorter(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        loader = DataLoader(data, batch_size=12, num_workers=2, persistent_workers=True,
                            multiprocessing_context="fork")
        for epoch in range(2):
            for x, y in loader:
                train(x, y)
        """,
    )
    assert found.samples() == [12, 12, 12, 4] * 2
    assert [event["epoch"] for event in found.steps()] == [1] * 4 + [2] * 4
    [loader] = found.events("loader")
    known = {"num_workers": 2, "batch_size": 12, "pin_memory": False, "persistent_workers": True}
    assert known.items() <= loader.items() and loader["multiprocessing_context"] == "fork"


def test_an_iterable_data_set(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        class Stream(IterableDataset):
            def __iter__(self):
                return (data[n] for n in range(40))
        for x, y in DataLoader(Stream(), batch_size=12):
            train(x, y)
        """,
    )
    assert found.samples() == [12, 12, 12, 4]
    [loader] = found.events("loader")
    assert loader["iterable"] is True


def test_no_loader_at_all(tmp_path: Path) -> None:
    """The model tells how many samples it is given, once it is known: from the second step on."""
    found = run(
        tmp_path,
        """
        for n in range(5):
            train(torch.randn(6, 8), torch.randn(6, 1))
            with torch.no_grad():
                model(torch.randn(100, 8))
        """,
    )
    assert found.samples()[1:] == [6] * 4


def test_a_model_that_is_watched_can_be_copied_saved_and_compiled_whole(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        import copy
        whole = torch.compile(model, backend="eager", fullgraph=True)
        for n in range(4):
            train(torch.randn(6, 8), torch.randn(6, 1))
            torch.save(model, "model.pt")
            for same in (copy.deepcopy(model), torch.load("model.pt", weights_only=False)):
                same(torch.randn(100, 8))
            whole(torch.randn(6, 8))
        """,
    )
    assert found.samples()[1:] == [6] * 3


def test_recomputed_activations_are_not_another_pass(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        from torch.utils.checkpoint import checkpoint
        for x, y in DataLoader(data, batch_size=8):
            hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
            mse_loss(model[2](hidden), y).backward()
            optimizer.step()
        """,
    )
    assert found.samples() == [8] * 5
    assert all(event["backward"] > 0 for event in found.steps())


def test_compiled_models_and_steps_are_not_compiled_again(tmp_path: Path) -> None:
    script = """
        from torch._dynamo.utils import counters
        def epochs(step):
            for epoch in range(4):
                for x, y in DataLoader(data, batch_size=8):
                    step(x, y)
            breaks = sum(counters["graph_break"].values())
            print("compiled", counters["frames"]["ok"], counters["stats"]["unique_graphs"], breaks)
        plain, model = model, torch.compile(model, backend="aot_eager")
        epochs(train)
        model = plain
        epochs(torch.compile(train, backend="aot_eager"))
        """
    probed = run(tmp_path, script)
    bare = run(tmp_path, script, ALLRANKS_PROBE="off")
    assert probed.samples() == [8] * 40
    assert bare.steps() == []
    assert len(bare.said("compiled")) == 2
    for with_probe, without in zip(probed.said("compiled"), bare.said("compiled"), strict=True):
        now, before = ([int(word) for word in line.split()] for line in (with_probe, without))
        # The hooks of the update, which the compiler does not look into, break it in two places,
        # and a trace that lasts meanwhile adds its own.
        assert all(a <= b + 4 for a, b in zip(now, before, strict=True)), (now, before)


def test_a_script_computes_the_same_with_and_without(tmp_path: Path) -> None:
    script = """
        dist.init_process_group("gloo")
        model = DDP(model)
        for epoch in range(5):
            for x, y in DataLoader(data, batch_size=4, shuffle=True):
                loss = train(x, y)
        print("loss", loss.item().hex(), sum(p.sum() for p in model.parameters()).item().hex())
        dist.destroy_process_group()
        """
    probed = run(tmp_path, script, 2)
    bare = run(tmp_path, script, 2, ALLRANKS_PROBE="off")
    assert len(probed.steps()) == 50 and bare.steps() == []
    for rank in range(2):
        assert probed.said("loss", rank) == bare.said("loss", rank) != []


def test_a_watched_model_is_copied_saved_and_scripted_as_without(tmp_path: Path) -> None:
    """A script without a loader: its model has a hook of the probe's."""
    script = """
        import copy, io, pickle, warnings
        warnings.simplefilter("ignore")
        for _ in range(3):
            train(torch.randn(6, 8), torch.randn(6, 1))
        torch.set_grad_enabled(False)
        x, hooks = torch.randn(2, 8), []
        for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            print("same", torch.equal(one(x), model(x)), sorted(vars(one)), one._forward_pre_hooks,
                  one._forward_pre_hooks_with_kwargs)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loaded.register_forward_pre_hook(lambda module, args: hooks.append(len(args)))
        print("loaded", torch.equal(loaded(x), model(x)), hooks)
        for make in (torch.jit.script, lambda one: torch.jit.trace(one, x)):
            for one in (model, copy.deepcopy(model)):
                print("script", torch.equal(make(one)(x), model(x)))
        torch.set_grad_enabled(True)
        for _ in range(2):
            train(torch.randn(6, 8), torch.randn(6, 1))
        """
    probed = run(tmp_path, script)
    bare = run(tmp_path, script, ALLRANKS_PROBE="off")
    assert probed.samples()[1:] == [6] * 4
    for word, times in (("same", 2), ("loaded", 1), ("script", 4)):
        assert probed.said(word) == bare.said(word)
        assert len(bare.said(word)) == times and "False" not in "".join(bare.said(word))


def test_loaders_stay_as_the_script_made_them(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        import copy, pickle
        class Strict(DataLoader):
            is_made = False
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.is_made = True
            def __setattr__(self, name, value):
                if self.is_made and name != "_iterator":
                    raise AttributeError(name)
                super().__setattr__(name, value)
            def __eq__(self, other):  # and so it has no hash
                return self is other
        loader = Strict(data, batch_size=8)
        before = sorted(vars(loader))
        for epoch in range(2):
            for x, y in loader:
                train(x, y)
        print("same", sorted(vars(loader)) == before)
        usual = DataLoader(data, batch_size=8)
        next(iter(usual))
        print("same", b"allranks" not in pickle.dumps(usual), len(copy.deepcopy(usual)))
        """,
    )
    assert found.said("same") == ["True", "True 5"]
    assert found.samples() == [8] * 10


# Scripts that are not as they should be.


def test_a_script_that_never_steps_leaves_no_step(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        for x, y in DataLoader(data, batch_size=8):
            mse_loss(model(x), y).backward()
        """,
    )
    assert found.steps() == []


def test_a_script_that_fails_keeps_its_steps(tmp_path: Path) -> None:
    text = (
        MODEL
        + "for x, y in DataLoader(data, batch_size=8):\n    train(x, y)\nraise OSError('no')\n"
    )
    found = run_script(tmp_path, text)
    assert found.exits == [1]
    assert found.samples() == [8] * 5
    assert "OSError: no" in found.log()


@pytest.mark.parametrize("part", ["Loader.fetched", "SampleCounter.take"])
def test_a_probe_that_fails_says_so_once_and_the_script_goes_on(part: str, tmp_path: Path) -> None:
    text = MODEL + (
        "import allranks.probe.samples as samples\n"
        "def broken(*_): raise KeyError('broken')\n"
        f"samples.{part} = broken\n"
        "for x, y in DataLoader(data, batch_size=8):\n"
        "    print('loss', train(x, y).item())\n"
    )
    found = run_script(tmp_path, text)
    assert found.exits == [0]
    assert len(found.said("loss")) == 5
    assert [line for line in found.log().splitlines() if "allranks" in line] == [
        "allranks: the probe is off: KeyError: 'broken'"
    ]


def test_a_forked_process_that_trains_is_not_this_rank(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        x, y = data[:8]
        train(x, y)
        train(x, y)
        if os.fork() == 0:
            for _ in range(5):
                train(x, y)
            raise SystemExit
        os.wait()
        train(x, y)
        """,
    )
    assert len(found.steps()) == 3


def test_ranks_that_a_script_starts_itself_have_a_file_each(tmp_path: Path) -> None:
    found = run_script(
        tmp_path,
        MODEL
        + """
import torch.multiprocessing as mp
def main(number):
    from allranks.probe.start import start
    start()  # as Python does at the start of any process that a rank starts
    dist.init_process_group("gloo", rank=number, world_size=2)
    for x, y in DataLoader(data, batch_size=8 + number):
        train(x, y)
    dist.destroy_process_group()
if __name__ == "__main__":
    processes = [mp.get_context("fork").Process(target=main, args=(n,)) for n in range(2)]
    [process.start() for process in processes]
    [process.join() for process in processes]
""",
    )
    assert found.exits == [0], found.log()
    assert found.samples(0) == [8] * 5
    assert found.samples(1) == [9, 9, 9, 9, 4]


# Ranks that never meet, or do not all step.


def test_ranks_that_never_meet(tmp_path: Path) -> None:
    script = """
        for epoch in range(100):
            for x, y in DataLoader(data, batch_size=8):
                train(x, y)
        """
    found = run(tmp_path, script, 2, ALLRANKS_MEASURE="20")
    told = found.timing()
    assert told.ranks == 2 and told.slowest_rank is None
    assert len(found.steps(0)) < 500  # it waits a hundred at most for steady ones


def test_steps_on_one_rank_only_end_both_without_a_failure(tmp_path: Path) -> None:
    text = MODEL + (
        "dist.init_process_group('gloo')\n"
        "model = DDP(model)\n"
        "for n in range(100_000):\n"
        "    mse_loss(model(torch.randn(6, 8)), torch.randn(6, 1)).backward()\n"
        "    if rank == 0:\n"
        "        optimizer.step()\n"
        "    time.sleep(0.01)\n"
    )
    found = run_script(tmp_path, text, 2, env={"ALLRANKS_MEASURE": "30"})
    assert found.exits == [0, 0], found.log(1)
    assert len(found.steps(0)) >= 30 and found.steps(1) == []
    assert found.log(0) == ""
    said = found.log(1).splitlines()
    assert said == [
        f"allranks: this rank ends here: rank 0 has made {len(found.steps(0))} steps, this one none"
    ]


# As a user starts it.

SCRIPT = """
import atexit, json, os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
torch.set_num_threads(1)
dist.init_process_group("gloo")
data = TensorDataset(torch.randn(640, 64), torch.randn(640, 1))
model = DistributedDataParallel(torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
ends = []
watch = f"watch-{os.environ['RANK']}.json"
atexit.register(lambda: open(watch, "w").write(json.dumps(ends)))
optimizer.register_step_post_hook(lambda *_: ends.append(time.perf_counter()))
for epoch in range(100_000):
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_measurement_ends_the_script_after_the_same_step_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = run_forked(
        *("run", "--layout", "1x2", "--", sys.executable, "train.py"),
        cwd=tmp_path,
        env={"ALLRANKS_MEASURE": "30"},
        timeout=100,
    )
    [folder] = list_runs(tmp_path / "runs")
    logs = [folder.log(0, rank).read_text() for rank in range(2)]
    assert ran.returncode == 0, ran.stderr + "".join(logs)
    assert not any("allranks" in log for log in logs)
    found = timing(folder)
    assert found is not None and found.ranks == 2
    assert found.num_steps >= 30
    ends = [json.loads((tmp_path / f"watch-{rank}.json").read_text()) for rank in range(2)]
    assert len(ends[0]) == len(ends[1]) == found.last_step
    watch = ends[0][found.last_step - 1] - ends[0][found.first_step - 2]
    expected = 2 * 16 * found.num_steps / watch
    assert found.samples_per_second == pytest.approx(expected, rel=0.03)
    assert found.parts is not None
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds)


LIGHTNING = """
import torch, lightning as L
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)
    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
trainer = L.Trainer(max_steps=20, accumulate_grad_batches=2, accelerator="cpu", devices=1,
                    logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Module(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=32))
"""


def test_lightning(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING)
    ran = run_allranks(
        *("run", "--layout", "1x1", "--", sys.executable, "train.py"), cwd=tmp_path, timeout=100
    )
    [folder] = list_runs(tmp_path / "runs")
    assert ran.returncode == 0, ran.stderr
    found = Recorded(RunDir(folder.path), [0])
    assert "allranks" not in found.log()
    assert found.samples() == [8] * 20
    assert all(event["forward"] and event["backward"] for event in found.steps())
