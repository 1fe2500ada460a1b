"""The program inside the sandbox, which `scoring.sandbox` starts as a file in an isolated Python.

It reads a task from standard input, drops its rights, runs the code and reports the outcome to standard output. It may
import the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import types

# Numbers of refused Linux system calls, (x86-64, arm64): those that make or reach processes, use the network or change
# files. None: arm64 lacks the call.
REFUSED = {
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "clone3": (435, 435),
    "execveat": (322, 281), "unshare": (272, 97), "setns": (308, 268), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kill": (62, 129), "tkill": (200, 130),
    "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "setrlimit": (160, 164),
    "socket": (41, 198), "socketpair": (53, 199), "bind": (49, 200), "connect": (42, 203),
    "io_uring_setup": (425, 425), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "memfd_create": (319, 279), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "creat": (85, None), "openat2": (437, 437), "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "unlink": (87, None), "unlinkat": (263, 35), "mknod": (133, None), "mknodat": (259, 33),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "chroot": (161, 51),
    "mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428),
}  # fmt: skip
# Refused with some arguments: (numbers, index of the argument, refused bits). Opening files for reading, which every
# import does, and reading limits are permitted.
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
REFUSED_WITH = {"open": ((2, None), 1, WRITING), "openat": ((257, 56), 2, WRITING)}
REFUSED_WITH |= {"prlimit64": ((302, 261), 2, 0xFFFFFFFF)}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # the column above, and the kernel's name for it

# Of linux/bpf_common.h, linux/seccomp.h and linux/prctl.h.
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL_PROCESS, NOT_PERMITTED = 0x7FFF0000, 0x80000000, 0x00050000 | 1
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2

# Audit events that are refused without the filter; hostile code can bypass the hook.
HOOKED = ("socket.", "subprocess.", "ctypes.", "shutil.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn")
HOOKED += ("os.system", "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink")
HOOKED += ("os.truncate", "os.chmod")


def main() -> None:
    task = json.loads(sys.stdin.read())
    report, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    limit(task)
    if not refuse_system_calls():
        sys.addaudithook(refuse_event)
    outcome = outcome_of(task)
    # The nonce is written only here, so code that ends the process has not passed, whatever its exit code.
    os.write(report, json.dumps({"nonce": task["nonce"], "outcome": outcome}).encode())
    os._exit(0)


def outcome_of(task: dict) -> str:
    """Run the parts in one module and make the call; return ``passed`` or the name of the exception."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        for number, part in enumerate(task["parts"]):
            exec(compile(part, f"part {number}", "exec", dont_inherit=True), module.__dict__)
        function, argument = task["call"]
        module.__dict__[function](module.__dict__[argument])
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        return type(error).__name__
    return "passed"


def limit(task: dict) -> None:
    """Set hard limits, which an unprivileged process cannot raise again."""
    limits = {"RLIMIT_CPU": task["cpu_seconds"], "RLIMIT_AS": task["memory"], "RLIMIT_FSIZE": task["file_bytes"]}
    limits |= {"RLIMIT_NPROC": 0, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": 32}
    for name, value in limits.items():
        kind = getattr(resource, name)
        most = resource.getrlimit(kind)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        # The hard limit is a second later, so that SIGXCPU comes before SIGKILL and names the reason.
        hard = value + (name == "RLIMIT_CPU" and value != most)
        try:
            resource.setrlimit(kind, (value, hard))
        except (ValueError, OSError):  # macOS refuses most values of RLIMIT_AS
            if sys.platform == "linux":
                raise


def refuse_system_calls() -> bool:
    """Make Linux refuse `REFUSED` with EPERM from now on; return whether it does. Needs no privileges."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return False
    code = filter_program(*MACHINES[platform.machine()])
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes, prctl.restype = [ctypes.c_int] + [ctypes.c_ulong] * 4, ctypes.c_int
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # die with the parent
    address = ctypes.create_string_buffer(program)
    return (
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        and prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(address), 0, 0) == 0
    )


def filter_program(column: int, machine: int) -> bytes:
    """Return the BPF program: instructions (code, jump if true, jump if false, operand)."""
    refuse = (RETURN, 0, 0, NOT_PERMITTED)
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, machine), (RETURN, 0, 0, KILL_PROCESS), (LOAD, 0, 0, 0)]
    code += [(AT_LEAST, 0, 1, 0x40000000), refuse]  # x32 numbers on x86-64
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            code += [(EQUAL, 0, 1, numbers[column]), refuse]
    for numbers, argument, bits in REFUSED_WITH.values():
        if numbers[column] is not None:
            code += [(EQUAL, 0, 4, numbers[column]), (LOAD, 0, 0, 16 + 8 * argument), (ANY_BIT, 0, 1, bits), refuse]
            code += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*code, (RETURN, 0, 0, ALLOW)])


def refuse_event(event: str, arguments: tuple) -> None:
    opens_to_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
    if opens_to_write or event.startswith(HOOKED):
        raise PermissionError(f"{event} is refused")


if __name__ == "__main__":
    main()
