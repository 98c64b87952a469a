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
    assert!(error.to_string().starts_with("out of memory: "), "{error}");
    assert!(device().zeros::<f64>(1 << 58).is_err());
}

#[test]
fn views_of_host_memory_start_on_a_cache_line() {
    let buffer = device().zeros::<f32>(100).unwrap();
    assert_eq!(buffer.view().host().as_ptr().align_offset(64), 0);
}
