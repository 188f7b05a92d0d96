"""Names of this machine."""

from ipaddress import ip_address


def is_loopback(name: str) -> bool:
    """Return whether a host name or address can only be this machine."""
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
