"""Signatures of thinking: they tell the thinking of this model from that of others.

A client that speaks Anthropic's dialect sends thinking back with the signature that it came with. Thinking that another
model wrote, or that was changed on the way, must not be shown to this model as its own.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

SIZE = 24
"""Bytes of a signature."""
LONGEST = 1 << 20
"""Bytes of sealed text that is read."""


class ThinkingSeal:
    """Signs thinking. Without a key, signatures are valid in this process only.

    Example:
        seal.accepts("amber first", seal.sign("amber first"))
    """

    def __init__(self, key: str = "") -> None:
        """`key`: the key of the endpoint if it survives a restart; the secret is derived from it."""
        given = key.encode() or secrets.token_bytes(32)
        self.secret = hashlib.blake2b(given, digest_size=32, person=b"turnwise thinks").digest()

    def sign(self, thinking: str) -> str:
        """The signature of a text."""
        mac = hashlib.blake2b(thinking.encode(), key=self.secret, digest_size=SIZE)
        return base64.urlsafe_b64encode(mac.digest()).decode()

    def accepts(self, thinking: str, signature: str) -> bool:
        """Whether a signature is this seal's for a text."""
        return hmac.compare_digest(self.sign(thinking).encode(), signature.encode())

    def pack(self, thinking: str) -> str:
        """A text with its signature, for dialects with one opaque field for both."""
        return f"{self.sign(thinking)}.{base64.urlsafe_b64encode(thinking.encode()).decode()}"

    def unpack(self, packed: str) -> str | None:
        """The text of `pack`; None if it is not this seal's."""
        signature, dot, encoded = packed.partition(".")
        if not dot or len(encoded) > LONGEST:
            return None
        try:
            thinking = base64.urlsafe_b64decode(encoded.encode()).decode()
        except ValueError:  # of base64 and of UTF-8
            return None
        return thinking if self.accepts(thinking, signature) else None
