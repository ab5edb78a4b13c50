"""vLLM engines for tests: one of our own, and one behind a server that runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from turnwise.engines.base import vocabulary_of
from turnwise.engines.remote.connection import Connection
from turnwise.engines.vllm.engine import VllmEngine
from turnwise.engines.vllm.local import LocalSettings, LocalVllm
from turnwise.engines.vllm.server import VllmServer
from turnwise.learn.learner import save_policy
from turnwise.weights.vllm_file import BACKEND, FileTransfer

THREADS = 1


def local(model, tokenizer, *, slots, context, end_tokens, pass_tokens=2048, dtype="float32", cache=256, **named):
    """A vLLM of this process on a model."""
    settings = LocalSettings(slots, dtype, "cpu", THREADS, cache=cache, pass_tokens=pass_tokens)
    service = LocalVllm(partial(save_policy, model, tokenizer), settings)
    return engine_on(service, model, dtype, slots=slots, context=context, end_tokens=end_tokens, **named)


def remote(url, model, *, dtype="float32", **named):
    """An engine on a server."""
    return engine_on(VllmServer(Connection(url)), model, dtype, first_weights=model.state_dict(), **named)


def engine_on(service, model, dtype, **named):
    """An engine on a vLLM that gets weights by a file."""
    transfer = FileTransfer(getattr(torch, dtype))
    return VllmEngine(service, transfer, vocabulary=vocabulary_of(model), tensors=model.state_dict(), **named)


@contextmanager
def server(folder: Path, *arguments: str, context: int, dev_mode=True, logprobs="processed_logprobs"):
    """The URL of a vLLM server on a model folder, started as docs/guides/vllm.md says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"),
        *("--model", str(folder), "--dtype", "float32", "--max-model-len", str(context), "--max-num-seqs", "8"),
        *("--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"),
        *("--block-size", "32", "--kv-cache-memory-bytes", str(256 << 20)),
        *("--distributed-executor-backend", "uni", "--logprobs-mode", logprobs),
        *("--worker-extension-cls", "turnwise.engines.vllm.worker.Extension"),
        *("--weight-transfer-config", f'{{"backend": "{BACKEND}"}}'),
        *arguments,
    ]
    settings = {
        "VLLM_SERVER_DEV_MODE": str(int(dev_mode)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(THREADS),
    }
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, process, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(url, process, log, seconds=800.0):
    """Until a server is healthy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            pass
        assert process.poll() is None, f"the server ended: {log.read_text()[-3000:]}"
        time.sleep(0.5)
    raise AssertionError(f"no server after {seconds:.0f} s: {log.read_text()[-3000:]}")
