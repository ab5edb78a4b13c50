"""An SGLang server over HTTP, started by the user: its routes for tokens, aborts and weights.

Written after SGLang's source (http_server, tokenizer_manager, scheduler, sampler) and rehearsed against a played
server, not run with SGLang itself.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from turnwise.engines.prompt_text import PromptTexts
from turnwise.engines.remote.connection import Connection, ServerFailure
from turnwise.engines.sglang.service import SglangAnswer, SglangRequest

LOAD_SECONDS = 1800.0
SPARE_TOKENS = 6
"""Tokens of SGLang's context that no call can have."""
ADVICE = "is it an SGLang server?"
DETERMINISTIC = "--enable-deterministic-inference"
WITHOUT = {
    "disaggregation_mode": ("null", "--disaggregation-mode"),
    "preferred_sampling_params": (None, "--preferred-sampling-params"),
    "skip_tokenizer_init": (False, "--skip-tokenizer-init"),
    "speculative_algorithm": (None, "--speculative-algorithm"),
    "tokenizer_worker_num": (1, "--tokenizer-worker-num"),
}
"""By setting: the value that a server must have, and the option that gives it another. Preferred parameters would
change how calls are sampled; several tokenizer workers do not agree on the name of the weights."""


class SglangServer:
    """`SglangService` behind a URL.

    A version of weights gets a name that nobody else gives: a server that was started again, or that another run has
    loaded weights into, has weights with another name, and what it samples is refused.

    Example:
        SglangServer(Connection("http://localhost:30000"))
    """

    def __init__(self, connection: Connection, *, seeds: bool = True, model_type: str = "") -> None:
        """`seeds`: whether it must sample by the seeds of calls; `model_type`: that of the model it must have, as
        Hugging Face's configs call it, empty for any."""
        self.connection = connection
        connection.advice = ADVICE
        self.url = connection.url
        self.seeds = seeds
        self.model_type = model_type
        self.model: dict[str, Any] = {}
        """What it says of its model; known once it has started."""
        self.mark = uuid.uuid4().hex[:12]
        self.weights = ""
        """The name of the weights that were loaded last; empty before the first load."""
        self.is_loading = False
        self.texts = PromptTexts()

    async def start(self, context: int) -> None:
        """Connect, and refuse a server that does not sample as calls ask for."""
        await self.connection.open()
        try:
            await self.check_settings(context)
            await self.check_model()
        except BaseException:
            await self.close()
            raise

    async def check_settings(self, context: int) -> None:
        info = await self.connection.get("server_info")
        try:
            longest = int(info["max_req_input_len"])
            settings = {name: info[name] for name in (*WITHOUT, "enable_deterministic_inference")}
        except (KeyError, TypeError, ValueError):
            raise ServerFailure(f"{self.url}/server_info is not what SGLang answers") from None
        if longest < context:
            raise ServerFailure(
                f"{self.url} serves prompts of {longest} tokens, and {context} are needed; start it with "
                f"--context-length {context + SPARE_TOKENS}"
            )
        if self.seeds and not settings["enable_deterministic_inference"]:
            raise ServerFailure(
                f"{self.url} ignores seeds; start it with {DETERMINISTIC}, or set engine.sglang.seeds = false"
            )
        for name, (wanted, option) in WITHOUT.items():
            if (settings[name] or wanted) != wanted:
                raise ServerFailure(f"{self.url} was started with {option}; start it without")

    async def check_model(self) -> None:
        """Ask which model it is, and refuse one of another kind than the recipe's."""
        info = await self.model_info()
        self.model = {name: info.get(name) for name in ("model_type", "architectures")}
        kind = self.model["model_type"]
        if not info.get("is_generation"):
            raise ServerFailure(f"{self.url} has a model that generates nothing; start it with the model of the recipe")
        if self.model_type and kind != self.model_type:
            shown = self.connection.said(str(kind))
            raise ServerFailure(
                f"{self.url} has a model of type {shown}, and the recipe's is {self.model_type}; start it with the "
                "model of the recipe"
            )

    async def model_info(self) -> dict[str, Any]:
        info = await self.connection.get("model_info")
        if not isinstance(info, dict) or "weight_version" not in info:
            raise ServerFailure(f"{self.url}/model_info is not what SGLang answers")
        return info

    async def check_alive(self) -> None:
        """Returns when the server answers and has the weights that it was given; while it loads, whichever it has."""
        name = (await self.model_info())["weight_version"]
        if self.weights and not self.is_loading and name != self.weights:
            shown = self.connection.said(str(name))
            raise ServerFailure(f'{self.url} has weights called "{shown}", which this run has not loaded')

    async def generate(self, request: SglangRequest) -> SglangAnswer:
        rest = {
            "rid": request.name,
            "sampling_params": dict(request.sampling),
            "return_logprob": True,
            "return_sampling_mask": request.is_cut,
            "extra_key": request.salt,
            "stream": False,
        }
        body = self.texts.body(request.session, rest, "input_ids", request.prompt)
        answer = await self.connection.post("generate", body, seconds=None)
        try:
            return answer_of(answer, request.is_cut)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            shown = self.connection.said(f"{type(error).__name__}: {error}")
            raise ServerFailure(f"{self.url} gave an answer that is none of SGLang's ({shown})") from None

    async def abort(self, name: str) -> None:
        await self.connection.post("abort_request", {"rid": name})

    async def abort_all(self) -> None:
        await self.connection.post("abort_request", {"abort_all": True})

    async def load(self, folder: Path, version: int) -> None:
        """Load a folder. SGLang takes its own lock for that, which waits until every request has ended. Its cache keeps
        prefixes of other weights, which nobody finds: they have another salt."""
        self.is_loading = True
        name = self.weights_of(version)
        body = {
            "model_path": str(folder),
            "load_format": "auto",
            "weight_version": name,
            "abort_all_requests": True,
            "flush_cache": False,
        }
        answer = await self.connection.post("update_weights_from_disk", body, seconds=LOAD_SECONDS)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            shown = self.connection.said(str(answer))
            raise ServerFailure(f"{self.url} did not load version {version}: {shown}")
        self.weights, self.is_loading = name, False

    def weights_of(self, version: int) -> str:
        return f"{self.mark}.{version}"

    async def close(self) -> None:
        await self.connection.close()


def answer_of(response: Any, is_cut: bool) -> SglangAnswer:
    """An answer of SGLang's form; any of the errors of a wrong one."""
    meta = response["meta_info"]
    finish = meta["finish_reason"]
    tokens = list(response["output_ids"])
    pairs = [(pair[0], pair[1]) for pair in meta.get("output_token_logprobs") or ()]
    if [token for _, token in pairs] != tokens:
        raise ValueError(f"{len(tokens)} tokens, and logprobs of {len(pairs)} other ones")
    cut = list(meta.get("output_token_sampling_logprobs") or ()) if is_cut else []
    return SglangAnswer(
        tokens=tokens,
        logprobs=cut if is_cut else [logprob for logprob, _ in pairs],
        weights=meta["weight_version"],
        finish=finish["type"],
        matched=finish.get("matched"),
        message=str(finish.get("message", "")),
        cached=int(meta.get("cached_tokens") or 0),
    )
