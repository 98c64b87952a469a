use super::{Form, Stored};
use crate::testing::device;

#[test]
fn a_buffer_starts_at_zero_and_holds_what_is_written() {
    let device = device();
    let mut buffer = device.zeros::<u32>(5).unwrap();
    assert_eq!(buffer.view().to_vec(), [0; 5]);
    buffer.range_mut(1..3).write(&[7, 8]);
    buffer.range_mut(4..5).fill(9);
    assert_eq!(buffer.view().to_vec(), [0, 7, 8, 0, 9]);
    let mut two = [0; 2];
    buffer.range(1..3).read(&mut two);
    assert_eq!(two, [7, 8]);
    assert_eq!(device.zeros::<f32>(0).unwrap().len(), 0);
}

#[test]
fn parts_of_an_arena_are_read_and_written_side_by_side() {
    let device = device();
    let mut arena = device.upload(&[1f32, 2.0, 3.0, 4.0]).unwrap();
    let [from, mut to] = arena.disjoint_mut([2..4, 0..2]);
    to.copy_from(from.into_view());
    assert_eq!(arena.view().to_vec(), [3.0, 4.0, 3.0, 4.0]);
}

#[test]
#[should_panic(expected = "disjoint_mut")]
fn overlapping_parts_are_refused() {
    let mut arena = device().zeros::<f32>(4).unwrap();
    let _ = arena.disjoint_mut([0..3, 2..4]);
}

#[test]
fn memory_that_cannot_be_had_is_an_error_not_a_crash() {
    let error = device().zeros::<f32>(usize::MAX / 2).unwrap_err();
    let message = error.to_string();
    assert!(
        message.starts_with("out of memory: ")
            && message.contains(" MiB could not be allocated on the host\nhint: "),
        "{message}"
    );
    assert!(device().zeros::<f64>(1 << 58).is_err());
}

#[test]
fn views_of_host_memory_start_on_a_cache_line() {
    let buffer = device().zeros::<f32>(100).unwrap();
    assert_eq!(buffer.view().host().as_ptr().align_offset(64), 0);
}

#[test]
fn a_stored_form_holds_the_elements_and_gives_them_back() {
    let device = device();
    let mut buffer = device.upload(&[1.5f32, -0.0, 3e-40, f32::MAX]).unwrap();
    let stored = buffer.view().read_stored();
    assert_eq!((stored.form, stored.len(), stored.scales.len()), (Form::F32, 4, 0));
    assert_eq!(stored.to_f32(), buffer.view().to_vec());
    let bf16 = Stored { form: Form::Bf16, bytes: vec![0x80, 0x3f, 0x00, 0xc0], scales: vec![] };
    buffer.range_mut(1..3).write_stored(&bf16);
    assert_eq!(buffer.view().to_vec(), [1.5, 1.0, -2.0, f32::MAX]);
    buffer.view_mut().write_stored(&stored);
    assert_eq!(buffer.view().to_vec()[1].to_bits(), (-0.0f32).to_bits());
}

#[test]
fn moments_of_eight_bits_are_decoded_as_the_gpu_decodes_them() {
    let first = Stored { form: Form::First8, bytes: vec![127, 0x81, 64, 0], scales: vec![2.0] };
    let x = 64.0f32 / 127.0;
    assert_eq!(first.to_f32(), [2.0, -2.0, x * x * 2.0, 0.0]);
    let second = Stored { form: Form::Second8, bytes: vec![0; 257], scales: vec![1.0, 3.0] };
    let mut second = Stored { bytes: [&second.bytes[..256], &[255]].concat(), ..second };
    assert_eq!(second.to_f32()[256], 3.0);
    assert_eq!((second.form.n_scales(257), second.first_non_finite()), (2, None));
    second.scales[1] = f32::NAN;
    assert_eq!(second.first_non_finite(), Some(256));
}

#[test]
fn an_element_that_is_not_finite_is_found_in_every_form() {
    let bytes = |x: f32| x.to_bits().to_le_bytes().to_vec();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let f32s = Stored { form: Form::F32, bytes: [bytes(1.0), bytes(bad)].concat(), scales: vec![] };
        assert_eq!(f32s.first_non_finite(), Some(1));
        let halves = [&bytes(f32::MAX)[2..], &bytes(1.0)[2..], &bytes(bad)[2..]].concat();
        // The upper half of the largest f32 is the largest bf16.
        let bf16 = Stored { form: Form::Bf16, bytes: halves, scales: vec![] };
        assert_eq!(bf16.first_non_finite(), Some(2));
    }
}
