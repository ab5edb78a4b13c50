"""What runs hostile Python: a supervisor that jails a child of its own, watches it, and tells what came of it.

Run as a file of its own, by `sandbox.py`, with nothing but the standard library. A request is a JSON line on stdin,
which stays open: where it ends, whoever asked is gone. The answer is a JSON line on stdout.

The child is the first process of namespaces of its own (processes, network, mounts, messages between processes, and
users, unless root made it, who becomes a user that nobody else is), so that all it leaves behind ends with it. It sees
a file system of the standard library, read-only, and nothing else; it has no capability and can get none; the kernel
bounds its memory, its time, its processes, and the size of files to nothing. A filter lets those system calls through
that Python needs to compute, to read and to print, and no other: no socket, no program, no memory that counts for
nobody, and nothing that a kernel may learn to do after this was written.
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
KEPT = {os.ST_NOEXEC: NO_EXEC, os.ST_NOATIME: 1024, os.ST_NODIRATIME: 2048, os.ST_RELATIME: 1 << 21}
"""Flags of a mount that somebody in a namespace must keep."""
NOBODY = 65534
FREE_USERS = 2_000_000_000
"""From here on nobody has a user id: those of root's sandboxes, each its own, because processes are counted by user."""

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
"""What a program may ask the kernel for: measured with strace over the standard library, and no more than that."""
ONLY = {  # system call -> which of its arguments is looked at, and what it may be
    "fcntl": (1, (0, 1, 2, 3, 4, 1030)),  # copy a descriptor, get and set its flags
    "ioctl": (1, (0x5401, 0x5413, 0x5421, 0x541B, 0x5450, 0x5451)),  # is it a terminal, flags, bytes that wait
    "prctl": (0, (15, 16)),  # the name of a thread
}
NAMESPACES = 0x7E020000
"""Flags of clone that no program may set."""
CLONE3, PIVOT_ROOT = (435, 435), (155, 41)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
EPERM, ENOSYS = 1, 38
CLOSED = b"closed"


class Refused(Exception):
    """What this machine does not allow."""


libc = ctypes.CDLL(None, use_errno=True)


def must(what: str, result: int) -> int:
    if result < 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


# ---------------------------------------------------------------- namespaces and files


def leave(as_root: bool) -> None:
    """Go into namespaces of one's own; processes only follow with the next fork."""
    spaces = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NETWORK | (0 if as_root else NEW_USERS)
    user, group = os.getuid(), os.getgid()
    must("namespaces", libc.unshare(spaces))
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
    must(f"mounting {target}", libc.mount(*names, ctypes.c_ulong(flags), options.encode() or None))


def move_into_empty_root() -> None:
    """Make a file system of the standard library all there is, and let go of the other."""
    folders = [path for path in sys.path if os.path.isdir(path)]
    apart = [path for path in folders if not any(path.startswith(f"{other}/") for other in folders)]
    handles = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in apart}
    kept = {path: os.statvfs(path).f_flag for path in apart}
    # Over /tmp, which is everywhere; what was below it is reached through handles.
    mount("tmpfs", "/tmp", "tmpfs", NO_SUID | NO_DEVICES, "size=1m,nr_inodes=1k,mode=755")
    for path, handle in handles.items():
        target = f"/tmp/jail{path}"
        os.makedirs(target, mode=0o755)
        mount(f"/proc/self/fd/{handle}", target, None, BIND | RECURSIVE)
        flags = sum(ours for theirs, ours in KEPT.items() if kept[path] & theirs)
        mount(None, target, None, flags | REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)
        os.close(handle)
        for packages in ("site-packages", "dist-packages"):
            if os.path.isdir(f"{target}/{packages}"):
                mount("tmpfs", f"{target}/{packages}", "tmpfs", READ_ONLY | NO_SUID | NO_DEVICES, "size=4k")
    os.chdir("/tmp")
    number = PIVOT_ROOT[MACHINES[os.uname().machine][0]]
    must("a root of its own", libc.syscall(ctypes.c_long(number), b".", b"."))
    must("leaving the old root", libc.umount2(b".", DETACH))
    mount(None, "/", None, REMOUNT | READ_ONLY | NO_SUID | NO_DEVICES)
    # In a folder of it: who is in another root than that of its mounts cannot make namespaces of users.
    os.chroot("/jail")
    os.chdir("/")


# ---------------------------------------------------------------- rights


def drop_rights(as_root: bool, user: int) -> None:
    """Have no capability, and no way to get one."""
    last = 63
    for capability in range(last + 1):
        libc.prctl(24, capability, 0, 0, 0)  # out of the bounding set; those that do not exist are refused
    libc.prctl(47, 4, 0, 0, 0)  # none that are kept across users
    if as_root:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header, nothing = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *[0] * 6)
    must("giving up capabilities", libc.capset(header, nothing))
    must("no new privileges", libc.prctl(38, 1, 0, 0, 0))
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # end with the supervisor, should somebody kill that


def bound(request: dict[str, Any], as_root: bool) -> None:
    """Tell the kernel how much there is."""
    seconds = max(1, round(request["seconds"]))
    processes = request["processes"] + (not as_root)  # the supervisor is a process of the same user then
    for what, most in (
        (resource.RLIMIT_AS, request["memory"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),
    ):
        resource.setrlimit(what, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def filter_of(machine: str) -> list[tuple[int, int, int, int]]:
    """The steps of the filter: refuse all system calls but those of the list, and end who calls as another machine.

    What is newer than the list does not exist, and neither does clone3, whose flags a filter cannot see: libraries then
    try what they did before.
    """
    column, architecture = MACHINES[machine]
    load, equal, above, has, give = 0x20, 0x15, 0x25, 0x45, 0x06
    allow, end, refuse, absent = 0x7FFF0000, 0x80000000, 0x00050000 | EPERM, 0x00050000 | ENOSYS
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, end), (load, 0, 0, 0)]
    numbers = {name: number for name, both in ALLOWED.items() if (number := both[column]) is not None}
    for name, number in numbers.items():
        then = [(give, 0, 0, allow)]
        if name == "clone":
            then = [(load, 0, 0, 16), (has, 0, 1, NAMESPACES), (give, 0, 0, refuse), *then]
        elif name in ONLY:
            place, values = ONLY[name]
            asked = [step for value in values for step in ((equal, 0, 1, value), (give, 0, 0, allow))]
            then = [(load, 0, 0, 16 + 8 * place), *asked, (give, 0, 0, refuse)]
        steps += [(equal, 0, len(then), number), *then]
    steps += [(equal, 0, 1, CLONE3[column]), (give, 0, 0, absent)]
    return [*steps, (above, 0, 1, max(numbers.values())), (give, 0, 0, absent), (give, 0, 0, refuse)]


def filter_calls() -> None:
    """Have the kernel refuse what is not on the list, from now on."""
    steps = filter_of(os.uname().machine)
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(program)))
    must("a filter of system calls", libc.prctl(22, 2, header, 0, 0))


# ---------------------------------------------------------------- the child


def run(code: str) -> int:
    """Run a program as Python's prompt would: where it ends with an expression, its value is shown."""
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
    except BaseException:  # the text of an error is code of the program
        text = type(error).__name__
    return f"line {line}: {text}" if line else text


def child(request: dict[str, Any], as_root: bool, output: int, closed: int) -> None:
    """What the child does, from its first step to its last. It tells that the jail is closed before anything hostile
    could tell it."""
    reader, writer = os.pipe()
    os.close(writer)
    try:
        for place, handle in enumerate((reader, output, output)):
            os.dup2(handle, place)
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
    except BaseException:  # it has closed that, or taken it away
        ended = ended or 1
    os._exit(ended & 0xFF)


def close_jail(request: dict[str, Any], as_root: bool) -> None:
    """Give up all that a program shall not have."""
    libc.sethostname(b"sandbox", 7)
    os.nice(5)
    user = FREE_USERS + request["number"] if as_root else NOBODY
    if as_root:
        # Before the processes of that user are counted.
        drop_rights(as_root, user)
        bound(request, as_root)
    else:
        bound(request, as_root)
        drop_rights(as_root, user)
    filter_calls()
    os.environ.clear()


# ---------------------------------------------------------------- the supervisor


def watch(process: int, output: int, request: dict[str, Any]) -> dict[str, Any]:
    """What the child said and how it ended, at the latest when its time is over or nobody waits for it any more."""
    poll = select.poll()
    handle = os.pidfd_open(process)
    for each in (0, output, handle):
        poll.register(each, select.POLLIN)
    said, size, why = bytearray(), 0, ""
    end = time.monotonic() + request["patience"]
    running = True
    while running:
        left = end - time.monotonic()
        ready = {each for each, _ in poll.poll(max(0.0, left) * 1000.0)}
        if output in ready:
            part = os.read(output, 1 << 16)
            size += len(part)
            said += part[: max(0, request["longest"] - len(said))]
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
    try:  # what was written before the end
        while part := os.read(output, 1 << 16):
            size += len(part)
            said += part[: max(0, request["longest"] - len(said))]
    except BlockingIOError:
        why = why or "alone"
    ended = os.waitstatus_to_exitcode(status)
    return {"said": said.decode("utf-8", "replace"), "size": size, "why": why, "ended": ended}


def supervise() -> dict[str, Any]:
    request = json.loads(sys.stdin.buffer.readline())
    machine = os.uname().machine
    if machine not in MACHINES:
        raise Refused(f"system calls of {machine} are not known here")
    as_root = os.geteuid() == 0
    leave(as_root)
    move_into_empty_root()
    reader, writer = os.pipe()
    hears, tells = os.pipe()
    process = os.fork()
    if process == 0:
        child(request, as_root, writer, tells)
    os.close(writer)
    os.close(tells)
    told = os.read(hears, 4096)
    os.close(hears)
    if told != CLOSED:
        os.kill(process, signal.SIGKILL)
        raise Refused(told.decode() or "the jail was not closed")
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
