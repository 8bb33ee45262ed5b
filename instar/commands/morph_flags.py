"""The verbs of `instar morph` and their flags. Imports nothing that makes --help slow."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from bus.policy import FIELDS
from bus.precisions import PRECISIONS
from instar.argparse_errors import Parser
from instar.verbs import at_least_one, one_of, verbs_of

TEXT = """\
Changes the shape of a running instance by hand, and the policy by which the service does it itself.

  instar morph swap --count 2 --precision int4          the next two layers of the profile's order
  instar morph swap demo@w0 --layers 0,4-6 --precision full
  instar morph swap --layers 3 --part ffn --precision int8
  instar morph resize 400                               KV blocks
  instar morph tp 2                                     two workers become one instance
  instar morph tp 1 --workers w0,w1                     and part again
  instar morph policy                                   shows it
  instar morph policy mode=manual kv_usage_high=0.9     changes it
  instar morph show ID                                  how far one is
  instar morph cancel ID                                gives it up; the old shape serves on

Instances are those of `instar status`; with only one, its name may be left out. Without pressure the
policy returns layers and parts groups that were ordered by hand; with mode=manual it does nothing by itself.
"""


def add_verbs(parser: Parser, add_client_flags: Callable[[Parser], None]) -> None:
    """`args.verb` says which was typed, "" without one."""
    declared = verbs_of(parser, "morph")

    def verb(name: str, summary: str) -> Parser:
        sub = declared(name, summary)
        add_client_flags(sub)
        sub.add_argument("--json", action="store_true", help="as JSON")
        return sub

    _add_swap(verb("swap", "hold layers in another precision"))
    resize = verb("resize", "have so many KV blocks")
    _add_instance(resize)
    resize.add_argument("blocks", type=_blocks, metavar="BLOCKS", help="as many as whole pages allow")
    _add_waits(resize)
    _add_tp(verb("tp", "serve a model at another degree of tensor parallelism"))
    policy = verb("policy", "show the policy, or change its fields")
    policy.add_argument("words", nargs="*", metavar="FIELD=VALUE", help="without any: shows all fields")
    policy.formatter_class = argparse.RawDescriptionHelpFormatter
    policy.epilog = policy_fields()
    for name, summary in (("show", "how far a morph is"), ("cancel", "give up a morph that runs")):
        sub = verb(name, summary)
        sub.add_argument("morph", metavar="ID", help="as `instar status` shows it")


def policy_fields() -> str:
    """Return the fields of the policy, each with its meaning, limits, default and effects of modes."""
    lines = ["fields:"]
    for one in FIELDS:
        default = f"{one.default:g}" if isinstance(one.default, float) else one.default
        unit = f" {one.unit}" if one.unit not in one.summary.split() and one.unit else ""
        lines.append(f"  {one.name:20}{one.summary}: {one.limits}{unit} [{default}]")
        notes = [f"0: {one.zero}"] if one.zero else []
        notes += [f"{name}: {text}" for name, text in one.choices.items() if text]
        notes += [f"with mode={mode} {effect.summary}" for mode, effect in one.by_mode.items()]
        lines += [f"{'':22}{note}" for note in notes]
    return "\n".join(lines)


def _add_swap(swap: Parser) -> None:
    _add_instance(swap)
    which = swap.add_mutually_exclusive_group(required=True)
    which.add_argument("--layers", type=layer_numbers, metavar="LIST", help="their numbers, as 0,4-6")
    which.add_argument(
        "--count",
        type=at_least_one,
        metavar="N",
        help="so many more in the instance's order; to full: the last swapped go first",
    )
    swap.add_argument(
        "--precision", required=True, type=one_of(PRECISIONS), metavar="P", help=_either(PRECISIONS)
    )
    swap.add_argument(
        "--part",
        action="append",
        type=one_of(("attention", "ffn")),
        metavar="PART",
        help="attention or ffn [both]",
    )
    _add_waits(swap)


def _add_tp(tp: Parser) -> None:
    """`members` and `served`: flags of `instar serve` have the names that they would have."""
    tp.add_argument("tp", type=at_least_one, metavar="DEGREE", help="workers of one instance")
    which = tp.add_mutually_exclusive_group()
    which.add_argument(
        "--workers",
        dest="members",
        type=_names,
        metavar="LIST",
        help="all that take part, as w0,w1 [the least loaded]",
    )
    which.add_argument("--instance", metavar="INSTANCE", help="one that takes part [of the only model]")
    tp.add_argument("--model", dest="served", metavar="NAME", help="where the workers serve several")
    tp.add_argument(
        "--layers-per-step",
        type=at_least_one,
        metavar="N",
        help="that change between two steps [worker.layers_per_step]",
    )
    _add_waits(tp)


def _add_instance(parser: Parser) -> None:
    parser.add_argument("instance", nargs="?", metavar="INSTANCE", help="[the only one]")
    parser.add_argument("--instance", dest="named", metavar="INSTANCE", help="the same as a flag")


def _add_waits(parser: Parser) -> None:
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="S", help="how long it may wait for free memory [0]"
    )
    parser.add_argument("--detach", action="store_true", help="return at once instead of when it has ended")


def _blocks(text: str) -> int:
    try:
        return at_least_one(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error}; the instance comes before it, as in resize demo@w0 400"
        ) from None


def layer_numbers(text: str) -> list[int]:
    """`0,4-6` -> [0, 4, 5, 6]."""
    found: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of layers; write it as 0,4-6") from None
        if high < low or high - low > 10_000:
            raise argparse.ArgumentTypeError(f"{piece!r} is no range of layers; write it as 4-6")
        found += range(low, high + 1)
    return found


def _names(text: str) -> list[str]:
    """`w0,w1` -> ["w0", "w1"]."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of workers; write it as w0,w1")
    return names


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
