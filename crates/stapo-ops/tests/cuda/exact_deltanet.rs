//! The tile of gated DeltaNet on the GPU: a row has the same bits in a full chunk, in a partly filled one and in decode, and the
//! numbers of the recurrence. Without a GPU these tests print that they are skipped, and pass.

use super::parity::{compute, distance, empty, gpu, numbers};
use crate::cuda::Precision;
use crate::cuda::kernels::DELTANET_TILE;
use crate::device::Backend;
use crate::testing::{bits, upload};
use crate::{Buffer, Device};

const CHUNK: usize = 64;

#[derive(Debug, Clone, Copy)]
struct Layout {
    key_heads: usize,
    value_heads: usize,
    dim: usize,
}

const LAYOUTS: [Layout; 4] = [
    Layout { key_heads: 4, value_heads: 4, dim: 128 },
    Layout { key_heads: 4, value_heads: 8, dim: 128 },
    Layout { key_heads: 2, value_heads: 2, dim: 64 },
    Layout { key_heads: 2, value_heads: 4, dim: 64 },
];

/// A chunk: queries and keys of length about 1, gates as models have them.
#[derive(Clone)]
struct Rows {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    log_decay: Vec<f32>,
    beta: Vec<f32>,
}

impl Rows {
    fn new(layout: Layout, seed: u64) -> Self {
        let Layout { key_heads, value_heads, dim } = layout;
        // Neighbouring keys resemble each other, so that the triangular system is far from the identity.
        let scaled = |seed, common: f32| -> Vec<f32> {
            let (base, rows) = (numbers(seed, key_heads * dim), numbers(seed + 1, CHUNK * key_heads * dim));
            let mixed = rows.iter().enumerate().map(|(i, x)| x + common * base[i % base.len()]);
            mixed.map(|x| round(x / ((1.0 + common * common) * dim as f32).sqrt())).collect()
        };
        let gate = |x: f32| 1.0 / (1.0 + (-x).exp());
        let gates = |seed| numbers(seed, CHUNK * value_heads).into_iter().map(gate);
        Rows {
            q: scaled(seed, 0.0),
            k: scaled(seed + 2, 0.7),
            v: numbers(seed + 4, CHUNK * value_heads * dim),
            log_decay: gates(seed + 5).map(|x| -x * x * 2.0).collect(),
            beta: gates(seed + 6).collect(),
        }
    }

    /// The first `n` rows of `self` and the others of `rest`, or zeros.
    fn with_rest(&self, n: usize, rest: Option<&Rows>) -> Rows {
        let join = |of: fn(&Rows) -> &Vec<f32>| {
            let kept = of(self).len() / CHUNK * n;
            let behind = match rest {
                Some(rest) => of(rest)[kept..].to_vec(),
                None => vec![0.0; of(self).len() - kept],
            };
            [&of(self)[..kept], &behind].concat()
        };
        Rows {
            q: join(|r| &r.q),
            k: join(|r| &r.k),
            v: join(|r| &r.v),
            log_decay: join(|r| &r.log_decay),
            beta: join(|r| &r.beta),
        }
    }
}

fn round(x: f32) -> f32 {
    crate::dtype::bf16_to_f32(crate::dtype::f32_to_bf16(x))
}

/// What the tile reads and writes from call to call.
struct Memory {
    state: Buffer<f32>,
    corrected: Buffer<f32>,
    out: Buffer<f32>,
    next: Buffer<f32>,
}

impl Memory {
    fn new(device: &Device, layout: Layout, state: &[f32]) -> Self {
        let n = CHUNK * layout.value_heads * layout.dim;
        let next = upload(device, &vec![f32::NAN; state.len()]);
        Memory { state: upload(device, state), corrected: empty(device, n), out: empty(device, n), next }
    }

    /// Computes the rows `first` to `n` and gives `out` and `corrected`.
    fn run(
        &mut self,
        device: &Device,
        layout: Layout,
        rows: &Rows,
        first: usize,
        n: usize,
    ) -> (Vec<f32>, Vec<f32>) {
        let Backend::Cuda(cuda) = device.backend() else { panic!("the tile runs on a GPU") };
        let Layout { key_heads, value_heads, dim } = layout;
        let [q, k, v] = [&rows.q, &rows.k, &rows.v].map(|x| compute(device, x));
        let [log_decay, beta] = [&rows.log_decay, &rows.beta].map(|x| upload(device, x));
        let launch = cuda.kernel(&DELTANET_TILE, "deltanet_tile").head_dim(dim);
        let launch = launch.arg(q.view().cuda()).arg(k.view().cuda()).arg(v.view().cuda());
        let launch = launch.arg(log_decay.view().cuda()).arg(beta.view().cuda());
        let launch = launch.arg(self.state.view().cuda()).arg(self.corrected.view_mut().cuda());
        let launch = launch.arg(self.out.view_mut().cuda()).arg(self.next.view_mut().cuda());
        // The fields of `Shared` in tile.cu.
        let in_bf16 = (3 * CHUNK + dim) * (dim + 8) + CHUNK * (CHUNK + 8);
        let in_f32 = CHUNK * 16 + 16 * (dim + 4) + 2 * CHUNK;
        launch.arg(key_heads).arg(first).arg(n).run([value_heads, 1], 128, 2 * in_bf16 + 4 * in_f32);
        (self.out.view().to_vec(), self.corrected.view().to_vec())
    }
}

fn skip_unless_hopper() -> Option<Device> {
    let device = gpu(Precision::Bf16)?;
    let Backend::Cuda(cuda) = device.backend() else { return None };
    if !cuda.is_hopper() {
        println!("skipped: the tile is compiled for Hopper only");
        return None;
    }
    Some(device)
}

#[test]
fn a_row_of_the_deltanet_tile_does_not_depend_on_the_rows_behind_it() {
    let Some(device) = &skip_unless_hopper() else { return };
    for layout in LAYOUTS {
        let state = numbers(90, layout.value_heads * layout.dim * layout.dim);
        let (rows, others) = (Rows::new(layout, 10), Rows::new(layout, 40));
        let full = Memory::new(device, layout, &state).run(device, layout, &rows, 0, CHUNK);
        assert!(full.0.iter().chain(&full.1).all(|x| x.is_finite()));
        // Decode: a row at a time, from the rows of k and of the corrected values that were kept.
        let mut decode = Memory::new(device, layout, &state);
        for t in 1..=CHUNK {
            let with_zeros = rows.with_rest(t, None);
            let with_others = rows.with_rest(t, Some(&others));
            let fresh = || Memory::new(device, layout, &state);
            let ways = [
                ("zeros", fresh().run(device, layout, &with_zeros, 0, CHUNK)),
                ("other rows", fresh().run(device, layout, &with_others, 0, CHUNK)),
                ("none", fresh().run(device, layout, &rows, 0, t)),
                ("none, in decode", decode.run(device, layout, &with_zeros, t - 1, t)),
            ];
            let width = layout.value_heads * layout.dim;
            for (what, got) in ways {
                for (name, got, full) in [("out", &got.0, &full.0), ("corrected", &got.1, &full.1)] {
                    let at = (0..t * width).find(|i| got[*i].to_bits() != full[*i].to_bits());
                    assert_eq!(
                        at.map(|i| i / width),
                        None,
                        "{layout:?}: row of {name}, {t} rows before {what}"
                    );
                }
            }
        }
        let mut again = Memory::new(device, layout, &state);
        again.run(device, layout, &rows, 0, CHUNK);
        let next = bits(&again.next.view().to_vec());
        assert!(next == bits(&decode.next.view().to_vec()), "{layout:?}: the state after decode differs");
    }
}

/// The recurrence in f64: `S = exp(g) S + k^T beta (v - exp(g) k S)`, `o = q S`. Outputs and the last state.
fn recurrence(layout: Layout, rows: &Rows, state: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let Layout { key_heads, value_heads, dim } = layout;
    let mut s: Vec<f64> = state.iter().map(|x| f64::from(*x)).collect();
    let mut out = vec![0f32; CHUNK * value_heads * dim];
    for t in 0..CHUNK {
        for head in 0..value_heads {
            let key_at = (t * key_heads + head / (value_heads / key_heads)) * dim;
            let at = t * value_heads + head;
            let (decay, beta) = (f64::from(rows.log_decay[at]).exp(), f64::from(rows.beta[at]));
            let s = &mut s[head * dim * dim..][..dim * dim];
            for x in s.iter_mut() {
                *x *= decay;
            }
            for column in 0..dim {
                let read = |x: &[f32], s: &[f64]| -> f64 {
                    (0..dim).map(|i| f64::from(x[key_at + i]) * s[i * dim + column]).sum()
                };
                let corrected = beta * (f64::from(rows.v[at * dim + column]) - read(&rows.k, s));
                (0..dim).for_each(|i| s[i * dim + column] += f64::from(rows.k[key_at + i]) * corrected);
                out[at * dim + column] = read(&rows.q, s) as f32;
            }
        }
    }
    (out, s.into_iter().map(|x| x as f32).collect())
}

#[test]
fn the_deltanet_tile_has_the_numbers_of_the_recurrence() {
    let Some(device) = &skip_unless_hopper() else { return };
    for layout in LAYOUTS {
        let state = numbers(90, layout.value_heads * layout.dim * layout.dim);
        let rows = Rows::new(layout, 10);
        let mut memory = Memory::new(device, layout, &state);
        let (out, _) = memory.run(device, layout, &rows, 0, CHUNK);
        let expected = recurrence(layout, &rows, &state);
        let (off_out, off_state) =
            (distance(&out, &expected.0), distance(&memory.next.view().to_vec(), &expected.1));
        println!("{layout:?}: outputs off by {off_out:.1e}, the state by {off_state:.1e}");
        assert!(off_out < 1e-2 && off_state < 1e-2, "{layout:?}: {off_out:.1e} {off_state:.1e}");
    }
}
