// Quantised weights to bf16, in the layout that products read: [[W, B], [A, 0]] where adapters are joined (see lora). A
// number is computed by the f32 operations of the file format's reference in their order, and rounded once. Where a product of
// scales and integers has so few bits that f32 holds it, the addition behind it may be fused with it: the same bits.

typedef unsigned char u8;

// A thread unpacks eight numbers of a tile at a time; a block of threads takes TILES tiles, whose bytes it loads at once.
#define TILE 2048
#define TILES 4
#define UNPACKERS 256
#define MODULES 3

// Rows of one format, as Encoding::number has it: `n_numbers` from row `first_row` on, in `n_vectors` of 16 bytes.
struct Rows {
    const uint4* blocks;
    u32 n_numbers, n_vectors;
    int format, first_row, first_block;
};

// The weight [outputs, inputs] with `columns` further columns behind each of `n_parts` parts of a row. Of n modules, b is
// [outputs of the module, rank], for rows from `start` on, and a [n rank, inputs], or null where it is not to lie below the
// weight; `apart` columns (rows) belong to each module.
struct Unpacked {
    Rows rows[MODULES];
    bf16* to;
    u32 outputs, inputs, n_parts, columns, pitch;
    int n_rows, first_factor_block;
    const bf16* b[MODULES];
    const bf16* a;
    int start[MODULES], len[MODULES];
    int n_modules, rank, apart;
};

enum Format { BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };

// Bytes of a tile.
template <int F> __device__ constexpr int tile_bytes() {
    return F == BF16   ? 2 * TILE
           : F == Q8_0 ? TILE / 32 * 34
           : F == Q4_0 ? TILE / 32 * 18
           : F == Q4_1 ? TILE / 32 * 20
           : F == Q5_0 ? TILE / 32 * 22
           : F == Q5_1 ? TILE / 32 * 24
           : F == Q4_K ? TILE / 256 * 144
           : F == Q5_K ? TILE / 256 * 176
                       : TILE / 256 * 210;
}

// Eight bytes at a multiple of ALIGNMENT.
template <int ALIGNMENT> __device__ __forceinline__ uint2 eight_bytes(const u8* at) {
    if (ALIGNMENT == 8) return *(const uint2*)at;
    if (ALIGNMENT == 4) return make_uint2(((const u32*)at)[0], ((const u32*)at)[1]);
    const u16* p = (const u16*)at;
    return make_uint2(p[0] | (u32)p[1] << 16, p[2] | (u32)p[3] << 16);
}

__device__ __forceinline__ float half_at(const u8* at) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(*(const u16*)at));
    return x;
}

// Byte i of eight, less `offset`, exactly: the byte becomes the low bits of 2^23.
__device__ __forceinline__ float byte_of(uint2 bytes, int i, float offset) {
    u32 word = i < 4 ? bytes.x : bytes.y;
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i % 4)) - (8388608.0f + offset);
}

// The low or the high nibble of eight bytes.
__device__ __forceinline__ uint2 nibbles(uint2 bytes, bool high) {
    int shift = high ? 4 : 0;
    return make_uint2(bytes.x >> shift & 0x0f0f0f0fu, bytes.y >> shift & 0x0f0f0f0fu);
}

// Bits 0 to 3 of `bits`, each the bit of value 16 in a byte.
__device__ __forceinline__ u32 fifth_bits(u32 bits) {
    return (bits & 1) << 4 | (bits & 2) << 11 | (bits & 4) << 18 | (bits & 8) << 25;
}

// The blocks of 32 numbers: eight numbers from `at` on of the block. FIFTH: q has a fifth bit; MIN: x = d q + m, else
// x = d (q - offset).
template <int BYTES, bool FIFTH, bool MIN>
__device__ __forceinline__ void decode_32(const u8* block, int at, float* x) {
    constexpr int HIGH = MIN ? 4 : 2, QS = HIGH + (FIFTH ? 4 : 0);
    float d = half_at(block), m = MIN ? half_at(block + 2) : 0.0f;
    uint2 q = nibbles(eight_bytes<BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : 2>(block + QS + at % 16), at >= 16);
    if (FIFTH) {
        const u16* p = (const u16*)(block + HIGH);
        u32 high = (p[0] | (u32)p[1] << 16) >> at;
        q.x |= fifth_bits(high), q.y |= fifth_bits(high >> 4);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        x[i] = MIN ? fmaf(d, byte_of(q, i, 0.0f), m) : d * byte_of(q, i, FIFTH ? 16.0f : 8.0f);
}

// The blocks of 256 numbers with pairs of scale and minimum: x = (d s) q - (dmin m), a pair for every 32 numbers.
__device__ __forceinline__ float2 pair_of(const u8* block, int pair) {
    const u8* packed = block + 4;
    int s = pair < 4 ? packed[pair] & 63 : (packed[pair + 4] & 15) | packed[pair - 4] >> 6 << 4;
    int m = pair < 4 ? packed[pair + 4] & 63 : packed[pair + 4] >> 4 | packed[pair] >> 6 << 4;
    return make_float2(half_at(block) * (float)s, half_at(block + 2) * (float)m);
}
template <bool FIFTH> __device__ __forceinline__ void decode_k(const u8* block, int at, float2 pair, float* x) {
    constexpr int QS = FIFTH ? 48 : 16;
    int number = at / 32;
    uint2 q = nibbles(eight_bytes<8>(block + QS + at / 64 * 32 + at % 32), number % 2 == 1);
    if (FIFTH) {
        uint2 high = eight_bytes<8>(block + 16 + at % 32);
        q.x |= (high.x >> number & 0x01010101u) << 4, q.y |= (high.y >> number & 0x01010101u) << 4;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = fmaf(pair.x, byte_of(q, i, 0.0f), -pair.y);
}

// The blocks of 256 numbers with a scale for every 16: x = (d s) (q - 32).
__device__ __forceinline__ void decode_q6_k(const u8* block, int at, float* x) {
    int half = at / 128, quarter = at % 128 / 32, i0 = at % 32;
    uint2 q = nibbles(eight_bytes<2>(block + half * 64 + quarter % 2 * 32 + i0), quarter >= 2);
    uint2 high = eight_bytes<2>(block + 128 + half * 32 + i0);
    q.x |= (high.x >> 2 * quarter & 0x03030303u) << 4, q.y |= (high.y >> 2 * quarter & 0x03030303u) << 4;
    float scale = half_at(block + 208) * (float)(signed char)block[192 + half * 8 + 2 * quarter + i0 / 16];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = scale * byte_of(q, i, 32.0f);
}

// Eight numbers from `at` on of a tile; `pair` is that of the numbers, in the formats that have pairs.
template <int F> __device__ __forceinline__ void decode(const u8* tile, int at, float2 pair, float* x) {
    if (F == BF16) load8((const bf16*)tile, at, TILE, true, x);
    if (F == Q8_0) {
        const u8* block = tile + at / 32 * 34;
        float d = half_at(block);
        uint2 q = eight_bytes<2>(block + 2 + at % 32);
        q.x ^= 0x80808080u, q.y ^= 0x80808080u;
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = byte_of(q, i, 128.0f) * d;
    }
    if (F == Q4_0) decode_32<18, false, false>(tile + at / 32 * 18, at % 32, x);
    if (F == Q4_1) decode_32<20, false, true>(tile + at / 32 * 20, at % 32, x);
    if (F == Q5_0) decode_32<22, true, false>(tile + at / 32 * 22, at % 32, x);
    if (F == Q5_1) decode_32<24, true, true>(tile + at / 32 * 24, at % 32, x);
    if (F == Q4_K) decode_k<false>(tile + at / 256 * 144, at % 256, pair, x);
    if (F == Q5_K) decode_k<true>(tile + at / 256 * 176, at % 256, pair, x);
    if (F == Q6_K) decode_q6_k(tile + at / 256 * 210, at % 256, x);
}

// A warp takes a block of 256 numbers from each tile. Of the pairs of these blocks, lane 8 i + p has pair p of tile i.
template <int F> __device__ __forceinline__ float2 pair_of_lane(const uint4* tiles) {
    if (F != Q4_K && F != Q5_K) return make_float2(0.0f, 0.0f);
    int lane = threadIdx.x % 32, tile = lane / 8 % TILES, size = F == Q4_K ? 144 : 176;
    return pair_of((const u8*)tiles + tile * tile_bytes<F>() + threadIdx.x / 32 * size, lane % 8);
}

// Shared memory: TILES tiles.
template <int F> __device__ __forceinline__ void unpack_rows(const Unpacked& w, const Rows& rows, u32 block) {
    constexpr int VECTORS = tile_bytes<F>() / 16;
    extern __shared__ uint4 tiles[];
    uint4 loaded[TILES];
    u32 first = block * TILES * VECTORS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
        if (threadIdx.x < VECTORS && first + i * VECTORS < rows.n_vectors)
            loaded[i] = __ldcs(rows.blocks + first + i * VECTORS);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
        if (threadIdx.x < VECTORS && first + i * VECTORS < rows.n_vectors) tiles[i * VECTORS + threadIdx.x] = loaded[i];
    __syncthreads();
    float2 own = pair_of_lane<F>(tiles);
    // Until here blocks alone were read, which never change. The kernel in front may still read what is overwritten now.
    wait_for_previous_kernel();
    u32 number = block * TILES * TILE + threadIdx.x * 8, part = w.inputs / w.n_parts;
    u32 row = number / w.inputs, column = number % w.inputs;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        float2 pair = own;
        if (F == Q4_K || F == Q5_K) {
            int lane = i * 8 + threadIdx.x % 32 / 4;
            pair = make_float2(__shfl_sync(~0u, own.x, lane), __shfl_sync(~0u, own.y, lane));
        }
        if (number < rows.n_numbers) {
            float x[8];
            decode<F>((const u8*)(tiles + i * VECTORS), threadIdx.x * 8, pair, x);
            // There are one part or four.
            u32 behind = (column >= part) + (column >= 2 * part) + (column >= 3 * part);
            store8(w.to + (size_t)(rows.first_row + row) * w.pitch + column + behind * w.columns, 0, 8, true, x);
        }
        number += TILE, column += TILE;
        while (column >= w.inputs) column -= w.inputs, ++row;
    }
}

// The further columns of every row (zero but behind the last part), then the rows below the weight.
__device__ __forceinline__ void copy_factors(const Unpacked& w, u32 block) {
    wait_for_previous_kernel();
    u32 part = w.inputs / w.n_parts, behind = w.n_parts * w.columns / 8, n_behind = w.outputs * behind;
#pragma unroll 1
    for (int i = 0; i < TILES; ++i) {
        u32 at = (block * TILES + i) * UNPACKERS + threadIdx.x;
        uint4 x = make_uint4(0, 0, 0, 0);
        bf16* eight = (bf16*)&x;
        if (at < n_behind) {
            u32 row = at / behind, column = at % behind * 8, in = column / w.columns;
            column %= w.columns;
            int module = column / w.apart, rank = column % w.apart;
            int own = module < w.n_modules ? (int)row - w.start[module] : -1;
            if (in + 1 == w.n_parts && own >= 0 && own < w.len[module])
                for (int r = 0; r < 8 && rank + r < w.rank; ++r) eight[r] = w.b[module][(size_t)own * w.rank + rank + r];
            *(uint4*)(w.to + (size_t)row * w.pitch + in * (part + w.columns) + part + column) = x;
        } else if (w.a && at - n_behind < w.columns * (w.inputs / 8)) {
            u32 row = (at - n_behind) / (w.inputs / 8), column = (at - n_behind) % (w.inputs / 8) * 8;
            int module = row / w.apart, rank = row % w.apart;
            if (module < w.n_modules && rank < w.rank) x = *(const uint4*)(w.a + (size_t)(module * w.rank + rank) * w.inputs + column);
            *(uint4*)(w.to + (size_t)(w.outputs + row) * w.pitch + column) = x;
        }
    }
}

KERNEL __launch_bounds__(UNPACKERS) unpack_quantised(const __grid_constant__ Unpacked w) {
    if ((int)blockIdx.x >= w.first_factor_block) return copy_factors(w, blockIdx.x - w.first_factor_block);
    int place = 0;
    while (place + 1 < w.n_rows && (int)blockIdx.x >= w.rows[place + 1].first_block) ++place;
    const Rows& rows = w.rows[place];
    u32 block = blockIdx.x - rows.first_block;
    switch (rows.format) {
        case BF16: return unpack_rows<BF16>(w, rows, block);
        case Q8_0: return unpack_rows<Q8_0>(w, rows, block);
        case Q4_0: return unpack_rows<Q4_0>(w, rows, block);
        case Q4_1: return unpack_rows<Q4_1>(w, rows, block);
        case Q5_0: return unpack_rows<Q5_0>(w, rows, block);
        case Q5_1: return unpack_rows<Q5_1>(w, rows, block);
        case Q4_K: return unpack_rows<Q4_K>(w, rows, block);
        case Q5_K: return unpack_rows<Q5_K>(w, rows, block);
        default: return unpack_rows<Q6_K>(w, rows, block);
    }
}
