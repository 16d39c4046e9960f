"""gloo over TLS, in a torch that was built with it (`allreduce(tls=true)`).

When a group is formed, gloo reads from environment variables which transport to use, and the paths of key,
certificate and authority. Both sides must present a certificate of the run's own authority, as on all other
links of the run. The store that a group meets at is not encrypted, and NCCL has no TLS.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from manyhands.errors import SpecError

if TYPE_CHECKING:
    from manyhands.transport import Credentials

TRANSPORT = "GLOO_DEVICE_TRANSPORT"
TLS = "TCP_TLS"
FILES = {"key": "PKEY", "certificate": "CERT", "authority": "CA_FILE"}
INSTEAD = (
    "Use ps:sync, whose links between hosts are TLS and whose mathematics is the same; or a network that "
    "encrypts by itself, such as WireGuard or a VPN, without tls."
)


def use_tls(credentials: Credentials) -> None:
    """Use TLS for all gloo groups of this process from now on; raise SpecError if that is not possible."""
    import torch
    import torch.distributed as dist

    os.environ[TRANSPORT] = TLS
    for name, variable in FILES.items():
        os.environ[f"{TRANSPORT}_{TLS}_{variable}"] = _nameless_file(getattr(credentials, name))
    try:
        dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    except RuntimeError as error:
        del os.environ[TRANSPORT]
        raise SpecError(
            f"allreduce(tls=true): the gloo of this torch ({torch.__version__}) was built without TLS "
            f"({str(error).splitlines()[0]}). {INSTEAD}"
        ) from None


def in_use() -> bool:
    return os.environ.get(TRANSPORT) == TLS


def _nameless_file(text: str) -> str:
    """Return a path that gloo can read as long as this process lives. The text is in memory, not on disk."""
    number = os.memfd_create("manyhands", os.MFD_CLOEXEC)
    os.write(number, text.encode())
    return f"/proc/self/fd/{number}"
