"""Runs a program that cannot outlive its parent: `python pdeathsig.py PARENT_PID PROGRAM [ARGUMENT ...]`.

The kernel kills the program when the parent dies, however it dies: a supervisor ended with kill -9 leaves no
worker behind that holds a GPU. Done in a process of its own, since code between fork and exec of a process
with threads may deadlock. Linux only, as the workers' memory is. Standard library only: it runs with -I -S.
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
    if os.getppid() != parent:  # it died before the tie was made, so no signal will come
        sys.exit(1)
    try:
        os.execv(program[0], program)
    except OSError as error:
        sys.exit(f"cannot run {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
