"""Tasks are described from their source: nothing is imported, least of all torch."""

import sys
from pathlib import Path

import pytest

from allranks.errors import AllranksError
from allranks.job.task_source import TaskSource, find_task
from allranks.tasks import BUNDLED

TASK = '''
"""A task."""
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar
import a_module_that_does_not_exist
from allranks.tasks import Task
raise RuntimeError("imported")

@dataclass
class Mine(Task):
    size: str = "tiny"
    _: KW_ONLY
    width: "int" = 3
    seen: list[int] = field(init=False)
    shared: ClassVar[int] = 1
    defaults: ClassVar[dict[str, object]] = {"batch_size": 8, "optimizer": {"lr": 0.1}}
    note = "not annotated: not a field"

class Plain(Task):
    defaults = {"steps": 5}

@dataclass
class Child(Mine):
    depth: int = 2
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str = TASK) -> None:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def refusal(name: str) -> AllranksError:
    with pytest.raises(AllranksError) as caught:
        find_task(name)
    assert caught.value.fix
    return caught.value


def test_a_class_in_the_current_folder() -> None:
    write("mine.py")
    source = find_task("mine:Mine")
    assert source.path == "mine:Mine"
    assert source.defaults == {"batch_size": 8, "optimizer": {"lr": 0.1}}
    assert source.options == ("size", "width")
    assert "mine" not in sys.modules


@pytest.mark.parametrize("package", [True, False], ids=["package", "namespace"])
def test_a_class_in_packages(package: bool) -> None:
    write("outer_tasks/inner/mine.py")
    if package:
        write("outer_tasks/__init__.py", "raise RuntimeError")
        write("outer_tasks/inner/__init__.py", "")
    assert find_task("outer_tasks.inner.mine:Mine").options == ("size", "width")
    assert not any(name.startswith("outer_tasks") for name in sys.modules)


def test_the_current_folder_comes_before_sys_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("other/mine.py", "class Mine: defaults = {'steps': 1}")
    monkeypatch.syspath_prepend(str(folder / "other"))
    assert find_task("mine:Mine").defaults == {"steps": 1}
    write("mine.py", "class Mine: defaults = {'steps': 2}")
    assert find_task("mine:Mine").defaults == {"steps": 2}


def test_options_that_cannot_be_told() -> None:
    write("mine.py")
    assert find_task("mine:Plain") == TaskSource("mine:Plain", {"steps": 5}, None)
    write("other.py", "import x\nclass Mine(x.Base):\n    y: int = 1")
    assert find_task("other:Mine").options is None


def test_a_derived_class_inherits() -> None:
    write("mine.py")
    child = find_task("mine:Child")
    assert child.defaults["batch_size"] == 8
    assert child.options == ("size", "width", "depth")
    write("again.py", "from mine import Child\nclass Again(Child): pass")
    assert find_task("again:Again").options == child.options
    write("own.py", "from mine import Mine\nclass Own(Mine):\n    def __init__(self): pass")
    assert find_task("own:Own").options is None


def test_a_class_that_is_exported_again() -> None:
    write("package/__init__.py", "from .deep.mine import Mine as Exported, Missing")
    write("package/deep/mine.py", TASK)
    source = find_task("package:Exported")
    assert source.path == "package:Exported"
    assert source.options == ("size", "width")
    assert find_task("package:Missing").options is None  # importing it will tell


def test_a_circle_of_exports_ends() -> None:
    write("one.py", "from two import Mine")
    write("two.py", "from one import Mine")
    assert find_task("one:Mine") == TaskSource("one:Mine")


@pytest.mark.parametrize(
    "text",
    [
        "from somewhere import *",
        "def __getattr__(name): ...",
        "Mine = make()",
        "try:\n    from x import Mine\nexcept ImportError:\n    Mine = None",
        "if True:\n    class Mine: pass",
    ],
)
def test_in_doubt_a_class_is_accepted(text: str) -> None:
    write("mine.py", text)
    assert find_task("mine:Mine").path == "mine:Mine"


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_tasks(name: str) -> None:
    write(f"{name}.py", "syntax error")  # of the user's own, and not meant
    source = find_task(name)
    assert source.path == f"allranks.tasks.{name}:{name.capitalize()}"
    assert source.defaults
    assert source.options


def test_a_name_that_is_none() -> None:
    error = refusal("spirl")
    assert error.fix == "write spiral"
    assert "spiral, digits, language" in error.what
    assert refusal("folder/mine.py:Mine").fix == "write folder.mine:Mine"
    assert refusal("folder.mine.Mine").fix == "write folder.mine:Mine"
    assert "package.module:Class" in refusal("").fix


def test_a_missing_module(folder: Path) -> None:
    write("mine.py")
    error = refusal("mien:Mine")
    assert str(folder) in error.what
    assert error.fix == "write mine:Mine"
    assert "PYTHONPATH" in refusal("nothing_like_it_here:Mine").fix
    write("package/mine.py")
    assert refusal("package.other:Mine").fix == "write package.mine:Mine"
    error = refusal("package.mien:Mine")
    assert str(folder / "package") in error.what
    assert error.fix == "write package.mine:Mine"
    assert "is a file" in refusal("mine.deeper:Mine").what
    assert "__init__.py" in refusal("package:Mine").what


def test_a_missing_class() -> None:
    write("mine.py")
    error = refusal("mine:Mime")
    assert "Mine, Plain, Child" in error.what
    assert error.fix == "write mine:Mine"
    write("empty.py", "")
    assert "no class at all" in refusal("empty:Mine").what


def test_source_that_does_not_parse(folder: Path) -> None:
    write("mine.py", "class Mine:\n    def (:\n")
    assert f"{folder / 'mine.py'}:2" in refusal("mine:Mine").what
    (folder / "binary.py").write_bytes(b"class Mine: pass\0")
    refusal("binary:Mine")
    (folder / "latin.py").write_bytes(b"class Mine: text = '\xe9'")
    refusal("latin:Mine")
    write("escape.py", 'class Mine: text = "\\d"')  # a warning, and not ours to give
    assert find_task("escape:Mine").path == "escape:Mine"


@pytest.mark.parametrize("value", ["dict(steps=1)", "{'steps': N}", "[1]", "{1: 2}"])
def test_defaults_that_are_no_literal(value: str) -> None:
    write("mine.py", f"class Mine:\n    defaults = {value}\nclass Child(Mine): pass")
    assert "mine.py:2" in refusal("mine:Mine").what
    assert "mine.py:2" in refusal("mine:Child").what


def test_the_old_name_of_blocks_is_answered_with_the_new_one(folder: Path) -> None:
    (folder / "old.py").write_text(
        "from allranks.tasks import Task\n\nclass Old(Task):\n    def stages(self, model): ...\n"
    )
    with pytest.raises(AllranksError, match=r"old.py:4: `stages` of Old is now called `blocks`"):
        find_task("old:Old")


def test_a_name_that_only_a_comment_or_a_text_mentions_is_refused() -> None:
    write("mine.py", TASK + '\n# Mien\nTEXT = "not Mien"\nMade = type("Made", (Mine,), {})\n')
    assert "no class Mien" in refusal("mine:Mien").what
    assert find_task("mine:Made").path == "mine:Made"
