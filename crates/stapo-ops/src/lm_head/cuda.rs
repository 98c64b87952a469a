use std::sync::Arc;

use super::{Alternatives, Dims, HeadGrads, HeadScores, LogitRule, ScoreGrads};
use crate::cuda::kernels::{ELEMENTWISE, LM_HEAD};
use crate::cuda::{
    Cuda, ElementType, MULTIPROCESSORS, MatrixProduct, Memory, SPLIT_K_BYTES, Slice, StridedBatch,
};
use crate::{Float, Weight, Write, matmul};

/// The most rows of a chunk: each chunk reads and writes the whole gradient of the head.
const MAX_ROWS: usize = 2048;

/// The most bytes of a chunk's logits: a vocabulary of 262k takes about as much memory as one of 152k with [`MAX_ROWS`] does.
const MAX_BYTES: usize = 5 << 28;

/// Rows and columns of a tile of the products that cuBLASLt chooses for a head.
const TILE: [usize; 2] = [128, 256];

/// The most parts of the vocabulary in the gradient of the rows, and the fewest tokens of a part.
const MAX_PARTS: usize = 8;
const PART_TOKENS: usize = 2048;

/// Parts of the vocabulary begin at multiples of this many tokens.
const PART_STEP: usize = 64;

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

/// The most rows of logits that are held at once. Plans of memory count as many.
pub(crate) fn max_rows(vocab: usize) -> usize {
    let rows = MAX_BYTES / (ElementType::F32.n_bytes() * row_pitch(vocab).max(1));
    (rows / TILE[0] * TILE[0]).clamp(TILE[0], MAX_ROWS)
}

/// Rows of logits that a chunk holds. Chunks are as even as multiples of 8 allow: products of a last chunk with few rows would leave
/// most multiprocessors without work.
pub(crate) fn chunk_rows(tokens: usize, vocab: usize) -> usize {
    let n_chunks = tokens.div_ceil(max_rows(vocab)).max(1);
    tokens.div_ceil(n_chunks).next_multiple_of(8).min(tokens)
}

/// Parts of the vocabulary that the gradient of `n` rows is summed in. This product is as deep as the vocabulary and has few tiles: one
/// chain for each element would leave multiprocessors without work. Chosen is the smallest number of parts whose tiles fill nine tenths
/// of the multiprocessors' rounds, because the partial sums of each part are written and read; if none does, the one that fills most.
fn vocabulary_parts(n: usize, width: usize, vocab: usize, kind: ElementType) -> usize {
    if kind != ElementType::Bf16 || !width.is_multiple_of(8) {
        return 1;
    }
    let tiles = n.div_ceil(TILE[0]) * width.div_ceil(TILE[1]);
    let fits = SPLIT_K_BYTES / (ElementType::F32.n_bytes() * n * width);
    let most = MAX_PARTS.min(vocab / PART_TOKENS).min(fits).max(1);
    // Tiles that as many rounds have place for.
    let places = |parts: usize| (parts * tiles).next_multiple_of(MULTIPROCESSORS);
    let fullest = |best: usize, parts: usize| {
        let is_fuller = parts * places(best) > best * places(parts);
        if is_fuller { parts } else { best }
    };
    let is_full = |parts: &usize| 10 * parts * tiles >= 9 * places(*parts);
    (1..=most).find(is_full).unwrap_or_else(|| (1..=most).fold(1, fullest))
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
    let n_logits = chunk_rows(dims.tokens, vocab) * row_pitch(vocab);
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
    rows_gradient(cuda, (d_logits, pitch), (weight, vocab), d_hidden.part(start * width, n * width));
    d_logits
}

/// `to [n, width] = d_logits weight`, summed over parts of the vocabulary: each part is one chain, and what is left over continues the
/// first part's. Rows of `d_logits` are `pitch` elements apart.
fn rows_gradient(
    cuda: &Arc<Cuda>,
    (d_logits, pitch): (Slice, usize),
    (weight, vocab): (Slice, usize),
    to: Slice,
) {
    let n = d_logits.len / pitch;
    let dims = matmul::Dims { tokens: n, inputs: to.len / n, outputs: vocab };
    let (aligned, stride) = (n_aligned(vocab, weight.kind), weight.len / vocab);
    let n_parts = vocabulary_parts(n, dims.inputs, vocab, weight.kind);
    let part = if n_parts > 1 { aligned / n_parts / PART_STEP * PART_STEP } else { aligned };
    let sums = if n_parts > 1 { cuda.split_k_workspace(n_parts * to.len) } else { to };
    let product = |write, to| {
        let whole = matmul::cuda::input_gradient(dims, d_logits, weight, write, to);
        whole.with_stride(0, stride).with_stride(1, pitch)
    };
    let batch = StridedBatch { n: n_parts, apart: [part * stride, part, to.len] };
    let batch = (n_parts > 1).then_some(batch);
    cuda.product(&MatrixProduct { k: part, batch, ..product(Write::Set, sums) });
    for (from, end) in [(n_parts * part, aligned), (aligned, vocab)] {
        if from < end {
            let rest = product(Write::Add, sums.part(0, to.len));
            cuda.product(&MatrixProduct { k: end - from, ..rest.with_starts([from * stride, from, 0]) });
        }
    }
    if n_parts > 1 {
        let launch = cuda.kernel(&ELEMENTWISE, "sum_of_parts_bf16").arg(sums).arg(to);
        launch.arg(to.len).arg(n_parts).run([to.len.div_ceil(8 * 256), 1], 256, 0);
    }
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
    let (at_once, pitch) = (chunk_rows(dims.tokens, vocab), row_pitch(vocab));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_large_vocabularies_have_fewer_rows() {
        let bytes = |vocab: usize| 4 * max_rows(vocab) * vocab;
        assert_eq!([32_000, 151_936].map(max_rows), [2048; 2]);
        assert_eq!([248_320, 262_144, 262_208].map(max_rows), [1280, 1280, 1152]);
        assert!([248_320, 262_144, 262_208].into_iter().all(|vocab| bytes(vocab) <= 5 << 28));
        // A tile of rows at least, whatever the vocabulary.
        assert_eq!(max_rows(1 << 26), 128);
        assert_eq!(max_rows(0), 2048);
    }

    #[test]
    fn chunks_are_even_and_within_the_cap() {
        assert_eq!(chunk_rows(16_384, 151_936), 2048);
        assert_eq!(chunk_rows(16_384, 262_208), 1096);
        assert_eq!([0, 5, 2049].map(|tokens| chunk_rows(tokens, 151_936)), [0, 5, 1032]);
    }

    #[test]
    fn parts_fill_multiprocessors_as_well_as_they_can() {
        let parts = |n, width, vocab| vocabulary_parts(n, width, vocab, ElementType::Bf16);
        // 128 tiles on 132 multiprocessors.
        assert_eq!(parts(2048, 2048, 151_936), 1);
        // 80 tiles: 240 in two rounds.
        assert_eq!(parts(1264, 2048, 248_320), 3);
        // 90 tiles: 360 in three rounds.
        assert_eq!(parts(1096, 2560, 262_208), 4);
        // 160 tiles: 480 in four rounds.
        assert_eq!(parts(2048, 2560, 151_936), 3);
        // 64 tiles: 128 in one round.
        assert_eq!(parts(2048, 896, 151_936), 2);
        // 28 tiles: no number of parts fills nine tenths; four and eight fill most.
        assert_eq!(parts(192, 3584, 151_936), 4);
        // One tile: as many parts as there may be, each of 2,048 tokens at least.
        assert_eq!(parts(24, 64, 151_936), 8);
        assert_eq!(parts(24, 64, 3 * 2048), 3);
        assert_eq!(parts(24, 64, 2047), 1);
        // Partial sums beyond the workspace.
        assert_eq!(parts(2048, 8192 + 2048, 151_936), 1);
        assert_eq!(parts(24, 68, 151_936), 1);
        assert_eq!(vocabulary_parts(24, 64, 151_936, ElementType::F32), 1);
    }
}
