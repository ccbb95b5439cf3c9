"""Secrets taken out of text before it is shown, stored or shared. Pure; no torch."""

from __future__ import annotations

import re

REDACTED = "[redacted]"

PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
# user:password@host, in any address
IN_ADDRESS = re.compile(r"(?P<before>\b[a-z][a-z0-9+.-]*://[^\s/:@]+:)[^\s/@]+(?=@)", re.IGNORECASE)
# Tokens that are known by their beginning, whoever prints them.
KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{15,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|nvapi-[\w-]{20,}|ya29\.[\w-]{20,}"
    r"|eyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*)"
)
# A token in place of user and password; a signed address; what wandb prints its keys like.
IN_PLACE = re.compile(
    r"(?P<before>https?://)[\w-]{16,}(?=@)"
    r"|(?P<query>[?&](?:sig|signature|x-amz-[a-z-]+|awsaccesskeyid)=)[^&\s\"']+"
    r"|(?P<wandb>wandb[^\n]{0,40}?\b)[0-9a-f]{40}\b",
    re.IGNORECASE,
)
HEADER = re.compile(
    r"(?P<before>\bauthorization[\"']?\s*[:=]\s*[\"']?(?:basic|bearer|token)\s+)[^\s\"',]+"
    r"|(?P<alone>\bbearer\s+)[\w.~+/-]{16,}=*",
    re.IGNORECASE,
)
# NAME=VALUE, NAME: VALUE, "NAME": "VALUE", --name VALUE, where NAME ends in one of these words.
NAMED = re.compile(
    r"(?P<before>(?<![A-Za-z0-9])[\w.-]*?(?P<word>password|passwd|passphrase|secret|credentials?"
    r"|api[_-]?key|access[_-]?key(?:[_-]?id)?|secret[_-]?key|private[_-]?key|auth[_-]?key|token)"
    r"[\"']?(?:\s*[=:]\s*|(?<=\w)\s+(?=[\w+/])))(?P<quote>[\"']?)(?P<value>[^\s\"',;&)}\]]+)",
    re.IGNORECASE,
)
# Variables of the environment, whose names are in capitals.
VARIABLE = re.compile(
    r"(?P<before>\b[A-Z][A-Z0-9_]*_(?:KEY|PAT|PWD|AUTH)=[\"']?)[^\s\"',;&)\[]{4,}"
)
# What looks like a name and a value but is a setting or a sentence: eos_token=</s>, token: 12.
MIN_TOKEN = 8


def redact(text: str) -> str:
    """The same text with tokens, keys and passwords replaced."""
    text = PRIVATE_KEY.sub(REDACTED, text)
    text = IN_ADDRESS.sub(rf"\g<before>{REDACTED}", text)
    text = HEADER.sub(lambda match: f"{match['before'] or match['alone']}{REDACTED}", text)
    text = IN_PLACE.sub(
        lambda match: f"{match['before'] or match['query'] or match['wandb']}{REDACTED}", text
    )
    text = KNOWN.sub(REDACTED, text)
    text = VARIABLE.sub(rf"\g<before>{REDACTED}", text)
    return NAMED.sub(_named, text)


def _named(match: re.Match[str]) -> str:
    value, word = match["value"], match["word"].lower()
    has_sign = re.search(r"[=:]\s*$", match["before"]) is not None
    is_option = match["before"].lstrip().startswith("--")
    if value.startswith(REDACTED) or value.lower() in ("none", "null", "true", "false"):
        return match[0]
    if not has_sign and not is_option:
        return match[0]  # a sentence that speaks of it
    if word == "token" and not _is_random(value):
        return match[0]
    return f"{match['before']}{match['quote']}{REDACTED}"


def _is_random(value: str) -> bool:
    """Whether it may be a token: long, of letters and digits."""
    return len(value) >= MIN_TOKEN and bool(
        re.search(r"\d", value) and re.search(r"[a-zA-Z]", value)
    )
