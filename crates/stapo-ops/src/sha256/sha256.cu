// SHA-256 (FIPS 180-4) of many pieces of memory, one thread for each.

// A piece of memory; `bytes` is a multiple of 16.
struct Piece {
    const unsigned char* bytes;
    u64 n_bytes;
};

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
__constant__ u32 ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

__device__ __forceinline__ u32 rotated(u32 x, int n) { return __funnelshift_r(x, x, n); }

// Word `at / 4` of a padded piece: its bytes, a bit 1, zeros, and the number of bits at the end.
__device__ __forceinline__ u32 padded_word(Piece piece, u64 at, u64 n_padded) {
    if (at + 8 >= n_padded) return (u32)(8 * piece.n_bytes >> (at + 4 < n_padded ? 32 : 0));
    u32 word = 0;
    for (u64 i = at; i < at + 4; ++i) {
        u32 byte = i < piece.n_bytes ? piece.bytes[i] : i == piece.n_bytes ? 0x80 : 0;
        word = word << 8 | byte;
    }
    return word;
}

// The 16 words of the block from byte `at` on, big-endian.
__device__ __forceinline__ void block_words(Piece piece, u64 at, u64 n_padded, u32* w) {
    if (at + 64 <= piece.n_bytes) {
        const uint4* from = (const uint4*)(piece.bytes + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint4 v = from[i];
            w[4 * i] = __byte_perm(v.x, 0, 0x0123), w[4 * i + 1] = __byte_perm(v.y, 0, 0x0123);
            w[4 * i + 2] = __byte_perm(v.z, 0, 0x0123), w[4 * i + 3] = __byte_perm(v.w, 0, 0x0123);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) w[i] = padded_word(piece, at + 4 * i, n_padded);
    }
}

// Takes one block into the state. The 16 words of the message schedule are overwritten as they are used.
__device__ __forceinline__ void compress(u32* state, u32* w) {
    u32 a = state[0], b = state[1], c = state[2], d = state[3];
    u32 e = state[4], f = state[5], g = state[6], h = state[7];
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        if (i >= 16) {
            u32 w15 = w[(i + 1) % 16], w2 = w[(i + 14) % 16];
            u32 s0 = rotated(w15, 7) ^ rotated(w15, 18) ^ w15 >> 3;
            u32 s1 = rotated(w2, 17) ^ rotated(w2, 19) ^ w2 >> 10;
            w[i % 16] += s0 + w[(i + 9) % 16] + s1;
        }
        u32 t = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) + ROUND[i] + w[i % 16];
        u32 u = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + t;
        d = c, c = b, b = a, a = t + u;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

// digests [n, 8]
KERNEL sha256_pieces(const Piece* pieces, u32* digests, u64 n) {
    u64 idx = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (idx >= n) return;
    Piece piece = pieces[idx];
    // The first 32 bits of the fractional parts of the square roots of the first 8 primes.
    u32 state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    u64 n_padded = (piece.n_bytes + 9 + 63) / 64 * 64;
    for (u64 at = 0; at < n_padded; at += 64) {
        u32 w[16];
        block_words(piece, at, n_padded, w);
        compress(state, w);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) digests[8 * idx + i] = state[i];
}
