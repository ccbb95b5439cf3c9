"""Secrets go; words that only look like them stay."""

from __future__ import annotations

import pytest

from allranks.redact import REDACTED, redact


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("HF_TOKEN=hf_abcdefghijklmnopqrstuvwx", "hf_abcdefghijklmnopqrstuvwx"),
        ("push to https://me:s3cr3t@git.example.org/x", "s3cr3t"),
        ("export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567", "0123456789abcdef"),
        ('{"aws_secret_access_key": "wJalrXUtnFEMI/K7MDENG"}', "wJalrXUtnFEMI"),
        ("key AKIAIOSFODNN7EXAMPLE was used", "AKIAIOSFODNN7EXAMPLE"),
        ("Authorization: Bearer abc.def.ghi", "abc.def.ghi"),
        ("train.py --api-key k9-very-long --lr 1", "k9-very-long"),
        ("db_password: hunter2", "hunter2"),
        ("GET /?token=a1b2c3d4e5f6&x=1", "a1b2c3d4e5f6"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----", "MIIE"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE cut off", "MIIE"),
        ("ghp_0123456789abcdefghijABCDEFGHIJ", "ghp_"),
    ],
)
def test_a_secret_is_taken_out(text: str, secret: str) -> None:
    assert secret not in redact(text)
    assert REDACTED in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "tokens: 4096, max_tokens=512, token: 12",
        "tokenizer=bert-base-uncased eos_token=</s> pad_token=[PAD]",
        "the password is not shown",
        "token is invalid",
        "loss 0.41 step 120 rank 3",
        "HF_TOKEN=None",
        "https://example.org:8080/path@v1",
        "secrets of the trade",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_the_rest_of_a_line_stays_and_twice_is_once() -> None:
    line = "rank 3: login failed for --password hunter2 at 12:00"
    assert redact(line) == f"rank 3: login failed for --password {REDACTED} at 12:00"
    assert redact(redact(line)) == redact(line)
