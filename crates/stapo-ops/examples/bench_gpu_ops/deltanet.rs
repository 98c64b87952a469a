//! Gated DeltaNet.

use super::{compute, line, time_batches};
use stapo_ops::{Device, OutOfMemory, deltanet};

/// Gated DeltaNet from input to output and back, as torch_deltanet.py measures it: heads of a 2B hybrid and of Qwen3.5-9B.
pub fn all(device: &Device) -> Result<(), OutOfMemory> {
    for (value, sequences, length) in [(16, 4, 2048), (16, 1, 16384), (32, 4, 2048), (32, 1, 16384)] {
        let heads = deltanet::Heads { key: 16, value, key_dim: 128, value_dim: 128 };
        let tokens = sequences * length;
        let d = deltanet::Dims { tokens, sequences, heads, kernel: 4, eps: 1e-6 };
        let conv = compute(device, heads.conv_width() * 4)?;
        let [a_log, dt_bias, norm] =
            [compute(device, value)?, compute(device, value)?, compute(device, 128)?];
        let parameters = deltanet::Parameters {
            conv: conv.view(),
            a_log: a_log.view(),
            dt_bias: dt_bias.view(),
            norm: norm.view(),
        };
        let raw = compute(device, tokens * heads.input_width())?;
        let mut mixed = compute(device, raw.len())?;
        let mut inv_norms = device.zeros(tokens * heads.n_norms())?;
        let mut out = compute(device, tokens * heads.value_width())?;
        let mut offsets = device.zeros(sequences + 1)?;
        let ends: Vec<u32> = (0..=sequences).map(|s| (s * length) as u32).collect();
        offsets.view_mut().write(&ends);
        let name = format!("deltanet {value} heads, {sequences} x {length}");
        let bytes = 2e-9 * (raw.len() + out.len()) as f64;
        let forward = time_batches(device, || {
            let to = deltanet::Out {
                mixed: mixed.view_mut(),
                inv_norms: inv_norms.view_mut(),
                out: out.view_mut(),
            };
            let rows = deltanet::Sequences { offsets: offsets.view(), carried: None };
            deltanet::forward(device, d, parameters, raw.view(), rows, to);
        });
        line(&format!("{name}, forward"), forward, bytes, "GB/s");
        let d_out = compute(device, out.len())?;
        let [mut d_mixed, mut d_raw] = [compute(device, raw.len())?, compute(device, raw.len())?];
        let mut d_conv = device.zeros(conv.len())?;
        let [mut d_a_log, mut d_dt_bias] = [device.zeros(value)?, device.zeros(value)?];
        let mut d_norm = device.zeros(128)?;
        let backward = time_batches(device, || {
            let saved = deltanet::Saved { raw: raw.view(), mixed: mixed.view(), inv_norms: inv_norms.view() };
            let sums = deltanet::ParameterSums {
                d_conv: d_conv.view_mut(),
                d_a_log: d_a_log.view_mut(),
                d_dt_bias: d_dt_bias.view_mut(),
                d_norm: d_norm.view_mut(),
            };
            let to = (d_mixed.view_mut(), d_raw.view_mut());
            deltanet::backward(device, d, (parameters, saved), offsets.view(), d_out.view(), to, Some(sums));
        });
        line(&format!("{name}, backward"), backward, 2.0 * bytes, "GB/s");
    }
    Ok(())
}
