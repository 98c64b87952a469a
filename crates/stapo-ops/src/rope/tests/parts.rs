//! Norms of whole projections, partial rotations, layers without positions, and `LongRoPE`.

use super::*;

#[derive(Clone, Copy)]
struct Case {
    extent: NormExtent,
    rotary_dim: usize,
}

const CASES: [Case; 3] = [
    Case { extent: NormExtent::Projection, rotary_dim: 10 },
    Case { extent: NormExtent::Projection, rotary_dim: 6 },
    Case { extent: NormExtent::Head, rotary_dim: 4 },
];
const TOKENS: usize = 3;

impl Case {
    fn weight_lens(self) -> [usize; 2] {
        match self.extent {
            NormExtent::Head => [HEADS.dim; 2],
            NormExtent::Projection => [HEADS.query * HEADS.dim, HEADS.kv * HEADS.dim],
        }
    }

    fn table<T: Float>(self, device: &Device) -> Table<T> {
        Table::new(device, &Frequencies { rotary_dim: self.rotary_dim, ..PLAIN }, 50).unwrap()
    }

    /// From raw rows and the two weights to out and inv_rms.
    fn forward<T: Float>(self, device: &Device, inputs: &[Vec<T>]) -> Tensors<T> {
        let d = dims(TOKENS, HEADS);
        let positions = upload(device, &ids(9, TOKENS, 50));
        let [raw, query, key] = [0, 1, 2].map(|i| upload(device, &inputs[i]));
        let mut out = device.zeros(raw.len()).unwrap();
        let mut inv_rms = device.zeros(TOKENS * (HEADS.query + HEADS.kv)).unwrap();
        let norm = self.norm(&query, &key);
        let norm = Some((norm, inv_rms.view_mut()));
        forward(device, d, &self.table(device), positions.view(), norm, raw.view(), out.view_mut());
        vec![out.view().to_vec(), inv_rms.view().to_vec()]
    }

    fn backward<T: Float>(self, device: &Device, inputs: &[Vec<T>], d_out: &[T]) -> Tensors<T> {
        let d = dims(TOKENS, HEADS);
        let positions = upload(device, &ids(9, TOKENS, 50));
        let inv_rms = upload(device, &self.forward(device, inputs)[1]);
        let [raw, query, key] = [0, 1, 2].map(|i| upload(device, &inputs[i]));
        let d_out = upload(device, d_out);
        let mut d_raw = device.zeros(raw.len()).unwrap();
        let [mut d_query, mut d_key] = self.weight_lens().map(|n| device.zeros(n).unwrap());
        let grad = HeadNormGrad {
            norm: self.norm(&query, &key),
            raw: raw.view(),
            inv_rms: inv_rms.view(),
            to: Some(HeadNormSums { d_query_weight: d_query.view_mut(), d_key_weight: d_key.view_mut() }),
        };
        let table = self.table(device);
        backward(device, d, &table, positions.view(), Some(grad), d_out.view(), d_raw.view_mut());
        [d_raw, d_query, d_key].map(|x| x.view().to_vec()).to_vec()
    }

    fn norm<'a, T: Float>(self, query: &'a crate::Buffer<T>, key: &'a crate::Buffer<T>) -> HeadNorm<'a, T> {
        HeadNorm { extent: self.extent, query_weight: query.view(), key_weight: key.view(), eps: 1e-3 }
    }

    fn inputs<T: Float>(self) -> Tensors<T> {
        let [n_query, n_key] = self.weight_lens();
        vec![values(1, TOKENS * HEADS.qkv_width()), values(3, n_query), values(4, n_key)]
    }
}

#[test]
fn gradients_of_every_part_are_finite_differences() {
    for case in CASES {
        let device = device();
        let inputs: Tensors<f64> = case.inputs();
        let d_out = &cotangents(&[vec![0.0; inputs[0].len()]])[0];
        let gradients = case.backward(&device, &inputs, d_out);
        assert_gradients(&inputs, &gradients, |x| project(&case.forward(&device, x)[..1]));
    }
}

#[test]
fn all_devices_agree_bitwise_on_every_part() {
    for case in CASES {
        assert_same_on_all_devices(|device| {
            let inputs: Tensors<f32> = case.inputs();
            let mut all = case.forward(device, &inputs);
            all.extend(case.backward(device, &inputs, &values(2, inputs[0].len())));
            all
        });
    }
}

#[test]
fn a_projection_has_one_mean_and_dimensions_behind_the_rotation_pass_through() {
    let case = CASES[1];
    let inputs: Tensors<f64> = case.inputs();
    let out = case.forward(&device(), &inputs);
    let width = HEADS.query * HEADS.dim;
    let mean = inputs[0][..width].iter().map(|x| x * x).sum::<f64>() / width as f64;
    let inv = 1.0 / (mean + 1e-3).sqrt();
    assert!(out[1][..HEADS.query].iter().all(|x| (x - inv).abs() < 1e-12));
    for (at, x) in inputs[0][..width].iter().enumerate().filter(|(at, _)| at % HEADS.dim >= 6) {
        assert!((out[0][at] - x * inv * inputs[1][at]).abs() < 1e-12);
    }
}

#[test]
fn a_layer_without_positions_leaves_queries_and_keys_as_they_are() {
    let device = device();
    let table = Table::new(&device, &Frequencies { rotary_dim: 0, ..PLAIN }, 50).unwrap();
    let raw = upload(&device, &values::<f32>(1, TOKENS * HEADS.qkv_width()));
    let positions = upload(&device, &ids(9, TOKENS, 50));
    let mut out = device.zeros(raw.len()).unwrap();
    forward(&device, dims(TOKENS, HEADS), &table, positions.view(), None, raw.view(), out.view_mut());
    assert_eq!(out.view().to_vec(), raw.view().to_vec());
}

#[test]
fn longrope_divides_by_the_factors_in_use() {
    let scaling = |used| Scaling::Long {
        short: [1.0, 1.0, 2.0].into(),
        long: [1.0, 4.0, 8.0].into(),
        used,
        original_positions: 8,
        attention_factor: 1.25,
    };
    let frequencies = |used| Frequencies { head_dim: 8, rotary_dim: 6, theta: 64.0, scaling: scaling(used) };
    let close =
        |a: Vec<f64>, b: [f64; 3]| a.len() == 3 && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12);
    assert!(close(frequencies(LongFactors::Short).per_pair(), [1.0, 0.25, 0.03125]));
    assert!(close(frequencies(LongFactors::Long).per_pair(), [1.0, 0.0625, 0.0078125]));
    assert_eq!(frequencies(LongFactors::Long).attention_factor(), 1.25);
}
