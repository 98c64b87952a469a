use std::sync::Arc;

use super::{Drawn, Filter, Inputs, SamplingRule};
use crate::Float;
use crate::cuda::kernels::SAMPLING;
use crate::cuda::{Cuda, Fields, Slice};
use crate::lm_head::cuda::{ROW_THREADS, for_chunks};

/// The largest vocabulary whose partial sums fit into shared memory.
const MAX_VOCAB: usize = 1 << 20;

/// Blocks of threads that share a row, as in sampling.cu.
const CLUSTER: usize = 8;
/// The largest vocabulary that they take, as in sampling.cu.
const MAX_CLUSTER_VOCAB: usize = 1 << 18;
/// With more rows, a block for each fills the GPU.
const MAX_CLUSTER_ROWS: usize = 64;

/// Whether a cluster of blocks draws each token, which the rows of a GPU with few of them take less time for.
fn fits_clusters(cuda: &Cuda, n_rows: usize, vocab: usize) -> bool {
    cuda.is_hopper() && n_rows <= MAX_CLUSTER_ROWS && vocab <= MAX_CLUSTER_VOCAB
}

pub(super) fn look_up(cuda: &Cuda, tokens: Slice, ids: Slice, out: Slice) {
    let launch = cuda.kernel(&SAMPLING, "sampling_look_up").arg(tokens).arg(ids).arg(out);
    launch.arg(tokens.len).arg(ids.len).run([tokens.len.div_ceil(256), 1], 256, 0);
}

pub(super) fn forward<T: Float>(
    cuda: &Arc<Cuda>,
    rule: SamplingRule,
    from: Inputs<'_, T>,
    drawn: &Drawn<'_, T>,
    logits: Slice,
) {
    let op = "sampling::forward";
    let vocab = from.head.shape().outputs;
    assert!(vocab <= MAX_VOCAB, "{op}: vocabulary of {vocab}, at most {MAX_VOCAB} on a GPU");
    let (greedy, filter) = match rule {
        SamplingRule::Greedy => (1usize, Filter::NONE),
        SamplingRule::Draw { filter, .. } => (0, filter),
    };
    let ids = drawn.ids.cuda();
    let logp = drawn.logp.cuda().f32(op);
    let entropy = drawn.entropy.cuda().f32(op);
    let (hidden, uniforms) = (from.hidden.cuda(), from.uniforms.cuda());
    let best = drawn.alternatives.as_ref();
    let n_best = best.map_or(0, |best| best.n);
    let is_plain = greedy == 0 && filter == Filter::NONE && n_best == 0;
    for_chunks(cuda, (ids.len, from.rule), hidden, from.head, logits, |start, n, logits| {
        if is_plain && fits_clusters(cuda, n, vocab) {
            let launch =
                cuda.kernel(&SAMPLING, "sampling_draw_cluster").arg(logits).arg(uniforms.part(start, n));
            let launch = launch.arg(ids.part(start, n)).arg(logp.part(start, n)).arg(entropy.part(start, n));
            let launch = launch.arg(vocab).arg((1.0 / rule.temperature()) as f32);
            return launch.run([CLUSTER * n, 1], ROW_THREADS / CLUSTER, 0);
        }
        let launch = cuda.kernel(&SAMPLING, "sampling_draw").arg(logits).arg(uniforms.part(start, n));
        let launch = launch.arg(ids.part(start, n)).arg(logp.part(start, n)).arg(entropy.part(start, n));
        let launch = launch
            .arg(n_best)
            .arg(best.map(|best| best.ids.cuda().part(start * n_best, n * n_best)))
            .arg(best.map(|best| best.logp.cuda().f32(op).part(start * n_best, n * n_best)));
        let top_k = filter.top_k.unwrap_or(vocab).clamp(1, vocab);
        let rule = Fields::default()
            .eight_bytes(filter.top_p)
            .four_bytes((1.0 / rule.temperature()) as f32)
            .four_bytes(filter.min_p as f32)
            .four_bytes(greedy)
            .four_bytes(top_k);
        launch.arg(vocab).fields(&rule).run([n, 1], ROW_THREADS, 0);
    });
}
