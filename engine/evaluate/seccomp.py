"""A seccomp filter as bytes of classic BPF, which the kernel runs at every system call.

    clone, fork, vfork                          EPERM: a program is one process with one thread, so that
                                                the limits of a process are the limits of the program
    clone3                                      ENOSYS: the C library then uses clone
    all calls added in Linux 5.14 and later     ENOSYS: their effects were not reviewed
    SysV shared memory, semaphores and queues, POSIX queues, memfd_create, userfaultfd, splice,
    tee, vmsplice                               EPERM: memory that can outlive its mapping in a process,
                                                where the limit of memory counts it
    socket, socketpair, ptrace, other processes' memory, mounts, namespaces, keys, bpf, io_uring,
    asynchronous I/O, perf, inotify, fanotify   EPERM
    changes of mode, owner, times and extended attributes; file locks; syslog
                                                EPERM: device nodes and read-only files are the host's.
                                                If root runs the evaluation, the program owns the nodes;
                                                every account may write to /dev/zero and so set its times;
                                                and the host sees a lock on a file opened for reading
    fcntl, except for duplicating descriptors, flags and the size of pipes
                                                EPERM: leases, record locks, notifications, owners, hints
    a call of another architecture              the process is killed

RLIMIT_NPROC would not prevent new processes, because the kernel does not apply it to root.

System call numbers are those of the kernel's tables for x86-64 and AArch64. For other machines `seccomp_filter`
returns None.
"""

from __future__ import annotations

import errno
import platform
import struct

# struct seccomp_data: nr at offset 0, arch at 4, the arguments from 16, 8 bytes each. The command of fcntl is 32 bits,
# the lower half of its argument, which comes first because both machines are little-endian.
_NR, _ARCH, _SECOND_ARGUMENT = 0, 4, 24
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_CLONE3 = 435
_NEWER = 443
_X32 = 0x40000000

_FCNTL_ALLOWED = (0, 1, 2, 3, 4, 1030, 1031, 1032)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_SETPIPE_SZ, F_GETPIPE_SZ. The allowed commands are
listed, not the refused ones, because Linux adds commands of fcntl without a new system call."""

_SAME = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442)
"""io_uring, the mount calls from open_tree on, pidfd_getfd, mount_setattr: the numbers are the same on all
architectures."""


def _numbers(text: str) -> tuple[int, ...]:
    return (*(int(number) for number in text.split()), *_SAME)


_TABLES: dict[str, tuple[int, int, tuple[int, ...]]] = {
    # machine: AUDIT_ARCH, the number of fcntl, the numbers of refused calls
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
        # (fchmodat2, setxattrat, removexattrat and file_setattr were added after Linux 5.13, so they get ENOSYS)
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
    """Return the filter in the form that bubblewrap's `--seccomp` reads; None if `machine` has no table here."""
    machine = platform.machine() if machine is None else machine
    if machine not in _TABLES:
        return None
    arch, fcntl, refused = _TABLES[machine]
    code = [
        _op(_LOAD, _ARCH),
        _op(_EQUAL, arch, then=1),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NR),
        # From this number on x86-64 has the second table of the x32 ABI.
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
