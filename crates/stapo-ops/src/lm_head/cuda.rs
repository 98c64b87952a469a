use std::sync::Arc;

use super::{Alternatives, Dims, HeadGrads, HeadScores, LogitRule, ScoreGrads};
use crate::cuda::kernels::LM_HEAD;
use crate::cuda::{Cuda, ElementType, MatrixProduct, Memory, Slice};
use crate::{Float, Weight, Write, matmul};

/// The most rows of a chunk. Each chunk reads and writes the whole gradient of the head, and the gradient of fewer rows has too few
/// tiles for all multiprocessors. Plans of memory count as many rows.
const MAX_ROWS: usize = 2048;

/// Threads that sum over a row. Training and sampling use the same number, because it determines the order of the sums.
pub(crate) const ROW_THREADS: usize = 1024;

/// Elements from one row of logits to the next, as in row.cu: products of rows that begin at multiples of 16 bytes are faster.
pub(crate) fn row_pitch(vocab: usize) -> usize {
    vocab.next_multiple_of(8)
}

/// How many tokens of a vocabulary aligned products take, in bf16. cuBLASLt has no fast kernels for widths that are no multiple of
/// 8, so what is behind the last whole eight is computed apart.
fn n_aligned(vocab: usize, kind: ElementType) -> usize {
    if kind == ElementType::Bf16 && vocab >= 8 { vocab / 8 * 8 } else { vocab }
}

/// Rows of logits that a chunk holds. Chunks are as even as multiples of 8 allow: products of a last chunk with few rows would leave
/// most multiprocessors without work.
pub(crate) fn chunk_rows(tokens: usize) -> usize {
    let n_chunks = tokens.div_ceil(MAX_ROWS).max(1);
    tokens.div_ceil(n_chunks).next_multiple_of(8).min(tokens)
}

/// Computes the logits chunk by chunk and calls `body(first token, number of tokens, logits)` for each. `memory` has
/// room for the f32 logits of a chunk; its length determines the number of rows of a chunk.
pub(crate) fn for_chunks<T: Float>(
    cuda: &Arc<Cuda>,
    (tokens, rule): (usize, LogitRule),
    hidden: Slice,
    weight: &Weight<T>,
    memory: Slice,
    mut body: impl FnMut(usize, usize, Slice),
) {
    if tokens == 0 {
        return;
    }
    let vocab = weight.shape().outputs;
    let rows = memory.f32("logits").len / row_pitch(vocab);
    assert!(rows > 0, "logits: memory for {} of a vocabulary of {vocab}", memory.len);
    for start in (0..tokens).step_by(rows) {
        let n = rows.min(tokens - start);
        body(start, n, logits(cuda, (start, n), rule, hidden, weight, memory));
    }
}

/// Computes the logits of `n` tokens from `start` on, at the beginning of `memory`.
fn logits<T: Float>(
    cuda: &Arc<Cuda>,
    (start, n): (usize, usize),
    rule: LogitRule,
    hidden: Slice,
    weight: &Weight<T>,
    memory: Slice,
) -> Slice {
    let (vocab, width) = (weight.shape().outputs, weight.shape().inputs);
    let dims = matmul::Dims { tokens: n, inputs: width, outputs: vocab };
    let to = memory.part(0, n * row_pitch(vocab));
    let rows = hidden.part(start * width, n * width);
    let weight = weight.view().cuda();
    if row_pitch(vocab) == vocab {
        matmul::cuda::forward(cuda, dims, rows, weight, None, to);
    } else {
        let m = n_aligned(vocab, rows.kind);
        let whole = matmul::cuda::product(dims, rows, weight, to).with_stride(2, row_pitch(vocab));
        cuda.product(&MatrixProduct { m, ..whole });
        if m < vocab {
            let launch =
                cuda.kernel(&LM_HEAD, "lm_head_last_logits").arg(rows).arg(weight).arg(to).arg(width);
            launch.arg(weight.len / vocab).arg(m).arg(vocab).run([n, 1], 32 * (vocab - m), 0);
        }
    }
    if !rule.is_plain() {
        let launch = cuda.kernel(&LM_HEAD, "lm_head_apply_rule").arg(to);
        let launch = launch.arg(rule.softcap.unwrap_or(0.0) as f32).arg((1.0 / rule.divisor) as f32);
        launch.arg(vocab).run([vocab.div_ceil(8 * 256), n], 256, 0);
    }
    to
}

/// Returns the logits of the last chunk, unless slopes are asked for.
pub(super) fn forward<T: Float>(
    cuda: &Arc<Cuda>,
    dims: Dims,
    hidden: Slice,
    weight: &Weight<T>,
    targets: Slice,
    scores: &HeadScores<'_, T>,
    best: Option<&Alternatives<'_, T>>,
) -> Option<Memory> {
    let op = "lm_head::forward";
    let vocab = weight.shape().outputs;
    let numbers = [&scores.logp, &scores.entropy, &scores.collision, &scores.lse].map(|x| x.cuda().f32(op));
    let n_logits = chunk_rows(dims.tokens) * row_pitch(vocab);
    let memory = Memory::scratch(cuda, n_logits, ElementType::F32);
    let slopes = scores.slopes.as_ref().map(|slopes| slopes.cuda());
    for_chunks(cuda, (dims.tokens, dims.rule), hidden, weight, memory.slice(), |start, n, logits| {
        let launch = cuda.kernel(&LM_HEAD, "lm_head_score").arg(logits).arg(targets.part(start, n));
        let launch = numbers.iter().fold(launch, |launch, x| launch.arg(x.part(start, n)));
        let n_best = best.map_or(0, |best| best.n);
        let launch = launch
            .arg(n_best)
            .arg(best.map(|best| best.ids.cuda().part(start * n_best, n * n_best)))
            .arg(best.map(|best| best.logp.cuda().f32(op).part(start * n_best, n * n_best)));
        launch.arg(vocab).arg((1.0 / dims.temperature) as f32).run([n, 1], ROW_THREADS, 0);
        if let Some(slopes) = slopes {
            let [_, entropy, _, lse] = numbers.map(|x| x.part(start, n));
            let numbers = [Some(lse), Some(entropy), None, None];
            backward_chunk(cuda, dims, weight, targets, &numbers, Chunk { start, n, logits }, slopes);
        }
    });
    slopes.is_none().then_some(memory)
}

/// Tokens from `start` on whose logits become gradients.
#[derive(Clone, Copy)]
struct Chunk {
    start: usize,
    n: usize,
    logits: Slice,
}

/// Elements from one row of gradients of logits to the next: they overwrite the f32 logits.
fn gradient_pitch(vocab: usize, kind: ElementType) -> usize {
    row_pitch(vocab) * ElementType::F32.n_bytes() / kind.n_bytes()
}

/// The gradients of the logits, which overwrite these, and of the hidden states, `d_hidden`, of a chunk. `numbers`: lse, entropy,
/// d_logp and d_entropy of the chunk, where an absent d_logp is 1 and an absent d_entropy 0. Returns the gradients of the logits.
fn backward_chunk<T: Float>(
    cuda: &Arc<Cuda>,
    dims: Dims,
    weight: &Weight<T>,
    targets: Slice,
    numbers: &[Option<Slice>; 4],
    Chunk { start, n, logits }: Chunk,
    d_hidden: Slice,
) -> Slice {
    let (vocab, width) = (weight.shape().outputs, weight.shape().inputs);
    let weight = weight.view().cuda();
    let pitch = gradient_pitch(vocab, weight.kind);
    let d_logits = Slice::plain(logits.address, weight.kind, n * pitch);
    let name = format!("lm_head_gradient_{}", d_logits.name());
    let launch = cuda.kernel(&LM_HEAD, &name).arg(logits).arg(targets.part(start, n));
    let launch = numbers.iter().fold(launch, |launch, x| launch.arg(*x));
    let launch = launch.arg(vocab).arg((1.0 / dims.temperature) as f32);
    let launch = launch.arg(dims.rule.softcap.unwrap_or(0.0) as f32).arg((1.0 / dims.rule.divisor) as f32);
    launch.run([n, 1], ROW_THREADS, 0);
    let chunk = matmul::Dims { tokens: n, inputs: width, outputs: vocab };
    let to = d_hidden.part(start * width, n * width);
    let (k, stride) = (n_aligned(vocab, weight.kind), weight.len / vocab);
    let product = |write| {
        let whole = matmul::cuda::input_gradient(chunk, d_logits, weight, write, to);
        whole.with_stride(0, stride).with_stride(1, pitch)
    };
    cuda.product(&MatrixProduct { k, ..product(Write::Set) });
    if k < vocab {
        cuda.product(&MatrixProduct { k: vocab - k, ..product(Write::Add).with_starts([k * stride, k, 0]) });
    }
    d_logits
}

/// Rows times a number each.
pub(super) fn scale_rows(cuda: &Arc<Cuda>, by: Slice, rows: Slice) {
    if rows.len == 0 {
        return;
    }
    let (n, width) = (by.len, rows.len / by.len);
    let name = format!("lm_head_scale_rows_{}", rows.name());
    let launch = cuda.kernel(&LM_HEAD, &name).arg(by.f32("lm_head::backward_frozen")).arg(rows).arg(width);
    launch.run([width.div_ceil(8 * 256), n], 256, 0);
}

/// `last`: the logits of the last chunk, from [`forward`].
pub(super) fn backward<T: Float>(
    cuda: &Arc<Cuda>,
    dims: Dims,
    hidden: Slice,
    weight: &Weight<T>,
    grads: ScoreGrads<'_, T>,
    last: Option<Memory>,
    to: &HeadGrads<'_, T>,
) {
    let op = "lm_head::backward";
    let (vocab, width) = (weight.shape().outputs, weight.shape().inputs);
    let numbers = [grads.lse, grads.entropy, grads.d_logp, grads.d_entropy].map(|x| x.cuda().f32(op));
    let (at_once, pitch) = (chunk_rows(dims.tokens), row_pitch(vocab));
    let mut has_logits = last.is_some();
    let memory = last.unwrap_or_else(|| Memory::scratch(cuda, at_once * pitch, ElementType::F32));
    assert!(memory.slice().len == at_once * pitch, "{op}: logits of another forward");
    let mut d_weight = to.d_weight.as_ref().map(|(d_weight, write)| (d_weight.cuda().f32(op), *write));
    if let Some((d_weight, Write::Set)) = d_weight.filter(|_| dims.tokens == 0) {
        cuda.fill(d_weight, 0.0_f32);
    }
    // The last chunk comes first, because `last` may hold its logits.
    for start in (0..dims.tokens).step_by(at_once.max(1)).rev() {
        let n = at_once.min(dims.tokens - start);
        let logits = if std::mem::take(&mut has_logits) {
            memory.slice().part(0, n * pitch)
        } else {
            logits(cuda, (start, n), dims.rule, hidden, weight, memory.slice())
        };
        let numbers = numbers.map(|x| Some(x.part(start, n)));
        let chunk = Chunk { start, n, logits };
        let targets = grads.targets.ids.cuda();
        let d_logits = backward_chunk(cuda, dims, weight, targets, &numbers, chunk, to.d_hidden.cuda());
        if let Some((d_weight, write)) = &mut d_weight {
            let write = std::mem::replace(write, Write::Add);
            let chunk = matmul::Dims { tokens: n, inputs: width, outputs: vocab };
            let rows = hidden.part(start * width, n * width);
            let product = || {
                let whole = matmul::cuda::weight_gradient(chunk, rows, d_logits, write, *d_weight);
                whole.with_stride(1, gradient_pitch(vocab, hidden.kind))
            };
            let n = n_aligned(vocab, hidden.kind);
            cuda.product(&MatrixProduct { n, ..product() });
            if n < vocab {
                let rest = product().with_starts([0, n, n * width]);
                cuda.product(&MatrixProduct { n: vocab - n, ..rest });
            }
        }
    }
}
