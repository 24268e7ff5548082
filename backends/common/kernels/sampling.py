"""Drawing tokens without a sort: every filter is a threshold on how far a token lies below the best.

    gap = max - logit ≥ 0          its bits, as an integer, are its key: they rise as the gap does

    1  greedy       walk: maximum, its lowest id, NaN                       rows that draw nothing end here
    2  top-k        search: smallest key that count(key' ≤ key) ≥ k reaches
    3  top-p        search: smallest key that mass(key' ≤ key) ≥ p · mass reaches, over what top-k left
    4  draw         walk: mass of keys up to the smallest threshold; walk again to where it passes uniform · mass

    search          keys of 31 bits, a digit at a time, the highest first: one walk over the row counts (or weighs)
                    what lies below each of FANOUT bounds, and the digit is the last bound short of the target
                    prefix ├──────┼──────┼──────┼──────┤   FANOUT parts of 2^shift keys

A program takes ROWS rows, COLS tokens at a time. Thresholds are keys that occur, so tokens that tie with the last one
kept are kept as well. Gaps stay undivided: gap / temperature rises with the gap, so the same tokens pass, and only
equal quotients of unequal gaps, which tie as well, need a look (`_with_ties`).

All sums of a row are added in an order that the row's length alone fixes: lane by lane over the tiles, then across
lanes; running sums tile by tile in id order.
"""

import triton
import triton.language as tl

_LARGEST_KEY = tl.constexpr(0x7FFFFFFF)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _any(flags):
    """Whether one of flags [ROWS, 1] is set."""
    return tl.max(tl.max(flags.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def _logits(logits_rows, row_mask, cols, width):
    return tl.load(logits_rows + cols, row_mask & (cols < width), other=float("-inf"))


@triton.jit
def _gaps(logits_rows, row_mask, cols, width, top):
    """Gaps and keys of tokens cols of each row; infinite beyond the row's end."""
    gaps = top - _logits(logits_rows, row_mask, cols, width)
    return gaps, gaps.to(tl.int32, bitcast=True)


@triton.jit
def _weights(gaps, keys, chill, limit):
    """e^(-gap / temperature) of the tokens whose key is within the limit, else 0. chill: log2(e) / temperature."""
    return tl.where(keys <= limit, tl.exp2(-gaps * chill), 0.0)


@triton.jit
def _with_ties(key, temperature):
    """The largest key whose gap / temperature is that of `key`: two neighbours at most share a quotient with it."""
    quotient = tl.div_rn(key.to(tl.float32, bitcast=True), temperature)
    for _ in tl.static_range(2):
        after = tl.minimum(key + 1, _LARGEST_KEY)
        key = tl.where(tl.div_rn(after.to(tl.float32, bitcast=True), temperature) == quotient, after, key)
    return key


@triton.jit
def _greedy(logits_rows, row_mask, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, 1]: the maximum, its lowest id, and whether a token can be told from it (finite, no NaN in the row)."""
    lanes = tl.arange(0, COLS)[None, :]
    best = tl.full((ROWS, COLS), float("-inf"), tl.float32)
    ids = tl.zeros((ROWS, COLS), tl.int32)
    is_nan = tl.zeros((ROWS, COLS), tl.int32)
    for first in range(0, width, COLS):
        x = _logits(logits_rows, row_mask, first + lanes, width)
        ids = tl.where(x > best, first + lanes, ids)
        best = tl.where(x > best, x, best)
        is_nan |= (x != x).to(tl.int32)
    top = tl.max(best, axis=1, keep_dims=True)
    token = tl.min(tl.where(best == top, ids, _NO_TOKEN), axis=1, keep_dims=True)
    is_good = (tl.max(is_nan, axis=1, keep_dims=True) == 0) & (tl.abs(top) < float("inf"))
    return top, token, is_good


@triton.jit
def _search(
    logits_rows, row_mask, width, top, chill, limit, goal,
    BY_MASS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The smallest key at which tokens with keys up to it, and within the limit, reach the goal; all [ROWS, 1].

    goal: a number of tokens, or BY_MASS a share of the mass within the limit.
    """
    FANOUT: tl.constexpr = 1 << BITS
    LEVELS: tl.constexpr = (31 + BITS - 1) // BITS
    lanes = tl.arange(0, COLS)[None, :]
    bounds = tl.arange(0, FANOUT)[None, :]
    prefix = tl.zeros((ROWS, 1), tl.int32)
    target = goal
    for level in range(LEVELS):
        shift = (LEVELS - 1 - level) * BITS
        below = tl.zeros((ROWS, FANOUT, COLS), tl.float32)
        for first in tl.range(0, width, COLS, num_stages=STAGES):
            gaps, keys = _gaps(logits_rows, row_mask, first + lanes, width, top)
            if BY_MASS:
                weights = _weights(gaps, keys, chill, limit)
            else:
                weights = tl.full((ROWS, COLS), 1.0, tl.float32)
            digits = (keys - prefix) >> shift  # negative below the prefix
            is_below = digits[:, None, :] < bounds[:, :, None]
            below += tl.where(is_below, weights[:, None, :], 0.0)
        sums = tl.sum(below, axis=2)
        if BY_MASS:
            # The highest bound of the first level lies above every key: what is below it is the whole.
            target = tl.where(level == 0, goal * tl.max(sums, axis=1, keep_dims=True), target)
        short = tl.sum((sums < target).to(tl.int32), axis=1, keep_dims=True)
        digit = tl.minimum(tl.maximum(short - 1, 0), _LARGEST_KEY >> shift)
        prefix += digit << shift
    return prefix


@triton.jit
def _draw(logits_rows, row_mask, width, top, chill, limit, uniform, is_drawn, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, 1]: the first id whose running mass passes uniform · mass; of rows that are drawn."""
    lanes = tl.arange(0, COLS)[None, :]
    mass = tl.zeros((ROWS, 1), tl.float32)
    last = tl.zeros((ROWS, COLS), tl.int32)
    for first in range(0, width, COLS):
        gaps, keys = _gaps(logits_rows, row_mask, first + lanes, width, top)
        weights = _weights(gaps, keys, chill, limit)
        mass += tl.sum(weights, axis=1, keep_dims=True)
        last = tl.where(weights > 0, first + lanes, last)
    target = uniform * mass
    # Where uniform · mass rounds up to the mass no running sum passes it: then the last token of any mass is meant.
    token = tl.max(last, axis=1, keep_dims=True)
    is_open = is_drawn
    running = tl.zeros((ROWS, 1), tl.float32)
    first = 0
    while (first < width) & _any(is_open):
        cols = first + lanes
        gaps, keys = _gaps(logits_rows, row_mask, cols, width, top)
        weights = _weights(gaps, keys, chill, limit)
        after = running + tl.sum(weights, axis=1, keep_dims=True)
        is_here = is_open & (after > target)
        if _any(is_here):
            passes = (weights > 0) & (running + tl.cumsum(weights, axis=1) > target)
            found = tl.min(tl.where(passes, cols, _NO_TOKEN), axis=1, keep_dims=True)
            # The scan adds in another order than the sum, and may stop just short of the target.
            last_here = tl.max(tl.where(weights > 0, cols, -1), axis=1, keep_dims=True)
            token = tl.where(is_here, tl.minimum(found, last_here), token)
            is_open = is_open & (after <= target)
        running = after
        first += COLS
    return token


@triton.jit
def sample(
    logits, temperature, top_k, top_p, min_p, uniform, out, num_rows, width, logits_stride,
    BITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token of each row of logits [R, V]; -1 for a row without one."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    row_mask = rows < num_rows
    logits_rows = logits + rows.to(tl.int64) * logits_stride
    top, token, is_good = _greedy(logits_rows, row_mask, width, ROWS, COLS)
    heat = tl.load(temperature + rows, row_mask, other=0.0)
    is_drawn = is_good & (heat > 0)
    token = tl.where(is_good, token, -1)
    if _any(is_drawn):
        heat = tl.where(is_drawn, heat, 1.0)
        chill = tl.minimum(1.4426950408889634 / heat, 3e38)  # finite, so that a gap of 0 still weighs 1
        limit = tl.full((ROWS, 1), _LARGEST_KEY, tl.int32)
        count = tl.load(top_k + rows, row_mask, other=0)
        is_cut = is_drawn & (count > 0) & (count < width)
        if _any(is_cut):
            goal = tl.where(is_cut, count, 0).to(tl.float32)
            floor = _search(logits_rows, row_mask, width, top, chill, limit, goal, False, BITS, ROWS, COLS, STAGES)
            limit = tl.where(is_cut, _with_ties(floor, heat), limit)
        share = tl.load(top_p + rows, row_mask, other=1.0)
        is_cut = is_drawn & (share < 1)
        if _any(is_cut):
            floor = _search(logits_rows, row_mask, width, top, chill, limit, share, True, BITS, ROWS, COLS, STAGES)
            limit = tl.where(is_cut, tl.minimum(_with_ties(floor, heat), limit), limit)
        least = tl.minimum(tl.load(min_p + rows, row_mask, other=0.0), 1.0)
        reach = tl.abs(tl.log(tl.where(least > 0, least, 1.0)) * heat).to(tl.int32, bitcast=True)
        limit = tl.where(least > 0, tl.minimum(limit, reach), limit)
        chance = tl.load(uniform + rows, row_mask, other=0.0)
        drawn = _draw(logits_rows, row_mask, width, top, chill, limit, chance, is_drawn, ROWS, COLS)
        token = tl.where(is_drawn, drawn, token)
    tl.store(out + rows, token.to(tl.int64), row_mask)
