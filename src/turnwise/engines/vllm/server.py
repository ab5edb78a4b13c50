"""A vLLM server over HTTP, started by the user: vLLM's routes for tokens and those for reinforcement learning."""

from __future__ import annotations

import base64
import io
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.vllm.guided import config_problem
from turnwise.engines.vllm.service import Span, VllmAnswer, VllmCall
from turnwise.types import TurnTiming

SESSION = "X-Session-ID"
"""Header by which routers in front of several vLLMs keep the turns of an attempt on one of them."""
CALL_PREFIX = "generate-tokens-"
"""vLLM puts this before the name of a call."""
LOAD_SECONDS = 1800.0
LOGPROBS = "processed_logprobs"
ROUTES_OPTION = "--enable-return-routed-experts"


class VllmServer:
    """`VllmService` behind a URL.

    Example:
        VllmServer("http://localhost:8000")
    """

    def __init__(self, url: str, *, routes: bool = False) -> None:
        """`routes`: whether calls ask for routes."""
        self.url = url.rstrip("/")
        self.routes = routes
        self.session: Any = None
        self.guidance_problem = ""

    async def start(self, context: int) -> None:
        """Connect, and refuse a server with other logprobs or a shorter context."""
        import aiohttp

        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)
        )
        try:
            await self.check(context)
        except BaseException:
            await self.close()
            raise

    async def check(self, context: int) -> None:
        config = (await self.get("server_info", config_format="json"))["vllm_config"]
        info = config["model_config"]
        self.guidance_problem = config_problem(config.get("structured_outputs_config"))
        if info["logprobs_mode"] != LOGPROBS:
            raise ValueError(f"{self.url} gives {info['logprobs_mode']}; start it with --logprobs-mode {LOGPROBS}")
        if info["max_model_len"] < context:
            raise ValueError(
                f"{self.url} serves {info['max_model_len']} tokens, and {context} are needed; start it with "
                f"--max-model-len {context}"
            )
        if self.routes and not (config.get("aux_output_config") or {}).get("enable_return_routed_experts"):
            raise ValueError(
                f"{self.url} gives no routes; start it with {ROUTES_OPTION}, or without model.router_replay"
            )
        await self.post("inference/v1/abort_requests", {"request_ids": []})  # fails where the routes for tokens are off

    async def generate(self, call: VllmCall) -> VllmAnswer:
        started = time.perf_counter()
        body = {
            "request_id": call.name,
            "token_ids": call.prompt,
            "sampling_params": dict(call.sampling),
            "cache_salt": call.salt,
        }
        response = await self.post("inference/v1/generate", body, headers={SESSION: call.session})
        [choice] = response["choices"]
        return VllmAnswer(
            tokens=choice["token_ids"],
            logprobs=[one["logprob"] for one in (choice["logprobs"] or {}).get("content") or ()],
            spans=[Span(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()],
            finish=choice["finish_reason"],
            stop=choice["stop_reason"],
            timing=TurnTiming(decode=time.perf_counter() - started),
            routes=array_of(choice.get("routed_experts")),
        )

    async def abort(self, name: str) -> None:
        await self.post("inference/v1/abort_requests", {"request_ids": [CALL_PREFIX + name]})

    async def pause(self) -> None:
        await self.post("pause", None, mode="keep", clear_cache="false")

    async def resume(self) -> None:
        await self.post("resume", None)

    async def name_version(self, version: str) -> None:
        await self.post("update_weight_version", {"new_version": version})

    async def init_transfer(self, info: dict[str, Any]) -> None:
        await self.post("init_weight_transfer_engine", {"init_info": info})

    async def start_update(self) -> None:
        await self.post("start_weight_update", None)

    async def update(self, info: Any) -> None:
        if "ipc_handles" in info:
            from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

            info = _json_safe_update_payload(info)
        await self.post("update_weights", {"update_info": info}, seconds=LOAD_SECONDS)

    async def finish_update(self, version: str) -> None:
        await self.post("finish_weight_update", {"weight_version": version}, seconds=LOAD_SECONDS)

    async def num_workers(self) -> int:
        return int((await self.get("get_world_size"))["world_size"])

    async def close(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            await session.close()

    # ------------------------------------------------------------ HTTP

    async def get(self, route: str, **query: str) -> Any:
        async with self.session.get(f"{self.url}/{route}", params=query) as response:
            return await self.read(route, response)

    async def post(
        self,
        route: str,
        body: Any,
        *,
        headers: dict[str, str] | None = None,
        seconds: float | None = None,
        **query: str,
    ) -> Any:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=30)
        address = f"{self.url}/{route}"
        async with self.session.post(address, json=body, params=query, headers=headers, timeout=timeout) as response:
            return await self.read(route, response)

    async def read(self, route: str, response: Any) -> Any:
        """The JSON of an answer; None for an answer without JSON."""
        if response.status == 404:
            raise RuntimeError(f"{self.url} has no /{route}; start vLLM 0.32 with VLLM_SERVER_DEV_MODE=1")
        if response.status != 200:
            raise RuntimeError(f"{self.url}/{route} answered {response.status}: {(await response.text())[:300]}")
        return await response.json() if response.content_type == "application/json" else None


def array_of(text: str | None) -> NDArray[Any] | None:
    """The array of an answer: an npy file in base64."""
    if text is None:
        return None
    array: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array
