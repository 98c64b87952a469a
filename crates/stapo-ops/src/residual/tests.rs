use crate::testing::*;

#[test]
fn add_is_elementwise_on_all_devices() {
    let (x, delta) = (values::<f32>(1, 40_001), values::<f32>(2, 40_001));
    assert_same_on_all_devices(|device| {
        let (mut sum, delta_on) = (upload(device, &x), upload(device, &delta));
        super::add(device, sum.view_mut(), delta_on.view());
        let sum = sum.view().to_vec();
        assert!(sum.iter().zip(x.iter().zip(&delta)).all(|(sum, (x, d))| *sum == x + d));
        vec![sum]
    });
}
