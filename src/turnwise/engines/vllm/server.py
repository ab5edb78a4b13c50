"""A vLLM server over HTTP, started by the user: vLLM's routes for tokens and those for reinforcement learning."""

from __future__ import annotations

import base64
import io
import time
import uuid
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.prompt_text import PromptTexts
from turnwise.engines.remote.connection import Connection, ServerFailure
from turnwise.engines.vllm.guided import config_problem
from turnwise.engines.vllm.service import Span, VllmAnswer, VllmCall
from turnwise.types import TurnTiming
from turnwise.weights.vllm_file import MODEL_METHOD

SESSION = "X-Session-ID"
"""Header by which routers in front of several vLLMs keep the turns of an attempt on one of them."""
CALL_PREFIX = "generate-tokens-"
"""vLLM puts this before the name of a call."""
LOAD_SECONDS = 1800.0
LOGPROBS = "processed_logprobs"
ROUTES_OPTION = "--enable-return-routed-experts"
ADVICE = "start vLLM 0.32 with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
EXTENSION_ADVICE = "start it with --worker-extension-cls turnwise.engines.vllm.worker.Extension"


class VllmServer:
    """`VllmService` behind a URL.

    A version of weights gets a name that nobody else gives: a server that was started again, or that another run has
    loaded weights into, has weights with another name, and what it samples is refused.

    Example:
        VllmServer(Connection("http://localhost:8000"))
    """

    def __init__(
        self,
        connection: Connection,
        *,
        routes: bool = False,
        sleeps: bool = False,
        has_extension: bool = True,
        vocabulary: int = 0,
    ) -> None:
        """`routes`: whether calls ask for routes; `sleeps`: whether the server shall sleep now and then;
        `has_extension`: whether its workers have our extension, which reads files and tells what model it is;
        `vocabulary`: how many tokens that must have, 0 for any."""
        self.connection = connection
        connection.advice = ADVICE
        self.url = connection.url
        self.routes = routes
        self.sleeps = sleeps
        self.has_extension = has_extension
        self.vocabulary = vocabulary
        self.guidance_problem = ""
        self.model: dict[str, Any] = {}
        """What its workers say of its model, by the names of Hugging Face's configs; known once it has started."""
        self.mark = uuid.uuid4().hex[:12]
        self.weights = ""
        """The name of the weights that were loaded last; empty before the first load."""
        self.is_loading = False
        self.texts = PromptTexts()

    async def start(self, context: int) -> None:
        """Connect, and refuse a server with other logprobs or a shorter context."""
        await self.connection.open()
        try:
            await self.check(context)
        except BaseException:
            await self.close()
            raise

    async def check(self, context: int) -> None:
        info = await self.connection.get("server_info", config_format="json")
        try:
            config = info["vllm_config"]
            model = config["model_config"]
            mode, longest = str(model["logprobs_mode"]), int(model["max_model_len"])
            gives_routes = bool((config.get("aux_output_config") or {}).get("enable_return_routed_experts"))
            can_sleep = bool(model.get("enable_sleep_mode"))
            self.guidance_problem = config_problem(config.get("structured_outputs_config"))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ServerFailure(f"{self.url}/server_info is not what vLLM 0.32 answers") from None
        if mode != LOGPROBS:
            shown = self.connection.said(mode)
            raise ServerFailure(f"{self.url} gives {shown}; start it with --logprobs-mode {LOGPROBS}")
        if longest < context:
            raise ServerFailure(
                f"{self.url} serves {longest} tokens, and {context} are needed; start it with --max-model-len {context}"
            )
        if self.routes and not gives_routes:
            raise ServerFailure(
                f"{self.url} gives no routes; start it with {ROUTES_OPTION}, or without model.router_replay"
            )
        if self.sleeps and not can_sleep:
            raise ServerFailure(
                f"{self.url} cannot sleep; start it with --enable-sleep-mode, or without engine.vllm.sleep"
            )
        if self.has_extension:
            await self.check_model()
        await self.weights_name()  # fails where the routes for reinforcement learning are off
        # fails where the routes for tokens are off
        await self.connection.post("inference/v1/abort_requests", {"request_ids": []})

    async def check_model(self) -> None:
        """Ask which model it is, and refuse one with another vocabulary."""
        try:
            answer = await self.connection.post("collective_rpc", {"method": MODEL_METHOD})
        except ServerFailure as error:
            if "answered 500" not in str(error):
                raise
            raise ServerFailure(f"{self.url} has no extension of turnwise; {EXTENSION_ADVICE}") from None
        try:
            self.model = dict(answer["results"][0])
        except (KeyError, TypeError, ValueError, IndexError):
            raise ServerFailure(f"{self.url}/collective_rpc is not what vLLM 0.32 answers") from None
        tokens = self.model.get("vocab_size")
        if self.vocabulary and tokens != self.vocabulary:
            shown = self.connection.said(str(tokens))
            raise ServerFailure(
                f"{self.url} has a model of {shown} tokens, and the recipe's has {self.vocabulary}; start it with the "
                "model of the recipe"
            )

    async def check_alive(self) -> None:
        """Returns when the server answers and has the weights that it was given. While it loads, its engine answers
        nothing, and only the front of the server is asked."""
        if self.is_loading:
            await self.connection.get("health")
        elif (name := await self.weights_name()) != self.weights and self.weights:
            shown = self.connection.said(str(name))
            raise ServerFailure(f'{self.url} has weights called "{shown}", which this run has not loaded')

    async def weights_name(self) -> Any:
        answer = await self.connection.get("weight_info")
        if not isinstance(answer, dict) or "weight_version" not in answer:
            raise ServerFailure(f"{self.url}/weight_info is not what vLLM 0.32 answers")
        return answer["weight_version"]

    async def generate(self, call: VllmCall) -> VllmAnswer:
        started = time.perf_counter()
        rest = {"request_id": call.name, "sampling_params": dict(call.sampling), "cache_salt": call.salt}
        body = self.texts.body(call.session, rest, "token_ids", call.prompt)
        answer = await self.connection.post(
            "inference/v1/generate", body, headers={SESSION: call.session}, seconds=None
        )
        return self.answer_of(answer, TurnTiming(decode=time.perf_counter() - started))

    def answer_of(self, response: Any, timing: TurnTiming) -> VllmAnswer:
        """The answer to a call; a ServerFailure where it is of another form than vLLM's."""
        try:
            [choice] = response["choices"]
            return VllmAnswer(
                tokens=list(choice["token_ids"]),
                logprobs=[one["logprob"] for one in (choice["logprobs"] or {}).get("content") or ()],
                spans=[self.span_of(span) for span in choice["weight_versions"] or ()],
                finish=choice["finish_reason"],
                stop=choice["stop_reason"],
                timing=timing,
                routes=array_of(choice.get("routed_experts")),
            )
        except (KeyError, TypeError, ValueError, AttributeError, EOFError) as error:
            shown = self.connection.said(f"{type(error).__name__}: {error}")
            raise ServerFailure(f"{self.url} gave an answer that is none of vLLM 0.32's ({shown})") from None

    def span_of(self, span: Any) -> Span:
        return Span(str(span["version"]).removeprefix(f"{self.mark}."), int(span["start"]), int(span["end"]))

    async def abort(self, name: str) -> None:
        await self.connection.post("inference/v1/abort_requests", {"request_ids": [CALL_PREFIX + name]})

    async def pause(self) -> None:
        await self.connection.post("pause", mode="keep", clear_cache="false")

    async def resume(self) -> None:
        await self.connection.post("resume")

    async def sleep(self, level: int) -> None:
        await self.connection.post("sleep", seconds=LOAD_SECONDS, level=str(level), mode="abort")

    async def wake(self, part: str) -> None:
        await self.connection.post("wake_up", seconds=LOAD_SECONDS, tags=part)

    async def name_version(self, version: str) -> None:
        self.weights = f"{self.mark}.{version}"
        await self.connection.post("update_weight_version", {"new_version": self.weights})

    async def init_transfer(self, info: dict[str, Any]) -> None:
        await self.connection.post("init_weight_transfer_engine", {"init_info": info}, seconds=LOAD_SECONDS)

    async def start_update(self) -> None:
        """Begin a load. vLLM refuses one while another is unfinished, which a lost connection may have left behind; it
        is ended first, and what it loaded is replaced."""
        self.is_loading = True
        try:
            await self.connection.post("start_weight_update", seconds=LOAD_SECONDS)
        except ServerFailure:
            with suppress(ServerFailure):
                await self.connection.post("finish_weight_update", {}, seconds=LOAD_SECONDS)
            await self.connection.post("start_weight_update", seconds=LOAD_SECONDS)

    async def update(self, info: Any) -> None:
        if "ipc_handles" in info:
            from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

            info = _json_safe_update_payload(info)
        await self.connection.post("update_weights", {"update_info": info}, seconds=LOAD_SECONDS)

    async def finish_update(self, version: str) -> None:
        name = f"{self.mark}.{version}"
        await self.connection.post("finish_weight_update", {"weight_version": name}, seconds=LOAD_SECONDS)
        self.weights = name
        self.is_loading = False

    async def num_workers(self) -> int:
        return int((await self.connection.get("get_world_size"))["world_size"])

    async def close(self) -> None:
        await self.connection.close()


def array_of(text: str | None) -> NDArray[Any] | None:
    """The array of an answer: an npy file in base64."""
    if text is None:
        return None
    array: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array
