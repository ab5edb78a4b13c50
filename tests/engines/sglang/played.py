"""A played SGLang server: the routes and answers of SGLang, over a real small model.

It imitates, of SGLang's source at cce0a124: entrypoints/http_server.py (routes, status codes), managers/io_struct.py
(fields), managers/tokenizer_manager.py (answers, the lock of a weight update, aborts by name), managers/scheduler.py
(aborts, limits), managers/schedule_batch.py (where a request ends), layers/sampler.py (played_sampler.py),
mem_cache/radix_cache.py (prefixes by extra_key), model_runner_components/weight_updater.py, utils/auth.py. Nothing here
shows that SGLang itself does so.
"""

from __future__ import annotations

import asyncio
import copy

import numpy as np

from engines.sglang.played_sampler import Running, draw, last_logits
from turnwise.testing.played_server import PlayedServer

SPARE = 6
"""SGLang leaves one token of its context free, and takes prompts that are five shorter still."""


class PlayedSglang(PlayedServer):
    """SGLang's routes over a model of transformers.

    Example:
        PlayedSglang(model, decode=tokenizer.decode, own_ends=[0], context=256)
    """

    def __init__(self, model, *, decode, own_ends, context, slots=8, settings=None, **named):
        """`own_ends`: the end tokens of the model's own settings; `settings` replaces parts of what it tells."""
        super().__init__(**named)
        self.model, self.decode, self.own_ends = model, decode, set(own_ends)
        self.context = context + SPARE
        self.slots = slots
        self.settings = {
            "max_req_input_len": context,
            "enable_deterministic_inference": True,
            "disaggregation_mode": "null",
            "preferred_sampling_params": None,
            "skip_tokenizer_init": False,
            "speculative_algorithm": None,
            "tokenizer_worker_num": 1,
            **(settings or {}),
        }
        self.weight_version = "default"
        self.waiting, self.running = [], []
        self.prefixes = {}
        """By extra_key: (tokens, model) of what was computed."""
        self.readers, self.writers = 0, 0
        self.changed = asyncio.Condition()
        self.work = asyncio.Event()
        self.held = False
        """While it is true no forward pass is made."""
        self.calls, self.loads = [], []
        """Bodies of all requests for tokens, and of all loads."""
        self.lost = ()
        """Names of weights that loads leave as they were."""
        self.scheduler = None

    async def listen(self):
        await super().listen()
        if self.scheduler is None:
            self.scheduler = asyncio.create_task(self.schedule(), name="played SGLang")

    async def close(self):
        await super().close()
        if self.scheduler is not None:
            self.scheduler.cancel()
            await asyncio.gather(self.scheduler, return_exceptions=True)

    def guarded(self, path):
        return not path.startswith(("/health", "/metrics"))

    def routes(self):
        return {
            "GET /health": self.health,
            "GET /server_info": self.server_info,
            "GET /model_info": self.model_info,
            "POST /generate": self.generate,
            "POST /abort_request": self.abort_request,
            "POST /update_weights_from_disk": self.update_weights_from_disk,
        }

    async def health(self, request):
        return {}

    async def server_info(self, request):
        return {**self.settings, "version": "played", "internal_states": [{}]}

    async def model_info(self, request):
        config = self.model.config
        return {
            "model_path": "/models/m",
            "is_generation": True,
            "weight_version": self.weight_version,
            "model_type": config.model_type,
            "architectures": config.architectures,
        }

    # ------------------------------------------------------------ requests

    async def generate(self, request):
        from aiohttp import web

        body = await request.json()
        self.calls.append(body)
        limit = self.settings["max_req_input_len"]
        if len(body["input_ids"]) >= limit:
            message = f"Input length ({len(body['input_ids'])} tokens) exceeds the maximum allowed length ({limit})"
            return web.json_response({"error": {"message": message}}, status=400)
        if body["return_sampling_mask"] and body["sampling_params"]["top_k"] == -1:
            return web.json_response({"error": {"message": "return_sampling_mask requires finite top_k"}}, status=400)
        async with self.changed:
            await self.changed.wait_for(lambda: not self.writers)
            self.readers += 1
        try:
            entry = self.submit(body)
            while not entry.future.done():
                await asyncio.wait({entry.future}, timeout=0.02)
                if request.transport is None or request.transport.is_closing():
                    self.end(entry, "the client went away")
            return entry.future.result()
        finally:
            async with self.changed:
                self.readers -= 1
                self.changed.notify_all()

    def submit(self, body):
        params = dict(body["sampling_params"])
        room = self.context - 1 - len(body["input_ids"]) - 1
        params["max_new_tokens"] = min(params["max_new_tokens"], room)
        future = asyncio.get_running_loop().create_future()
        entry = Running(body["rid"], body["input_ids"], params, body["extra_key"], future)
        self.waiting.append(entry)
        self.work.set()
        return entry

    async def abort_request(self, request):
        from aiohttp import web

        body = await request.json()
        for entry in [*self.waiting, *self.running]:
            if body.get("abort_all") or entry.rid == body.get("rid"):
                self.end(entry, "Aborted")
        return web.Response()

    def end(self, entry, message):
        """A waiting request is answered at once, a running one after one more token."""
        finish = {"type": "abort", "message": message, "status_code": None, "err_type": None}
        if entry in self.waiting:
            self.waiting.remove(entry)
            self.finish(entry, {"type": "abort", "message": "Abort in waiting queue"})
        elif entry in self.running:
            entry.ended = finish

    def finish(self, entry, reason):
        if entry in self.running:
            self.running.remove(entry)
            self.prefixes.setdefault(entry.extra_key, []).append((entry.tokens[:-1], entry.model))
        meta = {
            "id": entry.rid,
            "finish_reason": reason,
            "weight_version": self.weight_version,
            "prompt_tokens": len(entry.prompt),
            "completion_tokens": len(entry.output),
            "cached_tokens": entry.cached,
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(entry.logprobs, entry.output, strict=True)
            ],
            "output_token_sampling_logprobs": entry.cut_logprobs,
        }
        if not entry.future.done():
            entry.future.set_result({"text": "", "output_ids": entry.output, "meta_info": meta})

    # ------------------------------------------------------------ the scheduler

    async def schedule(self):
        while True:
            while not self.held and (self.waiting or self.running):
                while self.waiting and len(self.running) < self.slots:
                    self.admit(self.waiting.pop(0))
                self.step()
                await asyncio.sleep(0)
            self.work.clear()
            await self.work.wait()

    def admit(self, entry):
        """A prefix of the same extra_key is read again, whatever weights computed it. Keys and values are not kept
        here: a request that finds some of older weights gets the logits of those."""
        entry.model = self.model
        for tokens, model in self.prefixes.get(entry.extra_key, ()):
            both = min(len(tokens), len(entry.prompt))
            same = np.cumprod(np.array(tokens[:both]) == np.array(entry.prompt[:both])).sum()
            if same > entry.cached:
                entry.cached, entry.model = int(same), model
        self.running.append(entry)

    def step(self):
        """One token for every request."""
        for model in {id(entry.model): entry.model for entry in self.running}.values():
            entries = [entry for entry in self.running if entry.model is model]
            logits = last_logits(model, [entry.tokens for entry in entries])
            for entry, row in zip(entries, logits, strict=True):
                self.take(entry, row)

    def take(self, entry, logits):
        if np.isnan(logits).any():
            entry.output.append(min(self.own_ends))
            entry.logprobs.append(0.0)
            entry.cut_logprobs.append(0.0)
            self.finish(entry, {"type": "stop", "matched": "NaN happened"})
            return
        token, logprob, cut = draw(logits, entry, deterministic=self.settings["enable_deterministic_inference"])
        entry.output.append(token)
        entry.logprobs.append(logprob)
        entry.cut_logprobs.append(cut)
        if reason := self.reason(entry, token):
            self.finish(entry, reason)

    def reason(self, entry, token):
        """Why a request ends here: an abort comes before everything, and stop strings are looked for in its own output
        alone."""
        if entry.ended:
            return entry.ended
        stops = entry.params["stop"]
        text = self.decode(entry.output) if stops else ""
        if found := [stop for stop in stops if stop in text]:
            return {"type": "stop", "matched": found[0]}
        if not entry.params["ignore_eos"] and token in {*entry.params["stop_token_ids"], *self.own_ends}:
            return {"type": "stop", "matched": token}
        if len(entry.output) >= entry.params["max_new_tokens"]:
            return {"type": "length", "length": len(entry.output)}
        return None

    # ------------------------------------------------------------ weights

    async def update_weights_from_disk(self, request):
        from aiohttp import web

        body = await request.json()
        self.loads.append(body)
        if body["abort_all_requests"]:
            for entry in [*self.waiting, *self.running]:
                self.end(entry, "Aborted")
        async with self.changed:
            self.writers += 1
            try:
                await self.changed.wait_for(lambda: not self.readers)
                problem = await asyncio.to_thread(self.read, body["model_path"])
                if not problem and body["weight_version"] is not None:
                    self.weight_version = body["weight_version"]
            finally:
                self.writers -= 1
                self.changed.notify_all()
        if body["flush_cache"]:
            self.prefixes.clear()
        answer = {"success": not problem, "message": problem or "Succeeded to update model weights."}
        return web.json_response({**answer, "num_paused_requests": 0}, status=400 if problem else 200)

    def read(self, folder):
        """Load a folder's tensors into a model beside the present one; "", or why that failed. Names that are not there
        keep what they had."""
        from pathlib import Path

        from safetensors.torch import load_file

        paths = sorted(Path(folder).glob("*.safetensors"))
        if not paths:
            return f"Failed to get weights iterator: Cannot find any model weights with `{folder}`."
        tensors = {name: tensor for path in paths for name, tensor in load_file(path).items() if name not in self.lost}
        model = copy.deepcopy(self.model)
        try:
            model.load_state_dict(tensors, strict=False)
        except RuntimeError as error:
            return f"Failed to update weights: {error}.\nRolling back to original weights."
        self.model = model
        return ""

    async def start_again(self, model):
        """Have what a server has that was started again: other weights, and no memory of those before."""
        self.model, self.weight_version = model, "default"
        self.prefixes.clear()
