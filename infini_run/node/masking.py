"""Variables and command lines without what looks like a secret. Pure. A secret with a harmless name is not known."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MASK = "***"
_SECRET = r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE|DSN|NETRC|SESSION"
_NAME = re.compile(_SECRET, re.IGNORECASE)
_VALUE = re.compile(
    r"://[^/@\s]+@"  # a URL with a user, and perhaps a password
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\b(?:bearer|basic) +\S{8}"  # a header
    r"|\b(?:gh[opsu]_|github_pat_|glpat-|hf_|sk-|xox[abp]-|AKIA|eyJ)[\w.-]{10}"  # well-known tokens
    r"|[?&;](?:[\w.-]*(?:" + _SECRET + r"|sig)[\w.-]*)=[^&\s]",  # a query
    re.IGNORECASE,
)
_REST = r"\S+(?:\s+(?!-)\S+)*"  # an argument with spaces has no visible end: up to the next option
_OPTION = re.compile(
    r"((?:^|(?<=\s))-{0,2}[\w.-]*(?:" + _SECRET + r")[\w.-]*(?:=|:\s*|\s+(?!-))|\b(?:bearer|basic)\s+)" + _REST,
    re.IGNORECASE,
)


def masked(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the same variables, with a mask in place of values that may be secret."""
    return {name: MASK if value and _is_secret(name, value) else value for name, value in variables.items()}


def masked_command(text: str) -> str:
    """Return a command line with masks in place of words that may be secret."""
    text = _OPTION.sub(rf"\1{MASK}", text)
    return " ".join(MASK if _VALUE.search(word) else word for word in text.split(" "))


def _is_secret(name: str, value: str) -> bool:
    return bool(_NAME.search(name) or _VALUE.search(value))
