"""Run a program that the kernel kills when its parent dies: `python pdeathsig.py PARENT_PID PROGRAM ARG ...`.

A process of its own does this, since code between fork and exec of a process with threads may deadlock. Linux
only; it runs with -I -S, so imports the standard library only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>; survives exec


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.stderr.write(f"cannot tie {program[0]} to its parent: {os.strerror(ctypes.get_errno())}\n")
    if os.getppid() != parent:  # the parent died before prctl: no signal will come
        sys.exit(1)
    try:
        os.execv(program[0], program)
    except OSError as error:
        sys.exit(f"cannot run {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
