use crate::testing::*;

#[test]
fn add_is_elementwise_on_all_devices() {
    let (x, addend) = (values::<f32>(1, 40_001), values::<f32>(2, 40_001));
    assert_same_on_all_devices(|device| {
        let (mut sum, addend_on) = (upload(device, &x), upload(device, &addend));
        super::add(device, sum.view_mut(), addend_on.view());
        let sum = sum.view().to_vec();
        assert!(sum.iter().zip(x.iter().zip(&addend)).all(|(sum, (x, d))| *sum == x + d));
        vec![sum]
    });
}
