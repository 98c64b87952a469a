//! Tests of what several ranks need of a GPU: masters of a part of the weights, a second stream, sums from zero.

use super::parity::gpu;
use crate::cuda::Precision;
use crate::testing::{bits, upload, values};
use crate::{Device, Form, embedding, residual};

/// As bf16 stores it.
fn rounded(device: &Device, exact: &[f32]) -> Vec<f32> {
    let mut stored = device.compute_zeros::<f32>(exact.len()).unwrap();
    stored.view_mut().write(exact);
    stored.view().to_vec()
}

#[test]
fn a_rank_keeps_the_masters_that_it_owns_and_all_rounded_weights() {
    let Some(device) = gpu(Precision::Bf16) else { return };
    let (n, own) = (100_000, 16_384..65_536);
    let (first, second) = (values::<f32>(1, n), values::<f32>(2, n));
    let mut weights = device.weight_zeros::<f32>(n).unwrap();
    weights.view_mut().write(&first);
    weights.keep_masters(own.clone()).unwrap();
    for exact in [&first, &second] {
        if exact == &second {
            weights.view_mut().write(&second);
        }
        let owned = weights.range(own.clone());
        assert_eq!(owned.to_vec(), exact[own.clone()], "exact where owned");
        assert_eq!((owned.form(), owned.read_stored().to_f32()), (Form::F32, exact[own.clone()].to_vec()));
        assert_eq!(weights.range(20_000..20_016).to_vec(), exact[20_000..20_016]);
        assert_eq!(weights.view().to_vec(), rounded(&device, exact), "elsewhere what ops read");
    }
    weights.view_mut().fill(0.0);
    assert!(weights.range(own).to_vec().iter().all(|x| *x == 0.0));
    let mut none = device.weight_zeros::<f32>(64).unwrap();
    none.keep_masters(0..0).unwrap();
    none.view_mut().write(&first[..64]);
    assert_eq!(none.view().to_vec(), rounded(&device, &first[..64]));
    assert_eq!(none.view().form(), Form::F32, "the form of a weight is that of its master, wherever it is");
}

#[test]
fn streams_wait_for_marks_of_each_other() {
    let Some(device) = gpu(Precision::Bf16) else { return };
    let side = device.second_stream();
    let n = 1 << 24;
    let ones = device.upload(&vec![1.0_f32; n]).unwrap();
    let mut sum = device.zeros::<f32>(n).unwrap();
    let begin = device.mark();
    // Each stream adds in turn to the same memory: without the marks, additions would be lost.
    for _ in 0..20 {
        residual::add(&device, sum.view_mut(), ones.view());
        side.wait_for(&device.mark());
        residual::add(&side, sum.view_mut(), ones.view());
        device.wait_for(&side.mark());
    }
    let end = device.mark();
    assert!(sum.view().to_vec().iter().all(|x| *x == 40.0));
    assert!(begin.seconds_until(&end) > 0.0);
}

#[test]
fn the_embedding_sums_a_micro_batch_from_zero() {
    let Some(device) = gpu(Precision::F32) else { return };
    let d = embedding::Dims { tokens: 1500, vocab: 300, width: 136 };
    let ids: Vec<u32> = (0..d.tokens as u32).map(|t| t * t % 211).collect();
    let ids = upload(&device, &ids);
    let d_out = upload(&device, &values::<f32>(1, d.tokens * d.width));
    let before = values::<f32>(2, d.vocab * d.width);
    let mut expected = upload(&device, &before);
    let mut from_zero = device.zeros::<f32>(before.len()).unwrap();
    embedding::backward(&device, d, ids.view(), d_out.view(), from_zero.view_mut());
    residual::add(&device, expected.view_mut(), from_zero.view());
    let mut apart = upload(&device, &vec![f32::NAN; before.len()]);
    let mut table = upload(&device, &before);
    embedding::backward_apart(&device, d, ids.view(), d_out.view(), apart.view_mut(), table.view_mut());
    assert_eq!(bits(&table.view().to_vec()), bits(&expected.view().to_vec()));
}
