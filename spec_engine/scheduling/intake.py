"""Where prompts come in: each becomes a request that waits, or is refused with a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import ProcessGroup

from spec_engine.acceptance.logprobs import TokenLogProb
from spec_engine.acceptance.stops import StopScan
from spec_engine.assembly import Assembly
from spec_engine.config import EngineConfig
from spec_engine.errors import ConfigError
from spec_engine.memory.cache.host_tier import HostBlock
from spec_engine.models.decoder import Decoder
from spec_engine.models.loader import Draft
from spec_engine.models.tokenizer import Tokenizer
from spec_engine.request import Output, Refusal, Request, TokenEvent
from spec_engine.sampling import SamplingParams


class Intake(Assembly):
    """The half of an engine that takes prompts."""

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder | None,
        draft: Draft | None,
        tokenizer: Tokenizer | None,
        ranks: ProcessGroup | None,
    ) -> None:
        super().__init__(config, model, draft, tokenizer, ranks)
        self._scans: dict[str, StopScan] = {}  # of every request that has not ended
        self._handed_over: dict[str, tuple[Request, HostBlock | None]] = {}
        self._num_requests = 0

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        adapter: str = "",
        block: HostBlock | None = None,
        hands_over: bool = False,
    ) -> str:
        """Queue one prompt (text or token ids); returns its request id. ConfigError when it could never run.

        Requests of higher ``priority`` are admitted first and retracted last. Cached prefixes are shared among
        requests of one ``salt`` and one ``adapter`` only. An adapter is an identity: the models here have no LoRA, so
        it changes no token, but pages and the canary's chains are those of this adapter and of no other.
        block: of the host tier, what is computed of the prompt already.
        hands_over: it ends as "handed_over" with its first token, which is not told; `take_handed_over` has the rest.
        """
        request = self._enqueue(prompt, params, priority, salt, adapter)
        request.block, request.hands_over = block, hands_over
        return request.request_id

    def take_handed_over(self, request_id: str) -> tuple[Request, HostBlock | None]:
        """A request that has ended as "handed_over", and what it had computed; None where the tier had no room."""
        return self._handed_over.pop(request_id)

    def _try(self, prompt: str | Sequence[int], params: SamplingParams) -> Request | Refusal:
        try:
            return self._enqueue(prompt, params)
        except ConfigError as error:
            return Refusal(self._take_id(), str(error))

    def _take_id(self) -> str:
        self._num_requests += 1
        return f"req-{self._num_requests - 1}"

    def _enqueue(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        salt: str = "",
        adapter: str = "",
    ) -> Request:
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        vocab_size = self.model.config.vocab_size
        params.check_vocabulary(vocab_size)
        stray = [token for token in prompt_ids if not 0 <= token < vocab_size]
        if stray:
            raise ConfigError(f"prompt token {stray[0]} is out of the vocabulary of {vocab_size} tokens")
        request = Request("", prompt_ids, params, priority, salt, adapter)
        self.scheduler.submit(request)
        request.request_id = self._take_id()
        self._scans[request.request_id] = self._scan(params)
        return request

    def _scan(self, params: SamplingParams) -> StopScan:
        return StopScan(params, self.tokenizer.eos_ids, self.tokenizer.stream())


def output_of(request: Request | Refusal, events: dict[str, list[TokenEvent]]) -> Output:
    """What became of a prompt; ``events``: those of every request, by its id."""
    if isinstance(request, Refusal):
        return request.output
    own = events.get(request.request_id, [])
    return Output(
        request_id=request.request_id,
        text="".join(event.text for event in own),
        token_ids=tuple(request.output_ids),
        finish_reason=request.finish_reason or "",
        prompt_len=request.prompt_len,
        logprobs=None if request.params.logprobs is None else _listed(own),
    )


def _listed(events: Sequence[TokenEvent]) -> tuple[TokenLogProb, ...]:
    return tuple(entry for event in events for entry in event.logprobs or ())
