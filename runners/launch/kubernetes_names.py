"""What Kubernetes takes for a name, an amount or a variable, checked before a cluster refuses it in parts."""

from __future__ import annotations

import re

from torchrelay.errors import UsageError

LABEL = 63
"""The longest part of a host name: RFC 1123."""
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUANTITY = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?(m|[kMGTPE]|[KMGTPE]i)?")
_VARIABLE = re.compile(r"[-._A-Za-z][-._A-Za-z0-9]*")
_KEY = re.compile(r"[-._A-Za-z0-9]{1,253}")
_RESOURCE = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?")


def job_name(name: str, longest_tail: str) -> str:
    """Check the name of a job whose pods are called `<name><tail>`; raises UsageError.

    It is the first part of the host names of its pods, so it begins with a letter, and the longest of them
    has 63 characters.
    """
    room = LABEL - len(longest_tail)
    if _LABEL.fullmatch(name) is None:
        raise UsageError(
            f"the name {shown(name)} cannot be a Kubernetes job's: give --name of small letters a-z, "
            "digits and -, with a letter first and no - last"
        )
    if len(name) > room:
        raise UsageError(
            f"the name {shown(name)} has {len(name)} characters; at most {room} fit, because its pods are "
            f"called <name>{longest_tail}: give a shorter --name"
        )
    return name


def object_name(what: str, text: str) -> str:
    """Check the name of something that lies in the cluster: a claim, a secret, an account."""
    if len(text) > 253 or _SUBDOMAIN.fullmatch(text) is None:
        raise UsageError(
            f"--set {what}={shown(text)} names nothing in Kubernetes: it takes small letters a-z, "
            "digits, - and ."
        )
    return text


def label_name(what: str, text: str) -> str:
    """Check a name that is one part of a host name, as a namespace's is."""
    if len(text) > LABEL or not _SUBDOMAIN.fullmatch(text) or "." in text:
        raise UsageError(
            f"--set {what}={shown(text)} is no name of 1 to {LABEL} small letters a-z, digits and -"
        )
    return text


def quantity(what: str, text: str) -> str:
    """Check an amount such as `500m`, `1.5` or `64Gi`; it is above zero."""
    if _QUANTITY.fullmatch(text) is None or not re.search(r"[1-9]", text):
        raise UsageError(f"--set {what}={shown(text)} is no amount: give one such as 4, 500m or 64Gi")
    return text


def resource(what: str, text: str) -> str:
    """Check the name under which a cluster counts a device, such as `nvidia.com/gpu`."""
    if len(text) > 253 + 1 + LABEL or _RESOURCE.fullmatch(text) is None:
        raise UsageError(
            f"--set {what}={shown(text)} is no resource of a node: give one such as nvidia.com/gpu"
        )
    return text


def variable(name: str) -> str:
    """Check the name of an environment variable."""
    if _VARIABLE.fullmatch(name) is None:
        raise UsageError(
            f"the variable {shown(name)} cannot be given to a pod: its name is of A-Z a-z 0-9 _ - . "
            "and does not begin with a digit"
        )
    return name


def secret_key(what: str, text: str) -> str:
    """Check the name of an entry of a secret."""
    if _KEY.fullmatch(text) is None:
        raise UsageError(f"--set {what}={shown(text)}: no entry of a secret is called so")
    return text


def absolute_path(what: str, text: str) -> str:
    """Check a path inside of a container."""
    if not text.startswith("/") or ":" in text or not text.isprintable():
        raise UsageError(f"--set {what}={shown(text)} is no absolute path in the container, such as /runs")
    return text


def literal(what: str, text: str) -> str:
    """A text that a pod gets as it is: `$` is doubled, or `$(NAME)` would be replaced.

    Raises UsageError for what is no text: bytes that are no UTF-8. It does not show them: they may be secret.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is no UTF-8: a manifest cannot hold it") from None
    return text.replace("$", "$$")


def shown(text: str) -> str:
    """A text as a message shows it: on one line and not long."""
    quoted = ascii(text)
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."
