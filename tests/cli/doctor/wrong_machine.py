"""
Runs a command on a machine made wrong, in namespaces of its own: `python wrong_machine.py COMMAND...`

As root: /dev/shm gets a file system of a few MiB, an RDMA device appears whose port is
down, and limits fall. Memory of other processes cannot be read, as under a strict seccomp profile. The
rest of the machine stays unchanged.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import subprocess
import sys
from pathlib import Path

CLONE_NEWNS = 0x20000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
PROCESS_VM_READV = {"x86_64": 310, "aarch64": 270}
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM

LIBC = ctypes.CDLL(None, use_errno=True)


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def main(command: list[str]) -> None:
    check(LIBC.unshare(CLONE_NEWNS))
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for folder, size in (("/dev/shm", "8m"), ("/sys/class", "1m")):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    port = Path("/sys/class/infiniband/mlx5_0/ports/1")
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65_536, 65_536))
    forbid(PROCESS_VM_READV[platform.machine()])
    os.execvp(command[0], command)


def forbid(call: int) -> None:
    """Answer the system call with EPERM, here and in all that is started from here."""
    steps = [
        (0x20, 0, 0, 0),  # load the number of the call
        (0x15, 0, 1, call),  # if it is this one
        (0x06, 0, 0, REFUSE),
        (0x06, 0, 0, ALLOW),
    ]
    program = Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))


def check(done: int) -> None:
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main(sys.argv[1:])
