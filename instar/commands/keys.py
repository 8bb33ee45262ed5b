"""`instar keys`: the file of API keys."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from bus.api_keys import SCOPES, ApiKey, KeysFileError, change_keys, new_key, read_keys
from instar.client import settings_of
from instar.errors import InputError
from instar.output.tables import make_table, plural, write_found, write_parts, write_text
from instar.parser import CommandParser, add_config_flag, number_above_zero, one_of
from instar.redis_users import write_users

DESCRIPTION = """\
Adds, lists and revokes API keys in the file gateway.keys_file. Every gateway that has the file reads it again
when it changes, within a second. The file has digests: a key is printed once, when it is added.

  instar keys add alice                            for /v1, without limits
  instar keys add batch --weight 0.5 --tpm 60000 --rpm 600 --concurrent 8
  instar keys add grafana --scope admin-read       for /admin, to look only
  instar keys list
  instar keys revoke alice                         by name or id; what it runs goes on
  instar keys redis secrets                        users of Redis, each with its password: docs/security.md
"""


def add_to(parser: CommandParser) -> None:
    parser.set_defaults(run=lambda _: write_text(parser.format_help()))
    group = parser.add_subparsers(metavar="COMMAND", title="commands (`instar keys COMMAND --help`)")
    commands: list[CommandParser] = []
    for name, help_, run in (
        ("add", "add a key and print it", _add),
        ("list", "list the keys, without the keys themselves", _list),
        ("revoke", "remove a key", _revoke),
    ):
        command: CommandParser = group.add_parser(name, help=help_, description=f"{help_.capitalize()}.")
        add_config_flag(command, default=argparse.SUPPRESS)
        command.add_argument("--file", type=Path, metavar="FILE", help="[gateway.keys_file]")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
        commands.append(command)
    _add_redis(group.add_parser("redis", help="write the access list of Redis and a password a role"))
    add, _, revoke = commands
    add.add_argument("name", metavar="NAME", help="whose key it is; no two have the same")
    add.add_argument(
        "--scope",
        type=one_of(SCOPES),
        action="append",
        metavar="SCOPE",
        help=f"{', '.join(SCOPES)}; may be repeated [inference]",
    )
    add.add_argument("--weight", type=number_above_zero, default=1.0, metavar="W", help="share of tokens [1]")
    for flag, help_ in (
        ("--rpm", "requests per minute"),
        ("--tpm", "tokens per minute, prompt and output"),
        ("--concurrent", "requests at once"),
    ):
        add.add_argument(flag, type=_limit, default=0, metavar="N", help=f"most {help_} [no limit]")
    revoke.add_argument("key", metavar="KEY", help="its name or id, as `instar keys list` shows it")


def _add_redis(command: CommandParser) -> None:
    command.description = (
        "Writes DIR/redis/users.acl for Redis (`aclfile`), and for each process DIR/ROLE/password, which it "
        "names with redis.password_file. Passwords that are there stay. Prints the names of the files."
    )
    add_config_flag(command, default=argparse.SUPPRESS)
    command.add_argument("folder", type=Path, metavar="DIR", help="where; made if it is not there")
    command.add_argument(
        "--redis", type=one_of(("6.2", "7")), default="7", metavar="V", help="version [7]; or 6.2"
    )
    command.add_argument(
        "--sentinels", action="store_true", help="users of replicas and Sentinels, too: docs/deploy.md"
    )
    command.set_defaults(run=_redis)


def _redis(args: argparse.Namespace) -> int:
    prefix = settings_of(args).redis.prefix
    try:
        selectors = args.redis == "7"
        written = write_users(args.folder, prefix, selectors=selectors, servers=args.sentinels)
    except OSError as error:
        raise InputError(f"{error.filename} cannot be written or read: {error.strerror}") from error
    return write_text("".join(f"{path}\n" for path in written))


def _limit(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or more; 0 is no limit")
    return int(text)


def _file(args: argparse.Namespace) -> Path:
    if args.file is not None:
        return Path(args.file).expanduser()
    if not (name := settings_of(args).gateway.keys_file):
        raise InputError(
            "no file of keys is named: set gateway.keys_file (INSTAR_GATEWAY__KEYS_FILE), or --file"
        )
    return Path(name).expanduser()


def _add(args: argparse.Namespace) -> int:
    name, path = args.name.strip(), _file(args)
    if not name.isprintable() or not 0 < len(name) <= 64:
        raise InputError(f"the name {args.name!r} must have 1 to 64 printable characters")
    options = {one: getattr(args, one) for one in ("weight", "rpm", "tpm", "concurrent")}
    scopes = tuple(dict.fromkeys(args.scope or ["inference"]))

    def with_it(keys: list[ApiKey]) -> Iterable[ApiKey]:
        if any(one.name == name for one in keys):
            raise InputError(f"there is a key {name!r} in {path}; revoke it first, or take another name")
        return [*keys, key]

    try:
        text, key = new_key(name, scopes=scopes, **options)
        change_keys(path, with_it)
    except KeysFileError as error:
        raise InputError(str(error)) from error
    found = _shown(key) | {"key": text}
    return write_found(
        args, found, lambda _: f"{text}\n  {name}, id {key.id}: shown once, and kept nowhere\n"
    )


def _list(args: argparse.Namespace) -> int:
    keys = _read(_file(args))
    if not keys and not args.json:
        return write_text("no key is in the file; `instar keys add NAME` adds one\n")
    table = make_table(["name", "id", "scopes", "added"], ["weight", "rpm", "tpm", "at once"])
    for key in keys:
        added = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created_s))
        limits = [str(one or "-") for one in (key.rpm, key.tpm, key.concurrent)]
        table.add_row(key.name, key.id, ", ".join(key.scopes), added, f"{key.weight:g}", *limits)
    return write_parts(args, [_shown(key) for key in keys], [table])


def _revoke(args: argparse.Namespace) -> int:
    path = _file(args)
    gone: list[ApiKey] = []

    def without_it(keys: list[ApiKey]) -> Iterable[ApiKey]:
        gone.extend(one for one in keys if args.key in (one.name, one.id))
        if not gone:
            known = ", ".join(one.name for one in keys) or "none"
            raise InputError(f"no key {args.key!r} in {path}; there are: {known}")
        return [one for one in keys if one not in gone]

    try:
        change_keys(path, without_it)
    except KeysFileError as error:
        raise InputError(str(error)) from error
    names = ", ".join(f"{one.name} ({one.id})" for one in gone)
    found = [_shown(one) for one in gone]
    return write_found(args, found, lambda _: f"revoked {plural(len(gone), 'key')}: {names}\n")


def _read(path: Path) -> list[ApiKey]:
    try:
        return read_keys(path)
    except KeysFileError as error:
        raise InputError(str(error)) from error


def _shown(key: ApiKey) -> dict[str, Any]:
    """Return what may be shown of a key: all but its digest."""
    shown: dict[str, Any] = msgspec.to_builtins(key)
    del shown["digest"]
    return shown
