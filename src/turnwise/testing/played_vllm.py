"""A played vLLM server: the routes and answers of vLLM 0.32, over an engine of ours that samples.

It is made after vLLM's source (entrypoints/scale_out, entrypoints/serve/dev). It serves tests of several servers, of
keys and of faults, where real ones take minutes to start and gigabytes to install.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from turnwise.engines.base import Completion, Engine, Sampling
from turnwise.testing.played_server import Handler, PlayedServer
from turnwise.types import StopReason

GUARDED = ("/v1", "/v2", "/inference")
"""The routes that vLLM's own --api-key protects."""
CALL_PREFIX = "generate-tokens-"
FINISH = {StopReason.length: "length", StopReason.abort: "abort"}


class PlayedVllm(PlayedServer):
    """vLLM's routes over an engine, whose weights it loads from files.

    Example:
        PlayedVllm(engine, vocabulary=63, end_tokens=[0])
    """

    def __init__(
        self,
        engine: Engine,
        *,
        vocabulary: int,
        end_tokens: list[int],
        tied: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        guards_all: bool = False,
        **named: Any,
    ) -> None:
        """`tied`: names of weights that come with another one; `config` replaces parts of the model_config that it
        tells; `guards_all`: the key protects every route, as a proxy in front of vLLM would."""
        super().__init__(**named)
        self.engine = engine
        self.end_tokens = end_tokens
        self.tied = dict(tied or {})
        self.guards_all = guards_all
        self.model_config = {
            "model": "/models/m",
            "max_model_len": engine.context,
            "logprobs_mode": "processed_logprobs",
            **(config or {}),
        }
        self.model = {"model_type": "qwen3", "vocab_size": vocabulary}
        """What its workers say of their model, where they have our extension."""
        self.names = {0: "default"}
        """By the engine's version: what the weights are called."""
        self.version = 0
        self.update: dict[str, Any] | None = None
        """The tensors of an update under way."""
        self.sessions: dict[str, str] = {}
        """Of the calls under way: the engine's session by the name of the call."""
        self.calls: list[dict[str, Any]] = []
        """Bodies of all calls for tokens."""
        self.salt = ""
        self.kept: dict[str, Any] = {}
        """The weights of the last load."""
        self.slept: list[int] = []
        """The levels of all sleeps."""
        self.asleep: set[str] = set()
        """What has no memory now."""
        self.lost: tuple[str, ...] = ()
        """Names of weights that loads leave as they were."""

    async def close(self) -> None:
        await super().close()
        await self.engine.close()

    def guarded(self, path: str) -> bool:
        return self.guards_all or path.startswith(GUARDED)

    def routes(self) -> Mapping[str, Handler]:
        return {
            "GET /health": self.health,
            "GET /server_info": self.server_info,
            "GET /weight_info": self.weight_info,
            "GET /get_world_size": self.world_size,
            "POST /collective_rpc": self.call_workers,
            "POST /inference/v1/generate": self.generate,
            "POST /inference/v1/abort_requests": self.abort,
            "POST /sleep": self.sleep,
            "POST /wake_up": self.wake,
            "GET /is_sleeping": self.is_sleeping,
            "POST /pause": self.pause,
            "POST /resume": self.resume,
            "POST /init_weight_transfer_engine": self.done,
            "POST /start_weight_update": self.start_update,
            "POST /update_weights": self.update_weights,
            "POST /finish_weight_update": self.finish_update,
            "POST /update_weight_version": self.name_version,
        }

    async def health(self, request: Any) -> Any:
        return {}

    async def done(self, request: Any) -> Any:
        return {"message": "done"}

    async def server_info(self, request: Any) -> Any:
        assert request.query["config_format"] == "json"
        guided = {"backend": "guidance"}
        return {"vllm_config": {"model_config": self.model_config, "structured_outputs_config": guided}}

    async def weight_info(self, request: Any) -> Any:
        return {"weight_version": self.names[self.version]}

    async def call_workers(self, request: Any) -> Any:
        assert (await request.json())["method"] == "turnwise_model", "workers have no such method"
        return {"results": [self.model]}

    async def world_size(self, request: Any) -> Any:
        return {"world_size": 1}

    # ------------------------------------------------------------ tokens

    async def generate(self, request: Any) -> Any:
        body = await request.json()
        self.calls.append(body)
        if body["cache_salt"] != self.salt:
            self.salt = body["cache_salt"]
            await self.engine.forget()
        given = body["sampling_params"]
        assert given["logprobs"] == 0
        assert given["ignore_eos"]
        assert given["stop_token_ids"] == self.end_tokens
        sampling = Sampling(
            given["max_tokens"], given["temperature"], given["top_p"], given["top_k"], tuple(given["stop"])
        )
        name, session = body["request_id"], request.headers["X-Session-ID"]
        self.sessions[CALL_PREFIX + name] = name
        try:
            completion = await self.engine.generate(
                np.array(body["token_ids"], np.int32), sampling, session=name, seed=given["seed"] % (1 << 64)
            )
        finally:
            del self.sessions[CALL_PREFIX + name]
        return {"request_id": CALL_PREFIX + name, "choices": [self.choice(completion)], "session": session}

    def choice(self, completion: Completion) -> dict[str, Any]:
        tokens = completion.tokens.tolist()
        ended = completion.stop in (StopReason.end_token, StopReason.stop_string)
        stop = tokens[-1] if completion.stop is StopReason.end_token else "a stop string"
        return {
            "index": 0,
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": float(value)} for value in completion.logprobs]},
            "weight_versions": self.spans(completion.versions.tolist()),
            "finish_reason": "stop" if ended else FINISH[completion.stop],
            "stop_reason": stop if ended else None,
            "routed_experts": None,
        }

    def spans(self, versions: list[int]) -> list[dict[str, Any]]:
        """Stretches of tokens that one version sampled."""
        starts = [at for at, version in enumerate(versions) if at == 0 or version != versions[at - 1]]
        ends = [*starts[1:], len(versions)]
        return [
            {"version": self.names[versions[start]], "start": start, "end": end}
            for start, end in zip(starts, ends, strict=True)
            if end
        ]

    async def abort(self, request: Any) -> Any:
        for name in (await request.json())["request_ids"]:
            if name in self.sessions:
                await self.engine.abort(self.sessions[name])
        return {}

    async def pause(self, request: Any) -> Any:
        assert request.query["mode"] == "keep"
        await self.engine.pause()
        return {"status": "paused"}

    async def resume(self, request: Any) -> Any:
        await self.engine.resume()
        return {"status": "resumed"}

    # ------------------------------------------------------------ sleep

    async def sleep(self, request: Any) -> Any:
        self.slept.append(int(request.query["level"]))
        await self.engine.pause()
        await self.engine.forget()
        self.asleep = {"weights", "kv_cache"}
        if self.slept[-1] == 2:
            await self.engine.load({name: tensor * 0 for name, tensor in self.kept.items()}, self.version)
        return {}

    async def wake(self, request: Any) -> Any:
        """As vLLM does: it goes on by itself once all of it is awake."""
        self.asleep -= set(request.query.getall("tags", ["weights", "kv_cache"]))
        if not self.asleep:
            await self.engine.resume()
        return {}

    async def is_sleeping(self, request: Any) -> Any:
        return {"is_sleeping": bool(self.asleep)}

    # ------------------------------------------------------------ weights

    async def start_update(self, request: Any) -> Any:
        assert self.update is None, "a weight update is under way already"
        self.update = {}
        return {"message": "Weight update started"}

    async def update_weights(self, request: Any) -> Any:
        from safetensors.torch import load_file

        assert self.update is not None, "no weight update was started"
        assert "weights" not in self.asleep, "the weights have no memory"
        self.update |= load_file((await request.json())["update_info"]["path"])
        return {"message": "Weights updated"}

    async def finish_update(self, request: Any) -> Any:
        assert self.update is not None, "no weight update was started"
        tensors, self.update = self.update, None
        name = (await request.json()).get("weight_version")
        if name is None:
            return {"message": "Weight update finished"}
        tensors |= {name: tensors[first] for name, first in self.tied.items()}
        tensors |= {lost: self.kept[lost] for lost in self.lost}
        self.kept = tensors
        self.version += 1
        self.names[self.version] = name
        await self.engine.load(tensors, self.version)
        return {"message": "Weight update finished"}

    async def name_version(self, request: Any) -> Any:
        name = self.names[self.version] = (await request.json())["new_version"]
        return {"success": True, "new_version": name}

    async def start_again(self, weights: Mapping[str, Any]) -> None:
        """Have what a server has that was started again: the weights of its folder, and no memory of others."""
        self.version += 1
        self.names[self.version] = "default"
        self.update, self.asleep = None, set()
        await self.engine.load(weights, self.version)
        await self.engine.resume()
