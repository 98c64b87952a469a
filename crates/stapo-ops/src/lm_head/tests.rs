use super::*;
use crate::Buffer;
use crate::testing::*;
use std::collections::BTreeSet;

#[derive(Clone, Copy)]
struct Case {
    tokens: usize,
    width: usize,
    vocab: usize,
    temperature: f64,
    rule: LogitRule,
    /// Tokens that are kept for each row; 0 for all.
    n_kept: usize,
}

const PLAIN: LogitRule = LogitRule { divisor: 1.0, softcap: None };
const CAPPED: LogitRule = LogitRule { divisor: 1.4, softcap: Some(0.9) };

const CASES: [Case; 8] = [
    Case { tokens: 1, width: 1, vocab: 1, temperature: 1.0, rule: PLAIN, n_kept: 0 },
    Case { tokens: 5, width: 33, vocab: 257, temperature: 0.7, rule: PLAIN, n_kept: 0 },
    Case { tokens: 31, width: 16, vocab: 31, temperature: 1.3, rule: PLAIN, n_kept: 0 },
    Case { tokens: 6, width: 19, vocab: 65, temperature: 0.8, rule: CAPPED, n_kept: 0 },
    Case { tokens: 5, width: 19, vocab: 65, temperature: 0.8, rule: PLAIN, n_kept: 7 },
    Case { tokens: 4, width: 6, vocab: 40, temperature: 1.3, rule: CAPPED, n_kept: 40 },
    Case { tokens: 6, width: 19, vocab: 65, temperature: 0.8, rule: CAPPED, n_kept: 3 },
    // More tokens than a chunk holds.
    Case { tokens: 600, width: 7, vocab: 33, temperature: 1.0, rule: PLAIN, n_kept: 0 },
];

impl Case {
    fn dims(self) -> Dims {
        Dims { tokens: self.tokens, temperature: self.temperature, rule: self.rule }
    }

    fn inputs<T: Float>(self) -> (Vec<T>, Vec<T>, Vec<u32>) {
        let (hidden, weight) = (values(1, self.tokens * self.width), values(2, self.vocab * self.width));
        (hidden, weight, ids(3, self.tokens, self.vocab))
    }

    /// The kept tokens of each row, in ascending order: the target and others.
    fn kept(self) -> Vec<Vec<u32>> {
        let targets = ids(3, self.tokens, self.vocab);
        let row = |(t, target): (usize, &u32)| {
            let others = (1..=t % 3 + 1).map(|i| (target + i as u32 * 17) % self.vocab as u32);
            let all: BTreeSet<u32> = others.chain([*target]).collect();
            let rest = (0..self.vocab as u32).filter(|id| !all.contains(id));
            let n_rest = self.n_kept.saturating_sub(all.len() + t % 2);
            let row: BTreeSet<u32> = all.iter().copied().chain(rest.take(n_rest)).collect();
            row.into_iter().collect()
        };
        targets.iter().enumerate().map(row).collect()
    }

    /// [`Case::kept`] as the op takes it.
    fn kept_ids(self, device: &Device) -> (usize, Buffer<u32>) {
        let kept = self.kept();
        let n = kept.iter().map(Vec::len).max().unwrap_or(0);
        let padded = kept.into_iter().flat_map(|mut row| {
            row.resize(n, u32::MAX);
            row
        });
        (n, upload(device, &padded.collect::<Vec<u32>>()))
    }

    /// logp, entropy, collision, lse.
    fn forward<T: Float>(self, device: &Device, hidden: &[T], w: &[T]) -> Tensors<T> {
        let tokens = hidden.len() / self.width;
        let hidden = upload(device, hidden);
        let w = weight(device, self.vocab, self.width, w);
        let targets = upload(device, &ids(3, self.tokens, self.vocab)[..tokens]);
        let [mut logp, mut entropy, mut collision, mut lse] = [(); 4].map(|()| device.zeros(tokens).unwrap());
        let scores = HeadScores {
            logp: logp.view_mut(),
            entropy: entropy.view_mut(),
            collision: collision.view_mut(),
            lse: lse.view_mut(),
            slopes: None,
        };
        let dims = Dims { tokens, ..self.dims() };
        let (n, ids) = self.kept_ids(device);
        let kept = (self.n_kept > 0).then(|| Kept { n, ids: ids.range(0..tokens * n) });
        forward(device, dims, hidden.view(), &w, Targets { ids: targets.view(), kept }, scores, None);
        [logp, entropy, collision, lse].map(|x| x.view().to_vec()).to_vec()
    }

    /// d_hidden, and `before` + d_weight.
    fn backward<T: Float>(
        self,
        device: &Device,
        hidden: &[T],
        w: &[T],
        d: [&[T]; 2],
        before: &[T],
    ) -> Tensors<T> {
        let forward = self.forward(device, hidden, w);
        let [entropy, lse, d_logp, d_entropy] =
            [&forward[1], &forward[3], d[0], d[1]].map(|x| upload(device, x));
        let targets = upload(device, &ids(3, self.tokens, self.vocab));
        let hidden = upload(device, hidden);
        let w = weight(device, self.vocab, self.width, w);
        let mut d_hidden = device.zeros(hidden.len()).unwrap();
        let mut d_weight = upload(device, before);
        let (n, ids) = self.kept_ids(device);
        let kept = (self.n_kept > 0).then(|| Kept { n, ids: ids.view() });
        let grads = ScoreGrads {
            targets: Targets { ids: targets.view(), kept },
            lse: lse.view(),
            entropy: entropy.view(),
            d_logp: d_logp.view(),
            d_entropy: d_entropy.view(),
        };
        let to =
            HeadGrads { d_hidden: d_hidden.view_mut(), d_weight: Some((d_weight.view_mut(), Write::Add)) };
        backward(device, self.dims(), hidden.view(), &w, grads, LastLogits::default(), to);
        vec![d_hidden.view().to_vec(), d_weight.view().to_vec()]
    }

    /// The numbers of forward, and d_hidden of a frozen head from its slopes.
    fn frozen<T: Float>(self, device: &Device, hidden: &[T], w: &[T], d_logp: &[T]) -> Tensors<T> {
        let w = weight(device, self.vocab, self.width, w);
        let (hidden, d_logp) = (upload(device, hidden), upload(device, d_logp));
        let targets = upload(device, &ids(3, self.tokens, self.vocab));
        let [mut logp, mut entropy, mut collision, mut lse] =
            [(); 4].map(|()| device.zeros(self.tokens).unwrap());
        let mut slopes = device.zeros(hidden.len()).unwrap();
        let scores = HeadScores {
            logp: logp.view_mut(),
            entropy: entropy.view_mut(),
            collision: collision.view_mut(),
            lse: lse.view_mut(),
            slopes: Some(slopes.view_mut()),
        };
        let (n, ids) = self.kept_ids(device);
        let kept = (self.n_kept > 0).then(|| Kept { n, ids: ids.view() });
        forward(device, self.dims(), hidden.view(), &w, Targets { ids: targets.view(), kept }, scores, None);
        backward_frozen(device, d_logp.view(), slopes.view_mut());
        [logp, entropy, collision, lse, slopes].map(|x| x.view().to_vec()).to_vec()
    }

    fn all<T: Float>(self, device: &Device) -> Tensors<T> {
        let (hidden, w, _) = self.inputs();
        let mut all = self.forward(device, &hidden, &w);
        let d: Tensors<T> = vec![values(5, self.tokens), values(6, self.tokens)];
        all.extend(self.backward(device, &hidden, &w, [&d[0], &d[1]], &values(7, w.len())));
        all.extend(self.frozen(device, &hidden, &w, &d[0]));
        all
    }
}

#[test]
fn numbers_are_those_of_the_softmax() {
    for case in CASES {
        let (hidden, w, targets) = case.inputs::<f64>();
        let got = case.forward(&device(), &hidden, &w);
        for t in 0..case.tokens {
            let logits = w.chunks(case.width).map(|w| {
                let product: f64 = w.iter().zip(&hidden[t * case.width..]).map(|(w, h)| w * h).sum();
                let divided = product / case.rule.divisor;
                case.rule.softcap.map_or(divided, |cap| cap * (divided / cap).tanh()) / case.temperature
            });
            let is_kept = |id: usize| case.n_kept == 0 || case.kept()[t].contains(&(id as u32));
            let e: Vec<f64> =
                logits.enumerate().map(|(id, x)| if is_kept(id) { x.exp() } else { 0.0 }).collect();
            let sum: f64 = e.iter().sum();
            let logp = (e[targets[t] as usize] / sum).ln();
            let entropy: f64 = e.iter().filter(|e| **e > 0.0).map(|e| -e / sum * (e / sum).ln()).sum();
            let collision: f64 = e.iter().map(|e| (e / sum).powi(2)).sum();
            for (got, expected) in got.iter().zip([logp, entropy, collision, sum.ln()]) {
                assert!((got[t] - expected).abs() < 1e-9, "token {t}: {} {expected}", got[t]);
            }
        }
    }
}

#[test]
fn gradients_are_finite_differences() {
    for case in [CASES[1], Case { tokens: 9, ..CASES[2] }, CASES[3]] {
        let device = device();
        let (hidden, w, _) = case.inputs::<f64>();
        let outputs = vec![vec![0.0; case.tokens]; 2];
        let d = cotangents(&outputs);
        let gradients = case.backward(&device, &hidden, &w, [&d[0], &d[1]], &vec![0.0; w.len()]);
        let loss = |x: &Tensors<f64>| project(&case.forward(&device, &x[0], &x[1])[..2]);
        assert_gradients(&vec![hidden, w], &gradients, loss);
    }
}

#[test]
fn slopes_change_no_number_and_give_the_gradient_of_a_frozen_head() {
    for case in CASES {
        let device = device();
        let (hidden, w, _) = case.inputs::<f64>();
        let d_logp: Vec<f64> = values(5, case.tokens);
        let frozen = case.frozen(&device, &hidden, &w, &d_logp);
        for (with, without) in frozen.iter().zip(case.forward(&device, &hidden, &w)) {
            assert_eq!(*with, without);
        }
        let zeros = vec![0.0; case.tokens];
        let trained = case.backward(&device, &hidden, &w, [&d_logp, &zeros], &vec![0.0; w.len()]);
        assert!(frozen[4].iter().zip(&trained[0]).all(|(a, b)| (a - b).abs() < 1e-13));
    }
}

#[test]
fn all_devices_agree_bitwise_and_stay_close_to_double() {
    for case in CASES {
        assert_same_on_all_devices(|device| case.all(device));
        assert_close(&case.all(&device()), &case.all(&device()), 3e-5);
    }
}

#[test]
fn tokens_do_not_depend_on_the_batch_nor_the_weight_gradient_on_chunks() {
    let case = CASES[3];
    let device = device();
    let (hidden, w, _) = case.inputs::<f32>();
    let batch = case.forward(&device, &hidden, &w);
    let few = case.forward(&device, &hidden[..3 * case.width], &w);
    for (few, batch) in few.iter().zip(&batch) {
        assert_eq!(bits(few), bits(&batch[..3]));
    }
}

#[test]
fn alternatives_are_the_best_tokens_best_first() {
    let case = CASES[1];
    let device = device();
    let n = 5;
    let (hidden, w, _) = case.inputs::<f32>();
    let targets = upload(&device, &ids(3, case.tokens, case.vocab));
    let [mut logp, mut entropy, mut collision, mut lse] =
        [(); 4].map(|()| device.zeros(case.tokens).unwrap());
    let (mut best_ids, mut best_logp) = (device.zeros(5 * n).unwrap(), device.zeros(5 * n).unwrap());
    let scores = HeadScores {
        logp: logp.view_mut(),
        entropy: entropy.view_mut(),
        collision: collision.view_mut(),
        lse: lse.view_mut(),
        slopes: None,
    };
    let best = Alternatives { n, ids: best_ids.view_mut(), logp: best_logp.view_mut() };
    let hidden_on = upload(&device, &hidden);
    let w_on = weight(&device, case.vocab, case.width, &w);
    forward(&device, case.dims(), hidden_on.view(), &w_on, targets.view(), scores, Some(best));
    let (best_ids, best_logp) = (best_ids.view().to_vec(), best_logp.view().to_vec());
    for t in 0..case.tokens {
        let row = &hidden[t * case.width..(t + 1) * case.width];
        let score = |id: u32| {
            let w = &w[id as usize * case.width..][..case.width];
            w.iter().zip(row).fold(0f32, |sum, (w, h)| h.mul_add(*w, sum))
        };
        let mut order: Vec<u32> = (0..case.vocab as u32).collect();
        order.sort_by(|a, b| score(*b).total_cmp(&score(*a)));
        assert_eq!(best_ids[t * n..(t + 1) * n], order[..n]);
        assert!(best_logp[t * n..(t + 1) * n].is_sorted_by(|a, b| a >= b));
        if let Some(place) = order[..n].iter().position(|id| *id == targets.view().to_vec()[t]) {
            assert_eq!(best_logp[t * n + place], logp.view().to_vec()[t]);
        }
    }
}

#[test]
fn alternatives_beyond_the_vocabulary_are_marked_empty() {
    let (mut ids, mut logp) = ([0; 4], [0.0; 4]);
    let stats = row::Stats { top: 2.0, ln_sum: 0.5, entropy: 0.0, collision: 0.0 };
    row::best(&[1.0, 2.0, 2.0], &stats, 1.0, &mut ids, &mut logp);
    assert_eq!(ids, [1, 2, 0, u32::MAX]);
    assert_eq!(logp, [-0.5, -0.5, -1.5, f64::NEG_INFINITY]);
}

/// Numbers of PyTorch 2.15: `log_softmax` of logits that are minus infinity outside the kept tokens, `Categorical.entropy` of
/// the kept ones, and autograd, in f64.
#[test]
fn numbers_and_gradients_over_kept_tokens_are_those_of_pytorch() {
    let device = device();
    let hidden: Vec<f64> = vec![0.5, -1.25, 2.0, 1.5, 0.25, -0.75];
    #[rustfmt::skip]
    let w: Vec<f64> = vec![
        0.5, -0.25, 1.0, -1.0, 0.75, 0.5, 0.25, 1.5, -0.5, 1.25, -0.5, 0.25, -0.75, 0.5, 1.5,
    ];
    let dims = Dims { tokens: 2, temperature: 0.8, rule: PLAIN };
    let [targets, ids] = [&[4, 1][..], &[0, 3, 4, 1, 2, u32::MAX]].map(|x| upload(&device, x));
    let targets = Targets { ids: targets.view(), kept: Some(Kept { n: 3, ids: ids.view() }) };
    let [hidden, d_logp, d_entropy] =
        [hidden, vec![1.5, -0.5], vec![-0.25, 0.75]].map(|x: Vec<f64>| upload(&device, &x));
    let w = weight(&device, 5, 3, &w);
    let [mut logp, mut entropy, mut collision, mut lse] = [(); 4].map(|()| device.zeros::<f64>(2).unwrap());
    let scores = HeadScores {
        logp: logp.view_mut(),
        entropy: entropy.view_mut(),
        collision: collision.view_mut(),
        lse: lse.view_mut(),
        slopes: None,
    };
    forward(&device, dims, hidden.view(), &w, targets, scores, None);
    let [mut d_hidden, mut d_weight] = [6, 15].map(|n| device.zeros::<f64>(n).unwrap());
    let (lse, entropy_of) = (lse.view(), entropy.view());
    let (d_logp, d_entropy) = (d_logp.view(), d_entropy.view());
    let grads = ScoreGrads { targets, lse, entropy: entropy_of, d_logp, d_entropy };
    let to = HeadGrads { d_hidden: d_hidden.view_mut(), d_weight: Some((d_weight.view_mut(), Write::Set)) };
    backward(&device, dims, hidden.view(), &w, grads, LastLogits::default(), to);
    let golden: [&[f64]; 4] = [
        &[-1.322201382488272, -3.5449208709656785],
        &[1.004550498625416, 0.13079515319872195],
        &[
            -1.9889895878807347,
            1.1125843979375858,
            0.977416883431718,
            0.6431841673459724,
            0.3859105004075834,
            -0.5145473338767779,
        ],
        &[
            -0.47235841598887385,
            1.1808960399721846,
            -1.8894336639554954,
            -0.7718210008151668,
            -0.12863683346919447,
            0.3859105004075834,
            0.7718210008151668,
            0.12863683346919447,
            -0.3859105004075834,
            -0.20202338697713743,
            0.5050584674428436,
            -0.8080935479085497,
            0.6743818029660115,
            -1.6859545074150286,
            2.697527211864046,
        ],
    ];
    for (got, expected) in [logp, entropy, d_hidden, d_weight].iter().zip(golden) {
        let got = got.view().to_vec();
        assert_eq!(got.len(), expected.len());
        assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{got:?} {expected:?}");
    }
}
