"""No finding shows a secret, or anything that a terminal would obey."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from allranks.doctor.diagnose import diagnose_logs
from allranks.doctor.finding import as_json
from allranks.doctor.show import show_findings

TOKEN = "hf_" + "a1B2" * 8  # put together here, so that no scanner takes it for a real one


def test_findings_are_redacted(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "/home/user/train.py", line 3, in <module>\n'
        "FileNotFoundError: [Errno 2] No such file or directory: "
        f"'https://user:pa55word@host/data?token={TOKEN}'\n"
    )
    findings = diagnose_logs([log])
    assert findings[0].cause == "missing-file"
    printed = json.dumps(as_json(findings))
    assert "pa55word" not in printed and TOKEN not in printed


def test_no_finding_moves_a_terminal(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "/home/user/train.py", line 3, in <module>\n'
        "FileNotFoundError: [Errno 2] No such file or directory: "
        "'da\x1b]52;c;cm0=\x07ta\x9b2J\x1bPq\x1b\\.csv'\n"
    )
    found = diagnose_logs([log])[0]
    said = [found.title, found.fix, *(one.text for one in found.evidence)]
    assert "'data.csv'" in found.evidence[0].text
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]|cm0=", "".join(said))
    console = Console(file=io.StringIO(), width=100)
    show_findings(console, [replace(found, title="a\x1b]0;b\x07c", fix="\x1b[2Jd")], {})
    assert "\x1b" not in console.file.getvalue()  # type: ignore[attr-defined]
