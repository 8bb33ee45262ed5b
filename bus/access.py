"""The rights of each role in Redis: one table, of which the access list (ACL) and the check at start come.

A user of Redis is called as its role. A worker may not write requests, and nobody may flush, configure or
list the users. Where Redis is older than 7, which knows no selectors, a role may use each of its commands on
each of its keys.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from bus.names import Names

Role = Literal["gateway", "monitor", "controller", "worker", "cli"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
SELECTORS: Final = (7, 0)  # the first Redis that has them

# Commands without a key that the link itself gives.
BASE: Final = (
    *("ping", "auth", "hello", "info", "multi", "exec", "discard"),
    *("evalsha", "script|load", "acl|whoami"),
)


@dataclass(frozen=True, slots=True)
class Grant:
    """Commands on keys, the latter without the prefix and with `*` for what follows."""

    commands: tuple[str, ...]
    keys: tuple[str, ...]


def _grant(commands: str, keys: str) -> Grant:
    return Grant(tuple(commands.split()), tuple(keys.split()))


DATA_SET: Final = "boot schema"
RECORDS: Final = "catalogue model:* deployment:* profile:*"
REGISTRY: Final = "workers lease:* card:*"
LEADER: Final = "leader leader-lease"

TABLE: Final[Mapping[Role, tuple[Grant, ...]]] = {
    "gateway": (
        _grant(
            "get mget smembers pttl",
            f"{DATA_SET} policy answer:* gateway:* {LEADER} {REGISTRY} {RECORDS}",
        ),
        _grant("set", f"{DATA_SET} policy gateway:*"),
        _grant("pexpire del", "gateway:* tokens:*"),
        _grant("xadd", "requests:* control:* demand events orders dead-letters"),
        _grant("xread xinfo|stream xlen", "tokens:* metrics moments events"),
        _grant("xtrim", "tokens:*"),
        _grant("xdel", "orders"),
    ),
    "monitor": (
        _grant("get set", DATA_SET),
        _grant("set", "reads:*"),
        _grant("xread xinfo|stream", "telemetry"),
        _grant("xadd", "metrics moments events dead-letters"),
        _grant("xrevrange", "metrics"),  # docker/healthy.py
        _grant("time", ""),
    ),
    "controller": (
        _grant("scan time", ""),
        _grant("get pttl set pexpire del", LEADER),
        _grant(
            "get mget smembers pttl exists",
            f"{DATA_SET} policy answer:* gateway:* reads:* {REGISTRY} {RECORDS}",
        ),
        _grant("set", f"{DATA_SET} reads:* answer:* {RECORDS}"),
        _grant("sadd srem", "workers catalogue"),
        _grant("del", f"{REGISTRY} {RECORDS} requests:* control:* tokens:*"),
        _grant("xread xinfo|stream", "orders events metrics demand"),
        _grant("xadd", "control:* orders events dead-letters"),
        _grant("xdel", "orders requests:*"),
        _grant("xpending xack xgroup|delconsumer", "requests:*"),
    ),
    "worker": (
        _grant("get mget pttl smembers", f"{DATA_SET} policy catalogue gateway:* {REGISTRY}"),
        _grant("set", f"{DATA_SET} lease:* card:* profile:*"),
        _grant("sadd srem", "workers catalogue"),
        _grant("pexpire del", "lease:* card:*"),
        _grant("del xtrim xlen", "requests:*"),
        _grant(
            "xreadgroup xgroup|create xgroup|delconsumer xack xdel xpending xinfo|consumers xinfo|groups",
            "requests:*",
        ),
        _grant("xread xinfo|stream", "control:* metrics events"),
        _grant("del xtrim", "control:*"),
        _grant("xadd", "tokens:* telemetry events dead-letters"),
        _grant("exists", "lease:*"),
    ),
    "cli": (_grant("get set", DATA_SET),),
}

# Users for the servers of Redis, with the rights that the documentation of Sentinel gives them: what
# a replica asks its primary (`masteruser`), and what a Sentinel asks both (`sentinel auth-user`).
SERVERS: Final[Mapping[str, str]] = {
    "replica": "resetchannels -@all +psync +replconf +ping",
    "sentinel": (
        "allchannels -@all +multi +slaveof +ping +exec +subscribe +config|rewrite +role +publish +info "
        "+client|setname +client|kill +script|kill"
    ),
}

# Arguments with which Redis accepts a command for a transaction, "KEY" where its key stands.
_ARGUMENTS: Final[Mapping[str, str]] = {
    "set": "KEY x",
    "pexpire": "KEY 1",
    "sadd": "KEY x",
    "srem": "KEY x",
    "scan": "0",
    "time": "",
    "xadd": "KEY * m x",
    "xread": "STREAMS KEY 0",
    "xreadgroup": "GROUP g c STREAMS KEY >",
    "xgroup|create": "KEY g 0",
    "xgroup|delconsumer": "KEY g c",
    "xinfo|consumers": "KEY g",
    "xack": "KEY g 0-1",
    "xdel": "KEY 0-1",
    "xpending": "KEY g",
    "xrevrange": "KEY + -",
    "xtrim": "KEY MAXLEN 0",
}


def acl_rules(role: Role, prefix: str, *, selectors: bool) -> str:
    """Return what follows `user NAME on #HASH` in an access list, for keys with this prefix."""
    grants = TABLE[role]
    keys = {key for grant in grants for key in grant.keys}
    if not selectors:
        commands = {command for grant in grants for command in grant.commands}
        return " ".join(["resetchannels", "-@all", *_allowed({*BASE, *commands}), *_patterns(prefix, keys)])
    root = ["resetchannels", "-@all", *_allowed({*BASE, *_keyless(grants)}), *_patterns(prefix, keys)]
    parts = [
        "(" + " ".join(["-@all", *_allowed(set(grant.commands)), *_patterns(prefix, set(grant.keys))]) + ")"
        for grant in grants
        if grant.keys
    ]
    return " ".join([*root, *parts])


def acl_lines(passwords: Mapping[Role, str], prefix: str, *, selectors: bool) -> list[str]:
    """Return the lines of an access list with these users, and none that needs no password."""
    users = [
        _user(role, password, acl_rules(role, prefix, selectors=selectors))
        for role, password in passwords.items()
    ]
    return ["user default off resetpass -@all", *users]


def server_lines(passwords: Mapping[str, str]) -> list[str]:
    """Return the lines of an access list with these users of SERVERS."""
    return [_user(name, password, SERVERS[name]) for name, password in passwords.items()]


def new_password() -> str:
    """Return a new password, of letters and digits that a URL takes as they are."""
    return secrets.token_urlsafe(32)


def new_passwords() -> dict[Role, str]:
    """Return a new password for each role."""
    return {role: new_password() for role in ROLES}


def rights_needed(role: Role, names: Names) -> list[tuple[str, ...]]:
    """Return each command of a role on a key of each kind, for a transaction that is then discarded."""
    needed = []
    for grant in TABLE[role]:
        for command in grant.commands:
            words = (*command.split("|"), *_ARGUMENTS.get(command, "KEY").split())
            for key in grant.keys or ("",):
                name = names.prefix + key.replace("*", "(any)")
                needed.append(tuple(name if word == "KEY" else word for word in words))
    return needed


def _user(name: str, password: str, rules: str) -> str:
    return f"user {name} on #{hashlib.sha256(password.encode()).hexdigest()} {rules}"


def _keyless(grants: tuple[Grant, ...]) -> set[str]:
    return {command for grant in grants if not grant.keys for command in grant.commands}


def _allowed(commands: set[str]) -> list[str]:
    return [f"+{command}" for command in sorted(commands)]


def _patterns(prefix: str, keys: set[str]) -> list[str]:
    escaped = re.sub(r"([*?\[\]\\^])", r"\\\1", prefix)
    return [f"~{escaped}{key}" for key in sorted(keys)]
