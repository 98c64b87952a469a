use super::*;

fn parse(simd: Option<&str>, threads: Option<&str>) -> Result<CpuOptions, OptionError> {
    CpuOptions::parse(simd.map(str::to_owned), threads.map(str::to_owned))
}

#[test]
fn options_follow_the_environment() {
    assert_eq!(parse(None, None), Ok(CpuOptions::default()));
    assert_eq!(parse(Some("scalar"), Some("3")), Ok(CpuOptions { threads: 3, simd: Simd::Scalar }));
}

#[test]
fn options_that_cannot_be_followed_are_refused_by_name() {
    for threads in ["0", "-1", "two", "", "1025"] {
        let error = parse(None, Some(threads)).unwrap_err().to_string();
        assert!(error.starts_with("environment variable STAPO_THREADS"), "{error}");
    }
    let error = parse(Some("best"), None).unwrap_err().to_string();
    assert!(error.starts_with("environment variable STAPO_SIMD: simd level \"best\" is unknown"), "{error}");
}

#[test]
fn rows_are_covered_once_whatever_the_threads() {
    for threads in [1, 2, 7] {
        let device = Device::cpu(CpuOptions { threads, simd: Simd::Scalar });
        for (rows, cost) in [(0, 1), (1, 1 << 20), (5, 1 << 20), (1000, 1), (1000, 1000)] {
            let mut seen = vec![0u32; rows];
            let shared = Shared::new(&mut seen);
            device.as_cpu().rows(rows, cost, |range| {
                // SAFETY: ranges are disjoint; the assertion below would show it if they were not.
                unsafe { shared.range(range) }.iter_mut().for_each(|n| *n += 1);
            });
            assert!(seen.iter().all(|n| *n == 1), "{rows} rows of {cost} on {threads} threads");
        }
    }
}

#[test]
fn scratch_is_aligned_and_nests() {
    with_scratch(100, |a: &mut [f32]| {
        a.fill(1.0);
        with_scratch(50, |b: &mut [f32]| b.fill(2.0));
        assert_eq!(a.as_ptr().align_offset(64), 0);
        assert!(a.iter().all(|x| *x == 1.0));
    });
}

#[test]
fn a_device_is_read_as_it_is_written() {
    for text in ["cpu", "cuda", "cuda:3"] {
        assert_eq!(text.parse::<DeviceName>().unwrap().to_string(), text);
    }
    assert_eq!("cuda:0".parse::<DeviceName>().unwrap(), "cuda".parse().unwrap());
    for text in ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1", ""] {
        assert!(text.parse::<DeviceName>().unwrap_err().to_string().contains("cuda:N"), "{text}");
    }
}
