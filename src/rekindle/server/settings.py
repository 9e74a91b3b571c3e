"""How a server is run. The model and its cache have settings of their own: `rekindle.settings`."""

from __future__ import annotations

from dataclasses import dataclass, field

from rekindle.errors import InvalidSetting
from rekindle.listening import check_port, is_loopback
from rekindle.run.idle import IdleOptions
from rekindle.server.keys import Keys

DEFAULT_PORT = 8377
DEFAULT_PARALLEL = 8
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class ServerSettings:
    """What `rekindle serve` takes beside the settings of a session.

    allowed_hosts    names in the Host header that are answered; empty: those of this machine on loopback, else any
    origins          web pages of these origins may read replies (CORS); none by default
    queue            so many requests wait at most, beside those that are answered
    body_bytes       the largest body that is read
    most_tokens      the longest reply; None: as long as the context
    timeout_seconds  the longest a request may take, waiting included
    idle_seconds     how long a client may take to send its request, or to say something on an open connection
    stop_seconds     how long replies may go on after the server was told to stop
    ahead            what is done ahead while nobody asks; None: nothing
    quiet_seconds    after so long without a request that begins
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    keys: Keys = field(default_factory=Keys)
    allow_unauthenticated: bool = False
    allowed_hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    queue: int = 64
    body_bytes: int = 8 << 20
    most_tokens: int | None = None
    timeout_seconds: float = 600.0
    idle_seconds: float = 30.0
    stop_seconds: float = 15.0
    ahead: IdleOptions | None = None
    quiet_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.is_local and not self.keys and not self.allow_unauthenticated:
            raise InvalidSetting(
                f"{self.host} can be reached by others, and there is no API key. Give one with --api-key, or let "
                "everybody in with --allow-unauthenticated."
            )
        check_port(self.port)
        for name in ("body_bytes", "timeout_seconds", "idle_seconds"):
            if getattr(self, name) <= 0:
                raise InvalidSetting(f"{name}={getattr(self, name)} makes no sense. Use more than 0.")
        if self.queue < 0 or self.stop_seconds < 0 or self.quiet_seconds < 0:
            raise InvalidSetting("queue, stop_seconds and quiet_seconds are 0 or more.")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names that are answered, in lower case and without ports; None: any.

        A page in a browser can make its own name point to this machine: on loopback only the machine's own are right.
        """
        if "*" in self.allowed_hosts:
            return None
        if self.allowed_hosts:
            return frozenset(name.lower() for name in self.allowed_hosts)
        return frozenset({*_LOOPBACK_NAMES, self.host}) if self.is_local else None
