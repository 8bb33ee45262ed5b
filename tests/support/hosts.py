"""Hosts of a test on one machine: network namespaces on a bridge, and what runs in them.

Needs root, and a kernel that gives it namespaces. The bridge is in a namespace of its own, so that no rule of
this machine's firewall is in the way.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

NETWORK: Final = "10.231.77"  # .1 is this machine, the hosts follow


def run(*words: str) -> None:
    """Raises RuntimeError with what the command said."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


def why_not() -> str:
    """Return why this machine has no namespaces for a test, or an empty text."""
    if missing := [program for program in ("ip", "unshare") if not shutil.which(program)]:
        return f"{missing[0]} is not on PATH"
    try:
        with Network(num_hosts=1) as network:
            run(*network.command(0), "true")
    except RuntimeError as problem:
        return f"no network namespaces: {problem}"
    return ""


class Network:
    """`num_hosts` hosts that reach each other and this machine; a context in which they exist."""

    def __init__(self, num_hosts: int = 2) -> None:
        self._tag = f"i{os.getpid()}"
        self._hosts = [f"{self._tag}h{index}" for index in range(num_hosts)]
        self._switch, self._outside = f"{self._tag}s", f"{self._tag}o"

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._remove()

    @property
    def own_address(self) -> str:
        """The address of this machine, outside the namespaces."""
        return f"{NETWORK}.1"

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 2}"

    def command(self, host: int) -> list[str]:
        """Return the words before a command that runs on a host, with a host name of its own.

        Each of them ends in `exec`, so that the process has the command's id.
        """
        name = self._hosts[host]
        rename = f'hostname {name} && exec "$@"'
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", rename, "--"]

    def cut(self, host: int) -> None:
        """Take the link of a host down: nothing passes, and no connection is closed."""
        run("ip", "-n", self._switch, "link", "set", f"p{host}", "down")

    def mend(self, host: int) -> None:
        run("ip", "-n", self._switch, "link", "set", f"p{host}", "up")

    def _make(self) -> None:
        switch, outside = self._switch, self._outside
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", "own", "netns", switch)
        run("ip", "address", "add", f"{self.own_address}/24", "dev", outside)
        run("ip", "link", "set", outside, "up")
        self._plug_in("own")
        for index, name in enumerate(self._hosts):
            port = f"p{index}"
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "net", "netns", name)
            run("ip", "-n", name, "address", "add", f"{self.address(index)}/24", "dev", "net")
            run("ip", "-n", name, "link", "set", "net", "up")
            self._plug_in(port)

    def _plug_in(self, port: str) -> None:
        run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")

    def _remove(self) -> None:
        """Delete the link of this machine, which is its own, and the namespaces with theirs."""
        with suppress(RuntimeError):
            run("ip", "link", "delete", self._outside)
        for name in (*self._hosts, self._switch):
            with suppress(RuntimeError):
                run("ip", "netns", "delete", name)
