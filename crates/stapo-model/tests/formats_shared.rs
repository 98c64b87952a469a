//! Comparison with the goldens, for the tests of formats.

use serde_json::Value;
use stapo_model::{Pretrained, Tokenizer};
use std::path::Path;

/// A golden of `tests/goldens/make_formats.py`.
pub fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/formats").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Shape and checksum of every tensor listed.
pub fn check_tensors(model: &Pretrained, expected: &Value) {
    let expected = expected.as_object().unwrap();
    let specs = model.config.tensors();
    assert!(
        expected.keys().all(|name| specs.iter().any(|spec| spec.name == *name)),
        "a tensor is not in the model"
    );
    for spec in specs {
        let Some(golden) = expected.get(&spec.name) else { continue };
        let shape: Vec<usize> = serde_json::from_value(golden["shape"].clone()).unwrap();
        assert_eq!(spec.shape, shape, "{}", spec.name);
        let mut numbers = vec![0.0; spec.n_elements()];
        model.weights.read_f32(&spec.name, &spec.shape, &mut numbers).unwrap();
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(u64::from(crc32(&bytes)), golden["crc32"].as_u64().unwrap(), "{}", spec.name);
    }
}

/// The ids of every text, and the text streamed back.
pub fn check_tokens(tokenizer: &Tokenizer, cases: &Value) {
    for case in cases.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(ids, expected, "{text:?}");
        let mut stream = tokenizer.stream(&[]);
        let mut streamed: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        streamed += &stream.finish().unwrap();
        assert_eq!(streamed, tokenizer.decode(&ids).unwrap(), "{text:?}");
    }
}

pub fn crc32(bytes: &[u8]) -> u32 {
    let table: [u32; 256] = std::array::from_fn(|i| {
        (0..8).fold(i as u32, |value, _| if value & 1 == 1 { value >> 1 ^ 0xedb8_8320 } else { value >> 1 })
    });
    !bytes.iter().fold(!0, |crc, &byte| table[((crc ^ u32::from(byte)) & 255) as usize] ^ crc >> 8)
}
