"""Always-on host checks: each broken rule has a type and a message that shows both sides of it.

They are exceptions, not ``assert``, so that ``python -O`` keeps them; they are pure functions of plain numbers, cost a
few comparisons a step and stay on with the canary off. What only the device can see is a check of the canary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvcanary.errors import KVCanaryError

MAX_FLAT_INDEX = (1 << 31) - 1  # kernels address request rows and index buffers with 32-bit integers


class InvariantError(KVCanaryError, RuntimeError):
    """A rule of KV memory management was broken; going on would corrupt somebody's cache."""


class PageLeakError(InvariantError):
    """Free and owned pages no longer add up to the pool."""


class DoubleFreeError(InvariantError):
    """A page was freed that is not allocated."""


class PageAliasError(InvariantError):
    """A page was handed out that somebody owns; two requests would share it."""


class NullPageError(InvariantError):
    """Page 0 or request row 0 was handed out; padding writes there."""


class PoolExhaustedError(InvariantError):
    """More pages were asked for than are free: the admission estimate and the allocator disagree."""


class PagesQuarantinedError(PoolExhaustedError):
    """Enough pages are free, but some were freed in this very step: they may be handed out in the next one."""


class StalePageError(InvariantError):
    """A page was shared that nobody holds: the prefix tree, or a copy of a row, points at a free page."""


class ReferenceCountError(InvariantError):
    """A page has another number of references than rows and prefix tree that name it."""


class WritablePageError(InvariantError):
    """A page was published, or cached, that its request may still write."""


class PrefixLockError(InvariantError):
    """A prefix was locked that the tree has evicted, or unlocked more often than locked."""


class PoolSizeError(InvariantError):
    """A pool's tensors have another number of slots than the allocator's pages; the last page would lie outside."""


class PageSizeError(InvariantError):
    """Parts of the engine that share slots count pages of different sizes."""


class ReserveError(InvariantError):
    """A request's reserve does not cover one drafting step and the host's lag."""


class EstimateError(InvariantError):
    """The pages that a request owns are not those that the estimate promised."""


class EstimateMismatchError(InvariantError):
    """A decode step took another number of pages than the estimate by which it was admitted."""


class LengthOrderError(InvariantError):
    """0 <= committed <= allocated <= row width does not hold."""


class RowOverflowError(InvariantError):
    """A request needs more columns than its request-table row has; the write would reach its neighbour's row."""


class RowGapError(InvariantError):
    """Pages do not continue a request-table row where it ends, at a page boundary."""


class RowOwnershipError(InvariantError):
    """A request-table row is used by nobody, by two requests, or was released twice."""


class RowsExhaustedError(InvariantError):
    """More requests were admitted than the request table has rows."""


class IndexOverflowError(InvariantError):
    """A flat index would not fit into a signed 32-bit integer."""


class IndexBufferError(InvariantError):
    """A draft forward names more entries than its index buffer holds, or the buffer more than 32 bits can count."""


class IndexLengthError(InvariantError):
    """An index array and the lengths that it is read by disagree."""


class BranchLayoutError(InvariantError):
    """Draft branches overlap, or reach beyond what their request owns."""


class TreeShapeError(InvariantError):
    """A draft tree is no tree, or an accepted path is no path of it."""


class ChainConstantsError(InvariantError):
    """Constants of a chain are used for another number of steps, or more requests, than they were made for."""


class CommitError(InvariantError):
    """A committed length moved by something else than what was accepted, or beyond the tokens that are known."""


class ChunkError(InvariantError):
    """A prompt chunk does not continue what is committed, or feeds something else than the prompt."""


class RelayError(InvariantError):
    """A request drafts from proposals that are not its own, or not of its last step."""


class StagingError(InvariantError):
    """A host buffer is read for what it held before it was taken again."""


class RecurrentStateError(InvariantError):
    """A recurrent state would go on from something else than the last accepted node of its request."""


class WindowMapError(InvariantError):
    """A window pool's map and its books disagree, or a position is read whose bytes have left the window."""


class ResidencyError(InvariantError):
    """A page of a split pool is used on the device that does not lie there, or more are wanted there than fit."""


class HostCapacityError(InvariantError):
    """Pages are offloaded to a host tier that cannot hold so many."""


class HostBlockError(InvariantError):
    """A block of the host tier is restored that it does not hold, or into another number of pages."""


class NotRunningError(InvariantError):
    """A request was finished that does not run; its pages and its row would be released twice."""


# -- pages


def check_pages_available(needed: int, free: int, total: int) -> None:
    if needed > free:
        raise PoolExhaustedError(
            f"{needed} pages needed, {free} of {total} free: raise max_total_tokens or lower max_running_requests"
        )


def check_pages_ready(needed: int, ready: int, quarantined: int) -> None:
    """Pages that were freed in this step are not handed out in it: a forward in flight may still touch them."""
    if needed > ready:
        raise PagesQuarantinedError(
            f"{needed} pages needed, {ready} ready and {quarantined} more in quarantine since this step: wait a step"
        )


def check_pages_granted(pages: Sequence[int], taken: Collection[int], total: int) -> None:
    """Pages about to be handed out are in the pool, nobody's, and not the null page."""
    for page in pages:
        if not page:
            raise NullPageError(f"page 0 handed out with {list(pages)}, it is padding's: pages are 1 to {total}")
        if not 1 <= page <= total:
            raise PoolSizeError(f"page {page} handed out with {list(pages)}, the pool has pages 1 to {total}")
        if page in taken:
            raise PageAliasError(f"page {page} handed out with {list(pages)}, but it is one of {len(taken)} taken")
    if len(set(pages)) != len(pages):
        raise PageAliasError(f"pages {list(pages)} handed out, {len(pages)} in all, but {len(set(pages))} different")


def check_pages_freed(pages: Sequence[int], taken: Collection[int]) -> None:
    """Pages about to be freed are taken, and named once."""
    stray = [page for page in pages if page not in taken]
    if stray or len(set(pages)) != len(pages):
        raise DoubleFreeError(f"pages {list(pages)} freed, but {stray or 'some of them twice'} not allocated")


def check_generations(pages: Sequence[int], expected: Sequence[int], found: Sequence[int]) -> None:
    """Pages named by an earlier grant are still under that grant."""
    stale = [page for page, was, now in zip(pages, expected, found, strict=True) if was != now]
    if stale:
        raise DoubleFreeError(
            f"pages {list(pages)} of generations {list(expected)} freed, but {stale} were freed since: "
            f"generations are {list(found)}"
        )


def check_pages_shared(pages: Sequence[int], references: Mapping[int, int]) -> None:
    """A page gets one more reference only while somebody holds it."""
    stale = [page for page in pages if page not in references]
    if stale:
        raise StalePageError(
            f"pages {list(pages)} shared, but {stale} are free: evict a prefix before its last reference goes"
        )


def check_references(references: Mapping[int, int], named: Mapping[int, int]) -> None:
    """Each page has one reference for each row that names it and one for the prefix tree."""
    for page in sorted(references.keys() | named.keys()):
        count, names = references.get(page, 0), named.get(page, 0)
        if count != names:
            raise ReferenceCountError(
                f"references of page {page} are {count}, rows and prefix tree name it {names} times"
            )


def check_pages_add_up(free: int, quarantined: int, owned: int, evictable: int, protected: int, total: int) -> None:
    """After every step each page is free, waits, is one live request's, or is cached once."""
    found = free + quarantined + owned + evictable + protected
    if found != total:
        what = f"{total - found} leaked" if found < total else f"{found - total} counted twice"
        raise PageLeakError(
            f"{free} pages free + {quarantined} quarantined + {owned} owned by requests + {evictable} evictable "
            f"+ {protected} protected in the prefix tree = {found} != {total} in all: {what}"
        )


def check_pages_final(request: str, num_pages: int, committed_len: int, page_size: int) -> None:
    """Only pages that lie wholly below the committed length are written no more."""
    if num_pages * page_size > committed_len:
        raise WritablePageError(
            f"{request} publishes {num_pages} pages of {page_size} slots, it has committed {committed_len} and may "
            f"write behind that: publish {committed_len // page_size}"
        )


def check_pages_uncached(pages: Sequence[int], cached: Collection[int]) -> None:
    """A page stands for one prefix."""
    twice = [page for page in pages if page in cached]
    if twice or len(set(pages)) != len(pages):
        raise PageAliasError(
            f"pages {list(pages)} cached, but {twice or 'some of them twice'} already stand for another prefix"
        )


def check_prefix_lock(num_locks: int, is_cached: bool) -> None:
    """What is locked or unlocked is in the tree, and no lock is taken back twice."""
    if not is_cached:
        raise PrefixLockError("a prefix that the tree has evicted was locked or unlocked: lock what was just matched")
    if num_locks < 0:
        raise PrefixLockError(f"a prefix was unlocked once more than locked, its locks would be {num_locks}")


# -- sizes


def check_pool_slots(pool: str, num_slots: int, num_pages: int, page_size: int) -> None:
    """A pool has the allocator's pages and the null page."""
    if num_slots != (num_pages + 1) * page_size:
        raise PoolSizeError(
            f"pool {pool!r} has {num_slots} slots, {num_pages} pages and the null page of {page_size} slots "
            f"need {(num_pages + 1) * page_size}"
        )


def check_page_sizes(sizes: Mapping[str, int]) -> None:
    """Everything that shares slots counts the same pages."""
    if len(set(sizes.values())) > 1:
        named = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise PageSizeError(f"page_size must be one, got {named}: pass the same to all")


def check_reserve(reserve: int, lag: int, max_accept: int, alloc_len: int) -> None:
    if reserve < lag * max_accept + alloc_len:
        raise ReserveError(
            f"reserve {reserve} < lag {lag} * max_accept {max_accept} + alloc_len {alloc_len} "
            f"= {lag * max_accept + alloc_len}: size it by the longest draft"
        )


def check_flat_indices(what: str, rows: int, width: int) -> None:
    """The last element of a [rows, width] array can be addressed with a signed 32-bit integer."""
    if rows * width > MAX_FLAT_INDEX:
        raise IndexOverflowError(
            f"{what}: {rows} rows * {width} columns = {rows * width} must be below {MAX_FLAT_INDEX + 1}: "
            "lower max_running_requests, topk or context_length"
        )


def check_estimate(request: str, taken: int, committed_len: int, reserve: int, page_size: int, most: int) -> None:
    """A request owns exactly the pages that its length and its reserve need, and no more than admission counted."""
    estimate = -(-(committed_len + reserve) // page_size)
    if taken != estimate:
        raise EstimateError(
            f"{request} owns {taken} pages, committed {committed_len} + reserve {reserve} slots at page_size "
            f"{page_size} need {estimate}"
        )
    if taken > most:
        raise EstimateError(f"{request} owns {taken} pages, it was admitted for {most} of {page_size} slots at most")


def check_step_estimate(schedule: str, estimate: int, taken: int, num_requests: int, page_size: int) -> None:
    """A decode step takes page for page what was estimated: less is needless retraction, more an exhausted pool."""
    if estimate != taken:
        raise EstimateMismatchError(
            f"a decode step of {num_requests} requests was estimated at {estimate} pages of {page_size} slots, it took "
            f"{taken} (schedule {schedule}): estimate and allocation must call pages_for with one reserve"
        )


def check_lengths(request: str, committed_len: int, allocated_len: int, row_width: int) -> None:
    if not 0 <= committed_len <= allocated_len <= row_width:
        raise LengthOrderError(
            f"{request}: 0 <= committed {committed_len} <= allocated {allocated_len} <= row width {row_width} is broken"
        )


# -- sub-pools and tiers


def check_window_pages(needed: int, free: int, total: int) -> None:
    """Each page of the full pool takes one of the window pool: the smaller one decides."""
    if needed > free:
        raise PoolExhaustedError(
            f"{needed} window pages needed, {free} of {total} free: raise the window pool or lower max_running_requests"
        )


def check_protected(request: str, protected_len: int, page_size: int) -> None:
    """What a prefix cache holds of a row are whole pages."""
    if protected_len % page_size:
        raise WindowMapError(f"{request}: protected length {protected_len} must be whole pages of {page_size} slots")


def check_window_slide(request: str, evicted_len: int, committed_len: int, allocated_len: int) -> None:
    """What has left the window ends before what forwards still write."""
    if not evicted_len <= committed_len <= allocated_len:
        raise WindowMapError(
            f"{request}: evicted {evicted_len} <= committed {committed_len} <= allocated {allocated_len} is broken: "
            "slide by the length that the host has committed"
        )


def check_window_mapped(
    request: str, pages: Sequence[int], mapped: Collection[int], start: int, page_size: int
) -> None:
    """From the page of position ``start`` on, every page of a row has one in the window pool."""
    for place in range(start // page_size, len(pages)):
        if pages[place] not in mapped:
            raise WindowMapError(
                f"{request}: page {pages[place]} of positions [{place * page_size}, {(place + 1) * page_size}) has no "
                f"window page, but readers see positions from {start} on"
            )


def check_resident(request: str, pages: Sequence[int], resident: Collection[int]) -> None:
    """A forward reads and writes only what lies on the device."""
    absent = [page for page in pages if page not in resident]
    if absent:
        raise ResidencyError(
            f"{request}: {len(absent)} of {len(pages)} pages are not on the device, the first is page {absent[0]}: "
            "bring them before the forward"
        )


def check_device_room(forward: str, wanted: int, num_pages: int) -> None:
    """The rows of one forward are on the device together."""
    if wanted > num_pages:
        raise ResidencyError(
            f"{forward}: {wanted} pages wanted on the device at once, it has {num_pages}: run fewer rows at a time"
        )


def check_device_pages(num_on_device: int, num_saved: int, num_held: int) -> None:
    """Whatever lies on the device or on the host is of a page that somebody holds."""
    if max(num_on_device, num_saved) > num_held:
        raise ResidencyError(
            f"{num_on_device} pages lie on the device and {num_saved} on the host, {num_held} are held: pages that "
            "were freed kept their places"
        )


def check_host_capacity(needed: int, total: int) -> None:
    if not 1 <= needed <= total:
        raise HostCapacityError(
            f"{needed} pages offloaded at once, the host tier has {total}: raise its size, or recompute them"
        )


def check_host_block(block: str, is_held: bool, held: int, wanted: int) -> None:
    """A block that comes back is held, and comes back into as many pages as it left."""
    if not is_held:
        raise HostBlockError(f"{block} restored, but it was dropped or evicted: ask holds() first, or recompute it")
    if held != wanted:
        raise HostBlockError(f"{block} of {held} pages restored into {wanted}: allocate as many as were offloaded")


# -- the request table


def check_rows_available(free: int, total: int) -> None:
    if not free:
        raise RowsExhaustedError(f"1 row needed, 0 of {total} free: more requests run than max_running_requests")


def check_row_held(row: int, free_rows: Collection[int], num_rows: int) -> None:
    """A row that is written or released belongs to a request."""
    if row == 0:
        raise NullPageError("row 0 used for a request, it is padding's: rows begin at 1")
    if not 0 < row <= num_rows or row in free_rows:
        raise RowOwnershipError(f"row {row} of 1 to {num_rows} used, but no request holds it")


def check_row_fits(row: int, start: int, end: int, width: int, page_size: int) -> None:
    if end > width:
        raise RowOverflowError(
            f"row {row} needs columns [{start}, {end}), its width is {width}: "
            f"{(end - start) // page_size} pages of {page_size} slots do not fit"
        )


def check_row_continues(row: int, start: int, filled: int, page_size: int) -> None:
    """Pages are appended where the row ends, at a page boundary: no column is skipped or written twice."""
    if start != filled or start % page_size:
        raise RowGapError(
            f"row {row} is filled to column {filled}, pages of {page_size} slots appended at column {start}"
        )


def check_row_covers(row: int, end: int, filled: int, page_size: int) -> None:
    """Pages are replaced where the row has some."""
    if end > filled:
        raise RowGapError(
            f"row {row} is filled to column {filled}, {end // page_size} pages of {page_size} slots replaced up to "
            f"column {end}"
        )


def check_rows_distinct(requests: Sequence[str], rows: Sequence[int]) -> None:
    """The requests of one batch use different rows, none of them padding's."""
    if 0 in rows:
        raise NullPageError(f"{requests[rows.index(0)]} uses row 0, it is padding's: rows begin at 1")
    if len(set(rows)) != len(rows):
        named = ", ".join(f"{request} row {row}" for request, row in zip(requests, rows, strict=True))
        raise RowOwnershipError(f"{len(rows)} requests of a batch need {len(rows)} rows of their own, got {named}")


# -- lengths and tokens


def check_index_lengths(forward: str, array: str, found: int, lens: Sequence[int]) -> None:
    """An array has one entry for each that the rows' lengths announce."""
    if found != sum(lens):
        raise IndexLengthError(
            f"{forward}: {array} has {found} entries, its rows' lengths {list(lens)} add to {sum(lens)}"
        )


def check_run_pages(num_keys: int, num_pages: int, page_size: int) -> None:
    """A run of cached tokens has a page for every key."""
    if num_pages < num_keys:
        raise IndexLengthError(
            f"tokens of {num_keys} whole pages of {page_size} slots cached with {num_pages} pages: pass a page for each"
        )


def check_chunk(request: str, start: int, end: int, committed_len: int, prompt_len: int) -> None:
    if not start == committed_len < end <= prompt_len:
        raise ChunkError(
            f"{request}: chunk [{start}, {end}) must begin at the committed length {committed_len} and end within "
            f"the prompt of {prompt_len} tokens"
        )


def check_chunk_feed(request: str, start: int, fed: Sequence[int], prompt: Sequence[int]) -> None:
    """A draft is fed token p + 1 at position p; the last entry of a chunk that is not the last is a prompt token."""
    known = prompt[start + 1 : start + 1 + len(fed)]
    if list(fed[: len(known)]) != list(known):
        place = next(i for i, pair in enumerate(zip(fed, known, strict=False)) if pair[0] != pair[1])
        raise ChunkError(
            f"{request}: draft position {start + place} is fed token {fed[place]}, the prompt has {known[place]} there"
        )


def check_commit(request: str, before: int, after: int, num_accepted: int, most: int) -> None:
    """A decode step commits the bonus token and at most every accepted draft, and exactly what was accepted."""
    if after - before != num_accepted or not 1 <= num_accepted <= most:
        raise CommitError(
            f"{request}: committed length goes from {before} to {after} with {num_accepted} tokens accepted, "
            f"a step commits what is accepted, 1 to {most} tokens"
        )


def check_known_tokens(request: str, committed_len: int, prompt_len: int, output_len: int, finished: bool) -> None:
    """While a request runs one token is known and not committed: the bonus, or more of the prompt.

    A stop inside an accepted chain caps what is owned: nothing is committed beyond what the client saw.
    """
    pending = prompt_len + output_len - committed_len
    exact = output_len > 0 and not finished
    if pending < 0 or (not finished and pending < 1) or (exact and pending != 1):
        rule = "exactly 1" if exact else "at least 0" if finished else "at least 1"
        raise CommitError(
            f"{request}: prompt {prompt_len} + output {output_len} - committed {committed_len} = {pending} tokens "
            f"pending, must be {rule}"
        )


def check_running(request: str, is_running: bool, num_running: int) -> None:
    if not is_running:
        raise NotRunningError(f"{request} finished, but it is none of the {num_running} running requests")


# -- drafting


def check_branch_shape(shape: Sequence[int], bs: int, topk: int, num_steps: int) -> None:
    """One slot a request, branch and step, in this order."""
    if tuple(shape) != (bs, topk, num_steps):
        raise BranchLayoutError(
            f"branch slots are {list(shape)}, {bs} requests with topk {topk} and num_steps {num_steps} "
            f"need [{bs}, {topk}, {num_steps}]"
        )


def check_branches(request: str, start: int, stride: int, topk: int, num_steps: int, allocated_len: int) -> None:
    """Branch b is row positions [start + b * stride, + num_steps): apart from the others, inside what is owned."""
    end = start + (topk - 1) * stride + num_steps
    if (topk > 1 and stride < num_steps) or end > allocated_len:
        raise BranchLayoutError(
            f"{request}: {topk} branches of {num_steps} slots from {start}, {stride} apart, end at {end}: "
            f"they must not overlap and end by {allocated_len}, what is allocated"
        )


def check_window(request: str, start: int, num_nodes: int, allocated_len: int) -> None:
    if start + num_nodes > allocated_len:
        raise BranchLayoutError(
            f"{request}: verify window [{start}, {start + num_nodes}) of {num_nodes} nodes ends beyond the "
            f"{allocated_len} slots that are allocated"
        )


def check_draft_indices(lens: Sequence[int], topk: int, step: int, width: int) -> None:
    """Every branch of draft forward ``step`` names its request's prefix and its own ``step + 1`` slots.

    lens: committed lengths; width: entries of the index buffer's row, which must count every branch's prefix
    (sgl-project/sglang#27338).
    """
    needed = topk * sum(lens) + len(lens) * topk * (step + 1)
    if not needed <= width <= MAX_FLAT_INDEX:
        raise IndexBufferError(
            f"draft[{step}]: topk {topk} * committed {sum(lens)} + requests {len(lens)} * topk {topk} * own slots "
            f"{step + 1} = {needed} index entries <= row width {width} < {MAX_FLAT_INDEX + 1} is broken: the width is "
            "max_running_requests * topk * columns of a request-table row"
        )


def check_relay(request: str, row: int, committed_len: int, published: tuple[str, int] | None) -> None:
    """Proposals are consumed once, by the request that published them, at the length to which they belong."""
    if published != (request, committed_len):
        found = "nobody's" if published is None else f"those of {published[0]} at length {published[1]}"
        raise RelayError(f"{request} drafts at length {committed_len}, but the proposals of row {row} are {found}")


def check_staging(buffer: str, generation: int, now: int, count: int) -> None:
    """What the host reads of a buffer is what was copied there for it, not what the next step has put over it."""
    if generation != now:
        raise StagingError(
            f"host buffer {buffer!r} is read for its use {generation}, it is in its use {now}: a ring of {count} "
            "buffers is too short for the steps that the host is behind"
        )


def check_candidates(num_candidates: int, num_nodes: int) -> None:
    if not 1 <= num_nodes - 1 <= num_candidates:
        raise TreeShapeError(
            f"a tree of {num_nodes} nodes needs {num_nodes - 1} candidates beside its root, has {num_candidates}: "
            "lower num_draft_tokens, or raise topk or num_steps"
        )


def check_tree_array(name: str, found: Sequence[int], needed: Sequence[int], dtype: str, is_contiguous: bool) -> None:
    """Chosen candidates and parent lists are dense 64-bit integers of the shape that K, T and N make."""
    if tuple(found) != tuple(needed) or dtype != "int64" or not is_contiguous:
        strides = "contiguous" if is_contiguous else "strided"
        raise TreeShapeError(
            f"{name} must be contiguous int64 {list(needed)}, got {strides} {dtype} {list(found)}: its readers step by "
            "8 bytes an entry, topk and num_steps make the width"
        )


def check_chain_nodes(num_steps: int, num_nodes: int) -> None:
    """With topk 1 every candidate is kept."""
    if num_steps < 0 or num_nodes != num_steps + 1:
        raise TreeShapeError(
            f"num_draft_tokens of a chain must be num_steps + 1 = {num_steps + 1}, got {num_nodes}: topk 1 keeps every "
            "draft, and the root is one more"
        )


def check_chain_constants(max_bs: int, num_nodes: int, bs: int, num_drafts: int, needed_nodes: int) -> None:
    """Constants fit the batch they are used for, and the steps that were drafted."""
    if bs > max_bs or not num_nodes == num_drafts + 1 == needed_nodes:
        raise ChainConstantsError(
            f"chain constants are those of {num_nodes - 1} steps and at most {max_bs} requests, got {num_drafts} "
            f"drafts of {bs} requests for trees of {needed_nodes} nodes: rebuild them whenever num_steps changes"
        )


def check_parents(request: str, parents: Sequence[int]) -> None:
    """Parents come before their children; -1 is the root's, and that of a node that nothing reaches."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise TreeShapeError(
                f"{request}: node {node} of {len(parents)} has parent {parent}, must lie in [-1, {node}); "
                f"all parents are {list(parents)}"
            )


def check_siblings(request: str, parents: Sequence[int], tokens: Sequence[int]) -> None:
    """Children of one node propose different tokens; the mass of one proposed twice would count twice."""
    first: dict[tuple[int, int], int] = {}
    for node, proposal in enumerate(zip(parents, tokens, strict=True)):
        twin = first.setdefault(proposal, node)
        if twin != node and proposal[0] >= 0:
            raise TreeShapeError(
                f"{request}: nodes {twin} and {node} of {len(parents)}, children of node {proposal[0]}, both propose "
                f"token {proposal[1]}, siblings must differ"
            )


def check_accepted(nodes: Sequence[int], num_nodes: int) -> None:
    """Accepted nodes are nodes of the tree, before anything is gathered by them."""
    if nodes and not 0 <= min(nodes) <= max(nodes) < num_nodes:
        raise TreeShapeError(f"accepted nodes must lie in [0, {num_nodes}), they are {list(nodes)}")


def check_path(request: str, nodes: Sequence[int], parents: Sequence[int]) -> None:
    """Accepted nodes lead from the root down, each the child of the one before."""
    found = [parents[node] for node in nodes]
    if not nodes or nodes[0] != 0 or found[1:] != list(nodes[:-1]):
        raise TreeShapeError(
            f"{request}: accepted nodes {list(nodes)} are no path from the root, their parents are {found}"
        )


def check_state_settled(row: int, pending: int) -> None:
    """A request's recurrent state goes on only after the verify before has said which node was accepted last."""
    if pending:
        raise RecurrentStateError(
            f"the state of row {row} must be committed before its next forward, a verify of {pending} nodes is open"
        )


def check_state_commit(row: int, node: int, pending: int) -> None:
    """The committed node is one of the row's open verify; each verify is committed once."""
    if not 0 <= node < pending:
        raise RecurrentStateError(
            f"row {row} must commit one of the {pending} nodes of its open verify, got node {node}"
        )
