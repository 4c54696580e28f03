"""What each check means for who runs an engine, and what to do next; shown by `kvcanary codes R9`."""

from __future__ import annotations

from typing import NamedTuple


class Advice(NamedTuple):
    """Of one check: which wrong output may follow, and where to look, in whole sentences."""

    consequence: str
    remedy: str


#: By kind of check (`codes.KINDS`), in the order in which findings speak.
ADVICE: dict[str, Advice] = {
    "L1": Advice(
        "The engine's own books disagree, so a page may be used by two requests or lost. "
        "Outputs are not wrong yet, but nothing that is checked of these requests afterwards can be trusted.",
        "Read what contradicts what in the finding, then look at the call that tells the canary of it: a double free, "
        "a free that comes early, a plan whose arrays do not fit each other. "
        "Run with `kvcanary serve --kv-canary raise` to get the traceback of that call.",
    ),
    "X1": Advice(
        "Each rank goes on with its own history, and the next sum over ranks mixes them: answers turn to garbage, or "
        "the job hangs in a collective.",
        "Look at what differs first: a pool that a rank sized by its own free memory, a prefix that one has evicted, a "
        "token that one drew otherwise, a load that one has not consumed. Where one rank of three is alone, look "
        "there. `kvcanary explain DUMP` shows the step, the request and which rank is alone.",
    ),
    "X2": Advice(
        "A rank has computed or stored other bits than its peers, so a sum over ranks carries a wrong value into every "
        "answer. No other check sees a value that was wrong before it was written.",
        "Run the same step on other GPUs: where the rank changes with the GPU it is the GPU, drain it and run "
        "`kvcanary probe`. Where it stays, compare the kernels, their autotuning and the shards of that rank.",
    ),
    "W1": Advice(
        "Without the canary the store writes into memory of somebody else, or kills the CUDA context. "
        "The token itself is missing from the cache, and its request goes on without it.",
        "Compare the slot with the pool's size where the slot mapping is built: a padding mark such as -1, "
        "a slot of another pool, or one too many. `kvcanary explain DUMP` shows the id and its likeliest origin.",
    ),
    "W7": Advice(
        "The page may be handed to another request at any time, whose answer then contains this one's context.",
        "Look for a write that comes after its request has ended: a forward in flight, a late copy, or a row that was "
        "not removed from the batch. `kvcanary why-slot DUMP SLOT` shows when the page was freed.",
    ),
    "W2": Advice(
        "Somebody else's entries are overwritten: the request that owns the page answers from a context that is not "
        "its own.",
        "Compare the slot mapping of this forward with the request's page table; where they first differ is the bug. "
        "`kvcanary why-slot DUMP SLOT` names the owner and all rows that read the page.",
    ),
    "W3": Advice(
        "Every request that shares this prefix reads the overwritten entries, and answers from them from now on.",
        "Look at where a shared page is copied before it is written, and at the length that was matched in the prefix "
        "cache: the last, partly filled page must be private. `kvcanary why-slot DUMP SLOT` names its readers.",
    ),
    "W8": Advice(
        "The write is in a page of this request, but ahead of what was reserved or behind what is final. "
        "Tokens that were accepted may be overwritten, and the answer changes.",
        "Compare the number of tokens that are reserved for a step with the number that its forwards write, drafts "
        "included, and check that positions below the committed length are not written again. "
        "`kvcanary why-slot DUMP SLOT` shows the state of the page.",
    ),
    "W9": Advice(
        "Rows that exist only to fill up a batch overwrite entries of real requests, which answer from them.",
        "Reset the buffers of the captured graph to null slots behind the live rows before each replay. "
        "Run the same batch without graphs: if the finding goes, that is the place. "
        "`kvcanary explain DUMP` shows the history of the slot.",
    ),
    "W4": Advice(
        "Two tokens have one slot, or a layer stored twice: only the last one is kept, and both are read as it.",
        "Print the slot mapping of this forward and re-reads for the repeated slot: usually lengths or branches are "
        "counted in two ways. If the slots differ, look for a layer that runs its store twice. "
        "`kvcanary why-slot DUMP SLOT` shows who wrote it when.",
    ),
    "W5": Advice(
        "The token is encoded at a wrong position, so the model sees the words of this request in another order.",
        "Compare the positions of this forward with the lengths of its rows and the parents of its tree: "
        "an offset that was added twice, or a length that was not advanced after acceptance. "
        "`kvcanary replay DUMP` runs the step again on a CPU.",
    ),
    "N1": Advice(
        "Every request that reads this entry computes NaN from it, in this step and in all that follow, and shared "
        "prefixes pass it on. Their answers end in one repeated token.",
        "Look at the layer and the phase that the finding names, with that request's tokens alone: an overflow in "
        "float16, weights or scales that are not finite, or a kernel that reads padding. Where a model stores Inf by "
        "design, switch the check off with `KVCANARY_DISABLE=N1`. `kvcanary explain DUMP` shows the row before it.",
    ),
    "T1": Advice(
        "The requests of these pages continue from bytes that were damaged or mixed up on the way. "
        "Their next tokens may be wrong, without any other sign.",
        "Compare source and destination of the move: its order, its layers, both K and V, and overlapping ranges. "
        "`kvcanary explain DUMP` ranks what may have gone wrong.",
    ),
    "A1": Advice(
        "A request resumes, or a prefix is reused, with bytes that are not those it left: it answers from a damaged or "
        "foreign context.",
        "Read the first cause: one word, misrouted, short, stale and another layout each point to another part of the "
        "offload path. `kvcanary explain DUMP` has the advice for each of them.",
    ),
    "O1": Advice(
        "Whether the bytes are right depends on which of two streams is faster, so outputs may be wrong now and then.",
        "Let the stream that the finding names wait for the event of the copy that it names. "
        "`kvcanary explain DUMP` says who should have waited for what.",
    ),
    "P1": Advice(
        "Something writes into pages that nobody owns. The same write damages a real request as soon as the page is in "
        "use.",
        "Look for the last owner of the page and for what still holds its slots: a late copy, a graph with old slots, "
        "a request that has ended. `kvcanary why-slot DUMP SLOT` shows its history.",
    ),
    "R1": Advice(
        "Without the canary attention reads memory of somebody else, or the process dies of an illegal access.",
        "Compare the id with the pool's size where the index array is built: a padding mark that was not replaced, "
        "an off-by-one, or an array of another pool. `kvcanary explain DUMP` shows the id and its likeliest origin.",
    ),
    "R2": Advice(
        "A real request attends bytes that belong to nobody and that every padding row overwrites: its next tokens are "
        "arbitrary.",
        "Look at how live and padding rows are told apart in this batch, and for an entry of the page table that was "
        "never filled. `kvcanary windows` checks the map of a sliding window, where such an entry is a page that was "
        "given up early.",
    ),
    "R3": Advice(
        "Something writes where it should not: now it hit the canary's own memory, next time it may hit the cache. "
        "Whether this entry is right can no longer be told.",
        "Run with `compute-sanitizer`, and look for writes behind the end of a tensor that was allocated beside the "
        "canary's. If a single bit differs, test the machine's memory. "
        "`kvcanary explain DUMP` says which of the two fits better.",
    ),
    "R12": Advice(
        "Attention reads whatever lay in the page before: nothing, or another request's tokens. "
        "The answer is built on it.",
        "Look for the layer that did not store, a store that went to another slot, a forward that was skipped, or a "
        "load that was not waited for. `kvcanary explain DUMP` ranks which of these it was.",
    ),
    "R7": Advice(
        "The request reads a page that is free or about to be reused: its answer may contain another user's context.",
        "Look at the page's history before the finding: the free came early, or the page table was not updated after "
        "it. `kvcanary why-slot DUMP SLOT` shows both events.",
    ),
    "R8": Advice(
        "The request reads a page of another request: its answer may reveal that user's text.",
        "Compare the index array with the request's page table, and look for a table row that was reused, reordered or "
        "read from another batch. `kvcanary why-slot DUMP SLOT` names the owner.",
    ),
    "E1": Advice(
        "Answers are computed over entries of other rows, or over too few or too many, although plans and bytes are "
        "right: whatever is asked on this path is wrong.",
        "Compare what the finding says was read with the arguments of the attention kernel on this path: block table, "
        "lengths, mask and scales. Run the same step on another backend and `kvcanary codes R8` names the judge.",
    ),
    "W6": Advice(
        "The model continues a text that differs from the one the client was given, so the answer contradicts itself.",
        "Follow the token from sampling to the input of this forward: the order of rows after a request has ended, "
        "the index of the accepted branch, or a buffer that was read before its copy had ended. "
        "`kvcanary replay DUMP` runs the step again on a CPU.",
    ),
    "R4": Advice(
        "The row reads the right memory in a wrong order, or an entry of another place: the answer is based on "
        "shuffled words.",
        "Print the index array beside the page table from this position on; an offset within the page, a wrong page "
        "size, or a compaction that moved the other entries is the usual reason. "
        "`kvcanary why-slot DUMP SLOT` shows what lies there.",
    ),
    "R5": Advice(
        "The row mixes two texts: up to here it is one prefix, and from here on it continues another one. "
        "The answer follows the wrong text.",
        "Look at who wrote this entry and for which branch or request: a draft branch that was not moved after "
        "acceptance, a wrong match in the prefix cache, or other tokens under one hash. "
        "`kvcanary why-slot DUMP SLOT` names the writer.",
    ),
    "R10": Advice(
        "The request forgets its newest tokens, or attends some that were rejected: answers repeat, skip or drift.",
        "Follow the length of this request through the step: where it is raised, where it is rolled back after "
        "rejection, and whether it counts tokens, drafts or pages. "
        "`kvcanary replay DUMP` runs the step again on a CPU.",
    ),
    "R11": Advice(
        "The row sees a token that the model had not produced when this forward began, so the result cannot be "
        "reproduced.",
        "Look for two steps in flight over the same slots: a missing wait between streams, or a graph that replays an "
        "older step. `kvcanary timeline DUMP` shows which ran when.",
    ),
    "R9": Advice(
        "Attention reads other numbers than the model computed: the next tokens of every request that reads this slot "
        "may be wrong.",
        "If one bit differs, test the machine's memory; if a whole row does, look for a store or a copy that nobody "
        "declared, in the step between last good and found. `kvcanary explain DUMP` ranks what may have changed it. "
        "A run with `kvcanary serve --kv-canary-content full` finds it in the very forward.",
    ),
    "U1": Advice(
        "One NaN turns the whole attention row into NaN, although the slot is masked: the request then gets garbage, "
        "such as one token repeated.",
        "Zero pages when the pool is allocated, and look for a forward that writes NaN into padding or null slots. "
        "Run with `kvcanary serve --kv-canary-poison finite` to learn whether somebody wrote into the free page.",
    ),
    "R13": Advice(
        "A draft is verified in a context that is not its own, so that a token may be accepted that the model would "
        "not have chosen.",
        "Compare the tree mask with the parents of this forward: transposed, of another step, or built for another "
        "number of nodes. `kvcanary report DUMP` draws the tree.",
    ),
    "H1": Advice(
        "These tokens were not checked at all. A clean report says nothing about them.",
        "Open, store and close the hooks for every forward, captured ones and those of drafts included, and announce "
        "them before they run. `kvcanary certify DUMP` counts what was not covered.",
    ),
    "H2": Advice(
        "The canary cannot tell what it should protect, and stops instead of giving a clean report.",
        "Follow the traceback: attach once, arm after warm-up and capture, then open, store and close each forward in "
        "this order. `kvcanary doctor` shows whether the installation itself works.",
    ),
    "R6": Advice(
        "The request was given a whole row of somebody else: its answer belongs to another user's prompt.",
        "Compare the order of requests and of rows in this batch, then the keys of the prefix cache: tokens, salt and "
        "adapter. `kvcanary explain DUMP` ranks what may have mixed them up.",
    ),
}
