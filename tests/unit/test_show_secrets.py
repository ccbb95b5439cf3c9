"""Secrets go; words that only look like them stay."""

from __future__ import annotations

import time

import pytest

from allranks.show.secrets import MAX_LINE, REDACTED, redact, redact_all

# Known by their shape; put together here, so that no scanner takes them for real ones.
TOKENS = [
    *("hf_" + "a1B2" * 8, "ghp_" + "x" * 36, "github_pat_" + "y1" * 20, "AKIA" + "Q7" * 8),
    *("sk-" + "proj" * 8, "xoxb-" + "1234567890-abc", "eyJhbGciOi.eyJzdWIiOi.SflKxwRJ"),
]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        *((f"pushing with {token} to the hub", token) for token in TOKENS),
        ("push to https://me:s3cr3t@git.example.org/x", "s3cr3t"),
        ("https://oauth2abcdefghijklmnop@gitlab.com/x", "oauth2abcdefghijklmnop"),
        ("export WANDB_API_KEY=0123456789abcdef0123", "0123456789abcdef0123"),
        ("wandb: login with 0123456789012345678901234567890123456789", "0123456789012345"),
        ("AWS_SECRET_ACCESS_KEY=wJalr/XUtnFEMI", "wJalr/XUtnFEMI"),
        ('{"aws_secret_access_key": "wJalrXUtnFEMI/K7MDENG"}', "wJalrXUtnFEMI"),
        ("MY_SERVICE_TOKEN: s3cr3t-value", "s3cr3t-value"),
        ("Authorization: Bearer abc.def-ghi_jkl", "abc.def-ghi_jkl"),
        ("headers={'Authorization': 'token 12345678'}", "12345678"),
        ("train.py --api-key k9-very-long --lr 1", "k9-very-long"),
        ("db_password: hunter2", "hunter2"),
        ("GET /?token=a1b2c3d4e5f6&x=1", "a1b2c3d4e5f6"),
        ("GET /file?X-Amz-Signature=deadbeef01&x=1", "deadbeef01"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----", "MIIE"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE cut off", "MIIE"),
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
        "token_embedding: Embedding(50257, 768)",
        "EOS_TOKEN=</s> MAX_TOKEN=4096",
        "first_pass=12 the forward_pass: 0.31s",
        "tokens/s: 51234.5",
        "tokenizer: loaded 32000 tokens",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB.",
        "see https://pytorch.org/docs/stable/elastic/errors.html",
        "pad_token: None, use_token=true",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_the_rest_of_a_line_stays_and_twice_is_once() -> None:
    line = "rank 3: login failed for --password hunter2 at 12:00"
    assert redact(line) == f"rank 3: login failed for --password {REDACTED} at 12:00"
    assert redact(redact(line)) == redact(line)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('password: "correct horse battery staple" x', 'password: "[redacted]" x'),
        ("password='a,b;c' y", "password='[redacted]' y"),
        ('password="a\\"b c" d', 'password="[redacted]" d'),
        ('{\\"password\\": \\"a b\\"}', '{\\"password\\": \\"[redacted]\\"}'),
        ("--password 'a b' --lr 1", "--password '[redacted]' --lr 1"),
        ("DB_PASS=hunter2secret", "DB_PASS=[redacted]"),
        ("HF_TOKEN=abcdefghijklmno", "HF_TOKEN=[redacted]"),
        ("AccountKey=abc+/def==;x", "AccountKey=[redacted];x"),
        ("secret_token_value=foo", "secret_token_value=[redacted]"),
        ("postgres://u:p/w@h", "postgres://u:[redacted]@h"),
        (f"WANDB_API_KEY={'a1' * 20}", "WANDB_API_KEY=[redacted]"),
        ("bad token password=hunter2", "bad token password=[redacted]"),
        ("token: password: hunter", "token: password: [redacted]"),
    ],
)
def test_a_value_is_taken_out_whole_and_nothing_else(text: str, left: str) -> None:
    assert redact(text) == left
    assert redact(left) == left


@pytest.mark.parametrize("run", ["-", "_", ".", "a.", "a-", "eyJ-", "A_", "token=", "https://u:"])
def test_long_runs_take_no_time(run: str) -> None:
    text = (run * 100_000)[:100_000]
    begin = time.process_time()
    assert len(redact(text)) <= 2 * MAX_LINE
    assert time.process_time() - begin < 1.0  # quadratic, it would be minutes


def test_the_lines_of_a_private_key_go_one_by_one() -> None:
    body = ["MIIEowIBAAKCAQEA" * 4, "Zm9v" * 16 + "Zg=="]
    lines = ["-----BEGIN RSA PRIVATE KEY-----", *body, "word", "0123456789abcdef" * 4]
    assert [redact(line) for line in lines] == [REDACTED] * 3 + lines[-2:]


def test_plain_data_is_redacted_everywhere_in_it() -> None:
    assert redact_all({"a": ["--password x1", 3], "b": None}) == {
        "a": [f"--password {REDACTED}", 3],
        "b": None,
    }
