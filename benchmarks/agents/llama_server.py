"""llama.cpp's own server, as the wheel brings it: python -m benchmarks.agents.llama_server MODEL.gguf CONTEXT THREADS

Prints its address, and serves until it is terminated. Four slots share one KV buffer, its prompt cache in memory is on.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module

SLOTS = 4


def main() -> None:
    """Serve."""
    xllamacpp = import_module("xllamacpp")  # it has no types
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx = sys.argv[1], int(sys.argv[2])
    params.n_parallel, params.kv_unified = SLOTS, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
    params.port, params.warmup = 0, True
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
