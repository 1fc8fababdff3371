"""Compiled core of the adaptive drafter: live texts, occurrences of the latest tokens, confidence, the walk.

:func:`observe` serves a whole batch. :func:`plan` changes only the rows that it plans, so that threads may plan parts
of a batch with the same result. :func:`count` does the work that plans do not wait for. Modules ``live_texts``,
``confidence`` and ``adaptive`` own and describe the arrays. Code and constants are in one file, because numba's disk
cache does not notice changes in other files; the types of the state, part of its key, are in ``arrays``.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from verl_rhyme.compiled import compiled
from verl_rhyme.drafting.arrays import Scratch

#: Tokens of one block of live text.
BLOCK = 128
#: Lengths of the contexts whose next tokens are counted.
ORDERS = (1, 2, 3, 4, 6)
#: Entries of one bucket of the counts, a cache line: the most known next tokens of a context.
WAYS = 8
#: Largest count. All counts of a context are halved before one exceeds it, so recent text has more weight.
MAX_COUNT = 255
#: Inverse of the smallest share of a context's counts that makes a token a candidate.
_RARE = 6
#: Shortest context after which a token that followed only once is a candidate.
_RELIABLE_ORDER = 3
#: Counts of a context beyond which shorter contexts are not looked up.
_ENOUGH = 32
#: Match tier from which agreeing occurrences are not checked against counts, except for the first draft token.
_SURE = 1
#: Tokens whose contexts are looked up in memory together.
_AT_ONCE = 32
#: Most matched tokens.
MAX_MATCH = 32
#: Most occurrences in the prompt's history and in its group's live texts.
MAX_HISTORY, MAX_GROUP = 8, 8
#: Latest positions of the last token in the group's live texts that are searched for the longest matches.
_MOST_SEARCHED = 32
MAX_OCCURRENCES = MAX_HISTORY + MAX_GROUP + 1  # and the model's chain
#: Most candidates of a draft token.
_MAX_DISTINCT = 2 * MAX_OCCURRENCES

#: In the order of :data:`verl_rhyme.drafting.policy.SOURCES`; the last is the request's previous text.
HISTORY, SIBLING, OWN, ALL, MODEL, PREVIOUS = range(6)
#: Sources with votes: all but the previous text.
N_SOURCES = PREVIOUS
#: Match lengths (tokens) at which a new tier begins, besides 1. The tier of the model's chain is its position.
TIERS = (3, 5, 9, 17)
N_TIERS = len(TIERS) + 1
_N_VOTES = N_SOURCES * N_TIERS
#: Inputs of the confidence: vote shares by source and tier, recorded probability by tier, a constant one, recent
#: acceptance.
_ONE = _N_VOTES + N_TIERS
_RECENT = _ONE + 1
N_INPUTS = _ONE + 2
#: Weight sets: by the longest match, for the first draft token and for later ones, without and with the model's vote.
N_SETS = 4 * N_TIERS
#: Most candidates of a first draft token that the confidence learns from.
MAX_CANDIDATES = 8
#: Classes of the calibration: half units of the logit from -6 to 10, for the first draft token and for later ones.
_BINS = 32
N_BINS = 2 * _BINS

#: Smoothing of vote shares, learning rate of the weights, memory of the calibration and of recent acceptance.
_SMOOTHING = 0.3
_LEARNING_RATE = 0.005
_CALIBRATION_DECAY = 0.999
_RECENT_DECAY = 0.8


#: Logarithms by votes: the logit of a smoothed share is the difference of the entries for and against it.
_LOG_VOTES = np.log(np.arange(WAYS * MAX_COUNT + MAX_OCCURRENCES + 1) + _SMOOTHING).astype(np.float32)
#: Probability by its code in a history; see :func:`verl_rhyme.history.record.confidence_codes`.
_RECORDED = (1 / (1 + np.exp(-(np.arange(256.0) - 128) / 16))).astype(np.float32)


def scratch(longest: int) -> Scratch:
    """Work space of one walk with drafts of up to ``longest`` tokens."""
    n, candidates = MAX_OCCURRENCES, _MAX_DISTINCT
    return Scratch(
        position=np.zeros(n, dtype=np.int64),  # last matched position of each occurrence
        source=np.zeros(n, dtype=np.int32),
        match=np.zeros(n, dtype=np.int32),  # matched tokens
        following=np.zeros(n, dtype=np.int64),  # position of the next token
        which=np.zeros(n, dtype=np.int32),  # candidate of the occurrence
        candidate=np.zeros(candidates, dtype=np.int32),  # tokens
        votes=np.zeros((candidates, _N_VOTES), dtype=np.int32),
        mass=np.zeros((candidates, N_TIERS), dtype=np.float32),  # sum of recorded probabilities
        known=np.zeros((candidates, N_TIERS), dtype=np.int32),  # number of recorded probabilities
        total=np.zeros(_N_VOTES, dtype=np.int32),
        active=np.zeros(1 + _N_VOTES, dtype=np.int32),  # nonzero entries of ``total`` plus one, then their indices
        inputs=np.zeros(N_INPUTS, dtype=np.float32),
        keys=np.zeros(len(ORDERS), dtype=np.int64),  # hashes of the context's last tokens
        context=np.zeros(MAX_MATCH + longest, dtype=np.int32),
    )


@intrinsic
def pointer(typing_context, address):
    """Convert an address to a pointer, for ``carray``.

    :mod:`verl_rhyme.drafting.regrowth` inlines this code: touch that file after a change, or its cache is stale.
    """

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def _borrowed(typing_context, arrays):
    """Return the tuple of arrays without reference counting.

    numba counts references atomically wherever an array gets a name or is an argument. This happens hundreds of times
    a row, and threads would contend for the counters. The caller of :func:`observe` and :func:`plan` holds all arrays.
    """

    def codegen(context, builder, signature, args):
        borrowed = args[0]
        for i, kind in enumerate(signature.args[0]):
            array = context.make_array(kind)(context, builder, builder.extract_value(borrowed, i))
            array.meminfo = cgutils.get_null_value(array.meminfo.type)
            borrowed = builder.insert_value(borrowed, array._getvalue(), i)
        return borrowed

    return arrays(arrays), codegen


@intrinsic
def _prefetch(typing_context, array, index):
    def codegen(context, builder, signature, args):
        kind = signature.args[0]
        there = context.make_array(kind)(context, builder, args[0])
        address = builder.gep(there.data, [args[1]])
        line = builder.bitcast(address, cgutils.voidptr_t)
        number = ir.IntType(32)
        fetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [cgutils.voidptr_t], ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[number] * 3])
        )
        builder.call(fetch, [line, number(0), number(3), number(1)])  # to read, into all caches, data
        return context.get_dummy_value()

    return types.void(array, index), codegen


@compiled
def observe(live, slots, model, batch, drafted, accepted):
    """Learn from a step's sampled tokens, and add them to the live texts; the state is changed in place.

    ``drafted``, ``accepted``: int64[B], draft tokens that the step verified and accepted. Return tokens for
    :func:`count`: int32[k], the new tokens of each row after their context; and int64[B, 2], begin and end of a row's
    new tokens in it. Return also int64[3, 2]: tokens that would have been verified and accepted without a search in
    texts, from the model's chains and previous texts; rows whose last plan had a first token, granted or not, and those
    that sampled it; the same of the chains.
    """
    live, slots, model = _borrowed(live), _borrowed(slots), _borrowed(model)
    batch, (drafted, accepted) = _borrowed(batch), _borrowed((drafted, accepted))
    ids, lengths = batch.ids, batch.lengths
    spans = np.empty((len(ids), 2), dtype=np.int64)
    longest = ORDERS[len(ORDERS) - 1]
    size = 0
    for b in range(len(ids)):
        known = min(slots.length[ids[b]], lengths[b])
        # The first text of a request is not counted: a prompt, shared by its group, or a text counted before.
        begin = known if known else lengths[b] - 1
        size += min(begin, longest)
        spans[b, 0], spans[b, 1] = size, size + lengths[b] - begin
        size = spans[b, 1]
    sampled = np.empty(size, dtype=np.int32)
    size = 0
    counts = np.zeros((3, 2), dtype=np.int64)
    for b in range(len(ids)):
        slot = ids[b]
        text = batch.tokens[batch.rows[b]]
        if drafted[b] and slots.source[slot, 0] == PREVIOUS:
            counts[0, 0] += drafted[b]
            counts[0, 1] += accepted[b]
        for d in range(drafted[b]):
            slots.by_source[slot, slots.source[slot, d], 0] += 1
            slots.by_source[slot, slots.source[slot, d], 1] += d < accepted[b]
        known, length = min(slots.length[slot], lengths[b]), lengths[b]
        if slots.planned_at[slot] == known and known < length:
            chain = slots.chain_size[slot]
            if slots.planned[slot]:
                counts[1, 0] += 1
                counts[1, 1] += slots.draft[slot, 0] == text[known]
            if chain:
                counts[2, 0] += 1
                counts[2, 1] += slots.chain[slot, 0] == text[known]
            if slots.source[slot, 0] != PREVIOUS:
                chain = min(chain, drafted[b])
                hits = 0
                while hits < chain and known + hits < length and slots.chain[slot, hits] == text[known + hits]:
                    hits += 1
                counts[0, 0] += chain
                counts[0, 1] += hits
            _learn(slots, model, slot, text[known:length])
        slots.planned[slot] = 0
        slots.candidates[slot] = 0
        slots.planned_at[slot] = length
        _append(live, slots, slot, text, known, length)
        for index in range(length - (spans[b, 1] - size), length):
            sampled[size] = text[index]
            size += 1
        slots.length[slot] = length
    return sampled, spans, counts


@compiled
def count(counts, sampled, spans):
    """Count the tokens from :func:`observe` for later plans; each touches a few cache lines in gigabytes of memory."""
    counts, sampled, spans = _borrowed((counts, sampled, spans))
    begin = 0
    for b in range(len(spans)):
        _count(counts, sampled[begin : spans[b, 1]], spans[b, 0] - begin, spans[b, 1] - begin)
        begin = spans[b, 1]


@compiled
def plan(live, slots, model, scratch, batch, plans, floor, vocabulary, searches, span):
    """Plan the next drafts of the rows ``span[0]`` to before ``span[1]``; write to ``plans`` and the rows' slots only.

    ``plans.reach`` and ``.planned`` are zeros before; ``reach`` also gets the token below ``floor``, the minimum
    probability that a planned token is reached and accepted. Token ids are below ``vocabulary``. ``searches``: whether
    texts are searched, or the model's chains alone are planned. ``scratch`` is this thread's.
    """
    live, slots, model, scratch = _borrowed(live), _borrowed(slots), _borrowed(model), _borrowed(scratch)
    batch, plans = _borrowed(batch), _borrowed(plans)
    ids, rows, tokens, lengths, limits = batch
    for b in range(span[0], span[1]):
        if searches and b + 1 < span[1] and limits[b + 1] > 0:
            _prefetch_row(live, slots, scratch, ids[b + 1], tokens[rows[b + 1]], lengths[b + 1])
        if limits[b] > 0:
            plans.planned[b] = _plan(live, slots, model, scratch, batch, plans, b, floor, vocabulary, searches)


@compiled
def _prefetch_row(live, slots, scratch, slot, text, length):
    for order in range(_contexts(text, length, scratch.keys)):
        _prefetch(live.counts, _bucket(live.counts, scratch.keys[order])[0])
    heads = live.head_group
    _prefetch(heads, _hash(text[length - 1], slots.group[slot], len(heads)))
    entries = slots.history_size[slot, 2]
    if entries > 0:
        table = carray(pointer(slots.history[slot, 3]), (entries * 3,), dtype=np.int32)
        _prefetch(table, (np.int64(text[length - 1]) & (entries - 1)) * 3)


@compiled
def _hash(token, group, size):
    value = (np.uint64(group) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(token)) * np.uint64(0x9FB21C651E98DF25)
    value ^= value >> np.uint64(29)
    return np.int64(value & np.uint64(size - 1))


@compiled
def _append(live, slots, slot, text, first, last):
    # Local names, because passing a tuple of arrays in a loop costs more than the work on it.
    texts, fill, link_group, head_group = live.text, live.fill, live.link_group, live.head_group
    block, group = slots.block[slot], slots.group[slot]
    in_group = len(head_group)
    while first < last:
        if block < 0 or fill[block] == BLOCK:
            block = _take_block(live, block)
            if block < 0:
                return
            slots.block[slot] = block
            live.owner[block] = slots.owner[slot]
            live.group[block] = group
        position = np.int64(block) * BLOCK + fill[block]
        count = min(last - first, BLOCK - fill[block])
        for index in range(first, first + count):
            texts[position] = text[index]
            bucket = _hash(text[index], group, in_group)
            link_group[position] = head_group[bucket]
            head_group[bucket] = position
            position += 1
        fill[block] += count
        first += count


@compiled
def _contexts(text, end, keys):
    """Hash the last tokens of ``text[:end]``, for each of ORDERS that fits. Returns the number of hashes."""
    value, n = np.uint64(0x9E3779B97F4A7C15), 0
    for order in range(len(ORDERS)):
        if ORDERS[order] > end:
            return order
        while n < ORDERS[order]:
            value = (value ^ np.uint64(text[end - 1 - n])) * np.uint64(0x9FB21C651E98DF25)
            value ^= value >> np.uint64(29)
            n += 1
        keys[order] = np.int64(value >> np.uint64(1))
    return len(ORDERS)


@compiled
def _bucket(counts, key):
    """Return the first entry of a context's bucket, and the context's mark in it, from 1 to 2**23 - 1."""
    return (key & np.int64(len(counts) // WAYS - 1)) * WAYS, max(key >> np.int64(40), np.int64(1))


@compiled
def _count(counts, text, first, last):
    keys = np.empty(len(ORDERS), dtype=np.int64)
    starts = np.empty(_AT_ONCE * len(ORDERS), dtype=np.int64)
    marks = np.empty(_AT_ONCE * len(ORDERS), dtype=np.int64)
    while first < last:
        # Each context is a cache line in gigabytes of memory, so they are prefetched together.
        many = min(_AT_ONCE, last - first)
        n = 0
        for index in range(first, first + many):
            for order in range(_contexts(text, index, keys)):
                starts[n], marks[n] = _bucket(counts, keys[order])
                _prefetch(counts, starts[n])
                n += 1
        n = 0
        for index in range(first, first + many):
            token = np.int64(text[index])
            for order in range(len(ORDERS)):
                if ORDERS[order] > index:
                    break
                _count_one(counts, starts[n], marks[n], token, order)
                n += 1
        first += many


@compiled
def _count_one(counts, start, mark, token, order):
    least, fewest, found = start, np.int64(1 << 16), False
    for i in range(start, start + WAYS):
        entry = counts[i]
        if entry >> 40 == mark and entry & 0xFFFFFFFF == token:
            if (entry >> 32) & 0xFF == MAX_COUNT:
                _halve(counts, start, mark)
            counts[i] += 1 << 32
            found = True
            break
        count = (entry >> 32) & 0xFF
        if count < fewest:
            least, fewest = i, count
    if not found:
        # The least frequent entry is replaced, at once if it was seen once. Each newcomer also takes a count from
        # another entry, so that formerly frequent tokens leave in the end.
        counts[least] = (mark << 40) | (1 << 32) | token if fewest <= 1 else counts[least] - (1 << 32)
        other = start + (token + order) % WAYS
        if fewest and (counts[other] >> 32) & 0xFF > 1:
            counts[other] -= 1 << 32


@compiled
def _halve(counts, start, mark):
    for i in range(start, start + WAYS):
        entry = counts[i]
        if entry >> 40 == mark:
            half = ((entry >> 32) & 0xFF) // 2
            counts[i] = (mark << 40) | (max(half, 1) << 32) | (entry & 0xFFFFFFFF)


@compiled
def _take_block(live, previous):
    """Take the block filled longest ago, to follow ``previous``; -1 if running requests hold all blocks."""
    blocks = len(live.fill)
    for _ in range(blocks):
        block = live.cursor[0]
        live.cursor[0] = (block + 1) % blocks
        if not live.open[block]:
            break
    else:
        return -1
    # Links into the block may remain. Readers compare tokens, so a stale link finds no match or a true one.
    if live.before[block] >= 0:
        live.after[live.before[block]] = -1
    if live.after[block] >= 0:
        live.before[live.after[block]] = -1
    live.before[block] = previous
    live.after[block] = -1
    live.fill[block] = 0
    live.open[block] = True
    if previous >= 0:
        live.after[previous] = block
        live.open[previous] = False
    return block


@compiled
def _next(fill, after, position):
    """Return the position after ``position`` in its text, or -1."""
    block = position // BLOCK
    offset = position % BLOCK + 1
    if offset < fill[block]:
        return position + 1
    if offset == BLOCK and after[block] >= 0 and fill[after[block]] > 0:
        return np.int64(after[block]) * BLOCK
    return np.int64(-1)


@compiled
def _agreement(text, before, position, context, end):
    """Return how many tokens up to ``position`` agree with ``context[:end]``, newest first."""
    n = 0
    limit = min(end, MAX_MATCH)
    while n < limit and text[position] == context[end - 1 - n]:
        n += 1
        if position % BLOCK:
            position -= 1
        else:
            block = before[position // BLOCK]
            if block < 0:
                break
            position = np.int64(block) * BLOCK + BLOCK - 1
    return n


@compiled
def _occurrences(live, slots, scratch, slot, end, own_position):
    """Find the longest matches of the tail of ``context[:end]`` in the history and in live texts."""
    context, positions, sources, matches = scratch.context, scratch.position, scratch.source, scratch.match
    n = 0
    size = slots.history_size[slot, 1]
    if size > 0:
        text = carray(pointer(slots.history[slot, 0]), (slots.history_size[slot, 0],), dtype=np.int32)
        suffixes = carray(pointer(slots.history[slot, 1]), (size,), dtype=np.int32)
        table = carray(pointer(slots.history[slot, 3]), (slots.history_size[slot, 2], 3), dtype=np.int32)
        n = _history_occurrences(text, suffixes, table, context, end, positions, sources, matches)
    # Local names, because passing a tuple of arrays in a loop costs more than the work on it.
    text, fill, before, after, owners, groups = live.text, live.fill, live.before, live.after, live.owner, live.group
    group, owner = slots.group[slot], slots.owner[slot]
    first, seen = n, 0
    links = live.link_group
    position = np.int64(live.head_group[_hash(context[end - 1], group, len(live.head_group))])
    while position >= 0 and seen < _MOST_SEARCHED:
        seen += 1
        block = position // BLOCK
        following = np.int64(links[position])
        if following >= 0:  # not in a cache: prefetched while this one is compared
            _prefetch(links, following)
            _prefetch(text, following)
        if position != own_position and groups[block] == group and position % BLOCK < fill[block]:
            match = _agreement(text, before, position, context, end)
            at = n
            if n == first + MAX_GROUP:  # the oldest of the shortest matches is replaced
                at = first
                for i in range(first + 1, n):
                    if matches[i] <= matches[at]:
                        at = i
            if match > 0 and (at == n or match > matches[at]) and _next(fill, after, position) >= 0:
                positions[at] = position
                sources[at] = OWN if owners[block] == owner else SIBLING
                matches[at] = match
                n = max(n, at + 1)
        position = following
    return n


@compiled
def _entries(table, token):
    """Return the range of suffix array entries that begin with a token; ``table`` is suffix_index.first_tokens."""
    at = token & (len(table) - 1)
    while table[at, 0] != token:
        if table[at, 0] < 0:
            return 0, 0
        at = (at + 1) & (len(table) - 1)
    return table[at, 1], table[at, 2]


@compiled
def _narrowed(text, suffixes, low, high, length, token):
    """Narrow entries ``low`` to ``high``, which agree on ``length`` tokens, to those with ``token`` next.

    Each access misses the cache, so the common case that all agree is tested first. Else a binary search finds one
    agreeing entry, and from it the first and the last.
    """
    if text[suffixes[low] - length] == token and text[suffixes[high - 1] - length] == token:
        return low, high
    while low < high:
        middle = (low + high) // 2
        found = text[suffixes[middle] - length]
        if found < token:
            low = middle + 1
        elif found > token:
            high = middle
        else:
            break
    else:
        return low, low
    last = middle
    while low < last:
        half = (low + last) // 2
        if text[suffixes[half] - length] < token:
            low = half + 1
        else:
            last = half
    first = middle + 1
    while first < high:
        half = (first + high) // 2
        if text[suffixes[half] - length] <= token:
            first = half + 1
        else:
            high = half
    return low, high


@compiled
def _history_occurrences(text, suffixes, table, context, end, positions, sources, matches):
    """Find up to MAX_HISTORY occurrences in the history, longest matches first."""
    lows = np.empty(MAX_MATCH + 1, dtype=np.int64)
    highs = np.empty(MAX_MATCH + 1, dtype=np.int64)
    low, high, length = 0, len(suffixes), 0
    while length < min(end, MAX_MATCH):
        token = context[end - 1 - length]
        if length == 0:
            inner, outer = _entries(table, token)
        else:
            inner, outer = _narrowed(text, suffixes, low, high, length, token)
        if inner == outer:
            break
        low, high = inner, outer
        length += 1
        lows[length], highs[length] = low, high
    n = 0
    inner_low, inner_high = low, low
    while length > 0 and n < MAX_HISTORY:
        # Entries that agree on exactly `length` tokens lie around those that agree on more.
        left = inner_low - lows[length]
        total = left + highs[length] - inner_high
        take = min(total, MAX_HISTORY - n)
        for i in range(take):
            nth = i * total // take
            entry = lows[length] + nth if nth < left else inner_high + nth - left
            positions[n] = suffixes[entry]
            sources[n] = HISTORY
            matches[n] = length
            n += 1
        inner_low, inner_high = lows[length], highs[length]
        length -= 1
    return n


@compiled
def _tier(match):
    tier = 0
    for start in TIERS:
        if match >= start:
            tier += 1
    return tier


@compiled
def _logit(p):
    p = min(max(p, 0.002), 0.998)
    return math.log(p / (1 - p))


@compiled
def _probability(logit):
    return 1 / (1 + math.exp(-min(max(logit, -20.0), 20.0)))


@compiled
def _plan(live, slots, model, scratch, batch, plans, b, floor, vocabulary, searches):
    """Walk from the occurrences of the latest tokens, at each position to the candidate most likely to be accepted."""
    slot, text, length = batch.ids[b], batch.tokens[batch.rows[b]], batch.lengths[b]
    draft, reach, planned = plans.draft[b], plans.reach[b], 0
    limit = min(batch.limits[b], len(draft))
    start = max(0, length - MAX_MATCH)
    end = length - start
    scratch.context[:end] = text[start:length]
    reached = 1.0
    own_position = np.int64(-1)
    if searches and slots.block[slot] >= 0:
        own_position = np.int64(slots.block[slot]) * BLOCK + live.fill[slots.block[slot]] - 1
    n = _occurrences(live, slots, scratch, slot, end, own_position) if searches else 0
    size = slots.history_size[slot, 0]
    history = carray(pointer(slots.history[slot, 0]), (size,), dtype=np.int32)
    recorded = carray(pointer(slots.history[slot, 2]), (size,), dtype=np.uint8)
    votes, total, mass, known, recent = scratch.votes, scratch.total, scratch.mass, scratch.known, slots.recent[slot]
    active, inputs, candidates = scratch.active, scratch.inputs, scratch.candidate
    candidate_inputs, path_inputs = slots.candidate_inputs[slot], slots.inputs[slot]
    chain = slots.chain[slot, : slots.chain_size[slot]]
    if len(chain):
        n = _append_chain(scratch, n, np.int64(-1))
    while planned < limit:
        n, distinct, longest = _vote(live, scratch, history, recorded, chain, n, vocabulary)
        if searches and (planned == 0 or distinct != 1 or longest < _SURE):
            distinct, longest = _vote_counts(live.counts, scratch, end, distinct, longest, vocabulary)
        if distinct == 0:
            break
        weight_set = longest if planned == 0 else N_TIERS + longest
        if planned < len(chain) and n > 0 and scratch.source[n - 1] == MODEL:
            weight_set += 2 * N_TIERS
        weights = model.weights[weight_set]
        active[0] = 1
        for k in range(N_INPUTS):
            inputs[k] = 0
        for k in range(_N_VOTES):
            if total[k]:
                active[active[0]] = k
                active[0] += 1
        best, most = 0, -np.inf
        for j in range(distinct):
            logit = _weigh(votes, total, mass, known, active, weights, j, recent, inputs)
            if planned == 0 and j < MAX_CANDIDATES:
                slots.candidate[slot, j] = candidates[j]
                _copy(inputs, candidate_inputs[j])
                slots.candidates[slot] = j + 1
            if logit > most:
                best, most = j, logit
                _copy(inputs, path_inputs[planned])
        if planned == 0 and best >= MAX_CANDIDATES:  # always learn from the drafted candidate
            slots.candidate[slot, MAX_CANDIDATES - 1] = candidates[best]
            _copy(path_inputs[0], candidate_inputs[MAX_CANDIDATES - 1])
        bin = int((min(max(most, -6.0), 9.9) + 6) * 2) + (0 if planned == 0 else _BINS)
        accepted = model.calibration[bin, 0] / model.calibration[bin, 1]
        reached *= 0.5 * (accepted + _probability(most))
        reach[planned] = reached
        token = candidates[best]
        slots.draft[slot, planned] = token
        slots.source[slot, planned] = _first_source(votes, best)
        slots.weight_set[slot, planned] = weight_set
        slots.bin[slot, planned] = bin
        slots.planned[slot] = planned + 1
        if reached < floor:
            break
        draft[planned] = token
        planned += 1
        scratch.context[end] = token
        end += 1
        kept = 0
        for i in range(n):
            if scratch.which[i] == best:
                scratch.position[kept] = scratch.following[i]
                scratch.source[kept] = scratch.source[i]
                scratch.match[kept] = scratch.match[i] + 1
                kept += 1
        follows = kept > 0 and scratch.source[kept - 1] == MODEL  # it is the last occurrence
        lost, n = n > 0 and kept == follows, kept
        if searches and lost and planned < limit:  # otherwise counts alone continue
            n = _occurrences(live, slots, scratch, slot, end, np.int64(-1))
            if follows:
                n = _append_chain(scratch, n, np.int64(planned - 1))
    return planned


@compiled
def _append_chain(scratch, n, position):
    """Add the model's chain, of which the walk has followed the tokens up to ``position``, as the last occurrence."""
    scratch.position[n], scratch.source[n], scratch.match[n] = position, MODEL, 0
    return n + 1


@compiled
def _copy(inputs, into):
    for k in range(N_INPUTS):
        into[k] = inputs[k]


@compiled
def _first_source(votes, j):
    for k in range(_N_VOTES):
        if votes[j, k]:
            return k // N_TIERS
    return ALL


@compiled
def _index(candidates, distinct, token):
    j = 0
    while j < distinct and candidates[j] != token:
        j += 1
    return j


@compiled
def _clear(votes, mass, known, j):
    for k in range(_N_VOTES):
        votes[j, k] = 0
    for k in range(N_TIERS):
        mass[j, k] = 0
        known[j, k] = 0


@compiled
def _vote(live, scratch, history, recorded, chain, n, vocabulary):
    """Collect the next token of each occurrence. Returns remaining occurrences, candidates and the longest tier."""
    positions, sources, matches, following = scratch.position, scratch.source, scratch.match, scratch.following
    which, candidates, votes, total = scratch.which, scratch.candidate, scratch.votes, scratch.total
    mass, known = scratch.mass, scratch.known
    text, fill, after = live.text, live.fill, live.after
    for k in range(_N_VOTES):
        total[k] = 0
    kept, distinct, longest = 0, 0, 0
    for i in range(n):
        code = 0
        source = sources[i]
        if source == HISTORY:
            position = positions[i] + 1
            token = history[position]
            code = recorded[position]
        elif source == MODEL:
            position = positions[i] + 1
            if position >= len(chain):
                continue
            token = chain[position]
        else:
            position = _next(fill, after, positions[i])
            if position < 0:
                continue
            token = text[position]
        if token < 0 or token >= vocabulary:  # the end of a response, or an invalid history
            continue
        positions[kept], sources[kept], matches[kept], following[kept] = positions[i], source, matches[i], position
        tier = _tier(matches[i]) if source != MODEL else min(position, N_TIERS - 1)
        if source != MODEL:
            longest = max(longest, tier)
        j = _index(candidates, distinct, token)
        if j == distinct:
            candidates[j] = token
            _clear(votes, mass, known, j)
            distinct += 1
        which[kept] = j
        kept += 1
        votes[j, source * N_TIERS + tier] += 1
        total[source * N_TIERS + tier] += 1
        if code:
            mass[j, tier] += _RECORDED[code]
            known[j, tier] += 1
    return kept, distinct, longest


@compiled
def _vote_counts(counts, scratch, end, distinct, longest, vocabulary):
    """Add the counts of tokens after ``context[:end]`` in all responses. Returns candidates and the longest tier."""
    candidates, votes, total, keys = scratch.candidate, scratch.votes, scratch.total, scratch.keys
    mass, known = scratch.mass, scratch.known
    fitting = _contexts(scratch.context, end, keys)
    for order in range(fitting):
        _prefetch(counts, _bucket(counts, keys[order])[0])
    for order in range(fitting - 1, -1, -1):
        start, mark = _bucket(counts, keys[order])
        k = ALL * N_TIERS + order
        short = ORDERS[order] < _RELIABLE_ORDER
        for i in range(start, start + WAYS):
            if counts[i] >> 40 == mark:
                total[k] += (counts[i] >> 32) & 0xFF
        if not total[k]:
            continue
        longest = max(longest, _tier(ORDERS[order]))
        for i in range(start, start + WAYS):
            entry = counts[i]
            if entry >> 40 != mark:
                continue
            token, count = entry & 0xFFFFFFFF, (entry >> 32) & 0xFF
            if token >= vocabulary:
                continue
            j = _index(candidates, distinct, token)
            if j == distinct:
                if distinct == len(candidates) or _RARE * count < total[k] or (count == 1 and short):
                    continue
                candidates[j] = token
                _clear(votes, mass, known, j)
                distinct += 1
            votes[j, k] = count
        if total[k] >= _ENOUGH:
            break
    return distinct, longest


@compiled
def _weigh(votes, total, mass, known, active, weights, j, recent, inputs):
    """Return the logit that candidate ``j`` is accepted, and fill ``inputs``.

    ``active[1:active[0]]`` are the vote classes with votes; the inputs of all other classes stay 0.
    """
    logit = weights[_ONE] + weights[_RECENT] * recent
    inputs[_ONE] = 1.0
    inputs[_RECENT] = recent
    for i in range(1, active[0]):
        k = active[i]
        inputs[k] = _LOG_VOTES[votes[j, k]] - _LOG_VOTES[total[k] - votes[j, k]]
        logit += weights[k] * inputs[k]
        if k < N_TIERS:  # votes of the history
            recorded = _N_VOTES + k
            inputs[recorded] = _logit(mass[j, k] / known[j, k]) if known[j, k] else 0.0
            logit += weights[recorded] * inputs[recorded]
    return logit


@compiled
def _learn(slots, model, slot, sampled):
    """Learn from the tokens sampled after the last plan: every candidate of the first token, then the planned path."""
    if slots.planned[slot] == 0:
        return
    for j in range(slots.candidates[slot]):
        hit = 1.0 if slots.candidate[slot, j] == sampled[0] else 0.0
        _descend(model, slots.weight_set[slot, 0], slots.candidate_inputs[slot, j], hit)
    for d in range(min(slots.planned[slot], len(sampled))):
        hit = 1.0 if slots.draft[slot, d] == sampled[d] else 0.0
        if d == 0:
            slots.recent[slot] = _RECENT_DECAY * slots.recent[slot] + (1 - _RECENT_DECAY) * (2 * hit - 1)
        else:
            _descend(model, slots.weight_set[slot, d], slots.inputs[slot, d], hit)
        bin = slots.bin[slot, d]
        model.calibration[bin, 0] = _CALIBRATION_DECAY * model.calibration[bin, 0] + hit
        model.calibration[bin, 1] = _CALIBRATION_DECAY * model.calibration[bin, 1] + 1
        if not hit:
            break


@functools.partial(compiled, fastmath={"reassoc", "nsz", "contract"})
def _descend(model, weight_set, inputs, hit):
    weights = model.weights[weight_set]
    logit = 0.0
    for k in range(N_INPUTS):
        logit += weights[k] * inputs[k]
    error = _LEARNING_RATE * (hit - _probability(logit))
    for k in range(N_INPUTS):
        weights[k] += error * inputs[k]
