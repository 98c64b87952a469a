// The backward of SwiGLU behind a layer with an adapter, and the gradient of that layer's first factor.

// The parts of the first factor's gradient [groups of tiles of rows, rank, width].
struct FirstGradient {
    float* parts;
    int rank;
};

// Of a tile [64, 128] d_out += left right, rounded, and from it the gradients of gate and up in their place; OF_A: d_out becomes
// what SwiGLU gave. A warpgroup has 64 of the columns, 32 at a time, which leaves registers to three blocks on a multiprocessor.
template <bool OF_A>
__device__ __forceinline__ void update_tile(const bf16* left, const bf16* right, bf16* d_out, bf16* gate, bf16* up,
                                            int depth) {
#pragma unroll 1
    for (int part = 0; part < 64; part += 32) {
        float d[4][4];
        term(d, left, right + part, depth);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                int row = result_row() + half * 8, at = threadIdx.x / 128 * 64 + part + result_column() + j * 8;
                u32 *gates = pair_at(gate, row, at), *ups = pair_at(up, row, at), *outs = pair_at(d_out, row, at);
                u32 both = pack(low_half(*outs) + d[j][2 * half], high_half(*outs) + d[j][2 * half + 1]);
                float d_gate[2], d_up[2], activated[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float g = k ? high_half(*gates) : low_half(*gates), u = k ? high_half(*ups) : low_half(*ups);
                    float of_out = k ? high_half(both) : low_half(both), s = sigmoid(g), silu = g * s;
                    d_gate[k] = of_out * u * fmaf(silu, 1.0f - s, s);
                    d_up[k] = of_out * silu;
                    activated[k] = silu * u;
                }
                *gates = pack(d_gate[0], d_gate[1]);
                *ups = pack(d_up[0], d_up[1]);
                if (OF_A) *outs = pack(activated[0], activated[1]);
            }
    }
}

// d_activated += d_hidden A, rounded but not stored, and from it the gradients of gate and up (see swiglu.cu). A block takes
// 128 columns and `at_once` tiles of 64 rows one after another; each warpgroup has 64 of the columns. UPDATERS threads.
// Grid: (tiles of columns, groups of tiles of rows). Shared: A [depth, 128], d_hidden [64, depth], depth rounded up to 64;
// d_activated, gate and up [64, 128], of which the last two become their gradients; an mbarrier.
//
// OF_A, for ranks of at most 32: d_activated's tile becomes what the layer took in, and is multiplied with d_hidden.
template <bool OF_A>
__device__ __forceinline__ void backward_swiglu(const TensorMap& d_activated, const TensorMap& d_hidden,
                                                const TensorMap& a, const Maps& gate_up, const Maps& d_gate_up,
                                                const FirstGradient& d_a, int width, int depth, int n, int at_once) {
    int padded = whole_tiles(depth), first = blockIdx.y * at_once, column = blockIdx.x * 128, group = threadIdx.x / 128;
    int n_tiles = min(at_once, (n + ROWS - 1) / ROWS - first);
    bf16 *factor = aligned_memory(), *left = factor + 128 * padded, *d_out = left + ROWS * padded;
    bf16 *gate = d_out + 2 * TILE, *up = gate + 2 * TILE;
    u64* full = (u64*)(up + 2 * TILE);
    auto load = [&](int i) {
        int row = (first + i) * ROWS;
        mbarrier_arrive_expect_bytes(full, 2 * (ROWS * padded + 6 * TILE + (i == 0 ? 128 * padded : 0)));
        for (int c = 0; c < padded; c += 64) {
            if (i == 0) tma_load_tile(factor + c * 64, a, column, c, full);
            if (i == 0) tma_load_tile(factor + (padded + c) * 64, a, column + 64, c, full);
            tma_load_tile(left + c * ROWS, d_hidden, c, row, full);
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            tma_load_tile(d_out + part * TILE, d_activated, column + part * 64, row, full);
            tma_load_tile(gate + part * TILE, gate_up.of[0], column + part * 64, row, full);
            tma_load_tile(up + part * TILE, gate_up.of[1], column + part * 64, row, full);
        }
    };
    launch_dependents();
    wait_for_previous_kernel();
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init_fence();
        load(0);
    }
    __syncthreads();
    float sums[4][4] = {};
    for (int i = 0; i < n_tiles; ++i) {
        mbarrier_wait(full, i % 2);
        update_tile<OF_A>(left, factor + group * padded * 64, d_out, gate, up, depth);
        fence_async_proxy_shared();
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int part = 0; part < 2 && column + part * 64 < width; ++part) {
                tma_store_tile(d_gate_up.of[0], column + part * 64, (first + i) * ROWS, gate + part * TILE);
                tma_store_tile(d_gate_up.of[1], column + part * 64, (first + i) * ROWS, up + part * TILE);
            }
            tma_store_commit();
        }
        if (OF_A) {
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < ROWS; c += 16)
                wgmma_shared<1, 1>(sums, mn_major_operand<64>(d_out + group * TILE, c), mn_major_operand<64>(left, c),
                                   i + c > 0);
            wgmma_commit();
            wgmma_wait<0>();
            fence_registers(sums);
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            tma_store_wait();
            if (i + 1 < n_tiles) load(i + 1);
        }
    }
    if (!OF_A) return;
    float* part = d_a.parts + (size_t)blockIdx.y * d_a.rank * width;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int own = column + group * 64 + result_row() + i / 2 * 8, rank = result_column() + j * 8 + i % 2;
            if (own < width && rank < d_a.rank) part[(size_t)rank * width + own] = sums[j][i];
        }
}

// to [n] (+)= the sum of parts [n_parts, n], in order.
KERNEL lora_sum_parts(const float* parts, float* to, int n, int n_parts, int adds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    launch_dependents();
    wait_for_previous_kernel();
    if (i >= n) return;
    float sum = parts[i];
#pragma unroll 8
    for (int p = 1; p < n_parts; ++p) sum += parts[(size_t)p * n + i];
    put(to + i, sum, adds);
}

KERNEL __launch_bounds__(UPDATERS, 3)
lora_backward_swiglu(const __grid_constant__ TensorMap d_activated, const __grid_constant__ TensorMap d_hidden,
                     const __grid_constant__ TensorMap a, const __grid_constant__ Maps gate_up,
                     const __grid_constant__ Maps d_gate_up, int width, int depth, int n, int at_once) {
    backward_swiglu<false>(d_activated, d_hidden, a, gate_up, d_gate_up, FirstGradient(), width, depth, n, at_once);
}

KERNEL __launch_bounds__(UPDATERS, 3)
lora_backward_swiglu_factor(const __grid_constant__ TensorMap d_activated, const __grid_constant__ TensorMap d_hidden,
                            const __grid_constant__ TensorMap a, const __grid_constant__ Maps gate_up,
                            const __grid_constant__ Maps d_gate_up, const __grid_constant__ FirstGradient d_a,
                            int width, int depth, int n, int at_once) {
    backward_swiglu<true>(d_activated, d_hidden, a, gate_up, d_gate_up, d_a, width, depth, n, at_once);
}
