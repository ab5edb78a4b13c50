"""Runs hostile Python: a supervisor starts a child in a jail, watches it, and reports the result.

`sandbox.py` runs this file as a program; it imports only the standard library. A request is a JSON line on stdin. Stdin
stays open: when it closes, the caller has gone, and the child is killed. The answer is a JSON line on stdout.

The child is the first process of new namespaces (processes, network, mounts, IPC; and users, unless the supervisor is
root: then the child gets an unused user id), so everything it starts ends with it. It sees a read-only file system with
the standard library and nothing else. It has no capability and can get none. The kernel limits its memory, its time and
its processes, and it can write no file. A filter allows only the system calls that Python needs to compute, to read and
to print: no sockets, no other programs, no memory outside the limit, and no system call that is newer than the list.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import Any

NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USERS, NEW_PIDS, NEW_NETWORK = (1 << bit for bit in (17, 26, 27, 28, 29, 30))
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
LOCKED_FLAGS = {os.ST_NOEXEC: NO_EXEC, os.ST_NOATIME: 1024, os.ST_NODIRATIME: 2048, os.ST_RELATIME: 1 << 21}
"""Mount flags that a process in a user namespace must not remove: the bit in statvfs and the bit in mount."""
NOBODY = 65534
FREE_USERS = 2_000_000_000
"""The first of the unused user ids. Each sandbox of root gets a different one, because the kernel counts processes by
user."""

ALLOWED = {  # system call -> its number on x86_64, on aarch64
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62), "openat": (257, 56), "open": (2, None),
    "newfstatat": (262, 79), "fstat": (5, 80), "stat": (4, None), "lstat": (6, None), "statx": (332, 291),
    "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "brk": (12, 214),
    "madvise": (28, 233), "msync": (26, 227), "futex": (202, 98), "sched_yield": (24, 124), "getrandom": (318, 278),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165), "alarm": (37, None),
    "setitimer": (38, 103), "getitimer": (36, 102), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "rt_sigsuspend": (130, 133), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132), "kill": (62, 129), "tgkill": (234, 131), "restart_syscall": (219, 128),
    "pause": (34, None), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "close_range": (436, 436), "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None),
    "readlinkat": (267, 78), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "statfs": (137, 43), "fstatfs": (138, 44), "umask": (95, 166), "getpid": (39, 172), "getppid": (110, 173),
    "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150), "getpgid": (121, 155),
    "getpgrp": (111, None), "getsid": (124, 156), "setsid": (112, 157), "getpriority": (140, 141), "uname": (63, 160),
    "sched_getaffinity": (204, 123), "getcpu": (309, 168), "prlimit64": (302, 261), "wait4": (61, 260),
    "waitid": (247, 95), "exit": (60, 93), "exit_group": (231, 94), "set_robust_list": (273, 99),
    "set_tid_address": (218, 96), "rseq": (334, 293), "clone": (56, 220), "fcntl": (72, 25), "ioctl": (16, 29),
    "prctl": (157, 167),
}  # fmt: skip
"""The allowed system calls: those that strace showed for the standard library, and no others."""
ONLY = {  # system call -> the index of the argument that is checked, and its allowed values
    "fcntl": (1, (0, 1, 2, 3, 4, 1030)),  # copy a descriptor, get and set its flags
    "ioctl": (1, (0x5401, 0x5413, 0x5421, 0x541B, 0x5450, 0x5451)),  # is it a terminal, flags, waiting bytes
    "prctl": (0, (15, 16)),  # the name of a thread
}
NAMESPACES = 0x7E020000
"""Forbidden flags of clone."""
CLONE3, PIVOT_ROOT = (435, 435), (155, 41)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
EPERM, ENOSYS = 1, 38
CLOSED = b"closed"


class Refused(Exception):
    """This machine does not allow a step of the jail."""


libc = ctypes.CDLL(None, use_errno=True)


def check(step: str, result: int) -> int:
    if result < 0:
        raise Refused(f"{step}: {os.strerror(ctypes.get_errno())}")
    return result


# ---------------------------------------------------------------- namespaces and files


def leave(as_root: bool) -> None:
    """Enter new namespaces. The one for processes holds from the next fork on."""
    spaces = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NETWORK | (0 if as_root else NEW_USERS)
    user, group = os.getuid(), os.getgid()
    check("namespaces", libc.unshare(spaces))
    if not as_root:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    mount(None, "/", None, RECURSIVE | PRIVATE)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    names = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    check(f"mounting {target}", libc.mount(*names, ctypes.c_ulong(flags), options.encode() or None))


def move_into_empty_root() -> None:
    """Replace the root by a file system that has only the standard library."""
    folders = [path for path in sys.path if os.path.isdir(path)]
    apart = [path for path in folders if not any(path.startswith(f"{other}/") for other in folders)]
    handles = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in apart}
    mount_flags = {path: os.statvfs(path).f_flag for path in apart}
    # Mounted over /tmp, which every machine has; the handles reach folders that were below /tmp.
    mount("tmpfs", "/tmp", "tmpfs", NO_SUID | NO_DEVICES, "size=1m,nr_inodes=1k,mode=755")
    for path, handle in handles.items():
        target = f"/tmp/jail{path}"
        os.makedirs(target, mode=0o755)
        mount(f"/proc/self/fd/{handle}", target, None, BIND | RECURSIVE)
        flags = sum(mount_bit for statvfs_bit, mount_bit in LOCKED_FLAGS.items() if mount_flags[path] & statvfs_bit)
        mount(None, target, None, flags | REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)
        os.close(handle)
        for packages in ("site-packages", "dist-packages"):
            if os.path.isdir(f"{target}/{packages}"):
                mount("tmpfs", f"{target}/{packages}", "tmpfs", READ_ONLY | NO_SUID | NO_DEVICES, "size=4k")
    os.chdir("/tmp")
    number = PIVOT_ROOT[MACHINES[os.uname().machine][0]]
    check("a new root", libc.syscall(ctypes.c_long(number), b".", b"."))
    check("leaving the old root", libc.umount2(b".", DETACH))
    mount(None, "/", None, REMOUNT | READ_ONLY | NO_SUID | NO_DEVICES)
    # Into a folder of the new root: a process whose root is not the root of its mounts cannot make user namespaces.
    os.chroot("/jail")
    os.chdir("/")


# ---------------------------------------------------------------- rights


def drop_rights(as_root: bool, user: int) -> None:
    """Give up all capabilities and all ways to get one."""
    last = 63
    for capability in range(last + 1):
        libc.prctl(24, capability, 0, 0, 0)  # drop it from the bounding set; unknown numbers are refused
    libc.prctl(47, 4, 0, 0, 0)  # clear the ambient set
    if as_root:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header, nothing = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *[0] * 6)
    check("giving up capabilities", libc.capset(header, nothing))
    check("no new privileges", libc.prctl(38, 1, 0, 0, 0))
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # end with the supervisor if that is killed


def set_limits(request: dict[str, Any], as_root: bool) -> None:
    """Set the limits of the kernel."""
    seconds = max(1, round(request["seconds"]))
    processes = request["processes"] + (not as_root)  # then the supervisor has the same user and counts
    for limit, most in (
        (resource.RLIMIT_AS, request["memory"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),
    ):
        resource.setrlimit(limit, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def filter_of(machine: str) -> list[tuple[int, int, int, int]]:
    """The steps of the filter: it refuses all system calls but the listed ones, and kills a process that uses the calls
    of another architecture.

    For system calls newer than the list, and for clone3, whose flags a filter cannot see, it answers that they do not
    exist: libraries then fall back to older calls.
    """
    column, architecture = MACHINES[machine]
    load, equal, above, has, give = 0x20, 0x15, 0x25, 0x45, 0x06
    allow, end, refuse, absent = 0x7FFF0000, 0x80000000, 0x00050000 | EPERM, 0x00050000 | ENOSYS
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, end), (load, 0, 0, 0)]
    numbers = {name: number for name, both in ALLOWED.items() if (number := both[column]) is not None}
    for name, number in numbers.items():
        decision = [(give, 0, 0, allow)]
        if name == "clone":
            decision = [(load, 0, 0, 16), (has, 0, 1, NAMESPACES), (give, 0, 0, refuse), *decision]
        elif name in ONLY:
            index, values = ONLY[name]
            comparisons = [step for value in values for step in ((equal, 0, 1, value), (give, 0, 0, allow))]
            decision = [(load, 0, 0, 16 + 8 * index), *comparisons, (give, 0, 0, refuse)]
        steps += [(equal, 0, len(decision), number), *decision]
    steps += [(equal, 0, 1, CLONE3[column]), (give, 0, 0, absent)]
    return [*steps, (above, 0, 1, max(numbers.values())), (give, 0, 0, absent), (give, 0, 0, refuse)]


def filter_calls() -> None:
    """Install the filter: from now on the kernel refuses all system calls that are not listed."""
    steps = filter_of(os.uname().machine)
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(program)))
    check("a filter of system calls", libc.prctl(22, 2, header, 0, 0))


# ---------------------------------------------------------------- the child


def run(code: str) -> int:
    """Run a program as Python's prompt would: if it ends with an expression, print its value."""
    scope: dict[str, Any] = {"__name__": "__main__", "exit": sys.exit, "quit": sys.exit}
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), scope)
        if isinstance(last, ast.Expr):
            sys.displayhook(eval(compile(ast.Expression(last.value), "<code>", "eval"), scope))
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        print(in_a_line(error), file=sys.stderr)
        return 1
    return 0


def in_a_line(error: BaseException) -> str:
    """The line of the program and the error, and no traceback."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<code>":
            line = trace.tb_lineno
        trace = trace.tb_next
    try:
        text = " ".join(f"{type(error).__name__}: {error}".split())
    except BaseException:  # the text of an error may come from the program's code
        text = type(error).__name__
    return f"line {line}: {text}" if line else text


def child(request: dict[str, Any], as_root: bool, output: int, closed: int) -> None:
    """The whole work of the child. It reports that the jail is closed before any hostile code runs, so that code cannot
    forge the report."""
    reader, writer = os.pipe()
    os.close(writer)
    try:
        for target, handle in enumerate((reader, output, output)):
            os.dup2(handle, target)
        os.dup2(closed, 3)
        os.closerange(4, 4096)
        close_jail(request, as_root)
    except BaseException as error:
        os.write(3, str(error).encode())
        os._exit(1)
    os.write(3, CLOSED)
    os.close(3)
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    ended = run(request["code"])
    try:
        sys.stdout.flush()
    except BaseException:  # the program closed or replaced stdout
        ended = ended or 1
    os._exit(ended & 0xFF)


def close_jail(request: dict[str, Any], as_root: bool) -> None:
    """Give up everything that a program must not have."""
    libc.sethostname(b"sandbox", 7)
    os.nice(5)
    user = FREE_USERS + request["number"] if as_root else NOBODY
    if as_root:
        # First change the user: its processes are the ones that the limit counts.
        drop_rights(as_root, user)
        set_limits(request, as_root)
    else:
        set_limits(request, as_root)
        drop_rights(as_root, user)
    filter_calls()
    os.environ.clear()


# ---------------------------------------------------------------- the supervisor


def watch(process: int, output: int, request: dict[str, Any]) -> dict[str, Any]:
    """The output of the child and how it ended. It is killed when its time is over or the caller has gone."""
    poll = select.poll()
    handle = os.pidfd_open(process)
    for each in (0, output, handle):
        poll.register(each, select.POLLIN)
    kept, size, why = bytearray(), 0, ""
    end = time.monotonic() + request["patience"]
    running = True
    while running:
        left = end - time.monotonic()
        ready = {each for each, _ in poll.poll(max(0.0, left) * 1000.0)}
        if output in ready:
            part = os.read(output, 1 << 16)
            size += len(part)
            kept += part[: max(0, request["longest"] - len(kept))]
            if not part:
                poll.unregister(output)
        if size > request["most"]:
            why = "output"
        elif left <= 0:
            why = "time"
        elif 0 in ready:
            why = "alone"
        if why:
            os.kill(process, signal.SIGKILL)
        running = handle not in ready and not why
    _, status = os.waitpid(process, 0)
    os.set_blocking(output, False)
    try:  # read the output that was written before the end
        while part := os.read(output, 1 << 16):
            size += len(part)
            kept += part[: max(0, request["longest"] - len(kept))]
    except BlockingIOError:
        why = why or "alone"
    ended = os.waitstatus_to_exitcode(status)
    return {"said": kept.decode("utf-8", "replace"), "size": size, "why": why, "ended": ended}


def supervise() -> dict[str, Any]:
    request = json.loads(sys.stdin.buffer.readline())
    machine = os.uname().machine
    if machine not in MACHINES:
        raise Refused(f"the system calls of {machine} are not known; only those of {', '.join(MACHINES)} are")
    as_root = os.geteuid() == 0
    leave(as_root)
    move_into_empty_root()
    reader, writer = os.pipe()
    report_reader, report_writer = os.pipe()
    process = os.fork()
    if process == 0:
        child(request, as_root, writer, report_writer)
    os.close(writer)
    os.close(report_writer)
    report = os.read(report_reader, 4096)
    os.close(report_reader)
    if report != CLOSED:
        os.kill(process, signal.SIGKILL)
        raise Refused(report.decode() or "the jail was not closed")
    return watch(process, reader, request)


def main() -> None:
    try:
        answer = supervise()
    except (Refused, OSError) as error:
        answer = {"refused": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
