"""A checkpoint gives back every tensor, and loading one can run no code."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from allranks.errors import AllranksError
from allranks.run import claims
from allranks.run.claims import Claim
from allranks.run.commits import (
    MANIFEST,
    Commit,
    commit,
    commits,
    newest_whole,
    seal,
    with_checksum,
)
from allranks.run.events import EventLog, read_events
from allranks.train.checkpoint import (
    Checkpointer,
    Part,
    copy_on_one_core,
    load,
    named_parameters,
    share_of_parts,
    training_tensors,
)
from allranks.train.data import Progress
from allranks.train.storage import TensorReader

pytestmark = pytest.mark.usefixtures("alone")


class Tied(nn.Module):
    """Shared weights, a norm's buffers, a frozen layer, and a name that begins another's."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ParameterDict({"b": nn.Parameter(torch.randn(3))})
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(self.norm(self.second(self.first(x)))) * self.a["b"]
        return out


def trained(seed: int, name: str = "adamw", steps: int = 3) -> tuple[Tied, Any]:
    torch.manual_seed(seed)
    model = Tied()
    parameters = [p for p in model.parameters() if p.requires_grad]
    kinds: dict[str, Any] = {
        "adamw": lambda: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    }
    optimizer = kinds[name]()
    for _ in range(steps):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    log = EventLog(tmp_path / "rank-0.jsonl")
    yield log
    log.close()


def saver(folder: Path, model: nn.Module, optimizer: Any, log: EventLog) -> Checkpointer:
    group = dist.group.WORLD
    assert group is not None
    return Checkpointer(folder, model, optimizer, keep=2, group=group, log=log)


def saved(folder: Path, log: EventLog, step: int = 3, name: str = "adamw") -> Commit:
    checkpointer = saver(folder, *trained(0, name), log)
    checkpointer.save(Progress(step=step, epoch=1, position=5, samples=29), {"metrics": []})
    checkpointer.finish()
    checkpointer._thread.shutdown()
    return commits(folder)[0]


def reseal(commit: Commit) -> None:
    """Make the manifest agree with what is in the folder now, as a forger would."""
    manifest = json.loads((commit.path / MANIFEST).read_text())
    manifest["files"] = {
        path.name: seal(path) for path in commit.path.iterdir() if path.name != MANIFEST
    }
    (commit.path / MANIFEST).write_text(json.dumps(with_checksum(manifest)))


# --- There and back -----------------------------------------------------------------------------


def with_shared_buffer() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    buffer = torch.arange(3.0)
    for module in model:
        module.register_buffer("shared", buffer)
    return model


def test_a_buffer_of_two_modules_comes_back_where_it_has_become_two(
    tmp_path: Path, log: EventLog
) -> None:
    model = with_shared_buffer()
    checkpointer = saver(tmp_path / "checkpoints", model, torch.optim.SGD(model.parameters()), log)
    checkpointer.save(Progress(step=1), {"metrics": []})
    checkpointer.finish()
    checkpointer._thread.shutdown()
    other = with_shared_buffer()
    for module in other:
        module.shared = torch.zeros(3)  # as `other.to("cuda")` does
    load(commits(tmp_path / "checkpoints")[0], other, torch.optim.SGD(other.parameters()))
    assert [buffer.tolist() for buffer in other.buffers()] == [[0.0, 1.0, 2.0]] * 2


def test_a_state_that_is_no_tensor_is_refused() -> None:
    class Stateful(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 1}

    with pytest.raises(AllranksError, match="state dict has _extra_state, a dict"):
        named_parameters(Stateful(2, 2))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_everything_comes_back_to_the_bit(tmp_path: Path, log: EventLog, name: str) -> None:
    commit = saved(tmp_path / "checkpoints", log, name=name)
    assert commit.damage() is None
    expected = training_tensors(*trained(0, name))
    model, optimizer = trained(1, name, steps=0)
    progress, manifest = load(commit, model, optimizer)
    assert progress == Progress(step=3, epoch=1, position=5, samples=29)
    assert manifest["world_size"] == 1
    found = training_tensors(model, optimizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert model.second.weight is model.first.weight


def test_training_goes_on_to_the_bit(tmp_path: Path, log: EventLog) -> None:
    commit = saved(tmp_path / "checkpoints", log)
    one = trained(0)
    other = trained(1, steps=1)
    load(commit, *other)
    for model, optimizer in (one, other):
        torch.manual_seed(9)
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    expected, found = training_tensors(*one), training_tensors(*other)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_what_is_saved_is_what_was_there_when_save_was_called(
    tmp_path: Path, log: EventLog
) -> None:
    folder = tmp_path / "checkpoints"
    model, optimizer = trained(0)
    expected = {key: value.clone() for key, value in training_tensors(model, optimizer).items()}
    checkpointer = saver(folder, model, optimizer, log)
    checkpointer.save(Progress(step=3), {"metrics": []})
    for buffer in model.buffers():
        buffer.zero_()  # the next forward pass, while the parameters are being copied
    for parameter in model.frozen.parameters():
        parameter.data.zero_()
    checkpointer.finish_copying()
    for value in training_tensors(model, optimizer).values():
        value.zero_()  # the next update, while the files are written
    checkpointer.finish()
    other = trained(1)
    load(commits(folder)[0], *other)
    found = training_tensors(*other)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    checkpointer._thread.shutdown()


@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "float8_e5m2", "bool", "int64", "complex64", "complex128"]
)
def test_copies_are_exact_whatever_the_type_and_the_strides(name: str) -> None:
    turned = torch.randn(6, 5, 4).permute(2, 0, 1)[:, ::2]
    for source in (torch.randn(3, 4, 5), turned, torch.ones(())):
        source = source.to(getattr(torch, name))
        target = torch.zeros_like(source)
        copy_on_one_core(target, source)
        assert target.tolist() == source.tolist()


def test_the_manifest_and_the_event_tell_of_it_without_torch(tmp_path: Path, log: EventLog) -> None:
    manifest = saved(tmp_path / "checkpoints", log).manifest()
    assert {key: manifest[key] for key in ("step", "epoch", "position", "samples")} == {
        "step": 3,
        "epoch": 1,
        "position": 5,
        "samples": 29,
    }
    log.flush()
    (event,) = (event for event in read_events(log.path) if event["event"] == "checkpoint")
    assert event["step"] == 3
    assert 0 <= event["stall"] <= event["seconds"]


def test_what_was_recorded_up_to_a_checkpoint_is_on_disk_before_it_is(
    tmp_path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is killed right after the commit is not asked for these events again."""
    on_disk: list[int] = []

    def kill_here(*args: Any, **options: Any) -> None:
        on_disk.extend(event["step"] for event in read_events(log.path))
        commit(*args, **options)

    monkeypatch.setattr("allranks.run.commits.commit", kill_here)
    log._closing.set()  # nobody else writes them
    for step in (1, 2, 3, 4):
        log.write("step", step=step)
    checkpointer = saver(tmp_path / "checkpoints", *trained(0), log)
    checkpointer.save(Progress(step=3), {"metrics": []})
    checkpointer.finish()
    checkpointer._thread.shutdown()
    assert on_disk == [1, 2, 3]


def test_a_step_is_saved_once_and_only_the_newest_are_kept(tmp_path: Path, log: EventLog) -> None:
    folder = tmp_path / "checkpoints"
    checkpointer = saver(folder, *trained(0), log)
    for step in (1, 2, 2, 3):
        checkpointer.save(Progress(step=step), {"metrics": []})
    checkpointer.finish()
    checkpointer._thread.shutdown()
    assert [commit.step for commit in commits(folder)] == [3, 2]
    log.flush()
    assert [event["step"] for event in read_events(log.path)] == [1, 2, 3]


def test_a_write_that_fails_is_told_when_asked_and_the_old_one_stays(
    tmp_path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    checkpointer = saver(folder, *trained(0), log)
    checkpointer.save(Progress(step=1), {"metrics": []})
    checkpointer.finish()
    assert not checkpointer.failed

    def full(path: Path, crc32: int | None = None) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("allranks.run.commits.seal", full)
    checkpointer.save(Progress(step=2), {"metrics": []})
    with pytest.raises(AllranksError, match="No space left") as refusal:
        checkpointer.finish()
    checkpointer._thread.shutdown()
    assert refusal.value.exit_code == 1
    found, damaged = newest_whole(folder)
    assert found is not None
    assert (found.step, damaged) == (1, [])


def test_who_lost_the_run_is_told_so_and_leaves_nothing_half_written(
    tmp_path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the newer attempt has removed what it was writing, which looks like a lost disk."""
    folder = tmp_path / "checkpoints"
    monkeypatch.setenv(claims.VARIABLE, "0")
    assert claims.take(tmp_path / "claims", Claim(number=0))
    checkpointer = saver(folder, *trained(0), log)

    def taken(path: Path, crc32: int | None = None) -> None:
        claims.take(tmp_path / "claims", Claim(number=1))
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr("allranks.run.commits.seal", taken)
    checkpointer.save(Progress(step=2), {"metrics": []})
    with pytest.raises(AllranksError, match="has lost the run to process"):
        checkpointer.finish()
    checkpointer._thread.shutdown()
    assert list(folder.iterdir()) == []


# --- Who writes what ----------------------------------------------------------------------------


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 511)), max_size=20),
    world_size=st.integers(1, 9),
)
def test_every_part_is_written_once_by_a_rank_that_has_it_and_the_load_is_even(
    sizes: list[tuple[int, int]], world_size: int
) -> None:
    everywhere = (1 << world_size) - 1
    holders = [mask & everywhere or everywhere for _, mask in sizes]  # a bit for each rank
    held: list[dict[Part, int]] = [
        {
            (f"t{i}", (0,)): size
            for i, ((size, _), mask) in enumerate(zip(sizes, holders, strict=True))
            if mask >> rank & 1
        }
        for rank in range(world_size)
    ]
    shares = [share_of_parts(held, rank) for rank in range(world_size)]
    assert sorted(part for share in shares for part in share) == sorted(
        {part for parts in held for part in parts}
    )
    assert all(set(share) <= set(parts) for share, parts in zip(shares, held, strict=True))
    if all(mask == everywhere for mask in holders):
        loads = [sum(held[0][part] for part in share) for share in shares]
        assert max(loads) - min(loads) <= max((size for size, _ in sizes), default=0)


# --- What is refused ----------------------------------------------------------------------------


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def test_a_malicious_metadata_is_refused_and_runs_nothing(tmp_path: Path, log: EventLog) -> None:
    commit = saved(tmp_path / "checkpoints", log)
    (commit.path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "owned")))
    reseal(commit)
    assert commit.damage() is None
    with pytest.raises(AllranksError, match=r"asks for (posix|nt)\.system") as refusal:
        load(commit, *trained(1))
    assert "do not trust" in refusal.value.fix
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch", "Tensor"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("pathlib", "PosixPath.unlink"),
        ("collections", "OrderedDict.fromkeys"),
    ],
)
def test_no_other_name_is_let_in(tmp_path: Path, module: str, name: str) -> None:
    # Protocol 4's STACK_GLOBAL: the only opcode that takes dotted names.
    text = [b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)]
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + b"".join(text) + b"\x93.")
    with pytest.raises(AllranksError, match="which no checkpoint contains"):
        TensorReader(tmp_path, {}).read_metadata()


def test_metadata_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(AllranksError, match="is not a checkpoint's"):
        TensorReader(tmp_path, {}).read_metadata()


def test_entries_that_are_not_tensors_are_refused(tmp_path: Path, log: EventLog) -> None:
    commit = saved(tmp_path / "checkpoints", log)
    for path in commit.path.iterdir():
        if path.name != MANIFEST:
            path.unlink()
    state = {"model.first.weight": torch.zeros(4, 4), "payload": Bomb(tmp_path / "owned")}
    save(state, checkpoint_id=str(commit.path))
    reseal(commit)
    with pytest.raises(AllranksError, match="BytesStorageMetadata"):
        load(commit, *trained(1))
    assert not (tmp_path / "owned").exists()


def test_files_that_the_manifest_does_not_list_are_not_read(tmp_path: Path, log: EventLog) -> None:
    commit = saved(tmp_path / "checkpoints", log)
    manifest = json.loads((commit.path / MANIFEST).read_text())
    del manifest["files"]["__0_0.distcp"]
    (commit.path / MANIFEST).write_text(json.dumps(with_checksum(manifest)))
    with pytest.raises(AllranksError, match=r"names __0_0\.distcp, an unknown file"):
        load(commit, *trained(1))


def test_a_model_of_another_shape_is_refused(tmp_path: Path, log: EventLog) -> None:
    commit = saved(tmp_path / "checkpoints", log)
    model, optimizer = trained(1)
    model.frozen = nn.Linear(4, 5)
    with pytest.raises(AllranksError, match=r"model.frozen.weight is \(5, 4\)") as refusal:
        load(commit, model, optimizer)
    assert "options" in refusal.value.fix
