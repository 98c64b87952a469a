// Queries, keys and values of many rows: the product of large_m.cu whose heads are normed and rotated as rope_forward_eights does
// it, to the same bits, on their way to the output and to the cache. A tile has two heads, which share cosines and sines.

struct HeadProduct : Product {
    // Tables [positions, HEAD_DIM / 2], and each row's position.
    const float *cos, *sin;
    const u32* positions;
    // 0 where heads have no norm.
    const bf16 *q_weight, *k_weight;
    int query, kv;
    float eps;
    Stored<bf16> stored;
};

// Rows of a tile that a warp finishes, in turns of four rows with eight lanes each: from `first` on, each turn `apart` rows behind
// the one before. Cosines and sines are loaded a turn ahead, those of the first before there are results.
template <class T> struct HeadRows {
    static constexpr int N_HEADS = T::N / HEAD_DIM;
    const HeadProduct& p;
    int first, apart, column;
    // Lane i has those of row i % 4 in turn i / 4.
    u32 position, slot;
    Angles next;

    __device__ __forceinline__ HeadRows(const HeadProduct& p, Place place, int first, int apart)
        : p(p), first(place.row + first), apart(apart), column(place.column * N_HEADS), position(0), slot(0) {
        int row = this->first + lane() / 4 * apart + lane() % 4;
        if (row < p.n) {
            position = p.positions[row];
            if (p.stored.slots) slot = p.stored.slots[row];
        }
        next = angles(0);
    }

    __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
    // The first of a lane's columns in a head.
    __device__ __forceinline__ static int at() { return lane() % 8 * 8; }

    __device__ __forceinline__ u32 of_turn(u32 x, int turn) const {
        return __shfl_sync(0xffffffffu, x, turn * 4 + lane() / 8);
    }

    __device__ __forceinline__ Angles angles(int turn) const {
        size_t place = (size_t)of_turn(position, turn) * (HEAD_DIM / 2) + at();
        return load_angles(p.cos + place, p.sin + place);
    }

    // `results`: the first row's.
    __device__ __forceinline__ void finish(const bf16* results, int n_turns) {
        int normed = p.query + p.kv, heads = normed + p.kv;
        for (int turn = 0; turn < n_turns; ++turn) {
            Angles rotation = next;
            next = angles(turn + 1);
            u32 to = of_turn(slot, turn);
            int r = turn * apart + lane() / 8, row = first + r;
#pragma unroll
            for (int head = column; head < column + N_HEADS; ++head) {
                if (head >= heads) break;
                Eights h = load_eights(results + r * T::APART + (head - column) * HEAD_DIM, at());
                if (head < normed) {
                    if (p.q_weight) {
                        Eights weight = load_eights(head < p.query ? p.q_weight : p.k_weight, at());
                        scale(h, inv_rms_of(h, p.eps), weight);
                    }
                    rotate(h, rotation);
                }
                if (row >= p.n) continue;
                bool is_stored = p.stored.slots && head >= p.query;
                bf16* y = p.y + (size_t)row * p.pitch + head * HEAD_DIM;
                store_eights(is_stored ? p.stored.at(to, head - p.query, p.kv) : y, at(), h);
            }
        }
    }
};

// By the warps that finish: a warp has every third four of a warpgroup's 64 rows.
template <class T>
__device__ __forceinline__ void finish(const HeadProduct& p, const Shared<T>& shared, Place place, int group,
                                       int turn) {
    constexpr int WARPS = FINISHERS / 32;
    int first = 4 * (threadIdx.x / 32 - (T::THREADS / 32 - WARPS));
    HeadRows<T> rows(p, place, group * 64 + first, 4 * WARPS);
    mbarrier_wait(shared.left + group, turn % 2);
    rows.finish(shared.results + (group * 64 + first) * T::APART, (64 - first + 4 * WARPS - 1) / (4 * WARPS));
}

// By a warp that multiplies: the 16 rows that it has left.
template <class T>
__device__ __forceinline__ void finish_own(const HeadProduct& p, const Shared<T>& shared, Place place) {
    int first = threadIdx.x / 32 * 16;
    HeadRows<T> rows(p, place, first, 4);
    rows.finish(shared.results + first * T::APART, 4);
}

PRODUCT(heads_large_m_128, HeadProduct, HEADS, 2, 3, 256)
