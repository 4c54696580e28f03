"""The links that there are, by name of their transport."""

from __future__ import annotations

from importlib.util import find_spec

from spec_engine.disagg.link import Link
from spec_engine.disagg.nixl_link import NixlLink
from spec_engine.disagg.torch_link import TorchLink
from spec_engine.errors import ConfigError


def make_link(name: str, agent: str, host: str = "127.0.0.1", seconds: float = 10.0) -> Link:
    """A link of this transport for an agent of this name. ConfigError where its package is not installed.

    host, seconds: of "torch": of this machine, under which peers reach it; that a peer or one piece is waited for
    """
    if name == "torch":
        return TorchLink(host, seconds)
    if name != "nixl":
        raise ConfigError(f"transport must be nixl or torch, got {name!r}")
    if find_spec("nixl") is None:
        raise ConfigError("transport 'nixl' needs the package nixl", "pip install 'kvcanary[nixl]', or use torch")
    return NixlLink(agent)
