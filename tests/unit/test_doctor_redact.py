"""No secret reaches a screen or a file."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from allranks.doctor.diagnose import diagnose_logs
from allranks.doctor.finding import as_json
from allranks.doctor.show import show_findings
from allranks.show.secrets import REDACTED, redact

# Put together here, so that no scanner takes them for real ones.
SECRETS = [
    "hf_" + "a1B2" * 8,
    "ghp_" + "x" * 36,
    "github_pat_" + "y1" * 20,
    "AKIA" + "Q7" * 8,
    "sk-" + "proj" * 8,
    "xoxb-" + "1234567890-abc",
    "eyJhbGciOi.eyJzdWIiOi.SflKxwRJ",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_known_by_its_shape(secret: str) -> None:
    assert secret not in redact(f"pushing with {secret} to the hub")
    assert REDACTED in redact(f"pushing with {secret} to the hub")


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("export WANDB_API_KEY=0123456789abcdef0123", "0123456789abcdef0123"),
        ("AWS_SECRET_ACCESS_KEY=wJalr/XUtnFEMI", "wJalr/XUtnFEMI"),
        ('{"api_key": "abcd1234efgh"}', "abcd1234efgh"),
        ("MY_SERVICE_TOKEN: s3cr3t-value", "s3cr3t-value"),
        ("DB_PASSWORD='hunter22'", "hunter22"),
        ("Authorization: Bearer abc.def-ghi_jkl", "abc.def-ghi_jkl"),
        ("headers={'Authorization': 'token 12345678'}", "12345678"),
        ("git clone https://user:pa55word@host/repo.git", "pa55word"),
        ("https://oauth2abcdefghijklmnop@gitlab.com/x", "oauth2abcdefghijklmnop"),
        ("GET /file?X-Amz-Signature=deadbeef01&x=1", "deadbeef01"),
        ("wandb: login with 0123456789012345678901234567890123456789", "0123456789012345"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", "MIIEow"),
    ],
)
def test_a_secret_is_known_by_its_name_or_place(line: str, secret: str) -> None:
    assert secret not in redact(line)


@pytest.mark.parametrize(
    "line",
    [
        "max_tokens=4096 tokens/s: 51234.5",
        "tokenizer: loaded 32000 tokens",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB.",
        "see https://pytorch.org/docs/stable/elastic/errors.html",
        "pad_token: None, use_token=true",
    ],
)
def test_ordinary_lines_stay(line: str) -> None:
    assert redact(line) == line


def test_findings_are_redacted(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "/home/user/train.py", line 3, in <module>\n'
        "FileNotFoundError: [Errno 2] No such file or directory: "
        f"'https://user:pa55word@host/data?token={SECRETS[0]}'\n"
    )
    findings = diagnose_logs([log])
    assert findings[0].cause == "missing-file"
    printed = json.dumps(as_json(findings))
    assert "pa55word" not in printed and SECRETS[0] not in printed


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
    show_findings(console, [replace(found, title="a\x1b]0;b\x07c", fix="\x1b[2Jd")], "job")
    assert "\x1b" not in console.file.getvalue()  # type: ignore[attr-defined]
