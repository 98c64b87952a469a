use super::*;
use serde_json::{Map, Value, json};
use std::fs;

/// A safetensors file of this header and these numbers.
fn safetensors_bytes(header: &str, numbers: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(numbers);
    bytes
}

fn open_bytes(bytes: &[u8]) -> Result<Weights> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    fs::write(&path, bytes).unwrap();
    Weights::open(&path)
}

/// A header or a file refused with these words.
fn check_refused(bytes: &[u8], words: &[&str]) {
    let message = open_bytes(bytes).expect_err("accepted").to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

fn check_header_refused(header: &Value, n_bytes: usize, words: &[&str]) {
    check_refused(&safetensors_bytes(&header.to_string(), &vec![0; n_bytes]), words);
}

fn small() -> Vec<u8> {
    let header = json!({
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F16", "shape": [3], "data_offsets": [16, 22]},
        "c": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [22, 26]},
        "none": {"dtype": "F32", "shape": [0, 4], "data_offsets": [26, 26]},
    });
    let mut numbers = Vec::new();
    numbers.extend([1.0f32, -2.5, 3e-9, f32::MAX].iter().flat_map(|x| x.to_le_bytes()));
    numbers.extend([0x3c00u16, 0xc000, 0x0001].iter().flat_map(|x| x.to_le_bytes()));
    numbers.extend([0x3f80u16, 0xc040].iter().flat_map(|x| x.to_le_bytes()));
    safetensors_bytes(&header.to_string(), &numbers)
}

#[test]
fn floats_of_every_type_are_read_exactly() {
    let weights = open_bytes(&small()).unwrap();
    let read = |name: &str, shape: &[usize]| {
        let mut out = vec![0.0; shape.iter().product()];
        weights.read_f32(name, shape, &mut out).unwrap();
        out
    };
    assert_eq!(read("a", &[2, 2]), [1.0, -2.5, 3e-9, f32::MAX]);
    assert_eq!(read("b", &[3]), [1.0, -2.0, 5.960_464_5e-8]);
    assert_eq!(read("c", &[1, 2]), [1.0, -3.0]);
    assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "b", "c", "none"]);
    assert_eq!(weights.encoding("b"), Some(Encoding::F16));
}

#[test]
fn a_wrong_name_or_shape_is_refused_by_name() {
    let weights = open_bytes(&small()).unwrap();
    let message = weights.read_f32("a", &[4], &mut [0.0; 4]).unwrap_err().to_string();
    assert!(message.contains("tensor a has shape [2, 2], expected [4]"), "{message}");
    let message = weights.read_f32("x", &[4], &mut [0.0; 4]).unwrap_err().to_string();
    assert!(message.contains("no tensor x"), "{message}");
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = small();
    for length in 0..whole.len() {
        assert!(open_bytes(&whole[..length]).is_err(), "cut at {length} of {}", whole.len());
    }
    let mut longer = whole;
    longer.push(0);
    check_refused(&longer, &["27 bytes of numbers", "declares 26"]);
}

#[test]
fn a_file_with_any_byte_changed_never_panics() {
    let whole = small();
    for at in 0..whole.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut changed = whole.clone();
            changed[at] ^= flip;
            if let Ok(weights) = open_bytes(&changed) {
                let _ = weights.read_f32("a", &[2, 2], &mut [0.0; 4]);
            }
        }
    }
}

#[test]
fn lying_headers_are_refused_by_tensor() {
    let entry =
        |shape: Value, offsets: Value| json!({"dtype": "F32", "shape": shape, "data_offsets": offsets});
    let one = |entry: Value| json!({"w": entry});
    check_header_refused(&one(entry(json!([2]), json!([0, 12]))), 12, &["tensor w", "does not fill"]);
    check_header_refused(&one(entry(json!([2]), json!([8, 0]))), 8, &["tensor w"]);
    check_header_refused(&one(entry(json!([2]), json!([0]))), 8, &["tensor w", "expected 2"]);
    check_header_refused(&one(entry(json!([-2]), json!([0, 8]))), 8, &["tensor w", "shape"]);
    check_header_refused(&one(entry(json!([u64::MAX, u64::MAX]), json!([0, 8]))), 8, &["tensor w"]);
    check_header_refused(&one(entry(json!([1_u64 << 62]), json!([0, 1_u64 << 63]))), 8, &["w"]);
    check_header_refused(&one(entry(json!([1_u64 << 40]), json!([0, 1_u64 << 42]))), 8, &["declares"]);
    check_header_refused(&one(entry(json!([2]), json!([4, 12]))), 12, &["tensor w", "gap"]);
    check_header_refused(&one(json!([1])), 0, &["tensor w", "dtype"]);
    check_header_refused(
        &one(json!({"dtype": "I64", "shape": [1], "data_offsets": [0, 8]})),
        8,
        &["I64", "F32, F16"],
    );
    let two = json!({"w": entry(json!([2]), json!([0, 8])), "v": entry(json!([2]), json!([4, 12]))});
    check_header_refused(&two, 12, &["tensor v overlaps"]);
    let same = json!({"w": entry(json!([2]), json!([0, 8])), "v": entry(json!([2]), json!([0, 8]))});
    check_header_refused(&same, 8, &["overlaps"]);
}

#[test]
fn broken_headers_are_refused() {
    check_refused(b"", &["too short"]);
    check_refused(&u64::MAX.to_le_bytes(), &["header of 18446744073709551615 bytes"]);
    check_refused(&safetensors_bytes("[1]", b""), &["header", "a list"]);
    check_refused(&safetensors_bytes("{\"a\": 1, \"a\": 2}", b""), &["\"a\" appears twice"]);
    check_refused(&safetensors_bytes("{", b""), &["not JSON"]);
    let mut bytes = 2u64.to_le_bytes().to_vec();
    bytes.extend([0xff, 0xfe]);
    check_refused(&bytes, &["not UTF-8"]);
    let deep = "[".repeat(100_000);
    check_refused(&safetensors_bytes(&deep, b""), &["not JSON"]);
}

/// A folder with an index and two shards holding `a`, `b`, `c`, and `d`.
fn sharded(index: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("1.safetensors"), small()).unwrap();
    let header = json!({"d": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}});
    fs::write(
        folder.path().join("2.safetensors"),
        safetensors_bytes(&header.to_string(), &[0, 0, 0x80, 0x3f]),
    )
    .unwrap();
    fs::write(folder.path().join(safetensors::INDEX), index.to_string()).unwrap();
    folder
}

#[test]
fn shards_are_read_by_their_index() {
    let folder = sharded(&json!({"weight_map": {"a": "1.safetensors", "d": "2.safetensors"}}));
    let weights = Weights::open(folder.path()).unwrap();
    assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "d"]);
    let mut out = [0.0];
    weights.read_f32("d", &[1], &mut out).unwrap();
    assert_eq!(out, [1.0]);
}

#[test]
fn an_index_reaches_no_file_outside_its_folder() {
    for file in ["../1.safetensors", "/etc/passwd", "sub/1.safetensors", "..", ".", "", "a\\b", "c:x", "a\0b"]
    {
        let folder = sharded(&json!({"weight_map": {"a": file}}));
        let message = Weights::open(folder.path()).unwrap_err().to_string();
        assert!(message.contains("same folder"), "{file:?}: {message}");
    }
}

#[test]
fn a_broken_index_is_refused() {
    let cases = [
        (json!({}), "weight_map"),
        (json!({"weight_map": {}}), "names 0 files"),
        (json!({"weight_map": {"a": 1}}), "a is in 1"),
        (json!({"weight_map": {"a": "2.safetensors"}}), "no tensor a"),
        (json!({"weight_map": {"a": "3.safetensors"}}), "3.safetensors"),
    ];
    for (index, word) in cases {
        let folder = sharded(&index);
        let message = Weights::open(folder.path()).unwrap_err().to_string();
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

#[test]
fn a_folder_without_weights_is_refused_with_what_is_read() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("pytorch_model.bin"), b"x").unwrap();
    let message = Weights::open(folder.path()).unwrap_err().to_string();
    assert!(message.contains("no model.safetensors") && message.contains("GGUF"), "{message}");
}

#[test]
fn blocks_decode_to_the_bits_of_the_gguf_package() {
    let text = include_str!("../../tests/data/formats/blocks.json");
    let cases: Map<String, Value> = serde_json::from_str(text).unwrap();
    for encoding in Encoding::ALL {
        let case = &cases[encoding.name()];
        let hex = case["bytes"].as_str().unwrap();
        let bytes: Vec<u8> =
            (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect();
        let bits: Vec<u32> =
            case["bits"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect();
        let mut out = vec![f32::NAN; bits.len()];
        decode(encoding, &bytes, &mut out);
        let ours: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
        assert_eq!(ours, bits, "{}", encoding.name());
    }
}

#[test]
fn sizes_of_quantised_shapes_are_whole_blocks_without_overflow() {
    assert_eq!(Encoding::Q4_K.n_bytes(&[3, 512]), Some(3 * 2 * 144));
    assert_eq!(Encoding::Q4_K.n_bytes(&[3, 255]), None);
    assert_eq!(Encoding::Q8_0.n_bytes(&[usize::MAX, 32]), None);
    assert_eq!(Encoding::F32.n_bytes(&[]), Some(4));
}

#[test]
fn the_reference_crate_and_this_reader_agree() {
    let bytes = small();
    let reference = ::safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let weights = open_bytes(&bytes).unwrap();
    assert_eq!(reference.names().len(), weights.names().count());
    for name in reference.names() {
        let view = reference.tensor(name).unwrap();
        let stored = weights.find(name, view.shape()).unwrap();
        assert_eq!(&weights.files[0][stored.bytes.clone()], view.data(), "{name}");
    }
}

/// What stays quantised on a GPU is decoded there from these bytes.
#[test]
fn blocks_are_read_in_the_order_of_the_named_rows() {
    let (n_heads, shape) = (2, vec![8, 64]);
    let case = |encoding: Encoding, rows: RowOrder| {
        let n_bytes = encoding.n_bytes(&shape).unwrap();
        // Small bytes are finite numbers as scales, too.
        let stored: Vec<u8> = (0..n_bytes).map(|i| (i * 37 % 91) as u8).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), &stored).unwrap();
        let tensor = StoredTensor { rows, ..StoredTensor::as_named(0..n_bytes, shape.clone(), encoding) };
        let files = vec![Arc::new(MappedFile::open(file.path()).unwrap())];
        Weights::new("a test".into(), files, [("a".to_owned(), tensor)].into())
    };
    for rows in [RowOrder::AsNamed, RowOrder::RotaryPairs { n_heads }] {
        let (mut expected, mut got) = (vec![0.0; 512], vec![0.0; 512]);
        let weights = case(Encoding::Q5_0, rows);
        weights.read_f32("a", &shape, &mut expected).unwrap();
        decode(Encoding::Q5_0, &weights.read_blocks("a", &shape).unwrap(), &mut got);
        assert_eq!(got, expected, "{rows:?}");
        let weights = case(Encoding::F16, rows);
        weights.read_f32("a", &shape, &mut expected).unwrap();
        decode(Encoding::Bf16, &weights.read_blocks("a", &shape).unwrap(), &mut got);
        let rounded: Vec<f32> = expected.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect();
        assert_eq!(got, rounded, "{rows:?}");
        assert!(weights.read_blocks("a", &[64, 8]).is_err());
    }
}
