"""The file that `allranks init` writes is the bundled job, explained."""

import json
from pathlib import Path

import pytest

from allranks.errors import AllranksError
from allranks.job.job import Job, json_schema, load_job
from allranks.job.problems import key_paths
from allranks.job.template import commented_job, write_job


def test_it_loads_to_the_bundled_job(tmp_path: Path) -> None:
    written = write_job(tmp_path, force=False)
    assert written == {
        "job": str(tmp_path / "job.yaml"),
        "schema": str(tmp_path / "job.schema.json"),
    }
    assert load_job(tmp_path / "job.yaml") == load_job(None)
    assert json.loads((tmp_path / "job.schema.json").read_text()) == json_schema()


def test_every_key_is_there_and_explained() -> None:
    text = commented_job()
    assert text.startswith("# yaml-language-server: $schema=job.schema.json\n")
    lines = text.splitlines()[2:]
    assert all("  # " in line for line in lines)
    named = [line.lstrip("# ").partition(":")[0] for line in lines]
    # `compress` is null, so its own keys have no line.
    expected = [key for key in key_paths(json_schema()) if not key.startswith("compress.")]
    assert named == [key.rpartition(".")[2] for key in expected]
    assert max(map(len, lines)) <= 112


def test_what_is_commented_out_works_in_place(tmp_path: Path) -> None:
    lines = commented_job().splitlines()
    steps = [
        line.removeprefix("# ") if line.startswith(("# steps", "# batch_size_per_rank")) else line
        for line in lines
        if not line.startswith(("epochs", "batch_size:"))
    ]
    file = tmp_path / "job.yaml"
    file.write_text("\n".join(steps))
    job = load_job(file)
    assert (job.steps, job.epochs, job.batch_size_per_rank) == (1000, None, 32)
    starts = ("# command", "# launcher", "# last", "# resume")
    file.write_text("\n".join(line[2:] for line in lines if line.startswith(starts)))
    assert load_job(file).argv == ["python", "train.py"]


def test_nothing_is_overwritten_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: mine\n")
    with pytest.raises(AllranksError, match="already exist") as refusal:
        write_job(tmp_path, force=False)
    assert "--force" in refusal.value.fix
    assert sorted(file.name for file in tmp_path.iterdir()) == ["job.yaml"]
    write_job(tmp_path, force=True)
    assert load_job(tmp_path / "job.yaml").name == "spiral"


def test_a_folder_is_made_or_refused(tmp_path: Path) -> None:
    write_job(tmp_path / "new" / "folder", force=False)
    (tmp_path / "file").touch()
    with pytest.raises(AllranksError, match="cannot be written"):
        write_job(tmp_path / "file", force=False)


def test_the_schema_describes_every_key() -> None:
    schema = json_schema()
    for part in (schema, *schema["$defs"].values()):
        assert part["additionalProperties"] is False
        for value in part["properties"].values():
            assert value["description"]
    assert list(schema["properties"]) == list(Job.model_fields)
    assert schema["properties"]["precision"]["enum"] == ["auto", "fp32", "tf32", "fp16", "bf16"]
    assert schema["properties"]["timeout"]["default"] == "30m"
    assert schema["properties"]["layout"]["default"] == "1x1"


@pytest.mark.parametrize("word", ["task=language", "lm.yaml"])
def test_a_key_or_a_job_file_is_not_taken_for_a_folder(tmp_path: Path, word: str) -> None:
    with pytest.raises(AllranksError, match="takes a folder"):
        write_job(tmp_path / word, force=False)
    assert not [*tmp_path.iterdir()]
