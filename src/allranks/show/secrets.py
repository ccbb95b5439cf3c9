"""Secrets taken out of text before it is shown, stored or shared."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "[redacted]"
MAX_LINE = 8192  # characters; longer lines are cut

_KEY = r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
PRIVATE_KEY = re.compile(rf"-----BEGIN {_KEY}.*?(?:-----END {_KEY}|\Z)", re.DOTALL)
# A line of a key's body, where lines are read one by one. Checksums have no capitals.
KEY_LINE = re.compile(r"^(?=.{0,75}[A-Z])(?=.{0,75}[a-z])[A-Za-z0-9+/]{60,76}={0,2}$", re.MULTILINE)
# user:password@host, in any address; host:8080/path@v1 has a port there.
IN_ADDRESS = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.-]{0,20}://[^\s/:@]{0,256}:)(?!\d{1,5}/)[^\s\"'<>]{1,1024}(?=@)",
    re.IGNORECASE,
)
# Tokens with a known prefix.
KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{15,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|nvapi-[\w-]{20,}|ya29\.[\w-]{20,}"
    r"|eyJ[\w-]{6,2048}\.[\w-]{6,2048}\.[\w-]*)"
)
# A token instead of user and password; a signed address; how wandb prints its keys.
IN_PLACE = re.compile(
    r"(?P<before>https?://)[\w-]{16,}(?=@)"
    r"|(?P<query>[?&](?:sig|signature|x-amz-[a-z-]{1,40}|awsaccesskeyid)=)[^&\s\"']+"
    r"|(?P<wandb>wandb[^\n]{0,40}?\b)[0-9a-f]{40}\b",
    re.IGNORECASE,
)
HEADER = re.compile(
    r"(?P<before>\bauthorization[\"']?\s{0,8}[:=]\s{0,8}[\"']?(?:basic|bearer|token)\s{1,8})"
    r"[^\s\"',]+|(?P<alone>\bbearer\s{1,8})[\w.~+/-]{16,}=*",
    re.IGNORECASE,
)
_WORD = (
    r"(?P<word>password|passwd|passphrase|(?:db|user|sql|pg|postgres|smtp|redis|admin)[_-]?pass"
    r"|secret|credentials?|(?:api|account|access|secret|private|auth|signing|encryption|shared|ssh)"
    r"[_-]?key(?:[_-]?id)?|token)"
    r"(?:[_-](?:value|val|string|str|token|key|secret|data|raw|b64|base64)){0,3}\d{0,2}"
)
# NAME=VALUE, NAME: VALUE, "NAME": "VALUE", where NAME ends in one of these words.
NAMED = re.compile(_WORD + r"(?:\\?[\"'])?\]?\s{0,8}[=:]\s{0,8}", re.IGNORECASE)
# --name VALUE
OPTION = re.compile(r"(?<!-)--[\w.-]{0,64}?" + _WORD + r"\s{1,8}(?=[\w+/\"'\\])", re.IGNORECASE)
# Variables of the environment, whose names are in capitals.
VARIABLE = re.compile(
    r"\b[A-Z][A-Z0-9_]{0,64}_"
    r"(?P<word>KEY|PAT|PWD|AUTH|PASS|PASSWD|PASSWORD|SECRET|TOKEN|CREDENTIALS?)"
    r"(?:[\"']\s{0,4}:\s{0,4}(?=[\"'])|(?:[\"']\])?\s{0,4}=(?!=)\s{0,4})"
)
QUOTE = re.compile(r"[bruf]{0,2}(?P<quote>\\?(?:\"{3}|'{3}|[\"']))", re.IGNORECASE)
BARE = re.compile(r"[^\s\"',;&)}\]]+")
# Shorter values are settings or sentences: eos_token=</s>, token: 12.
MIN_TOKEN, MIN_VARIABLE = 8, 4


def redact(text: str) -> str:
    """The same text with tokens, keys and passwords replaced."""
    text = KEY_LINE.sub(REDACTED, PRIVATE_KEY.sub(REDACTED, text))
    if len(text) > MAX_LINE:
        text = "\n".join(map(_cut, text.split("\n")))
    text = IN_ADDRESS.sub(rf"\g<before>{REDACTED}", text)
    text = HEADER.sub(lambda match: f"{match['before'] or match['alone']}{REDACTED}", text)
    text = IN_PLACE.sub(
        lambda match: f"{match['before'] or match['query'] or match['wandb']}{REDACTED}", text
    )
    text = KNOWN.sub(REDACTED, text)
    for pattern in (VARIABLE, OPTION, NAMED):
        text = _without_values(pattern, text)
    return text


def redact_all(value: Any) -> Any:
    """Plain data with every text in it redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_all(item) for item in value]
    return value


def _cut(line: str) -> str:
    if len(line) <= MAX_LINE:
        return line
    words, space, last = line[:MAX_LINE].rpartition(" ")
    # Half a token would not be recognised.
    return (words if space and len(last) < MAX_LINE // 8 else line[:MAX_LINE]) + "…"


def _without_values(pattern: re.Pattern[str], text: str) -> str:
    parts, done, place = [], 0, 0
    while (match := pattern.search(text, place)) is not None:
        begin, end = _value(text, match.end())
        place = match.end("word")  # a value that is not a secret may be a name itself
        if _is_secret(pattern, match["word"].lower(), text[begin:end]):
            parts += [text[done:begin], REDACTED]
            done = place = end
    return "".join([*parts, text[done:]])


def _value(text: str, begin: int) -> tuple[int, int]:
    """Where a value begins and ends: at its closing quote, or at the end of the word."""
    opened = QUOTE.match(text, begin)
    if opened is None:
        bare = BARE.match(text, begin)
        return begin, bare.end() if bare else begin
    quote, place = opened["quote"], opened.end()
    line_end = text.find("\n", place)
    line_end = len(text) if line_end < 0 else line_end
    while (close := text.find(quote, place, line_end)) >= 0:
        if quote[0] == "\\" or text[close - 1] != "\\":
            return opened.end(), close
        place = close + 1
    return opened.end(), line_end


def _is_secret(pattern: re.Pattern[str], word: str, value: str) -> bool:
    if not value or value.startswith(REDACTED[:-1]):
        return False
    if value.lower() in ("none", "null", "true", "false"):
        return False
    if pattern is VARIABLE:
        is_setting = word == "token" and (value[0] in "<[" or value.isdigit())
        return len(value) >= MIN_VARIABLE and not is_setting
    return word != "token" or _is_random(value)


def _is_random(value: str) -> bool:
    """Whether it may be a token: long, with letters and digits."""
    value = value[:256]
    return len(value) >= MIN_TOKEN and bool(
        re.search(r"\d", value) and re.search(r"[a-zA-Z]", value)
    )
