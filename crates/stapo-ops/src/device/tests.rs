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
fn a_device_is_read_as_it_is_written() {
    for text in ["cpu", "cuda", "cuda:3"] {
        assert_eq!(text.parse::<DeviceName>().unwrap().to_string(), text);
    }
    assert_eq!("cuda:0".parse::<DeviceName>().unwrap(), "cuda".parse().unwrap());
    for text in ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1", ""] {
        assert!(text.parse::<DeviceName>().unwrap_err().to_string().contains("cuda:N"), "{text}");
    }
}
