"""System calls that nothing in a sandbox needs and that reach past its namespaces, refused by the kernel.

Invariant: the filter is a plain deny list on top of the namespaces, in classic BPF. Sockets outside UNIX, INET, INET6
and NETLINK cannot be made (AF_VSOCK ignores network namespaces); io_uring looks missing, so that programs fall back.
"""

from __future__ import annotations

import errno
import platform
import struct

from clawgym_env.errors import SandboxUnavailable

ALLOW = 0x7FFF0000
ERRNO = 0x00050000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NR_OFFSET, ARCH_OFFSET, FIRST_ARGUMENT_OFFSET = 0, 4, 16  # of struct seccomp_data, little endian
X32_BIT = 0x40000000
FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SOCKET_CALLS = {"x86_64": (41, 53), "aarch64": (198, 199)}  # socket, socketpair
IO_URING = (425, 426, 427)
NEW_MOUNT_API = (428, 429, 430, 431, 432, 433, 442)  # open_tree, move_mount, fsopen/config/mount/pick, mount_setattr
# bpf, perf_event_open, userfaultfd, keyctl, add_key, request_key, setns, unshare, mount, umount2, pivot_root,
# open_by_handle_at, kexec_load, init_module, finit_module, ptrace, process_vm_readv, process_vm_writev
DENIED = {
    "x86_64": (321, 298, 323, 250, 248, 249, 308, 272, 165, 166, 155, 304, 246, 175, 313, 101, 310, 311),
    "aarch64": (280, 241, 282, 219, 217, 218, 268, 97, 40, 39, 41, 265, 104, 105, 273, 117, 270, 271),
}


def program(machine: str = platform.machine()) -> bytes:
    """The filter for a machine, as an array of ``struct sock_filter``.

    Raises:
        SandboxUnavailable: the system-call numbers of that machine are not known.
    """
    if machine not in AUDIT_ARCH:
        raise SandboxUnavailable(f"no system-call filter for {machine}; there is one for {', '.join(AUDIT_ARCH)}")
    missing, denied, no_family = (_return(ERRNO | code) for code in (errno.ENOSYS, errno.EPERM, errno.EAFNOSUPPORT))
    code = [_op(LOAD, ARCH_OFFSET), _op(JUMP_EQUAL, AUDIT_ARCH[machine], 1, 0), missing, _op(LOAD, NR_OFFSET)]
    code += [_op(JUMP_AT_LEAST, X32_BIT, 0, 1), missing]
    for number in IO_URING:
        code += [_op(JUMP_EQUAL, number, 0, 1), missing]
    for number in (*DENIED[machine], *NEW_MOUNT_API):
        code += [_op(JUMP_EQUAL, number, 0, 1), denied]
    socket, socketpair = SOCKET_CALLS[machine]
    code += [_op(JUMP_EQUAL, socket, 2, 0), _op(JUMP_EQUAL, socketpair, 1, 0), _return(ALLOW)]
    code += [_op(LOAD, FIRST_ARGUMENT_OFFSET)]
    code += [_op(JUMP_EQUAL, family, len(FAMILIES) - at, 0) for at, family in enumerate(FAMILIES)]
    return b"".join([*code, no_family, _return(ALLOW)])


def _op(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _return(value: int) -> bytes:
    return _op(RETURN, value)
