"""What a server is told besides its engine: one frozen dataclass, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from spec_engine.errors import ConfigError

LINKS = ("nixl", "torch")  # transports of handovers
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, and what it refuses.

    port: 0 takes any free one.
    model_name: what clients call the model; by default "embedded" or the name of its folder.
    api_key: what clients must show for /v1 and /debug; None: nothing for /v1.
    max_waiting: sequences that may wait for a row of the engine; more are refused with 429.
    max_concurrent: HTTP requests that are answered at a time; more are refused with 429.
    max_body_bytes: longest request body, more is refused with 413.
    max_tokens: of a chat answer that asks for no number.
    grace_seconds: time that running requests have to finish once the server is told to stop.
    debug: /debug/kvcanary is there; it needs an api_key.
    debug_hosts: names by which the debug pages may be reached besides `host` and those of this machine.
    role: "prefill": prompts are computed here and decoded elsewhere; "decode": those of others are; None: all is here.
    peers: of a decode server, URLs of prefill servers whose handovers it takes; they have its api_key.
    transport: by which K and V travel, "nixl" or "torch";  peer_name: what findings elsewhere call this engine.
    lease_seconds: time that a prefilled request is kept for whoever decodes it.
    handover_timeout: seconds after which a decode server computes a prompt again whose bytes have not come.
    allow_faults: POST /debug/kvcanary/faults is there, for clients of this machine on a server that only they reach.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    api_key: str | None = None
    max_waiting: int = 64
    max_concurrent: int = 128
    max_body_bytes: int = 2**20
    max_tokens: int = 256
    grace_seconds: float = 10.0
    debug: bool = False
    debug_hosts: tuple[str, ...] = ()
    allow_faults: bool = False
    role: str | None = None
    peers: tuple[str, ...] = ()
    transport: str = "nixl"
    peer_name: str | None = None
    lease_seconds: float = 30.0
    handover_timeout: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must lie in [0, 65535], got {self.port}")
        for name, least in (("max_waiting", 0), ("max_concurrent", 1), ("max_body_bytes", 1), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.grace_seconds < float("inf"):
            raise ConfigError(f"grace_seconds must be finite and not negative, got {self.grace_seconds}")
        if self.api_key == "":
            raise ConfigError("api_key must not be empty", "leave it out to ask for none")
        if self.allow_faults and not is_loopback(self.host):
            raise ConfigError(
                f"allow_faults needs a loopback address, got host {self.host!r}: faults are for this machine alone",
                "use --host 127.0.0.1",
            )
        if (self.debug or self.allow_faults) and self.api_key is None:
            raise ConfigError("the debug pages need an api_key, got none", "pass --api-key, or KVCANARY_API_KEY")

        self._check_role()

    def _check_role(self) -> None:
        if self.role not in (None, "prefill", "decode"):
            raise ConfigError(f"role must be prefill or decode, got {self.role!r}")
        if (self.role == "decode") != bool(self.peers):
            raise ConfigError(
                f"a decode server takes handovers of the peers that it is told, and no other role has any, got role "
                f"{self.role} and {len(self.peers)} peers",
                "pass --role decode --peer URL, once for each prefill server",
            )
        if self.transport not in LINKS:
            raise ConfigError(f"transport must be one of {', '.join(LINKS)}, got {self.transport!r}")
        for name in ("lease_seconds", "handover_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be finite and above 0, got {getattr(self, name)}")

    @property
    def has_debug(self) -> bool:
        """Faults are armed on the debug pages, so they open them."""
        return self.debug or self.allow_faults

    @property
    def known_hosts(self) -> frozenset[str]:
        """Names in a Host header that are this server's own, without a port."""
        return frozenset(name.lower() for name in (*LOOPBACK_NAMES, in_url(self.host), *self.debug_hosts))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def in_url(host: str) -> str:
    """An address as it stands in a URL."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
