"""A filter of system calls, as classic BPF bytes that the kernel runs at every call.

    clone, fork, vfork                          EPERM: a program is one process with one thread, so that
                                                the limits of a process are the limits of the program
    clone3                                      ENOSYS: the C library then uses clone
    all that Linux 5.14 and later added         ENOSYS: their effects were not reviewed here
    SysV shared memory, semaphores and queues, POSIX queues, memfd_create, userfaultfd, splice,
    tee, vmsplice                               EPERM: memory that can outlive its mapping in a process,
                                                where the limit of memory counts it
    socket and its like, ptrace, other processes' memory, mounts, namespaces, keys, bpf, io_uring,
    asynchronous input, perf, notifications     EPERM
    changes of mode, owner, times and extended attributes, locks of files, the kernel's own log
                                                EPERM: device nodes and read-only files are the host's own.
                                                A program that root started owns the nodes, every account
                                                may write to /dev/zero and so set its times, and a lock or
                                                lease on a file that is open for reading is seen outside
    fcntl, but for descriptors, flags and pipes EPERM: leases, record locks, notifications, owners, hints
    a call of another architecture              the process is killed

The process limit of `setrlimit` would not be enough for the first, because the kernel does not apply it to
root.

Numbers are those of the kernel's tables for x86-64 and AArch64. For other machines `seccomp_filter` returns
None.
"""

from __future__ import annotations

import errno
import platform
import struct

# struct seccomp_data: nr at 0, arch at 4, then the arguments from 16, 8 bytes each. The kernel takes the command
# of fcntl as 32 bits, and these are the low ones: both machines here are little-endian.
_NR, _ARCH, _SECOND_ARGUMENT = 0, 4, 24
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_CLONE3 = 435
_NEWER = 443
_X32 = 0x40000000

_FCNTL_ALLOWED = (0, 1, 2, 3, 4, 1030, 1031, 1032)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_SETPIPE_SZ, F_GETPIPE_SZ. The allowed commands are
listed instead of the refused ones, because Linux adds commands of fcntl without new system calls."""

_SAME = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442)
"""io_uring, the mount calls from open_tree on, pidfd_getfd, mount_setattr: these numbers are the same
everywhere."""


def _numbers(text: str) -> tuple[int, ...]:
    return (*(int(number) for number in text.split()), *_SAME)


_TABLES: dict[str, tuple[int, int, tuple[int, ...]]] = {
    # machine: AUDIT_ARCH, the number of fcntl, refused
    "x86_64": (
        0xC000003E,
        72,
        # clone fork vfork | socket socketpair | ptrace process_vm_readv process_vm_writev |
        # mount umount2 pivot_root chroot | unshare setns | add_key request_key keyctl | bpf
        # perf_event_open userfaultfd | init_module finit_module delete_module kexec_load |
        # shmget shmat shmctl shmdt | semget semop semctl semtimedop | msgget msgsnd msgrcv msgctl |
        # mq_open mq_unlink | memfd_create | splice tee vmsplice | io_setup | inotify_init
        # inotify_init1 fanotify_init |
        # chmod fchmod fchmodat | chown fchown lchown fchownat | utime utimes futimesat utimensat |
        # setxattr lsetxattr fsetxattr | removexattr lremovexattr fremovexattr | flock | syslog
        # (fchmodat2, setxattrat, removexattrat and file_setattr are newer than all that is allowed)
        _numbers(
            "56 57 58 41 53 101 310 311 165 166 155 161 272 308 248 249 250 321 298 323 175 313 176 246 "
            "29 30 31 67 64 65 66 220 68 69 70 71 240 241 319 275 276 278 206 253 294 300 "
            "90 91 268 92 93 94 260 132 235 261 280 188 189 190 197 198 199 73 103"
        ),
    ),
    "aarch64": (
        0xC00000B7,
        25,
        _numbers(
            "220 198 199 117 270 271 40 39 41 51 97 268 217 218 219 280 241 282 105 273 106 104 "
            "194 196 195 197 190 193 191 192 186 189 188 187 180 181 279 76 77 75 0 26 262 "
            "52 53 54 55 88 5 6 7 14 15 16 32 116"
        ),
    ),
}


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """Return the filter in the form that bubblewrap's `--seccomp` reads; None for a machine without a table here."""
    machine = platform.machine() if machine is None else machine
    if machine not in _TABLES:
        return None
    arch, fcntl, refused = _TABLES[machine]
    code = [
        _op(_LOAD, _ARCH),
        _op(_EQUAL, arch, then=1),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NR),
        # x86-64 has a second table, for 32-bit pointers, above this number.
        _op(_AT_LEAST, _X32, otherwise=1),
        _op(_RETURN, _KILL),
        _op(_AT_LEAST, _NEWER, then=1),
        _op(_EQUAL, _CLONE3, otherwise=1),
        _op(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for number in refused:
        code += [_op(_EQUAL, number, otherwise=1), _op(_RETURN, _ERRNO | errno.EPERM)]
    allowed = len(_FCNTL_ALLOWED)
    code += [_op(_EQUAL, fcntl, otherwise=allowed + 2), _op(_LOAD, _SECOND_ARGUMENT)]
    code += [
        _op(_EQUAL, command, then=allowed - index) for index, command in enumerate(_FCNTL_ALLOWED)
    ]
    code += [_op(_RETURN, _ERRNO | errno.EPERM), _op(_RETURN, _ALLOW)]
    return b"".join(code)


def _op(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """Return one `struct sock_filter`; `then` and `otherwise` count the instructions that a jump skips."""
    return struct.pack("<HBBI", code, then, otherwise, value)
