//! A GPU that fails under way is an error with its remedy, not a crash. In a program of its own: nothing works on that GPU
//! in this process afterwards. Without a GPU it says so and passes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::print_stdout, reason = "a skipped test says why")]

use stapo_model::Device;
use stapo_model::cuda::{CudaOptions, guard, is_failing};
use stapo_ops::embedding;

#[test]
fn a_gpu_lost_in_the_midst_of_work_is_told_with_its_remedy() {
    let device = match Device::cuda(CudaOptions::default()) {
        Ok(device) => device,
        Err(error) => return println!("skipped: {error}"),
    };
    let lost = guard(|| {
        let (ids, table) = (device.upload(&[7u32]).unwrap(), device.compute_zeros::<f32>(3 * 8).unwrap());
        let mut out = device.compute_zeros::<f32>(8).unwrap();
        // A row outside the table stops the kernel, and the GPU with it.
        let dims = embedding::Dims { tokens: 1, vocab: 3, width: 8 };
        embedding::forward(&device, dims, ids.view(), table.view(), out.view_mut());
        out.view().to_vec()
    });
    let text = lost.expect_err("the kernel stops").to_string();
    assert!(text.contains("the GPU's memory is lost") && text.contains("last checkpoint"), "{text}");
    assert!(!is_failing());
    // Whatever is asked of it now fails the same way, and giving memory back does not crash.
    assert!(guard(|| device.synchronize()).is_err());
}
