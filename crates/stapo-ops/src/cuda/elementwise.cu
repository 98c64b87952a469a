// Kernels that treat elements one by one, and sums over columns.

__device__ __forceinline__ size_t element() { return (size_t)blockIdx.x * blockDim.x + threadIdx.x; }

template <class S, class D> __device__ __forceinline__ void convert(const S* from, D* to, u64 n) {
    size_t i = element();
    if (i < n) to[i] = round_to<D>(widen(from[i]));
}

KERNEL convert_float_bf16(const float* from, bf16* to, u64 n) { convert(from, to, n); }
KERNEL convert_bf16_float(const bf16* from, float* to, u64 n) { convert(from, to, n); }

template <class S> __device__ __forceinline__ void add(S* x, const S* addend, u64 n) {
    u64 at = 8 * element();
    if (at >= n) return;
    float a[8], b[8];
    bool whole = at + 8 <= n && ((u64)x | (u64)addend) % 16 == 0;
    int left = (int)min((u64)8, n - at);
    load8(x + at, 0, left, whole, a);
    load8(addend + at, 0, left, whole, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] += b[i];
    store8(x + at, 0, left, whole, a);
}

KERNEL residual_add_float(float* x, const float* addend, u64 n) { add(x, addend, n); }
KERNEL residual_add_bf16(bf16* x, const bf16* addend, u64 n) { add(x, addend, n); }

template <class S> __device__ __forceinline__ void scale(S* x, float factor, u64 n) {
    u64 at = 8 * element();
    if (at >= n) return;
    float a[8];
    bool whole = at + 8 <= n && (u64)x % 16 == 0;
    int left = (int)min((u64)8, n - at);
    load8(x + at, 0, left, whole, a);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] *= factor;
    store8(x + at, 0, left, whole, a);
}

KERNEL residual_scale_float(float* x, float factor, u64 n) { scale(x, factor, n); }
KERNEL residual_scale_bf16(bf16* x, float factor, u64 n) { scale(x, factor, n); }

// A block of threads copies a row of x [rows, width]; rows of `out` are `pitch` apart.
template <class S> __device__ __forceinline__ void copy_row(const S* x, S* out, int width, int pitch) {
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        out[(size_t)blockIdx.x * pitch + i] = x[(size_t)blockIdx.x * width + i];
}

KERNEL residual_copy_rows_float(const float* x, float* out, int width, int pitch) { copy_row(x, out, width, pitch); }
KERNEL residual_copy_rows_bf16(const bf16* x, bf16* out, int width, int pitch) { copy_row(x, out, width, pitch); }

// The last step of split-K: y [n] = the sum of parts [n_parts, n], in order; n is a multiple of 8.
KERNEL sum_of_parts_bf16(const float* parts, bf16* y, u64 n, int n_parts) {
    u64 at = 8 * element();
    if (at >= n) return;
    float sum[8], x[8];
    load8(parts + at, 0, 8, true, sum);
    for (int p = 1; p < n_parts; ++p) {
        load8(parts + p * n + at, 0, 8, true, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += x[i];
    }
    store8(y + at, 0, 8, true, sum);
}

// to[j] += the sum over rows of parts [rows, columns], in order. One warp sums 32 columns, while all eight load the rows behind.
KERNEL column_sums_add(const float* parts, float* to, int rows, int columns) {
    constexpr int WARPS = 8, EACH = 16, ROWS = WARPS * EACH;
    __shared__ float tiles[2][ROWS][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, j = blockIdx.x * 32 + lane;
    // The next row of the thread, and how many rows there are from it on.
    const float* next = parts + (size_t)warp * columns + j;
    size_t apart = (size_t)WARPS * columns;
    int n_left = j < columns ? rows - warp : 0;
    float ahead[EACH], sum = 0.0f;
    auto load = [&] {
#pragma unroll
        for (int i = 0; i < EACH; ++i, next += apart) ahead[i] = i * WARPS < n_left ? *next : 0.0f;
        n_left -= ROWS;
    };
    load();
    for (int start = 0, stage = 0; start < rows; start += ROWS, stage ^= 1) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) tiles[stage][i * WARPS + warp][lane] = ahead[i];
        __syncthreads();
        load();
        if (warp > 0) continue;
        int n = min(ROWS, rows - start);
#pragma unroll 16
        for (int r = 0; r < n; ++r) sum += tiles[stage][r][lane];
    }
    if (warp == 0 && j < columns) to[j] += sum;
}

// parts [gridDim.y, columns]: the sums of consecutive rows of x [rows, columns].
template <class S> __device__ __forceinline__ void column_parts(const S* x, float* parts, int rows, int columns) {
    int j = element();
    if (j >= columns) return;
    int per_block = (rows + gridDim.y - 1) / gridDim.y;
    int end = min(rows, ((int)blockIdx.y + 1) * per_block);
    float sum = 0.0f;
    for (int r = blockIdx.y * per_block; r < end; ++r) sum += widen(x[(size_t)r * columns + j]);
    parts[(size_t)blockIdx.y * columns + j] = sum;
}

KERNEL column_parts_float(const float* x, float* parts, int rows, int columns) {
    column_parts(x, parts, rows, columns);
}
KERNEL column_parts_bf16(const bf16* x, float* parts, int rows, int columns) { column_parts(x, parts, rows, columns); }

// delta [rows, query heads] becomes the gradients of the heads' attention sinks by row.
template <class S>
__device__ __forceinline__ void sink_terms(const S* sinks, const float* lse, float* delta, int query, u64 n) {
    u64 at = element();
    if (at < n) delta[at] *= -expf(widen(sinks[at % query]) - lse[at]);
}
KERNEL attention_sink_terms_float(const float* sinks, const float* lse, float* delta, int query, u64 n) {
    sink_terms(sinks, lse, delta, query, n);
}
KERNEL attention_sink_terms_bf16(const bf16* sinks, const float* lse, float* delta, int query, u64 n) {
    sink_terms(sinks, lse, delta, query, n);
}

// A buffer of several whose elements are those of `n` from block `first_block` on.
struct Squared {
    const float* x;
    u64 n;
    u32 first_block;
};

// parts[block]: the sum of squares of the block's 16384 elements; 256 threads.
KERNEL reduce_square_parts(const Squared* buffers, int n_buffers, double* parts) {
    const Squared of = entry_of(buffers, n_buffers);
    u64 start = 16384ull * (blockIdx.x - of.first_block);
    float sum = 0.0f;
    for (int k = 0; k < 8; ++k) {
        u64 at = start + 8 * (256 * k + threadIdx.x);
        if (at >= of.n) break;
        float v[8];
        bool whole = at + 8 <= of.n;
        load8(of.x + at, 0, whole ? 8 : (int)(of.n - at), whole, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(v[i], v[i], sum);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// One block of 256: thread i adds the parts i, i + 256, .., then the threads' sums are added in order.
KERNEL reduce_sum_parts(const double* parts, double* to, u64 n) {
    __shared__ double sums[256];
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < n; i += 256) sum += parts[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < 256; ++i) sum += sums[i];
    *to = sum;
}

// Remembers the lowest place. Places are unsigned integers, so their minimum does not depend on the order of the threads; a
// place that is not lower than what is there needs no atomic operation, of which many at one address are slow.
__device__ __forceinline__ void keep_lowest(u64* first, u64 place) {
    if (place < *(volatile u64*)first) atomicMin(first, place);
}

KERNEL reduce_first_non_finite(const float* x, u64* first, u64 n) {
    size_t i = element();
    if (i < n && !isfinite(x[i])) keep_lowest(first, i);
}

KERNEL reduce_first_non_finite_bf16(const bf16* x, u64* first, u64 n) {
    size_t i = element();
    if (i < n && !isfinite(widen(x[i]))) keep_lowest(first, i);
}

KERNEL reduce_first_nonzero(const float* x, u64* first, u64 n) {
    size_t i = element();
    if (i < n && x[i] != 0.0f) keep_lowest(first, i);
}

KERNEL reduce_first_nonzero_bf16(const bf16* x, u64* first, u64 n) {
    size_t i = element();
    if (i < n && widen(x[i]) != 0.0f) keep_lowest(first, i);
}

// x[i] = factor * a centred sum of four 16-bit parts of a hash of key and place, see noise/mod.rs.
template <class T>
__device__ __forceinline__ void noise(T* x, u64 n, u64 key, float factor) {
    u64 i = element();
    if (i >= n) return;
    u64 h = key + (i + 1) * 0x9e3779b97f4a7c15ull;
    h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9ull;
    h = (h ^ h >> 27) * 0x94d049bb133111ebull;
    h ^= h >> 31;
    int total = (int)(h & 0xffff) + (int)(h >> 16 & 0xffff) + (int)(h >> 32 & 0xffff) + (int)(h >> 48);
    x[i] = round_to<T>((float)(total - 2 * 0xffff) * factor);
}

KERNEL noise_float(float* x, u64 n, u64 key, float factor) { noise(x, n, key, factor); }
KERNEL noise_bf16(bf16* x, u64 n, u64 key, float factor) { noise(x, n, key, factor); }

// A hash of an element's place and bits.
__device__ __forceinline__ u64 fingerprint(u64 at, u32 bits) {
    u64 x = at * 0x9e3779b97f4a7c15ull ^ bits;
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
    return x ^ x >> 29;
}

// parts[block]: the sum modulo 2^64 of the hashes of the block's 16384 elements; 256 threads. -0 counts as 0. Integers
// are added, so the sum does not depend on the order of the threads.
template <class T>
__device__ __forceinline__ void fingerprint_parts(const T* x, u64* parts, u64 n) {
    __shared__ u64 total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    u64 start = 16384ull * blockIdx.x, end = min(n, start + 16384), sum = 0;
    for (u64 at = start + threadIdx.x; at < end; at += 256) sum += fingerprint(at, __float_as_uint(widen(x[at]) + 0.0f));
    atomicAdd(&total, sum);
    __syncthreads();
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

KERNEL reduce_fingerprint_float(const float* x, u64* parts, u64 n) { fingerprint_parts(x, parts, n); }
KERNEL reduce_fingerprint_bf16(const bf16* x, u64* parts, u64 n) { fingerprint_parts(x, parts, n); }

// c [m, n] (+)= alpha op(a) op(b) in column-major order, for shapes that cuBLASLt refuses: each element is one chain over the
// depth. Grid: elements of c.
template <class S, class D>
__device__ __forceinline__ void product(const S* a, const S* b, D* c, const D* bias, int m, int n, int k,
                                        int a_stride, int b_stride, int c_stride, int transposed_a, int transposed_b,
                                        int adds, float alpha) {
    size_t at = element();
    if (at >= (size_t)m * n) return;
    size_t i = at % m, j = at / m;
    size_t a_start = transposed_a ? i * a_stride : i, a_step = transposed_a ? 1 : a_stride;
    size_t b_start = transposed_b ? j : j * b_stride, b_step = transposed_b ? b_stride : 1;
    at = i + j * c_stride;
    float sum = 0.0f;
    for (int d = 0; d < k; ++d) sum = fmaf(widen(a[a_start + d * a_step]), widen(b[b_start + d * b_step]), sum);
    sum *= alpha;
    if (bias) sum += widen(bias[i]);
    if (adds) sum += widen(c[at]);
    c[at] = round_to<D>(sum);
}

#define PRODUCT(S, D)                                                                                                  \
    KERNEL product_##S##_##D(const S* a, const S* b, D* c, const D* bias, int m, int n, int k, int a_stride,           \
                             int b_stride, int c_stride, int transposed_a, int transposed_b, int adds, float alpha) {  \
        product<S, D>(a, b, c, bias, m, n, k, a_stride, b_stride, c_stride, transposed_a, transposed_b, adds, alpha);  \
    }
PRODUCT(float, float)
PRODUCT(bf16, bf16)
PRODUCT(bf16, float)

template <class Unit> __device__ __forceinline__ void copy_block(const void* from, void* to, u64 n_bytes) {
    u64 first = (u64)blockIdx.y * blockDim.x + threadIdx.x;
    for (u64 i = first; i < n_bytes / sizeof(Unit); i += gridDim.y * blockDim.x) ((Unit*)to)[i] = ((const Unit*)from)[i];
}

// Grid: (pairs [n, 2] of blocks of n_bytes, parts of a block); a pair's first block is copied over its second.
KERNEL copy_blocks(const u32* pairs, char* blocks, u64 n_bytes, u32 n_blocks) {
    u32 from = pairs[2 * blockIdx.x], to = pairs[2 * blockIdx.x + 1];
    if (from >= n_blocks || to >= n_blocks) __trap();
    if (n_bytes % sizeof(uint4) == 0)
        copy_block<uint4>(blocks + from * n_bytes, blocks + to * n_bytes, n_bytes);
    else
        copy_block<u16>(blocks + from * n_bytes, blocks + to * n_bytes, n_bytes);
}

// to [groups x padded_rows, padded] = from [groups x rows, columns], rows of a group and columns filled up with zeros; `to`
// has n elements.
struct Padded {
    const bf16* from;
    bf16* to;
    u64 n;
    u32 first_block;
    int rows, padded_rows, columns, padded;
};

// Blocks of 256 elements of all of `of`.
KERNEL pad_groups_bf16(const Padded* of, int n_of) {
    const Padded t = entry_of(of, n_of);
    u64 i = (u64)(blockIdx.x - t.first_block) * blockDim.x + threadIdx.x;
    if (i >= t.n) return;
    int column = i % t.padded, row = i / t.padded % t.padded_rows;
    u64 group = i / t.padded / t.padded_rows;
    bool is_there = column < t.columns && row < t.rows;
    t.to[i] = is_there ? t.from[(group * t.rows + row) * t.columns + column] : round_to<bf16>(0.0f);
}

// Copies rows of `columns`; the matrices have their rows from_apart and to_apart elements apart. n elements in all.
KERNEL copy_rows_bf16(const bf16* from, int from_apart, bf16* to, int to_apart, int columns, u64 n) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 row = i / columns, column = i % columns;
    to[row * to_apart + column] = from[row * from_apart + column];
}

// A factor [.., columns] of n elements; its rows become parts of rows that are `pitch` apart.
struct Factor {
    const bf16* from;
    bf16* to;
    u64 n;
    u32 first_block;
    int columns, pitch;
};

// Blocks of 256 elements of all factors.
KERNEL join_factors_bf16(const Factor* factors, int n_factors) {
    const Factor f = entry_of(factors, n_factors);
    u64 i = (u64)(blockIdx.x - f.first_block) * blockDim.x + threadIdx.x;
    if (i < f.n) f.to[i / f.columns * f.pitch + i % f.columns] = f.from[i];
}

// Whether rows `pitch` apart of which `before` elements are left out can be read eight elements at a time.
__device__ __forceinline__ bool are_whole(int width, int before, int pitch) {
    return is_whole(width) && is_whole(before) && is_whole(pitch);
}

// keys [E, width]: the columns from `before` on of rows of qkv. Grid: rows of keys.
template <class S>
__device__ __forceinline__ void copy_keys(const u32* rows, const S* qkv, S* keys, int width, int before, int pitch) {
    const S* from = qkv + (size_t)rows[blockIdx.x] * pitch + before;
    S* to = keys + (size_t)blockIdx.x * width;
    bool whole = are_whole(width, before, pitch);
    for (int at = 8 * threadIdx.x; at < width; at += 8 * blockDim.x) {
        float x[8];
        load8(from, at, width, whole, x);
        store8(to, at, width, whole, x);
    }
}

// The columns from `before` on of a row of d_qkv: the sum over its copies, in their order. Grid: rows of d_qkv.
template <class S>
__device__ __forceinline__ void add_key_copies(const u32* starts, const u32* list, const S* d_keys, S* d_qkv, int width,
                                               int before, int pitch) {
    u32 begin = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    S* to = d_qkv + (size_t)blockIdx.x * pitch + before;
    bool whole = are_whole(width, before, pitch);
    for (int at = 8 * threadIdx.x; at < width; at += 8 * blockDim.x) {
        float sum[8] = {};
        for (u32 i = begin; i < end; ++i) {
            float x[8];
            load8(d_keys + (size_t)list[i] * width, at, width, whole, x);
#pragma unroll
            for (int k = 0; k < 8; ++k) sum[k] += x[k];
        }
        store8(to, at, width, whole, sum);
    }
}

#define KEY_COPIES(S)                                                                                                  \
    KERNEL attention_copy_keys_##S(const u32* rows, const S* qkv, S* keys, int width, int before, int pitch) {         \
        copy_keys(rows, qkv, keys, width, before, pitch);                                                              \
    }                                                                                                                  \
    KERNEL attention_add_key_copies_##S(const u32* starts, const u32* list, const S* d_keys, S* d_qkv, int width,      \
                                        int before, int pitch) {                                                       \
        add_key_copies(starts, list, d_keys, d_qkv, width, before, pitch);                                             \
    }
KEY_COPIES(float)
KEY_COPIES(bf16)
