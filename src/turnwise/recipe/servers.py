"""Servers that run already, by their addresses."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from pydantic import model_validator

from turnwise.recipe.section import Section

BAD = "is no address of a server; write it as http://host:port or https://host:port"


class ServersConfig(Section):
    """The keys that every engine on servers has."""

    servers: tuple[str, ...] = ()
    """Addresses of servers that run already, for instance ["http://a:8000", "http://b:8000"]. Each has a copy of the
    weights; the turns of an attempt stay on one, and one that is lost is left out until it answers again."""
    api_key_variable: str = ""
    """Name of the environment variable that has the key of the servers. The key itself is never written down."""
    ca_file: str = ""
    """File with the certificates that https servers are known by; empty takes those of the machine."""

    @model_validator(mode="after")
    def addresses_are_plain(self) -> Self:
        for address in self.servers:
            if problem := address_problem(address):
                raise ValueError(problem)
        plain = [address.rstrip("/") for address in self.servers]
        if twice := [address for address in plain if plain.count(address) > 1]:
            raise ValueError(f"servers names {twice[0]} twice; name each server once")
        return self

    @model_validator(mode="after")
    def servers_are_there(self) -> Self:
        for name in ("api_key_variable", "ca_file"):
            if getattr(self, name) and not self.servers:
                raise ValueError(f"{name} is ignored without servers; name them, or remove it")
        if self.ca_file and not any(address.startswith("https:") for address in self.servers):
            raise ValueError("ca_file is ignored where no server is https; remove it, or write https://")
        return self


def address_problem(address: str) -> str:
    """Why nobody can be asked at an address; empty where somebody can."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return f"servers: {address[:80]!r} {BAD}"
    if parts.username is not None or parts.password is not None:
        return "servers: an address with a password would be written down; name its variable in api_key_variable"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        return f"servers: {address[:80]!r} {BAD}"
    return ""
