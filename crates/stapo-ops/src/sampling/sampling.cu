// Grid: rows of a chunk of logits [rows, row_pitch(vocab)]; 1024 threads.

#define STRETCH 256
#define MAX_STRETCHES 4096

// The last token kept, in the order of falling weight and rising id.
struct Cut {
    float weight;
    u32 id;
};

struct Row {
    const float* logits;
    int vocab;
    float inv_temperature, top;
};

__device__ __forceinline__ float weight_of(const Row& row, int id) {
    return expf(row.logits[id] * row.inv_temperature - row.top);
}

__device__ __forceinline__ bool is_kept(Cut cut, float weight, u32 id) {
    return weight > cut.weight || (weight == cut.weight && id <= cut.id);
}

struct Mass {
    int count;
    double sum;
};

// Tokens inside `cut` whose weight is at least `floor` (and, with `exact`, equal to it and of an id at most `last`).
__device__ Mass mass_above(const Row& row, Cut cut, float floor, bool exact, u32 last) {
    __shared__ Mass warps[32];
    Mass m = {0, 0.0};
    for (int id = threadIdx.x; id < row.vocab; id += blockDim.x) {
        float w = weight_of(row, id);
        bool counts = exact ? w == floor && (u32)id <= last : w >= floor;
        if (counts && is_kept(cut, w, id)) m.count += 1, m.sum += w;
    }
    for (int step = 16; step > 0; step >>= 1) {
        m.count += __shfl_xor_sync(0xffffffffu, m.count, step);
        m.sum += __shfl_xor_sync(0xffffffffu, m.sum, step);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = m;
    __syncthreads();
    m = warps[0];
    for (int i = 1; i < (int)blockDim.x / 32; ++i) m.count += warps[i].count, m.sum += warps[i].sum;
    return m;
}

// The shortest run of the tokens inside `cut`, heaviest first, that has `n` tokens and the mass `goal`.
__device__ Cut shortened(const Row& row, Cut cut, int n, double goal) {
    // Weights are not negative, so their bits are ordered as they are: the highest floor that leaves enough tokens and
    // mass is found bit by bit.
    u32 bits = 0;
    for (int bit = 29; bit >= 0; --bit) {
        Mass m = mass_above(row, cut, __uint_as_float(bits | 1u << bit), false, 0);
        if (m.count >= n && m.sum >= goal) bits |= 1u << bit;
    }
    float floor = __uint_as_float(bits);
    Mass above = mass_above(row, cut, __uint_as_float(bits + 1), false, 0);
    Mass ties = mass_above(row, cut, floor, true, 0xffffffffu);
    // Of the tokens whose weight is the floor, as many as are still missing, lowest ids first.
    int missing = max(n - above.count, 1);
    if (floor > 0.0f) missing = max(missing, (int)ceil(fmin((goal - above.sum) / floor, 2e9)));
    if (missing >= ties.count) return {floor, 0xffffffffu};
    u32 last = 0;
    for (int bit = 19; bit >= 0; --bit)
        if (mass_above(row, cut, floor, true, (last | 1u << bit) - 1).count < missing) last |= 1u << bit;
    return {floor, last};
}

// The sums of the weights of each stretch of 256 tokens that are inside `cut`.
__device__ __forceinline__ void stretch_sums(const Row& row, Cut cut, float* sums, int n) {
    int lane = threadIdx.x % 32;
    for (int k = threadIdx.x / 32; k < n; k += blockDim.x / 32) {
        float sum = 0.0f;
        for (int i = 0; i < 8; ++i) {
            int id = k * STRETCH + 8 * lane + i;
            float w = id < row.vocab ? weight_of(row, id) : 0.0f;
            sum += is_kept(cut, w, id) ? w : 0.0f;
        }
        sum = warp_sum(sum);
        if (lane == 0) sums[k] = sum;
    }
}

// Adds the lanes' sums to `total` in the order of the lanes; returns the total before this lane's own.
__device__ __forceinline__ double add_lanes_in_order(double own, double& total) {
    double before = 0.0;
    for (int l = 0; l < 32; ++l) {
        if (l == threadIdx.x % 32) before = total;
        total += __shfl_sync(0xffffffffu, own, l);
    }
    return before;
}

// The last lane that starts at or before the goal and holds anything; -1: there is none.
__device__ __forceinline__ int owner_of(double goal, double own, double before) {
    return 31 - __clz(__ballot_sync(0xffffffffu, own > 0.0 && before <= goal));
}

// Inverse transform sampling in the order of ids, by one warp: the stretch that the goal falls in, then the token. Sums
// are added up in f64. Returns the id in the lane that finds it, and whether this is that lane.
__device__ __forceinline__ bool find_drawn(const Row& row, Cut cut, double uniform, const float* sums, int n, u32* id) {
    int lane = threadIdx.x % 32;
    // Each lane adds up consecutive stretches.
    int per_lane = (n + 31) / 32, from = min(n, lane * per_lane), to = min(n, from + per_lane);
    double own = 0.0, total = 0.0;
    for (int k = from; k < to; ++k) own += sums[k];
    double before = add_lanes_in_order(own, total), goal = uniform * total, seen = before;
    int owner = owner_of(goal, own, before), chosen = from;
    if (lane == owner) {
        int last = from;
        for (int k = from; k < to; ++k)
            if (sums[k] > 0.0f) last = k;
        for (; chosen < last && !(goal < seen + sums[chosen]); ++chosen) seen += sums[chosen];
    }
    chosen = __shfl_sync(0xffffffffu, chosen, owner);
    total = __shfl_sync(0xffffffffu, seen, owner);
    // Each lane adds up eight consecutive tokens of the chosen stretch.
    float w[8];
    own = 0.0;
    for (int i = 0; i < 8; ++i) {
        int id = chosen * STRETCH + 8 * lane + i;
        w[i] = id < row.vocab ? weight_of(row, id) : 0.0f;
        if (!is_kept(cut, w[i], id)) w[i] = 0.0f;
        own += w[i];
    }
    before = add_lanes_in_order(own, total);
    owner = owner_of(goal, own, before);
    // A row of NaN has no owner.
    *id = owner < 0 ? 0xffffffffu : 0;
    for (int i = 0; lane == owner && i < 8; ++i) {
        if (!(w[i] > 0.0f)) continue;
        *id = chosen * STRETCH + 8 * lane + i;
        before += w[i];
        if (goal < before) break;
    }
    return lane == max(owner, 0);
}

// Draws a token inside `cut`. `sums` of stretches are given where nothing is cut.
__device__ u32 drawn(const Row& row, Cut cut, double uniform, float* sums, bool is_cut) {
    __shared__ u32 chosen_id;
    int n = (row.vocab + STRETCH - 1) / STRETCH;
    if (is_cut) stretch_sums(row, cut, sums, n);
    __syncthreads();
    if (threadIdx.x < 32) {
        u32 id;
        if (find_drawn(row, cut, uniform, sums, n, &id)) chosen_id = id;
    }
    __syncthreads();
    return chosen_id;
}

// An input token is a token's id, or DRAWN plus the number of a draw of the step before, whose id only the GPU knows
// yet.
#define DRAWN 0x80000000u
KERNEL sampling_look_up(const u32* tokens, const u32* drawn, u32* out, int n, u32 n_drawn) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 token = tokens[i];
    if (token >= DRAWN && token - DRAWN >= n_drawn) __trap();
    out[i] = token < DRAWN ? token : drawn[token - DRAWN];
}

// How a token is chosen. Without a filter top_k is the vocabulary, top_p 1 and min_p 0.
struct SamplingRule {
    double top_p;
    float inv_temperature, min_p;
    int is_greedy, top_k;
};

// The sum of a stretch's e^z, and what it is relative to.
struct StretchSum {
    float sum, top;
};

// From each lane's largest z so far, and the sum of its e^z relative to that.
__device__ __forceinline__ StretchSum stretch_sum(float top, float part) {
    float largest = top;
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    return {warp_sum(part > 0.0f ? part * expf(top - largest) : 0.0f), largest};
}

KERNEL __launch_bounds__(1024)
sampling_draw(const float* logits, const double* uniforms, u32* ids, float* logp, float* entropy, int n_best,
              u32* best_ids, float* best_logp, int vocab, const __grid_constant__ SamplingRule rule) {
    size_t r = blockIdx.x;
    float inv_temperature = rule.inv_temperature;
    Row row = {logits + r * row_pitch(vocab), vocab, inv_temperature, 0.0f};
    __shared__ float sums[MAX_STRETCHES], tops[MAX_STRETCHES];
    Stats s = row_stats(row.logits, vocab, inv_temperature, [](int stretch, float top, float part) {
        StretchSum of = stretch_sum(top, part);
        if (threadIdx.x % 32 == 0) sums[stretch] = of.sum, tops[stretch] = of.top;
    });
    row.top = s.top;
    __syncthreads();
    for (int k = threadIdx.x; k * STRETCH < vocab; k += blockDim.x) sums[k] *= expf(tops[k] - s.top);
    __syncthreads();
    float ln_sum = logf(s.sum);
    u32 id;
    if (rule.is_greedy) {
        Candidate first = {__int_as_float(0x7f800000), 0u};
        id = block_best(next_best(row.logits, vocab, first)).id;
    } else {
        Cut cut = {0.0f, 0xffffffffu};
        if (rule.top_k < vocab) cut = shortened(row, cut, rule.top_k, 0.0);
        if (rule.top_p < 1.0) cut = shortened(row, cut, 1, rule.top_p * mass_above(row, cut, 0.0f, false, 0).sum);
        if (rule.min_p > cut.weight) cut = {fminf(rule.min_p, 1.0f), 0xffffffffu};
        bool is_cut = cut.weight > 0.0f || cut.id != 0xffffffffu;
        id = drawn(row, cut, uniforms[r], sums, is_cut);
    }
    // A row of NaN has no best token: token 0 stands for it, and logp and entropy are NaN.
    if (id >= vocab) id = 0;
    if (threadIdx.x == 0) {
        ids[r] = id;
        logp[r] = logp_of(row.logits[id], inv_temperature, s, ln_sum);
        entropy[r] = ln_sum - s.weighted / s.sum;
    }
    if (n_best > 0)
        row_best(row.logits, vocab, inv_temperature, s, ln_sum, n_best, best_ids + r * n_best, best_logp + r * n_best);
}

// The same draw without filters, for few rows: the warps of a row are spread over a cluster of blocks, each with a warp
// for each scheduler of its multiprocessor. The first block of the cluster gets what the others find, and draws.
#if __CUDA_ARCH__ >= 900
#define CLUSTER 8
#define BLOCK_WARPS (ROW_WARPS / CLUSTER)
// The most stretches of a warp.
#define MAX_OWN 32

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Writes to the same place in the shared memory of the cluster's first block.
__device__ __forceinline__ void store_in_first(float* to, float x) {
    asm volatile("{ .reg .u32 at; mapa.shared::cluster.u32 at, %0, 0; st.shared::cluster.f32 [at], %1; }" ::"r"(
                     shared_address(to)),
                 "f"(x)
                 : "memory");
}

KERNEL __launch_bounds__(32 * BLOCK_WARPS) __cluster_dims__(CLUSTER, 1, 1)
sampling_draw_cluster(const float* logits, const double* uniforms, u32* ids, float* logp, float* entropy, int vocab,
                      float inv_temperature) {
    __shared__ float sums[ROW_WARPS * MAX_OWN], tops[ROW_WARPS * MAX_OWN];
    __shared__ float2 lanes[BLOCK_WARPS][MAX_OWN][32];
    __shared__ Stats warps[ROW_WARPS];
    int r = blockIdx.x / CLUSTER, own = threadIdx.x / 32, lane = threadIdx.x % 32;
    int warp = blockIdx.x % CLUSTER * BLOCK_WARPS + own, n = (vocab + STRETCH - 1) / STRETCH;
    Row row = {logits + r * row_pitch(vocab), vocab, inv_temperature, 0.0f};
    cluster_arrive();
    Stats s = warp_stats(row.logits, vocab, inv_temperature, warp, [&](int stretch, float top, float part) {
        lanes[own][stretch / ROW_WARPS][lane] = make_float2(top, part);
    });
    __syncwarp();
    // The other blocks have started: their shared memory is there.
    cluster_wait();
#pragma unroll 4
    for (int k = 0; k < (n - warp + ROW_WARPS - 1) / ROW_WARPS; ++k) {
        float2 x = lanes[own][k][lane];
        StretchSum of = stretch_sum(x.x, x.y);
        if (lane == 0) store_in_first(sums + k * ROW_WARPS + warp, of.sum);
        if (lane == 1) store_in_first(tops + k * ROW_WARPS + warp, of.top);
    }
    if (lane == 0) {
        store_in_first(&warps[warp].top, s.top), store_in_first(&warps[warp].sum, s.sum);
        store_in_first(&warps[warp].weighted, s.weighted), store_in_first(&warps[warp].squares, s.squares);
    }
    cluster_arrive();
    cluster_wait();
    if (blockIdx.x % CLUSTER > 0) return;
    s = joined_in_order(warps);
    row.top = s.top;
    for (int k = threadIdx.x; k < n; k += blockDim.x) sums[k] *= expf(tops[k] - s.top);
    u32 id = drawn(row, {0.0f, 0xffffffffu}, uniforms[r], sums, false);
    if (id >= vocab) id = 0;
    if (threadIdx.x > 0) return;
    float ln_sum = logf(s.sum);
    ids[r] = id;
    logp[r] = logp_of(row.logits[id], inv_temperature, s, ln_sum);
    entropy[r] = ln_sum - s.weighted / s.sum;
}
#endif
