"""Tokens, keys and passwords are taken out of every line before it is shown or stored."""

from __future__ import annotations

import re

HIDDEN = "[redacted]"

# What a secret looks like by itself.
_SHAPES = re.compile(
    r"""
    \b(?:
      hf_[A-Za-z0-9]{16,}                                   # Hugging Face
    | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,}
    | glpat-[A-Za-z0-9_-]{16,}                              # GitLab
    | (?:AKIA|ASIA)[A-Z0-9]{16}                             # AWS
    | sk-[A-Za-z0-9_-]{16,}                                 # OpenAI, Anthropic
    | xox[abprs]-[A-Za-z0-9-]{10,}                          # Slack
    | AIza[A-Za-z0-9_-]{30,}                                # Google
    | ya29\.[A-Za-z0-9_-]{20,}
    | pypi-[A-Za-z0-9_-]{20,}
    | npm_[A-Za-z0-9]{30,}
    | nvapi-[A-Za-z0-9_-]{20,}
    | r8_[A-Za-z0-9]{30,}                                   # Replicate
    | eyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]+  # a JSON web token
    )
    """,
    re.VERBOSE,
)
# NAME=value, "name": "value", --name value; the value goes.
_NAMED = re.compile(
    r"""
    (?P<name>
      (?:[A-Za-z0-9_.-]*(?:token(?!iz)|secret|passw(?:or)?d|passphrase|credential|api[_-]?key
        |access[_-]?key|private[_-]?key|signing[_-]?key)[A-Za-z0-9_-]*)
      | [A-Z][A-Z0-9_]*_(?:KEY|PAT|PWD|AUTH)
    )
    (?P<between> ["']? \s* (?:=|:|:=) \s* | \s+(?=["']) | (?<=[a-z])\s+(?=[A-Za-z0-9+/_-]{20,}) )
    (?P<quote>["']?)
    (?P<value>[^\s"',;&)}\]]{4,})
    """,
    re.VERBOSE | re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9+/._~=-]{8,}", re.IGNORECASE)
_HEADER = re.compile(r"\b(authorization|x-api-key|cookie)(['\"]?\s*[:=]\s*)\S.*", re.IGNORECASE)
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^\s/@:]*:[^\s@/]+@", re.IGNORECASE)
_URL_TOKEN = re.compile(r"(?P<scheme>https?://)[A-Za-z0-9_-]{16,}@", re.IGNORECASE)
_QUERY = re.compile(
    r"([?&](?:sig|signature|token|key|x-amz-[a-z-]+|awsaccesskeyid)=)[^&\s\"']+", re.IGNORECASE
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN[ A-Z]*PRIVATE KEY-----.*?(?:-----END[ A-Z]*PRIVATE KEY-----|$)", re.DOTALL
)
# A long value behind words of the tool that asks for it: `wandb login 0123…`.
_WANDB = re.compile(r"(wandb[^\n]{0,40}?)\b[0-9a-f]{40}\b", re.IGNORECASE)
# Values that no secret has: counts and settings such as max_tokens=4096, tokens: true.
_HARMLESS = re.compile(r"(?:[\d.,]+|true|false|none|null|not|is|was|for|of|in|<[^>]*>)", re.I)


def redact(text: str) -> str:
    """The text without anything that opens a door."""
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _URL.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _URL_TOKEN.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _QUERY.sub(rf"\1{HIDDEN}", text)
    text = _SHAPES.sub(HIDDEN, text)
    text = _WANDB.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    return _NAMED.sub(_hide_value, text)


def _hide_value(match: re.Match[str]) -> str:
    if _HARMLESS.fullmatch(match["value"]) or HIDDEN in match["value"]:
        return match[0]
    return f"{match['name']}{match['between']}{match['quote']}{HIDDEN}"
