// SwiGLU of some hundred rows in front of a layer with adapters: x = silu(gate) up goes to memory, and hidden = s x A^T is made of the
// x that is still in shared memory. Both have the bits of swiglu_forward and of lora_project.

// Columns of a group. A warp computes a row of a group at a time, eight columns a lane.
#define GROUP 256
// Threads that compute x; a further warpgroup multiplies.
#define ACTIVATORS 512
#define WARPS (ACTIVATORS / 32)
// Rows of groups that a warp loads ahead: with all warps 64 KB, more than arrives during a load.
#define AHEAD 4

// 1 / d, rounded to nearest, for 1 <= d < 2^126: the compiler's own division without its branch to other numbers.
__device__ __forceinline__ float reciprocal(float d) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d));
    return fmaf(y, fmaf(-d, y, 1.0f), y);
}

// silu(gate) up of two columns, where exp(-gate) is less than 2^126.
__device__ __forceinline__ u32 activate_pair(u32 gate, u32 up) {
    float low = low_half(gate), high = high_half(gate);
    low *= reciprocal(1.0f + expf(-low)), high *= reciprocal(1.0f + expf(-high));
    return pack(low * low_half(up), high * high_half(up));
}

// The lesser of two pairs, number by number; NaN is less than nothing.
__device__ __forceinline__ u32 lesser(u32 a, u32 b) {
    u32 least;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
    return least;
}
// Whether exp(-gate) is less than 2^126 = exp(87.3) for eight gates. A gate that is NaN gives NaN by either division.
__device__ __forceinline__ bool are_moderate(uint4 gate) {
    u32 least = lesser(lesser(gate.x, gate.y), lesser(gate.z, gate.w));
    return !(low_half(least) < -87.0f || high_half(least) < -87.0f);
}

// Sixteen bytes in shared memory.
__device__ __forceinline__ void store_shared(u32 address, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// Keeps what is the same in all turns of a loop in a register: the compiler would rather compute it anew in each of them.
__device__ __forceinline__ void keep(u32& x) { asm volatile("" : "+r"(x)); }

// A row of a group, both counted from the block's first.
struct GroupRow {
    u32 group, row;
};

// gate_up [n, 2 width], and out [n, width] with rows `pitch` apart, where eight columns count as one.
struct Eights {
    const uint4* gate_up;
    uint4* out;
    u32 width, pitch;
};

// x of `n` rows from `first` on and of the columns from `from` to `end`, eight counted as one, to memory and to tiles [N, STEP] in
// shared memory, where the columns behind the end are 0 to the end of a tile. Each row of a group arrives at the group's mbarrier of
// `ready` when it is complete: `rows` of them, of which those behind the n are empty.
template <int N>
__device__ __forceinline__ void activate_rows(Eights of, u32 first, u32 n, u32 rows, u32 from, u32 end, bf16* x, u64* ready) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 n_written = (end - from + 7) / 8 * 8, n_groups = (n_written + 31) / 32;
    u32 tiles = shared_address(x) + lane / 8 * N * 128, ready_at = shared_address(ready);
    u32 gates_at = first * 2 * of.width + from + lane, out_at = first * of.pitch + from + lane;
    keep(of.width), keep(of.pitch), keep(n_groups), keep(tiles), keep(ready_at), keep(gates_at), keep(out_at);
    GroupRow apart = {WARPS / rows, WARPS % rows}, next = {warp / rows, warp % rows};
    GroupRow at[AHEAD] = {};
    uint4 gate[AHEAD], up[AHEAD];
    auto is_inside = [&](int i) { return at[i].row < n && at[i].group * 32 + lane < end - from; };
    auto place_of = [&](int i) { return gates_at + at[i].row * 2 * of.width + at[i].group * 32; };
    auto fetch = [&](int i) {
        at[i] = next;
        u32 place = is_inside(i) ? place_of(i) : 0;
        gate[i] = of.gate_up[place], up[i] = of.gate_up[place + of.width];
        next.group += apart.group, next.row += apart.row;
        if (next.row >= rows) next.row -= rows, ++next.group;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(i);
    while (true) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            auto [group, row] = at[i];
            if (group >= n_groups) return;
            bool is_x = is_inside(i);
            u32 offset = (group * (GROUP / STEP) * N + row) * 128 + (lane ^ row) % 8 * 16;
            uint4 y = {activate_pair(gate[i].x, up[i].x), activate_pair(gate[i].y, up[i].y),
                       activate_pair(gate[i].z, up[i].z), activate_pair(gate[i].w, up[i].w)};
            if (!is_x) y = make_uint4(0, 0, 0, 0);
            if (group * 32 + lane < n_written) store_shared(tiles + offset, y);
            if (is_x && !are_moderate(gate[i])) {
                bf16* to = x + (lane / 8 * N * 128 + offset) / 2;
                const bf16 *gates = (const bf16*)(of.gate_up + place_of(i)), *ups = gates + 8 * of.width;
#pragma unroll 1
                for (int j = 0; j < 8; ++j) to[j] = round_to<bf16>(activate<false>(widen(gates[j])) * widen(ups[j]));
                y = *(const uint4*)to;
            }
            fence_async_proxy_shared();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(ready_at + 8 * group);
            if (is_x) of.out[out_at + row * of.pitch + group * 32] = y;
            // Behind the fence, which may wait for loads.
            fetch(i);
        }
    }
}

// A cluster of PARTS blocks computes `rows` rows, at most N, and `columns` columns of hidden, at most 64, each block a part of the
// depth (`split` long, whole tiles); then each adds up the parts of a quarter of N rows. A is fetched while the kernel in front still
// runs. Shapes: gate_up [n, 2 width]; out [n, width], rows `pitch` apart. Grid: PARTS x tiles of rows. Shared: tiles of A
// [columns, STEP] and of x [N, STEP]; the parts that this block adds up; an mbarrier for each tile and each group.
template <int N>
__device__ __forceinline__ void swiglu_project(const bf16* gate_up, bf16* out, int pitch, int width, const TensorMap& map_a,
                                               Projected to, int rows, int split, int columns) {
    int first = blockIdx.x / PARTS * rows, from = blockIdx.x % PARTS * split, end = max(from, min(width, from + split));
    int n_tiles = steps_between(from, end), most = split / STEP;
    bf16 *a = aligned_memory(), *x = a + most * columns * STEP;
    float* parts = (float*)(x + most * N * STEP);
    u64 *full = (u64*)(parts + N * columns), *ready = full + most;
    // Of the N rows, those behind `rows` are another cluster's.
    to.n = min(to.n, first + rows);
    int tile = (int)threadIdx.x - ACTIVATORS;
    bool copies = tile >= 0 && tile < n_tiles;
    launch_dependents();
    cluster_arrive_relaxed();
    if (copies) {
        mbarrier_init(full + tile, 1);
        if (tile * STEP % GROUP == 0) mbarrier_init(ready + tile * STEP / GROUP, rows);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (copies) {
        mbarrier_arrive_expect_bytes(full + tile, 2 * columns * STEP);
        tma_load_tile(a + tile * columns * STEP, map_a, from + tile * STEP, 0, full + tile);
    }
    // All blocks of the cluster have started.
    cluster_wait();
    if (threadIdx.x < ACTIVATORS) {
        wait_for_previous_kernel();
        Eights of = {(const uint4*)gate_up, (uint4*)out, (u32)width / 8, (u32)pitch / 8};
        activate_rows<N>(of, first, to.n - first, rows, from / 8, end / 8, x, ready);
        cluster_arrive_relaxed();
    } else {
        float d[N / 8][4];
        multiply_part<N>(d, a, columns, 0, x, n_tiles, [&](int t) {
            mbarrier_wait(ready + t * STEP / GROUP, 0);
            mbarrier_wait(full + t, 0);
        });
        give_part<N>(d, parts, columns, 0);
        wait_for_previous_kernel();
        cluster_arrive();
    }
    cluster_wait();
    add_parts<N>(parts, to, first, 0, columns);
}

#define SWIGLU_PROJECT(N)                                                                                              \
    KERNEL __cluster_dims__(PARTS, 1, 1) __launch_bounds__(ACTIVATORS + CONSUMERS, 1)                                  \
        lora_swiglu_project_##N(const bf16* gate_up, bf16* out, int pitch, int width,                                  \
                                const __grid_constant__ TensorMap a, const __grid_constant__ Projected to, int rows,   \
                                int split, int columns) {                                                              \
        swiglu_project<N>(gate_up, out, pitch, width, a, to, rows, split, columns);                                    \
    }
SWIGLU_PROJECT(8)
SWIGLU_PROJECT(16)
SWIGLU_PROJECT(24)
