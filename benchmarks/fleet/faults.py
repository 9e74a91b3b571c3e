"""What is broken in the bench, and how."""

from __future__ import annotations

from contextlib import suppress

from benchmarks.fleet.rivals import RivalFleet

# Redis loses its connections in the last two: some clients do not come back from that.
FAULTS = ("bytes flipped", "S3 slow", "worker killed", "Redis killed", "tiers hang")
_LARGE_BYTES = 4096  # what is larger holds KV
_FLIPPED_EVERY = 61  # bytes: odd, so that signs and exponents of numbers are hit, not only their last digits


def break_tiers(fleet: RivalFleet, fault: str) -> None:
    """Break what a fault breaks; a worker is killed by the bench, in the midst of its work."""
    match fault:
        case "bytes flipped":
            _flip_in_redis(fleet)
            _flip_in_s3(fleet)
        case "S3 slow":
            fleet.client().flushall()
            fleet.links["s3"].state = "slow"
        case "Redis killed":
            fleet.redis.stop()
        case "tiers hang":
            for link in fleet.links.values():
                link.state = "hanging"


def heal(fleet: RivalFleet, fault: str) -> None:
    """Repair what was broken. Bytes stay flipped."""
    if fault == "Redis killed":
        fleet.redis.start()
    if fault == "worker killed":
        fleet.restart_worker(0)
    for link in fleet.links.values():
        link.state = "open"


def flipped(data: bytes) -> bytes:
    """Every so-manieth byte of the second half inverted, so that some are in whatever is read of it."""
    changed = bytearray(data)
    for place in range(len(data) // 2, len(data), _FLIPPED_EVERY):
        changed[place] ^= 0xFF
    return bytes(changed)


def _flip_in_redis(fleet: RivalFleet) -> None:
    client = fleet.client()
    for key in client.scan_iter("*"):
        if client.type(key) == b"string" and client.strlen(key) > _LARGE_BYTES:
            client.set(key, flipped(client.get(key)), keepttl=True)


def _flip_in_s3(fleet: RivalFleet) -> None:
    import obstore

    store = fleet.bucket()
    for item in [item for page in obstore.list(store) for item in page]:
        if item["size"] > _LARGE_BYTES:
            with suppress(FileNotFoundError):
                obstore.put(store, item["path"], flipped(bytes(obstore.get(store, item["path"]).bytes())))
