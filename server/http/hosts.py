"""Names of this machine."""

import socket
from ipaddress import ip_address


def is_loopback(name: str) -> bool:
    """Return whether a host name or address can only be this machine."""
    try:
        address = None if name == "localhost" else ip_address(name)
        return address is None or (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return False


def is_bound_to_loopback(host: str) -> bool:
    """Return whether a server that listens on `host` can be reached from this machine alone, however the host is written."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(is_loopback(str(address[0])) for *_, address in found)
