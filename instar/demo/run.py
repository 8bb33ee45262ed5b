"""`instar demo` from its checks to its end, whatever ends it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import webbrowser
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from rich.console import Console
from rich.text import Text

from instar.demo.scenes import Scenes
from instar.demo.service import DemoService, available_mib, memory_problem
from instar.errors import InputError, ServerError
from instar.running import sole_demo
from instar.serve.preflight import listening_problem
from instar.serve.programs import DEMO_MODEL
from instar.serve.redis_server import free_port
from instar.serve.supervisor import STOP_SIGNALS

INTERRUPTED: Final = 130


def demo(args: argparse.Namespace) -> int:
    """Return 0 after all scenes, 130 after Ctrl-C. Raises CommandError."""
    if not (DEMO_MODEL / "model.safetensors").is_file():
        raise InputError(f"{DEMO_MODEL} has no demo model: run the demo in a clone of the repository")
    if problem := memory_problem(available_mib()):
        raise InputError(problem)
    port = args.port or free_port()
    with sole_demo(f"http://127.0.0.1:{port}/"):
        if problem := listening_problem("127.0.0.1", port):
            raise InputError(problem)
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {args.out}: cannot be made: {error.strerror}") from error
        return asyncio.run(_play(args, DemoService(args.out, port)))


async def _play(args: argparse.Namespace, service: DemoService) -> int:
    """Play the demo, or stop where it is when asked to. The service has ended when this returns."""
    show = Show(service, args)
    task = asyncio.create_task(show.play())
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, show.stop, task)
    try:
        await task
    except asyncio.CancelledError:
        say("The demo was stopped; nothing of it runs any more")
        return 0 if show.is_over else INTERRUPTED
    say("The service of the demo has ended; nothing of it runs any more")
    return 0


class Show:
    """The demo with its service. `is_over`: all scenes were played."""

    def __init__(self, service: DemoService, args: argparse.Namespace) -> None:
        self.is_over = False
        self._service, self._args = service, args
        self._is_stopping = False

    def stop(self, task: asyncio.Task[None]) -> None:
        """End the demo; when called again, end its service at once."""
        if self._is_stopping:
            self._service.hurry()
            return  # what stops the service must not be cancelled itself
        self._is_stopping = True
        task.cancel()

    async def play(self) -> None:
        """Play the scenes beside the service. Raises CommandError."""
        service, args = self._service, self._args
        async with service.running() as client:
            scenes = Scenes(
                client, service.url, args.out, args.seconds, say, open_page if args.opens else _no_page
            )
            await before_end(scenes.play(), service.ended)
            self.is_over = True
            if args.keep:
                say(f"The service goes on; Ctrl-C ends it: {service.url}/")
                raise ServerError(await service.ended())


async def before_end(work: Awaitable[None], ended: Callable[[], Awaitable[str]]) -> None:
    """Do `work`. Raises ServerError if the service ends first, with what `ended` returns."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(ended())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ServerError(tasks[1].result())
        tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def say(text: str) -> None:
    """Write a line, whole on any terminal: in colour, without, narrow or not in UTF-8."""
    style = "bold" if text.startswith("[") else ""
    Console().print(Text(text, style=style), soft_wrap=True, highlight=False)


def has_browser(environ: Mapping[str, str]) -> bool:
    """Return True if a page can be opened in a window: a browser of the terminal would take the terminal."""
    if not (environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    return type(browser) is not webbrowser.GenericBrowser  # the class of links, lynx and w3m


def _no_page(_: str) -> None:
    """Open nothing."""


def open_page(url: str) -> None:
    """Open the dashboard if there is a browser for it; its address has been told."""
    if has_browser(os.environ) and not webbrowser.open(url):
        sys.stderr.write("note: the browser did not open\n")
