"""The checks: code, short name, plain sentence, where each is judged, which finding speaks first, and which are fed.

`kvcanary codes R9` shows one of them, with what it means for a user and what to do next (`kvcanary_tools.advice`).
"""

from __future__ import annotations

from dataclasses import dataclass

# Who judges what: a function, a method or a class, as module:qualified name, and the kinds that it finds.

#: On the host: eager forwards, and what it learns of captured ones.
HOST = {
    "kvcanary.manager.contradictions:Contradictions._report_contradiction": "L1",
    "kvcanary.ledger.page_states:Pages._refused": "L1",
    "kvcanary.checks.writes:refuse": "W1 W2 W3 W7 W8 R1",
    "kvcanary.ledger.page_states:Pages._write_code": "W2 W3 W7 W8",
    "kvcanary.checks.writes:judge_slots": "W1 W4 R1",
    "kvcanary.checks.writes:judge_layer": "W4",
    "kvcanary.checks.writes:judge_layers": "R12",
    "kvcanary.checks.stores:judge_finite": "N1",
    "kvcanary.checks.seals:_misplaced": "W5",
    "kvcanary.checks.seals:judge_lineage": "R5",
    "kvcanary.checks.tokens:judge_tokens": "W6",
    "kvcanary.checks.lengths:judge_lengths": "R10 H1",
    "kvcanary.checks.lengths:judge_starts": "R10",
    "kvcanary.checks.lengths:judge_mask": "R13",
    "kvcanary.checks.lengths:judge_commit": "H1",
    "kvcanary.checks.lengths:judge_collected": "H1",
    "kvcanary.checks.rows:Reader": "R2 R3 R4 R5 R7 R8 R11 R12",
    "kvcanary.checks.rows:Reader._judge_own": "R5",
    "kvcanary.checks.rows:Reader._judge_truth": "R6",
    "kvcanary.checks.rows:_null_writes": "R2",
    "kvcanary.checks.rows:_shared_slots": "R8",
    "kvcanary_kernels.judge.verify:verify": "R2 R3 R4 R5 R7 R8 R11 R12",
    "kvcanary.checks.rows:grant_codes": "R7 R8",
    "kvcanary.checks.content:find_changed": "R3 R9",
    "kvcanary.scrub.unwritten_tails:UnwrittenTails._fired": "U1",
    "kvcanary.scrub.poison:Poisoner.granted": "P1",
    "kvcanary.transfers.moves:Mover.apply": "T1 R9",
    "kvcanary.transfers.moves:Mover.arrived": "T1",
    "kvcanary.transfers.snapshots:PageSnapshots._judge": "A1",
    "kvcanary.transfers.imports:did_not_arrive": "T1",
    "kvcanary.tier.arrival:violation_of": "A1",
    "kvcanary.tier.arrival:bare_violation": "A1",
    "kvcanary.transfers.async_ops:AsyncOps.use": "O1",
    "kvcanary.transfers.async_ops:AsyncOps.complete": "O1",
    "kvcanary.transfers.async_ops:AsyncOps.free": "O1",
    "kvcanary.captured.registry:SubstepRegistry._take": "H1",
    "kvcanary.captured.states:CapturedStates.violations": "H1",
    "kvcanary.manager.substep:ExpectedForwards.missing": "H1",
    "kvcanary.manager.substep:ExpectedForwards.left_out": "H1",
    "kvcanary.manager.manager:CanaryManager.arm": "H2",
    "kvcanary.manager.substep:SubstepCanary.open": "H2",
    "kvcanary.captured.substep:CapturedSubstep.open": "H2",
    "kvcanary.pools.attachment:Attachment.__init__": "H2",
    "kvcanary.states.judging:Judge.taken": "R1 R2 R4 R7 R8 R12",
    "kvcanary.states.judging:Judge.absorbed": "R4 R5 R6 R12",
    "kvcanary.states.judging:Judge.changed": "R9",
    "kvcanary.states.judging:Judge.written": "W1 W2 W3",
    "kvcanary.states.judging:Judge.padded": "W1 W9",
    "kvcanary.states.states:States._left": "W4",
    "kvcanary.states.states:States._arrived": "T1 R9",
    "kvcanary.states.states:States._unlike": "T1",
    "kvcanary.probe.reader:misread_violation": "E1",
    "kvcanary.ranks.findings:violation_of": "X1 X2",
}

#: On the device: captured forwards, and bytes that lie there. The torch reference stands beside each in its file.
DEVICE = {
    "kvcanary_kernels.judge.plan:plan": "W1 W4 W5 W9 R2 R10",
    "kvcanary_kernels.judge.admit:page_code": "W2 W3 W7 W8",
    "kvcanary_kernels.judge.verify:verify": "R1 R2 R3 R4 R5 R7 R8 R11 R12",
    "kvcanary_kernels.judge.settle:settle": "W4 N1 R5 R6 R12",
    "kvcanary_kernels.content.check:check_content": "T1 R9",
    "kvcanary_kernels.content.reads:judge_reads": "R9",
    "kvcanary_kernels.content.finite:finite_check": "U1",
    "kvcanary_kernels.content.poison:poison_check": "P1",
}

#: In caches that are only watched, those of vLLM and transformers.
OBSERVED = {
    "kvcanary_kernels.watch.advance:advance": "W1 W2 W3 W5 W6 W7",
    "kvcanary_kernels.watch.walk:walk": "R1 R2 R3 R4 R5 R6 R7 R8 R10 R12",
    "kvcanary.adapters.observed.inputs:WrongLengths.violations": "R10",
    "kvcanary.adapters.observed.inputs:SampledTokens.violations": "W6",
    "kvcanary.adapters.observed.canary:PagedCanary._look_at_poison": "P1",
    "kvcanary_kernels.watch.reread:take": "W4 N1 R12",
    "kvcanary_kernels.watch.reread:reread": "R9",
    "kvcanary.adapters.observed.canary:PagedCanary.written_twice": "W4",
    "kvcanary.adapters.hosted.handle:HostHandle._ranks_differ": "X1 X2",
    "kvcanary.adapters.observed.moves:copied": "T1",
    "kvcanary.adapters.observed.moves:zeroed": "T1",
    "kvcanary.adapters.observed.moves:loaded": "A1",
    "kvcanary.adapters.transformers.attention_probe:misread_violation": "R4",
    "kvcanary.adapters.transformers.dense_cache:DenseRows.go_on": "W5",
    "kvcanary.adapters.transformers.dense_cache:DenseRows.written_by": "R6",
    "kvcanary.adapters.vllm.identity:Contents._tell": "R6",
    "kvcanary.adapters.sglang.host_tier:HostTier.ran": "O1",
    "kvcanary_kernels.watch.states:take_states": "R4 R6 R7 R8 R9 R12 T1 W1 W2 W3",
    "kvcanary.adapters.hosted.states:WatchedStates.copied": "T1",
    "kvcanary.adapters.hosted.states:WatchedStates.kept": "R9",
    "kvcanary.adapters.hosted.states:WatchedStates.brought": "T1",
    "kvcanary.adapters.transformers.judging:judge_fed": "R12",
    "kvcanary.adapters.transformers.judging:judge_reread": "T1 R4 R6 R9 R12",
    "kvcanary.adapters.transformers.judging:judge_stored": "N1",
    "kvcanary.adapters.transformers.paged_cache:_not_finite": "N1",
    "kvcanary.adapters.transformers.judging:judge_tokens": "R6 R10",
    "kvcanary.adapters.transformers.judging:wrong_length": "R10",
    "kvcanary.adapters.transformers.states:StateRows.begun": "R4 R9",
    "kvcanary.adapters.transformers.states:StateRows.selected": "T1",
    "kvcanary.adapters.transformers.paged_cache:BatchedCache._fed": "W5 R10",
    "kvcanary.adapters.transformers.paged_cache:BatchedCache._judge": "R4 R6 R12",
    "kvcanary.adapters.transformers.paged_cache:BatchedCache._reread": "R9 R12",
    "kvcanary.adapters.transformers.paged_cache:BatchedCache.copied": "T1",
}


@dataclass(frozen=True)
class Code:
    """One check: its code, its name in reports, and what a violation means in one sentence.

    variant: stands for the code where it means something of its own
    """

    code: str
    name: str
    sentence: str
    variant: str = ""

    @property
    def kind(self) -> str:
        """What tells it from all others."""
        return self.variant or self.code

    @property
    def host(self) -> tuple[str, ...]:
        """Who judges it on the host; `device` and `observed`: on the device, and in caches that are only watched."""
        return _judges(HOST, self.kind)

    @property
    def device(self) -> tuple[str, ...]:
        return _judges(DEVICE, self.kind)

    @property
    def observed(self) -> tuple[str, ...]:
        return _judges(OBSERVED, self.kind)


def _judges(places: dict[str, str], kind: str) -> tuple[str, ...]:
    return tuple(place for place, kinds in places.items() if kind in kinds.split())


_ALL = (
    Code("L1", "contradiction", "an engine's event or plan contradicts what the canary knows of a page or a request"),
    Code("X1", "ranks disagree", "ranks of one engine decided otherwise in a step: it has two histories from then on"),
    Code(
        "X2", "computed differently", "ranks must hold the same bits and do not: one of them computed or stored others"
    ),
    Code("W1", "write out of range", "a forward was told to write a slot that the pool does not have"),
    Code("W7", "write into quarantine", "a forward writes a page that was freed and is not to be used yet"),
    Code("W2", "write not owned", "a forward writes a page that its request does not own"),
    Code("W3", "write to shared page", "a forward writes a page that several requests read"),
    Code("W8", "write outside reserve", "a forward writes beyond the pages that were reserved for its request"),
    Code("W9", "padding write", "padding writes a slot that is not a null slot"),
    Code("W4", "duplicate write", "one forward writes the same slot, or the same layer of it, twice"),
    Code("W5", "write position", "an entry is written at a position that is not its parent's plus one"),
    Code("N1", "stored value not finite", "a forward stored NaN or Inf: who reads the entry computes NaN from it"),
    Code("T1", "moved bytes", "bytes were moved, and what arrived is not what was sent"),
    Code("O1", "unordered access", "memory was used without waiting for the copy that fills it, or for an old grant"),
    Code("P1", "poison damaged", "somebody wrote into a page that was free"),
    Code("R1", "slot out of range", "attention was told to read a slot that the pool does not have"),
    Code("R2", "null slot", "a live row reads a null slot, which belongs to padding"),
    Code("R3", "record damaged", "the canary's own record of this slot was overwritten"),
    Code("R12", "unwritten slot", "the slot was not written, or not by every layer, since its page was granted"),
    Code("R7", "stale page", "the row points at a page that was given back, or never granted"),
    Code("R8", "foreign slot", "the row points at a page that was granted to another request"),
    Code("W6", "wrong token", "the forward was fed another token than the request has at this position"),
    Code("R4", "wrong position", "the slot holds a token of another position than the row expects there"),
    Code("R5", "chain break", "the slot holds a token that does not continue the token before it"),
    Code("R10", "wrong length", "the row has more or fewer entries than the request's length and the plan say"),
    Code("R11", "future entry", "the row reads an entry that was written in a later step"),
    Code("R9", "content changed", "bytes of K or V are not those that were written"),
    Code("R13", "tree mask", "a tree node attends other nodes than the prefix and its ancestors"),
    Code(
        "H1",
        "canary not running",
        "a forward ran, tokens became final or a check was due, and no hook of the canary has run for them",
    ),
    Code("H2", "hook order", "the canary's hooks were called in an order in which they protect nothing"),
    Code("R6", "wrong row", "the row is consistent, but it is not this request's: its tokens, or its images, differ"),
)

UNWRITTEN = "U1"  # stands for R9 where nobody has written: a finding's causes and a dump's damage are kept apart by it
MISREAD = "E1"  # stands for R8 where a probe has shown what attention reads, where its causes are asked
ARRIVED = "A1"  # stands for T1 where bytes came back, where its causes are asked

#: What R9 means at a slot that nobody has written, in a null page or behind the end of a row (U1).
NOT_FINITE = Code(
    "R9",
    "content not finite",
    "NaN or Inf lies where nobody has written: who reads whole pages multiplies it by zero",
    UNWRITTEN,
)

#: What R8 means of a probe: the plan is right, and so are the bytes.
READS_ELSE = Code(
    "R8",
    "read elsewhere",
    "attention does not give what its plan and the bytes in the pool say: it read otherwise",
    MISREAD,
)

#: What T1 means of bytes that were put away, and came back by a load, a restore or a swap.
CAME_BACK = Code("T1", "bytes came back wrong", "bytes came back from elsewhere, and are not those that left", ARRIVED)

#: What codes mean where the slot is an entry of a StateView.
OF_STATES: dict[str, str] = {
    "W1": "a forward was told to leave a state in an entry that the view does not have",
    "W2": "a forward leaves a state in an entry that its request does not own",
    "W3": "a forward leaves a state in an entry that a prefix cache may hand out",
    "W9": "padding leaves a state in an entry that is not a null entry",
    "W4": "one forward leaves two states in the same entry",
    "T1": "a state was copied, or came back, and what arrived is not what was sent",
    "R1": "a forward was told to take a state from an entry that the view does not have",
    "R2": "a live row takes its state from a null entry, which belongs to padding",
    "R12": "nobody has left a state in the entry since it was granted",
    "R7": "the row takes its state from an entry that was given back, or never granted",
    "R8": "the row takes its state from an entry that was granted to another request",
    "R4": "the state has absorbed another number of tokens than it is taken, or published, for",
    "R5": "the state has absorbed drafts that are not the tokens of its request",
    "R9": "bytes of the state are not those that were left there",
    "R6": "the state has absorbed as many tokens, but they are another prompt's, or under another root",
}

#: Codes by name; the order is the order in which findings at one slot speak: what went wrong at a write, a move or a
#: free page, then what a row reads, as listed.
CODES: dict[str, Code] = {code.code: code for code in _ALL}
#: The same, each followed by what else it means, by kind.
KINDS: dict[str, Code] = {
    one.kind: one for code in _ALL for one in (code, NOT_FINITE, CAME_BACK, READS_ELSE) if one.code == code.code
}
RANK: dict[str, int] = {code.code: rank for rank, code in enumerate(_ALL)}
#: Codes that speak before everything that a row reads, wherever in the row they fired.
SPEAK_FIRST = frozenset(code for code in CODES if RANK[code] < RANK["R1"])
#: Checks of the bytes; the others are checks of identity.
CONTENT_CODES = frozenset({"R9"})
#: Checks that something feeds in this version; the others can not fire, and the certificate says so.
FED = frozenset(CODES) - {"W9", "H2", "X1", "X2"}
