"""Messages as one prompt: the chat template that a checkpoint brings along, in jinja2's sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spec_engine.models.config import CheckpointError, read_json
from spec_engine.models.embedded import embedded_model
from spec_engine.server.errors import RefusedError


class ChatTemplate:
    """Renders messages by the ``chat_template`` of a checkpoint's tokenizer_config.json or chat_template.jinja."""

    def __init__(self, source: str | None, specials: dict[str, str]) -> None:
        """``source``: None where the model has no template; its chats are refused. CheckpointError when it is none."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        try:
            self._template = None if source is None else environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"the chat template must be one of jinja2 ({error}): fetch it again") from None
        self._specials = specials

    @classmethod
    def of(cls, model: str) -> ChatTemplate:
        """Of "embedded" or a checkpoint's folder."""
        folder = embedded_model() if model == "embedded" else Path(model)
        path, apart = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = read_json(path) if path.is_file() else {}
        source = apart.read_text(encoding="utf-8") if apart.is_file() else config.get("chat_template")
        specials = {name: _text(config[name]) for name in ("bos_token", "eos_token") if config.get(name)}
        return cls(source if isinstance(source, str) else None, specials)

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt to complete. RefusedError where there is no template, or where it refuses these messages."""
        if self._template is None:
            raise RefusedError(
                400, "this model has no chat template: use /v1/completions", code="no_chat_template", param="messages"
            )
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._specials)
        except (TemplateError, TypeError, ValueError) as error:
            raise RefusedError(400, f"the chat template refuses these messages: {error}", param="messages") from error


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _raise(message: str) -> None:
    raise TemplateError(message)
