"""A job's text: YAML as people write it, read with lines, and refused with the place."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allranks.errors import AllranksError
from allranks.job.job import load_job
from allranks.job.yaml_lines import Dumper, parse_value, read_file, read_overrides

# A loaded machine is no failure.
unhurried = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_key_has_its_line() -> None:
    Path("job.yaml").write_text("a: 1\nb:\n  c: {d: 2,\n    e: 3}\n  f: [{g: 4}]\n")
    layer = read_file(Path("job.yaml"))
    lines = {".".join(path): place.line for path, place in layer.places.items() if path}
    assert lines == {"a": 1, "b": 2, "b.c": 3, "b.c.d": 3, "b.c.e": 4, "b.f": 5, "b.f.0.g": 5}
    assert layer.place(("b", "c", "x")).text == "job.yaml:3"
    assert layer.place(("x",)).text == "job.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("+3", 3),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("off", "off"),
        ("1:30:00", "1:30:00"),
        ("2026-11-15", "2026-11-15"),
        ("1_000", "1_000"),
        ("<<", "<<"),
        ("'3'", "3"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found, _ = parse_value(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("data", "what", "fix"),
    [
        (b"a: 1\nb: [1\nc: 2", "job.yaml:3:2: not valid YAML", "line 3"),
        (b"a: 1\n\tb: 2", "job.yaml:2:1: YAML does not allow a tab", "spaces"),
        (b"optimizer:\n\tlr: 2", "job.yaml:2:1: YAML does not allow a tab", "spaces"),
        (b"name: \xe9", "job.yaml:1:7: the byte 0xe9 is not UTF-8", "UTF-8"),
        (b"seed: 1\nname: x\x07", "job.yaml:2: ", "character"),
        (b"PK\0\0", "binary", "UTF-8"),
        ("seed: 1".encode("utf-16"), "binary", "UTF-8"),
        (b"x" * 2_000_000, "larger than", "YAML"),
        (b"seed: 1\nseed: 2", "job.yaml:2:1: not valid YAML: the key seed is already", "line 2"),
        (b"1: 2", "the key 1 is not text", "line 1"),
        (b"[a, b]: 2", "the key is not text", "line 1"),
        (b"- a", "job.yaml:1: a job file contains keys and values, not a list", "allranks init"),
        (b"hello", 'not the value "hello"', "allranks init"),
        (b"seed: 1\n---\nseed: 2", "not valid YAML", "line 2"),
        (b"options: !!python/object:os.x {}", "could not determine a constructor", "line 1"),
        (b"options: {a: !!timestamp 2020-01-01}", "could not determine a constructor", "line 1"),
        (b"options: &a {b: *a}", "refers to itself", "line 1"),
        (b"options: " + b"[" * 600, "nested too deeply", "line 1"),
        (b"seed: " + b"1" * 5000, "not valid YAML: Exceeds the limit", "line 1"),
        (
            b"options:\n  a: &a [1,1,1,1,1,1,1,1]\n"
            + b"".join(
                b"  %c: &%c [*%c,*%c,*%c,*%c,*%c,*%c]\n" % (n + 1, n + 1, *[n] * 6)
                for n in b"abcdefgh"
            ),
            "too many values",
            "line 2",
        ),
    ],
    ids=range(20),
)
def test_a_file_that_cannot_be_read(data: bytes, what: str, fix: str) -> None:
    Path("job.yaml").write_bytes(data)
    with pytest.raises(AllranksError) as caught:
        load_job(Path("job.yaml"))
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_a_file_that_is_not_there(folder: Path) -> None:
    with pytest.raises(AllranksError, match=r"no job file nothing\.yaml") as caught:
        load_job(Path("nothing.yaml"))
    assert "allranks init" in caught.value.fix
    with pytest.raises(AllranksError, match="is a folder") as caught:
        load_job(folder)
    assert "allranks init" in caught.value.fix
    (folder / "job.yaml").touch()
    with pytest.raises(AllranksError, match="is a folder") as caught:
        load_job(folder)
    assert caught.value.fix == f"write {folder / 'job.yaml'}"
    with pytest.raises(AllranksError, match="cannot be read"):
        load_job(folder / "job.yaml" / "below")


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
words = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)


@unhurried
@given(st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_what_is_dumped_reads_back(value: Any) -> None:
    text = yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    assert parse_value(text)[0] == value


@unhurried
@given(st.lists(words, min_size=1, max_size=4), scalars)
def test_an_override_sets_its_path(path: list[str], value: Any) -> None:
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True)
    layer = read_overrides([f"{'.'.join(path)}={text}"])
    found: Any = layer.values
    for part in path:
        found = found[part]
    assert found == value
