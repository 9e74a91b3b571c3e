"""The rivals of the bench, each two vLLM workers over one Redis and one S3, which are theirs alone.

A worker stands for a machine: what its rival keeps locally is its own (Rekindle's folder, LMCache's server), and the
tiers are shared. The links to them count what is moved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.fleet.tier_servers import ACCESS, BUCKET, FaultyLink, RedisServer, S3Server, free_ports, wait_for_port
from benchmarks.fleet.worker import BLOCK_SIZE, START_SECONDS, VllmConfig, VllmReply, VllmWorker

RIVALS = {  # by the name that their JSON has
    "rekindle": "Rekindle's connector",
    "vllm": "vLLM's own prefix cache",
    "lmcache": "LMCache, server mode",
}
SHARING = ("rekindle", "lmcache")  # which use the tiers
WORKERS = 2
REPLY_SECONDS = 45.0  # then a request has failed
_SETTLED_SECONDS, _SETTLE_SECONDS = 1.5, 60.0


class RivalFleet:
    """Two workers and their tiers."""

    def __init__(self, name: str, context: Any, model: str, max_tokens: int, folder: Path) -> None:
        self.name, self._context, self._model, self._max_tokens = name, context, model, max_tokens
        self._folder = folder / name
        (self._folder / "s3").mkdir(parents=True)
        # With a dump on disk, as Redis has by default: it survives a restart, not a loss of power.
        self.redis = RedisServer(("--dir", str(self._folder)))
        self.s3 = S3Server(self._folder / "s3", hosted=True)
        self.links: dict[str, FaultyLink] = {}
        self._servers: list[subprocess.Popen[bytes]] = []
        self._ports = free_ports(2 * WORKERS)
        self.workers: list[VllmWorker] = []

    def start(self) -> None:
        """Start everything."""
        if self.name in SHARING:
            self.redis.start()
            self.s3.start()
            self.links = {name: FaultyLink(server.port) for name, server in (("redis", self.redis), ("s3", self.s3))}
        self._start_workers()

    def restart(self) -> None:
        """Restart everything: workers, servers, Redis and S3, which have what they had."""
        for worker in self.workers:
            worker.stop()
        self._stop_servers()
        if self.name in SHARING:
            self.client().save()
            self.redis.stop()
            self.redis.start()
            self.s3.stop()
            self.s3.start()
        self._start_workers()

    def restart_worker(self, number: int) -> None:
        """Start a worker again that was killed."""
        self.workers[number] = self._worker(number)
        self.workers[number].wait()

    def stop(self) -> None:
        """End everything, at once."""
        for worker in self.workers:
            worker.kill()
        self._stop_servers()
        for link in self.links.values():
            link.close()
        self.redis.stop()
        self.s3.stop()

    def ask(self, number: int, prompt: tuple[int, ...], count: int, salt: str | None) -> tuple[VllmReply, int]:
        """A reply of a worker; if that fails, of the next, as a router does it. Also returns the number of retries.

        What was waited for before a retry counts.
        """
        began = time.perf_counter()
        for retries in range(WORKERS):
            worker = self.workers[(number + retries) % WORKERS]
            waited = time.perf_counter() - began
            reply = worker.ask(prompt, count, salt, REPLY_SECONDS)
            if reply.first_token_seconds is not None:
                reply.first_token_seconds += waited
            if reply.error is None:
                break
        return reply, retries

    @property
    def moved_bytes(self) -> dict[str, int]:
        """What passed the links so far, both ways."""
        return {name: link.moved_bytes for name, link in self.links.items()}

    def settle(self) -> None:
        """Wait until nothing is written any more."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        before, since = self.moved_bytes, time.monotonic()
        while self.links and time.monotonic() < min(deadline, since + _SETTLED_SECONDS):
            time.sleep(0.1)
            if (now := self.moved_bytes) != before:
                before, since = now, time.monotonic()

    def client(self) -> Any:
        """A client of Redis, past the link."""
        import redis

        return redis.Redis.from_url(self.redis.url)

    def bucket(self) -> Any:
        """A client of the bucket that the rival uses, past the link."""
        from obstore.store import S3Store

        return S3Store(
            BUCKET if self.name == "rekindle" else "127",
            endpoint=self.s3.environment()["AWS_ENDPOINT_URL"],
            access_key_id=ACCESS["AWS_ACCESS_KEY_ID"],
            secret_access_key=ACCESS["AWS_SECRET_ACCESS_KEY"],
            region=ACCESS["AWS_REGION"],
            client_options={"allow_http": True},
        )

    def _start_workers(self) -> None:
        if self.name == "lmcache":
            self._start_servers()
        self.workers = [self._worker(number) for number in range(WORKERS)]
        for worker in self.workers:
            worker.wait()

    def _worker(self, number: int) -> VllmWorker:
        environment = self.s3.environment(self.links["s3"].port) if self.links else {}
        log = self._folder / f"worker-{number}.log"
        config = VllmConfig(self._model, self._max_tokens, self._transfer(number), log, environment)
        return VllmWorker(self._context, config)

    def _transfer(self, number: int) -> Mapping[str, Any] | None:
        """What vLLM's `--kv-transfer-config` takes."""
        if self.name == "rekindle":
            extra: dict[str, Any] = {
                "cache": str(self._folder / f"kv-{number}"),
                "tiers": "memory > disk > redis > s3",
                "redis": f"redis://127.0.0.1:{self.links['redis'].port}/0",
                "s3": f"s3://{BUCKET}/kv",
            }
            connector, module = "RekindleConnector", "rekindle.vllm"
        elif self.name == "lmcache":
            extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._ports[2 * number]}
            connector, module = "LMCacheMPConnector", "lmcache.integration.vllm.lmcache_mp_connector"
        else:
            return None
        return {
            "kv_connector": connector,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def _start_servers(self) -> None:
        """A server of LMCache beside each worker."""
        program = str(Path(sys.executable).parent / "lmcache")
        tiers: Sequence[Mapping[str, Any]] = [
            {"type": "resp", "host": "127.0.0.1", "port": self.links["redis"].port, "num_workers": 2},
            {
                "type": "s3",
                "s3_endpoint": f"127.0.0.1:{self.links['s3'].port}",
                "s3_region": ACCESS["AWS_REGION"],
                "disable_tls": True,
                "s3_prefer_http2": False,
                "s3_num_io_threads": 2,
                "aws_access_key_id": ACCESS["AWS_ACCESS_KEY_ID"],
                "aws_secret_access_key": ACCESS["AWS_SECRET_ACCESS_KEY"],
            },
        ]
        for number in range(WORKERS):
            port, http_port = self._ports[2 * number : 2 * number + 2]
            command = [program, "server", "--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port)]
            command += ["--supported-transfer-mode", "engine_driven", "--chunk-size", str(BLOCK_SIZE)]
            command += ["--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"]
            command += ["--disable-observability"]
            command += [word for tier in tiers for word in ("--l2-adapter", json.dumps(tier))]
            with (self._folder / f"server-{number}.log").open("ab") as log:
                self._servers.append(
                    subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ})
                )
        for number, server in enumerate(self._servers):
            wait_for_port(self._ports[2 * number + 1], server, START_SECONDS)

    def _stop_servers(self) -> None:
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            with suppress(subprocess.TimeoutExpired):
                server.wait(20.0)
            server.kill()
            server.wait()
        self._servers = []
