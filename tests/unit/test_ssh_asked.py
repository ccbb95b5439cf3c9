"""What hosts are asked before a run starts on them over ssh, and what is refused; ssh is faked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allranks import __version__
from allranks.errors import AllranksError
from allranks.launch import backends
from allranks.launch.backends import Options, ssh
from allranks.launch.prepare import Request
from allranks.run.folder import RunDir


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in place of ssh; what it is called with comes after the options."""
    file = tmp_path / "bin" / "ssh"
    file.parent.mkdir()
    file.touch(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
    return file


def answer(file: Path, text: str, code: int = 0) -> None:
    asked = '[ "$1" = -G ] && echo "hostname 10.0.0.7" && exit'
    file.write_text(f"#!/bin/sh\n{asked}\n{text}\nexit {code}\n")


def test_a_host_says_which_python_it_has_and_has_the_address_of_the_configuration(
    fake_ssh: Path,
) -> None:
    answer(fake_ssh, f"echo welcome; echo allranks {__version__} 20123 '/opt/my python/bin/python'")
    host = ssh.ask_host("me@left")
    assert host == ssh.Host("me@left", "10.0.0.7", "/opt/my python/bin/python", 20123)


def test_the_question_works_with_a_real_shell_and_python(fake_ssh: Path) -> None:
    answer(fake_ssh, 'eval "last=\\${$#}"; eval "$last"; exit $?')
    host = ssh.ask_host("here")
    assert Path(host.python).name.startswith("python") and 20000 <= host.port < 30000


def test_a_command_runs_on_every_host_of_a_run_that_answers(fake_ssh: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.update_info(lambda info: info.update(backend="ssh", hosts=["a", "gone", "b"]))
    fake_ssh.write_text(
        '#!/bin/sh\ncase "$*" in *"-- gone "*) exit 255;; esac\n'
        'eval "last=\\${$#}"; eval "$last"; exit $?\n'
    )
    backend = backends.named(backends.of(run))
    assert backend.on_nodes(run, ["-c", "print('it is here')"], 60.0) == "it is here\n" * 2


@pytest.mark.parametrize(
    ("said", "code", "what", "fix"),
    [
        ("echo 'ssh: connect to host b: timed out' >&2", 255, "timed out", "ssh b true"),
        ("", 90, "host b has no Python with allranks", f"allranks=={__version__}"),
        ("echo allranks 0.0.9 20000 /python", 0, "has allranks 0.0.9, not", "ssh b python3 -m pip"),
    ],
)
def test_a_host_that_cannot_be_used_is_named_with_the_fix(
    fake_ssh: Path, said: str, code: int, what: str, fix: str
) -> None:
    answer(fake_ssh, said, code)
    with pytest.raises(AllranksError) as refused:
        ssh.ask_host("b")
    assert what in refused.value.what and "host b" in refused.value.what
    assert fix in refused.value.fix


@pytest.mark.parametrize(
    ("hosts", "layout", "what"),
    [
        ((), "2x1", "layout 2x1 needs 2 hosts, not none"),
        (("a",), "2x1", "layout 2x1 needs 2 hosts, not 1 (a)"),
        (("a", "b"), "1x2", "layout 1x2 needs 1 host, not 2 (a, b)"),
        (("-oProxyCommand=x", "b"), "2x1", "'-oProxyCommand=x' is not the name of a host"),
        (("a", ""), "2x1", "'' is not the name of a host"),
    ],
)
def test_each_node_needs_a_host(
    tmp_path: Path, hosts: tuple[str, ...], layout: str, what: str
) -> None:
    request = Request(overrides=["task=spiral"], layout=layout, runs=tmp_path)
    with pytest.raises(AllranksError) as refused:
        ssh.check(request, Options(hosts=hosts))
    assert refused.value.what == what
