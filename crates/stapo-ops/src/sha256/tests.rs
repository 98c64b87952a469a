use sha2::{Digest as _, Sha256};

use super::{Digest, LEAF, leaves};
use crate::cuda::{CudaOptions, Training};
use crate::testing::{upload, values};
use crate::{Buffer, CpuOptions, Device, Form, Moment, View};

/// The digests by their definition, from what the host reads.
fn defined(view: View<'_, f32>) -> Vec<Digest> {
    let stored = view.read_stored();
    let scales: Vec<u8> = stored.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let mut scales = scales.chunks(4 * LEAF / Form::SCALED);
    let mut digests = Vec::new();
    for leaf in stored.bytes.chunks(LEAF * stored.form.n_bytes()) {
        digests.push(Sha256::digest(leaf).into());
        digests.extend(scales.next().map(|scales| Digest::from(Sha256::digest(scales))));
    }
    digests
}

fn check(device: &Device, buffers: &[Buffer<f32>]) {
    let views = || buffers.iter().map(Buffer::view);
    let expected: Vec<Vec<Digest>> = views().map(defined).collect();
    assert_eq!(leaves(device, views()), expected);
}

/// Lengths with every kind of padding: of less than a block of 64 bytes, with and without room for the length.
const LENGTHS: [usize; 9] = [1, 13, 14, 16, 300, LEAF - 1, LEAF, LEAF + 15, 3 * LEAF + 7];

#[test]
fn leaves_are_hashed_one_by_one_whatever_the_threads() {
    for threads in [1, 3] {
        let device = Device::cpu(CpuOptions { threads, ..CpuOptions::default() });
        let buffers: Vec<_> = LENGTHS.iter().map(|&n| upload(&device, &values(n as u64, n))).collect();
        check(&device, &buffers);
        assert_eq!(leaves(&device, [buffers[0].range(0..0)]), [Vec::<Digest>::new()]);
        let long = buffers[8].view();
        let whole = leaves(&device, [long]);
        assert_eq!(leaves(&device, [long.range(LEAF..long.len())])[0], whole[0][1..]);
    }
}

#[test]
fn a_gpu_gives_the_digests_of_its_stored_bytes() {
    for training in [Training::F32, Training::EightBit] {
        let device = Device::cuda(CudaOptions { training, ..CudaOptions::default() });
        let device = match device {
            Ok(device) => device,
            Err(error) => return println!("skipped: {error}"),
        };
        let mut buffers = Vec::new();
        for n in LENGTHS {
            let x: Vec<f32> = values(n as u64, n);
            for mut buffer in [
                device.weight_zeros(n).unwrap(),
                device.compute_zeros(n).unwrap(),
                device.moment_zeros(n, Moment::First).unwrap(),
                device.moment_zeros(n, Moment::Second).unwrap(),
            ] {
                buffer.view_mut().write(&x);
                buffers.push(buffer);
            }
        }
        check(&device, &buffers);
    }
}
