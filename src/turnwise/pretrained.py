"""The border to transformers: what turnwise asks of a causal language model and of its tokenizer, and nothing else.

Annotations, and how transformers is imported: nothing here imports it or torch before it is asked to, and nothing asks
an object whether it is one of these.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

if TYPE_CHECKING:
    import torch


def import_models() -> None:
    """Import what transformers' models are made of, before the first of them: without torchao. transformers imports it
    wherever it is installed, for models with quantized weights, which are not trained here; that takes seconds, and
    prints what it did not find."""
    if "transformers.quantizers" in sys.modules:
        return
    from transformers import utils

    is_available = utils.is_torchao_available
    utils.is_torchao_available = lambda *_: False
    try:
        import transformers.quantizers  # noqa: F401
    finally:
        utils.is_torchao_available = is_available


class CausalLM(Protocol):
    """A causal language model of transformers: a `PreTrainedModel` with an output layer, with adapters or without."""

    config: Any
    """Its attributes differ from one architecture to the next."""
    generation_config: Any
    supports_gradient_checkpointing: bool
    _supports_sdpa: bool
    tp_plan: dict[str, str]
    """How transformers divides its layers among processes that compute them together."""
    ep_plan: dict[str, str]
    """How it divides its experts."""

    @property
    def device(self) -> torch.device: ...

    @property
    def base_model(self) -> Any:
        """The part that computes hidden states. Its class and attributes differ from one architecture to the next."""

    def __call__(self, **inputs: Any) -> Any:
        """The output of a forward pass, with `logits` [rows, tokens, vocabulary]."""

    def get_input_embeddings(self) -> torch.nn.Embedding: ...

    def get_output_embeddings(self) -> torch.nn.Linear: ...

    # ------------------------------------------------------------ weights

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

    def buffers(self) -> Iterator[torch.Tensor]: ...

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def modules(self) -> Iterator[torch.nn.Module]: ...

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]: ...

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, torch.Tensor]: ...

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> object: ...

    def tie_weights(self) -> object: ...

    def can_generate(self) -> bool: ...

    def save_pretrained(self, save_directory: Path, *, state_dict: dict[str, torch.Tensor] | None = None) -> object: ...

    # ------------------------------------------------------------ how it computes

    def to(self, device: str | torch.device | torch.dtype) -> Self: ...

    def to_empty(self, *, device: str) -> Self: ...

    def cpu(self) -> Self: ...

    def train(self) -> Self: ...

    def zero_grad(self) -> None: ...

    def requires_grad_(self, requires_grad: bool) -> Self: ...

    def set_attn_implementation(self, attn_implementation: str) -> None: ...

    def set_experts_implementation(self, experts_implementation: str) -> None: ...

    def _can_set_experts_implementation(self) -> bool: ...

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None: ...

    def disable_input_require_grads(self) -> None: ...


class ChatTokenizer(Protocol):
    """A tokenizer of transformers that has a chat template."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """An `AddedToken` for every token that is not of the trained vocabulary."""

    def __len__(self) -> int: ...

    def get_vocab(self) -> dict[str, int]: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False) -> list[int]: ...

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool | None = None
    ) -> str: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool,
    ) -> str: ...

    def save_pretrained(self, save_directory: Path) -> object: ...
