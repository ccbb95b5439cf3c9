"""Ranks that wait for each other: for what, and for whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.scripts import run

pytestmark = pytest.mark.ranks

DELAY = 0.1  # seconds: many times what else happens on the machine
MOST = 0.9 * DELAY

# A loop that is slow in one place, on some ranks: `nap` is called everywhere.
LOOP = """
        PLACE, LATE = "{place}", {late}
        def nap(place):
            if place == PLACE and LATE:
                time.sleep({delay})
        class Slow(Dataset):
            def __len__(self):
                return 48 * world
            def __getitem__(self, n):
                nap("data set")
                return data[n % 40]
        all_reduce = dist.all_reduce
        def slow_all_reduce(*args, **kwargs):
            nap("before all_reduce")
            done = all_reduce(*args, **kwargs)
            nap("after all_reduce")
            return done
        if PLACE.endswith("all_reduce"):
            dist.all_reduce = slow_all_reduce
        def hook(state, bucket):
            nap("hook")
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            def done(future):
                nap("after hook")
                return future.value()[0] / world
            return work.get_future().then(done)
        dist.init_process_group("gloo")
        usual = dist.new_group()
        class Group(dist.ProcessGroup):
            group_name = "own"
            def __init__(self):
                super().__init__(rank, world)
            def size(self):
                return world
            def getBackendName(self):
                return "own"
            def allreduce(self, *args):
                nap("group")
                return usual.allreduce(*args)
            def allgather(self, *args):
                return usual.allgather(*args)
            def broadcast(self, *args):
                return usual.broadcast(*args)
        by_hand = PLACE.endswith("all_reduce")
        if not by_hand:
            model = DDP(model, process_group=Group() if PLACE == "group" else None)
        if PLACE.endswith("hook"):
            model.register_comm_hook(None, hook)
        sampler = torch.utils.data.DistributedSampler(Slow())
        for epoch in range(3):
            for x, y in DataLoader(Slow(), batch_size=6, sampler=sampler):
                nap("forward")
                mse_loss(model(x), y).backward()
                if by_hand:
                    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
                    dist.all_reduce(gradients)
                optimizer.step()
        dist.destroy_process_group()
        """


def delayed(tmp_path: Path, place: str, late: str = "rank == 1", ranks: int = 2) -> dict[str, Any]:
    """Parts of a step of ranks that are slow somewhere, and who is to blame."""
    delay = DELAY / 6 if place == "data set" else DELAY
    found = run(tmp_path, LOOP.format(place=place, late=late, delay=delay), ranks)
    assert found.samples(0) == found.samples(1) == [6] * 24
    told = found.timing()
    assert told.parts is not None
    assert sum(told.parts.values()) == pytest.approx(told.step_seconds)
    return {
        **told.parts,
        "rank": told.slowest_rank,
        "share": told.slowest_share,
        "part": told.slowest_part,
    }


def test_a_rank_that_computes_longer_is_a_straggler(tmp_path: Path) -> None:
    parts = delayed(tmp_path, "forward")
    assert parts["straggler"] >= MOST
    assert parts["rank"] == 1 and parts["share"] > 0.9 and parts["part"] == "forward"


def test_data_that_comes_late_to_one_rank(tmp_path: Path) -> None:
    parts = delayed(tmp_path, "data set")
    assert parts["data"] >= MOST
    assert parts["rank"] == 1 and parts["share"] > 0.9 and parts["part"] == "data"


@pytest.mark.parametrize(("place", "part"), [("data set", "data"), ("hook", "comm")])
def test_what_is_slow_for_all_ranks_is_the_fault_of_none(
    tmp_path: Path, place: str, part: str
) -> None:
    parts = delayed(tmp_path, place, late="True")
    assert parts[part] >= MOST
    assert parts["rank"] is None


@pytest.mark.parametrize(
    ("place", "ranks"),
    [
        ("hook", 2),
        ("after hook", 2),
        ("before all_reduce", 2),
        ("after all_reduce", 2),
        ("group", 2),
        pytest.param("hook", 4, marks=pytest.mark.soak),
        pytest.param("after hook", 4, marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_is_slow_in_an_exchange(tmp_path: Path, place: str, ranks: int) -> None:
    parts = delayed(tmp_path, place, ranks=ranks)
    assert parts["comm"] >= MOST
    assert parts["straggler"] < 2 * (DELAY - MOST)  # equal ranks wait for each other, too
    assert parts["rank"] == 1 and parts["share"] > 0.9 and parts["part"] == "comm"


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
def test_activations_that_are_recomputed_by_a_pass_within_a_pass(
    tmp_path: Path, is_first: bool
) -> None:
    """DDP waits at the end of the inner pass if the last gradients come from it."""
    script = f"""
        from torch.utils.checkpoint import checkpoint
        dist.init_process_group("gloo")
        class Recomputed(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
            def forward(self, x):
                if {is_first}:
                    x = checkpoint(self.first, x, use_reentrant=True)
                    return self.third(self.second(x))
                return checkpoint(self.third, self.second(self.first(x)), use_reentrant=True)
        torch.manual_seed(1)
        model = DDP(Recomputed(), find_unused_parameters=False)
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in DataLoader(data, batch_size=2):
            if rank == 1:
                time.sleep({DELAY})
            mse_loss(model(x.requires_grad_()).sum(1, keepdim=True), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        print("weights", sum(p.sum() for p in model.parameters()).item().hex())
        dist.destroy_process_group()
        """
    probed = run(tmp_path, script, 2)
    bare = run(tmp_path, script, 2, ALLRANKS_PROBE="off")
    assert probed.said("weights") == bare.said("weights") != []
    assert probed.samples(0) == [2] * 20
    assert sum(event["wait"] >= DELAY / 2 for event in probed.steps(0)) >= 17
    told = probed.timing()
    assert told.parts is not None
    assert told.parts["straggler"] >= MOST and told.slowest_rank == 1


def test_arriving_is_seen_when_a_parameter_gets_no_more_gradients(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        dist.init_process_group("gloo")
        class Heads(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(8, 1), nn.Linear(8, 1)
            def forward(self, x, both):
                return self.first(x) + self.last(x) if both else self.first(x)
        model = DDP(Heads(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step, (x, y) in enumerate(DataLoader(data, batch_size=2)):
            mse_loss(model(x, step < 10), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        2,
    )
    missing = [event["step"] for event in found.steps() if "arrive" not in event]
    assert missing in ([], [11])  # the one that shows it


def test_gradients_that_a_script_exchanges_itself(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        f"""
        dist.init_process_group("gloo")
        for x, y in DataLoader(data, batch_size=2):
            loss = mse_loss(model(x), y)
            if rank == 1:
                time.sleep({DELAY})
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
            optimizer.step()
            optimizer.zero_grad()
        dist.destroy_process_group()
        """,
        2,
    )
    told = found.timing()
    assert told.parts is not None
    assert told.parts["straggler"] >= MOST
    assert told.slowest_rank == 1
    assert found.samples(1) == [2] * 20


def test_sharded_parameters(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        f"""
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("gloo")
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in DataLoader(data, batch_size=2):
            if rank == 1:
                time.sleep({DELAY})
            mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        dist.destroy_process_group()
        """,
        2,
    )
    assert found.samples(0) == found.samples(1) == [2] * 20
    told = found.timing()
    assert told.parts is not None and told.slowest_rank == 1
    assert told.parts["straggler"] >= MOST
    # The others wait for the slow rank where its parameters are gathered.
    assert {"all-gather", "reduce-scatter"} <= set(told.exchanges)
    assert told.exchanges["all-gather"] >= MOST
    for event in found.steps():
        assert sum(event["exchanges"].values()) <= event["wait"] + 1e-5
