// Rows of gated DeltaNet in bf16 with heads of DIM, eight columns for each thread: the convolution over four rows, and the norm of outputs.

#define LENGTH_EPS 1e-6f
#define TAPS 4
// Neighbouring lanes that share a head.
#define HEAD_LANES (DIM / 8)

// The inputs of the convolution. `carried` [slots, TAPS, conv_width] holds the last rows in front of the call: the row at position p of its
// sequence lies at p % TAPS, so that a row can be stored while others still read the three in front of it.
struct ConvRows {
    const bf16 *raw, *conv, *carried;
    Heads h;
    Sequences sequences;
};

// Without the steps that keep numbers below 1e-38.
__device__ __forceinline__ float fast_sigmoid(float x) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950216293335f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return inverse;
}

__device__ __forceinline__ void widen8(float* x, uint4 row) {
    u32 words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = low_half(words[i]);
        x[2 * i + 1] = high_half(words[i]);
    }
}

__device__ __forceinline__ uint4 pack8(const float* x) {
    return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// Rows that other columns follow may begin anywhere.
__device__ __forceinline__ void store8_anywhere(bf16* to, const float* x) { store8(to, 0, 8, (size_t)to % 16 == 0, x); }

// Sums over the lanes of a head.
__device__ __forceinline__ float head_sum(float x) {
#pragma unroll
    for (int step = HEAD_LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// The convolution of eight columns, row after row. Weights [TAPS][8], the first row's first.
struct Convolution {
    float weights[TAPS][8];
    // The rows in front of the next one, the earliest first.
    uint4 before[TAPS - 1];
    // The next row, and where its sequence begins and ends in the call.
    int row, sequence, start, end, column;

    __device__ __forceinline__ Convolution(const ConvRows& of, int row, int sequence, int column)
        : row(row), sequence(sequence), column(column) {
        take_weights((const uint4*)(of.conv + (size_t)column * TAPS));
        enter(of);
    }

    // Of one row, from its weights and the rows in front, the earliest first.
    __device__ __forceinline__ Convolution(const uint4* loaded) {
        take_weights(loaded);
#pragma unroll
        for (int i = 0; i < TAPS - 1; ++i) before[i] = loaded[TAPS + i];
    }

    __device__ __forceinline__ void take_weights(const uint4* from) {
#pragma unroll
        for (int half = 0; half < TAPS; ++half) {
            float two[8];
            widen8(two, from[half]);
#pragma unroll
            for (int i = 0; i < 8; ++i) weights[i % TAPS][2 * half + i / TAPS] = two[i];
        }
    }

    // Takes the rows in front of `row` from its sequence: those of the call, else those of earlier calls.
    __device__ __forceinline__ void enter(const ConvRows& of) {
        start = of.sequences.offsets[sequence], end = of.sequences.offsets[sequence + 1];
        int done = row - start;
        int position = done + of.sequences.done(sequence);
#pragma unroll
        for (int i = 0; i < TAPS - 1; ++i) {
            int lag = TAPS - 1 - i;
            before[i] = make_uint4(0, 0, 0, 0);
            if (lag <= done) {
                before[i] = *(const uint4*)(of.raw + (size_t)(row - lag) * of.h.input_width() + column);
            } else if (lag <= position) {
                size_t kept = (size_t)of.sequences.slots[sequence] * TAPS + (position - lag) % TAPS;
                before[i] = *(const uint4*)(of.carried + kept * of.h.conv_width() + column);
            }
        }
    }

    // Goes on to the row behind.
    __device__ __forceinline__ void step(const ConvRows& of, uint4 x) {
        before[0] = before[1], before[1] = before[2], before[2] = x;
        if (++row < end) return;
        do ++sequence;
        while (sequence < of.sequences.n && (int)of.sequences.offsets[sequence + 1] <= row);
        if (sequence < of.sequences.n) enter(of);
    }

    // The convolution in front of SiLU, with x the row itself.
    __device__ __forceinline__ void sum(float* sums, uint4 x) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] = 0.0f;
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) {
            float values[8];
            widen8(values, tap + 1 < TAPS ? before[tap] : x);
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] = fmaf(weights[tap][i], values[i], sums[i]);
        }
    }
};

// What the recurrence takes in: the convolution of the row x through SiLU, where `is_normed` divided by the length of its head. Gives one over
// that length.
__device__ __forceinline__ float mix_columns(float* sums, const Convolution& conv, uint4 x, bool is_normed, bool is_query) {
    float squares = 0.0f;
    conv.sum(sums, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sums[i] *= fast_sigmoid(sums[i]);
        squares = fmaf(sums[i], sums[i], squares);
    }
    float inv = 1.0f / sqrtf(head_sum(squares) + LENGTH_EPS), factor = is_query ? inv * (1.0f / sqrtf((float)DIM)) : inv;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (is_normed) sums[i] *= factor;
    return inv;
}

// norm(x) * silu(z) over x. Gives one over the root of the mean square.
__device__ __forceinline__ float norm_columns(float* x, const float* z, const float* weight, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares = fmaf(x[i], x[i], squares);
    float inv = 1.0f / sqrtf(head_sum(squares) / (float)DIM + eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = x[i] * inv * weight[i] * (z[i] * fast_sigmoid(z[i]));
    return inv;
}
