// Norms of queries and keys with the rotation behind them, for norms of whole projections and rotations of a part of a head, and
// such rotations alone. Rows are [query heads, key heads, value heads] of `dim` columns.

// Which columns of a token a block has. A block norms a unit: one head, or all query heads, or all key heads. Blocks along y
// are the units and then the values, which are copied.
struct Units {
    int query, kv, dim;
    // Heads of a unit: 1, or all of a kind.
    int is_whole_kind;

    __device__ __forceinline__ int n_heads(int y) const {
        return !is_whole_kind ? 1 : y == 0 ? query : kv;
    }
    __device__ __forceinline__ int first_head(int y) const {
        return !is_whole_kind ? y : y == 0 ? 0 : query + (y - 1) * kv;
    }
    __device__ __forceinline__ bool is_query(int y) const { return first_head(y) < query; }
    __device__ __forceinline__ bool is_value(int y) const { return first_head(y) >= query + kv; }
};

// How the first `rotary` dimensions of a head turn; the angles are those of one position.
struct Turn {
    const float *cos, *sin;
    int rotary;
    float sign;

    // Eight rotated elements of a row of heads of `dim` columns, from `at` on.
    __device__ __forceinline__ void operator()(const float* row, int at, int width, int dim, float (&x)[8]) const {
        int half = rotary / 2, column = at % dim;
        if (dim % 8 == 0 && half % 8 == 0) {
            bool is_low = column < half;
            const float *own = row + at, *other = is_low ? own + half : own - half;
            int pair = is_low ? column : column - half;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                x[i] = own[i];
                if (column >= rotary) continue;
                float c = cos[pair + i], s = sign * sin[pair + i];
                x[i] = fmaf(is_low ? -other[i] : other[i], s, own[i] * c);
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (at + i >= width) continue;
            const float* own = row + at + i;
            column = (at + i) % dim;
            x[i] = *own;
            if (column >= rotary) continue;
            bool is_low = column < half;
            int pair = is_low ? column : column - half;
            x[i] = fmaf(is_low ? -own[half] : own[-half], sign * sin[pair], *own * cos[pair]);
        }
    }
};

template <class S> struct NormArgs {
    const S* raw;
    S* out;
    const S *q_weight, *k_weight;
    // [T, query + kv heads]: the same number for all heads of a unit.
    float* inv_rms;
    const float *cos, *sin;
    const u32* positions;
    Units units;
    int rotary;
    float eps;
};

// Copies a block's columns of a token.
template <class S> __device__ __forceinline__ void copy_columns(const S* from, S* to, int width) {
    bool whole = is_whole(width);
    float x[8];
    for (int at = 8 * threadIdx.x; at < width; at += 8 * blockDim.x) {
        load8(from, at, width, whole, x);
        store8(to, at, width, whole, x);
    }
}

// Grid: (tokens, units). Shared: a unit's columns. Normed elements are rounded before they turn.
template <class S> __device__ __forceinline__ void norm_and_turn(const NormArgs<S>& a) {
    extern __shared__ float row[];
    const Units& u = a.units;
    int first = u.first_head(blockIdx.y), heads = u.n_heads(blockIdx.y), width = heads * u.dim;
    size_t token = blockIdx.x, start = (token * (u.query + 2 * u.kv) + first) * u.dim;
    const S* x = a.raw + start;
    if (u.is_value(blockIdx.y)) return copy_columns(x, a.out + start, width);
    const S* weight = u.is_query(blockIdx.y) ? a.q_weight : a.k_weight;
    bool whole = is_whole(u.dim);
    float v[8], w[8], squares = 0.0f;
    for (int at = 8 * threadIdx.x; at < width; at += 8 * blockDim.x) {
        load8(x, at, width, whole, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            squares = fmaf(v[i], v[i], squares);
            if (at + i < width) row[at + i] = v[i];
        }
    }
    float inv = 1.0f / sqrtf(block_sum(squares) / (float)width + a.eps);
    for (int at = 8 * threadIdx.x; at < width; at += 8 * blockDim.x) {
        load8(weight, at, width, whole, w);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (at + i < width) row[at + i] = widen(round_to<S>(row[at + i] * inv * w[i]));
    }
    for (int i = threadIdx.x; i < heads; i += blockDim.x) a.inv_rms[token * (u.query + u.kv) + first + i] = inv;
    __syncthreads();
    size_t place = (size_t)a.positions[token] * (a.rotary / 2);
    Turn turn = {a.cos + place, a.sin + place, a.rotary, 1.0f};
    for (int at = 8 * threadIdx.x; at < width; at += 8 * blockDim.x) {
        turn(row, at, width, u.dim, v);
        store8(a.out + start, at, width, whole, v);
    }
}

template <class S> struct NormBackwardArgs {
    const S *d_out, *raw;
    S* d_raw;
    const S *q_weight, *k_weight;
    const float *inv_rms, *cos, *sin;
    const u32* positions;
    // Of queries [blocks, query, dim], then of keys [blocks, kv, dim].
    float* parts;
    Units units;
    int rotary, tokens;
    // From one token of d_raw to the next.
    int pitch;
};

// Grid: (blocks of consecutive tokens, units). A thread has eight columns of a unit and keeps their sums for the gradients of the
// weights. Shared: a unit's columns. The loads of the next token are issued before the current one is summed.
template <class S> __device__ __forceinline__ void norm_and_turn_backward(const NormBackwardArgs<S>& a) {
    extern __shared__ float row[];
    const Units& u = a.units;
    int first = u.first_head(blockIdx.y), width = u.n_heads(blockIdx.y) * u.dim, normed = u.query + u.kv;
    int per_block = (a.tokens + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * per_block;
    int end = min(a.tokens, begin + per_block), at = 8 * threadIdx.x;
    bool whole = is_whole(u.dim) && is_whole(a.pitch), is_there = at < width;
    auto from = [&](const S* x, int token) { return x + ((size_t)token * (u.query + 2 * u.kv) + first) * u.dim; };
    auto to = [&](int token) { return a.d_raw + (size_t)token * a.pitch + first * u.dim; };
    if (u.is_value(blockIdx.y)) {
        for (int token = begin; token < end; ++token) copy_columns(from(a.d_out, token), to(token), width);
        return;
    }
    bool is_query = u.is_query(blockIdx.y);
    Eight<S> w = {}, next_x = {}, next_d = {};
    if (is_there) w = fetch8(is_query ? a.q_weight : a.k_weight, at, width, whole);
    auto fetch = [&](int token) {
        if (!is_there || token >= end) return;
        next_x = fetch8(from(a.raw, token), at, width, whole);
        next_d = fetch8(from(a.d_out, token), at, width, whole);
    };
    float part[8] = {};
    fetch(begin);
    for (int token = begin; token < end; ++token) {
        float x[8], d[8] = {}, dot = 0.0f, inv = a.inv_rms[(size_t)token * normed + first];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = widen_at(next_x, i) * inv;
            if (at + i < width) row[at + i] = widen_at(next_d, i);
        }
        fetch(token + 1);
        __syncthreads();
        size_t place = (size_t)a.positions[token] * (a.rotary / 2);
        Turn turn = {a.cos + place, a.sin + place, a.rotary, -1.0f};
        if (is_there) turn(row, at, width, u.dim, d);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            part[i] = fmaf(d[i], x[i], part[i]);
            d[i] *= widen_at(w, i);
            dot = fmaf(d[i], x[i], dot);
        }
        float projection = block_sum(dot) / (float)width;
#pragma unroll
        for (int i = 0; i < 8; ++i) d[i] = inv * fmaf(-x[i], projection, d[i]);
        if (is_there) store8(to(token), at, width, whole, d);
    }
    int kind_heads = is_query ? u.query : u.kv;
    float* parts = a.parts + (is_query ? 0 : (size_t)gridDim.x * u.query * u.dim);
    parts += ((size_t)blockIdx.x * kind_heads + first - (is_query ? 0 : u.query)) * u.dim;
    if (is_there) store8(parts, at, width, whole, part);
}

// Heads of 256 in bf16, each in a warp: a lane has eight columns, and what they turn with comes from another lane. The bits are those of
// norm_and_turn and of its backward.
#define WARP_DIM 256
#define WARPS 4

__device__ __forceinline__ void turn_lane(float (&x)[8], const float* cos, const float* sin, int rotary, float sign) {
    int lane = threadIdx.x % 32, half = rotary / 2, column = 8 * lane;
    bool turns = column < rotary, is_low = column < half;
    int other_lane = !turns ? lane : is_low ? lane + half / 8 : lane - half / 8;
    float other[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) other[i] = __shfl_sync(0xffffffffu, x[i], other_lane);
    if (!turns) return;
    int pair = is_low ? column : column - half;
    float c[8], s[8];
    load8(cos, pair, rotary, true, c);
    load8(sin, pair, rotary, true, s);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = fmaf(is_low ? -other[i] : other[i], sign * s[i], x[i] * c[i]);
}

// Two heads a warp, so that twice as many loads are under way. Grid: all heads of all tokens.
KERNEL __launch_bounds__(32 * WARPS, 8) norm_and_turn_by_warps(const __grid_constant__ NormArgs<bf16> a, int tokens) {
    launch_dependents();
    wait_for_previous_kernel();
    const Units& u = a.units;
    int heads = u.query + 2 * u.kv, lane = threadIdx.x % 32, n = tokens * heads;
    int first = 2 * (blockIdx.x * WARPS + threadIdx.x / 32);
    float x[2][8];
#pragma unroll
    for (int k = 0; k < 2; ++k)
        if (first + k < n) load8(a.raw + (size_t)(first + k) * WARP_DIM, 8 * lane, WARP_DIM, true, x[k]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        int token = (first + k) / heads, head = (first + k) % heads;
        if (first + k >= n) return;
        if (head < u.query + u.kv) {
            float w[8], squares = 0.0f;
            size_t place = (size_t)a.positions[token] * (a.rotary / 2);
            load8(head < u.query ? a.q_weight : a.k_weight, 8 * lane, WARP_DIM, true, w);
#pragma unroll
            for (int i = 0; i < 8; ++i) squares = fmaf(x[k][i], x[k][i], squares);
            float inv = 1.0f / sqrtf(warp_sum(squares) / (float)WARP_DIM + a.eps);
            if (lane == 0) a.inv_rms[(size_t)token * (u.query + u.kv) + head] = inv;
#pragma unroll
            for (int i = 0; i < 8; ++i) x[k][i] = widen(round_to<bf16>(x[k][i] * inv * w[i]));
            turn_lane(x[k], a.cos + place, a.sin + place, a.rotary, 1.0f);
        }
        store8(a.out + (size_t)(first + k) * WARP_DIM, 8 * lane, WARP_DIM, true, x[k]);
    }
}

// Grid: (blocks of consecutive tokens, heads). The loads of two tokens are under way while one before them is summed.
KERNEL __launch_bounds__(32 * WARPS, 6) norm_and_turn_backward_by_warps(const __grid_constant__ NormBackwardArgs<bf16> a) {
    const Units& u = a.units;
    int heads = u.query + 2 * u.kv, normed = u.query + u.kv, head = blockIdx.y * WARPS + threadIdx.x / 32, at = threadIdx.x % 32 * 8;
    int per_block = (a.tokens + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * per_block, end = min(a.tokens, begin + per_block);
    if (head >= heads) return;
    bool is_query = head < u.query, is_normed = head < normed;
    auto from = [&](const bf16* x, int token) { return x + ((size_t)token * heads + head) * WARP_DIM; };
    Eight<bf16> w = {}, next_x[2] = {}, next_d[2] = {};
    float next_inv[2] = {}, part[8] = {};
    u32 next_position[2] = {};
    if (is_normed) w = fetch8(is_query ? a.q_weight : a.k_weight, at, WARP_DIM, true);
    auto fetch = [&](int k, int token) {
        if (token >= end) return;
        next_d[k] = fetch8(from(a.d_out, token), at, WARP_DIM, true);
        if (!is_normed) return;
        next_x[k] = fetch8(from(a.raw, token), at, WARP_DIM, true);
        next_inv[k] = a.inv_rms[(size_t)token * normed + head];
        next_position[k] = a.positions[token];
    };
    fetch(0, begin);
    fetch(1, begin + 1);
    for (int pair = begin; pair < end; pair += 2)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            int token = pair + k;
            if (token >= end) break;
            float x[8], d[8], dot = 0.0f, inv = next_inv[k];
            size_t place = (size_t)next_position[k] * (a.rotary / 2);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = widen_at(next_x[k], i) * inv, d[i] = widen_at(next_d[k], i);
            fetch(k, token + 2);
            if (is_normed) {
                turn_lane(d, a.cos + place, a.sin + place, a.rotary, -1.0f);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    part[i] = fmaf(d[i], x[i], part[i]);
                    d[i] *= widen_at(w, i);
                    dot = fmaf(d[i], x[i], dot);
                }
                float projection = warp_sum(dot) / (float)WARP_DIM;
#pragma unroll
                for (int i = 0; i < 8; ++i) d[i] = inv * fmaf(-x[i], projection, d[i]);
            }
            store8(a.d_raw + (size_t)token * a.pitch + head * WARP_DIM, at, WARP_DIM, true, d);
        }
    if (!is_normed) return;
    size_t before = is_query ? (size_t)blockIdx.x * u.query : (size_t)gridDim.x * u.query + (size_t)blockIdx.x * u.kv - u.query;
    store8(a.parts + (before + head) * WARP_DIM, at, WARP_DIM, true, part);
}

// Rotates the first `rotary` dimensions of each query and key head by its angles, with `sign` -1 back; all else is copied.
template <class S>
__device__ __forceinline__ void rotate_part(const S* raw, S* out, const float* cos, const float* sin,
                                            const u32* positions, int query, int kv, int dim, int rotary, int pitch,
                                            float sign) {
    size_t token = blockIdx.x;
    int heads = query + 2 * kv, half = rotary / 2;
    const S* row = raw + token * heads * dim;
    size_t place = (size_t)positions[token] * half;
    for (int i = threadIdx.x; i < heads * dim; i += blockDim.x) {
        int head = i / dim, column = i % dim;
        S x = row[i];
        if (head < query + kv && column < rotary) {
            int pair = column % half;
            float c = cos[place + pair], s = sign * sin[place + pair];
            float other = widen(row[column < half ? i + half : i - half]);
            x = round_to<S>(fmaf(column < half ? -other : other, s, widen(x) * c));
        }
        out[token * pitch + i] = x;
    }
}

#define PARTS(S)                                                                                                       \
    KERNEL __launch_bounds__(1024) norm_and_turn_##S(const __grid_constant__ NormArgs<S> args) { norm_and_turn(args); } \
    KERNEL __launch_bounds__(1024)                                                                                     \
        norm_and_turn_backward_##S(const __grid_constant__ NormBackwardArgs<S> args) {                                 \
        norm_and_turn_backward(args);                                                                                  \
    }                                                                                                                  \
    KERNEL rotate_part_##S(const S* raw, S* out, const float* cos, const float* sin, const u32* positions, int query,  \
                           int kv, int dim, int rotary, int pitch, float sign) {                                       \
        rotate_part(raw, out, cos, sin, positions, query, kv, dim, rotary, pitch, sign);                               \
    }

PARTS(float)
PARTS(bf16)
