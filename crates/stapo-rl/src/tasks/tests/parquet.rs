use super::*;
use ::parquet::basic::Compression;
use ::parquet::data_type::{ByteArray, ByteArrayType};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use std::sync::Arc;

const SCHEMA: &str = "message schema {
  optional group prompt (LIST) {
    repeated group list { optional group element { optional binary content (UTF8); optional binary role (UTF8); } }
  }
  optional group reward_model { optional binary ground_truth (UTF8); }
  optional binary unmarked;
}";

/// Rows in verl's layout with one user message each; the reference of row i is i.
fn verl_file(path: &Path, n_rows: usize, compression: Compression) {
    let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut writer =
        SerializedFileWriter::new(std::fs::File::create(path).unwrap(), schema, properties).unwrap();
    let text = |make: &dyn Fn(usize) -> String| -> Vec<ByteArray> {
        (0..n_rows).map(|i| ByteArray::from(make(i).as_str())).collect()
    };
    let columns = [
        (text(&|i| format!("problem {i}")), 4, true),
        (text(&|_| "user".into()), 4, true),
        (text(&|i| i.to_string()), 2, false),
        (text(&|i| format!("plain {i}")), 1, false),
    ];
    let mut group = writer.next_row_group().unwrap();
    for (values, definition, is_repeated) in columns {
        let mut column = group.next_column().unwrap().unwrap();
        let definitions = vec![definition; n_rows];
        let repetitions = vec![0; n_rows];
        let repetitions = is_repeated.then_some(&repetitions[..]);
        column.typed::<ByteArrayType>().write_batch(&values, Some(&definitions), repetitions).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

fn spec(path: &Path) -> TaskSpec {
    TaskSpec::Parquet(RowsSpec { held_out_share: 1.0, ..RowsSpec::new(path) })
}

#[test]
fn nested_rows_are_read_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("verl.parquet");
    for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY] {
        verl_file(&path, 300, compression);
        let problems = Task::open(&spec(&path)).unwrap().held_out(1000);
        assert_eq!(problems.len(), 300);
        assert_eq!((problems[299].id.as_str(), problems[299].reference.as_str()), ("verl-300", "299"));
        assert!(problems[7].prompt.starts_with("problem 7\n"));
    }
    let unmarked = RowsSpec {
        problem_field: Some("unmarked".into()),
        template: Some("{{ problem }} {{ prompt[0].role }}".into()),
        held_out_share: 1.0,
        ..RowsSpec::new(&path)
    };
    assert_eq!(Task::open(&TaskSpec::Parquet(unmarked)).unwrap().held_out(1)[0].prompt, "plain 0 user");
}

/// Files that pyarrow and polars wrote; `tests/files/make.py` made them.
fn peer_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files").join(name)
}

#[test]
fn files_of_pyarrow_and_polars_are_read_with_every_codec() {
    for name in ["zstd", "gzip", "lz4", "snappy", "zstd_v2", "polars"] {
        let path = peer_file(&format!("{name}.parquet"));
        let note = RowsSpec {
            template: Some("{{ note }}{{ problem }}".into()),
            held_out_share: 1.0,
            ..RowsSpec::new(&path)
        };
        let problems =
            Task::open(&TaskSpec::File(note)).unwrap_or_else(|error| panic!("{error}")).held_out(1000);
        assert_eq!(problems.len(), 300, "{name}");
        assert_eq!(problems[299].reference, "299", "{name}");
        let words = "the same words again and again 5 ".repeat(4);
        assert_eq!(problems[299].prompt, format!("{words}problem 299"), "{name}");
    }
    let message = refusal(&spec(&peer_file("brotli.parquet")));
    assert!(
        message.contains("BROTLI") && message.contains("write the file with zstd or snappy"),
        "{message}"
    );
}

#[test]
fn corrupt_pages_of_every_codec_are_errors_not_crashes() {
    let folder = tempfile::tempdir().unwrap();
    for codec in ["zstd", "gzip", "lz4"] {
        let whole = std::fs::read(peer_file(&format!("{codec}.parquet"))).unwrap();
        let path = folder.path().join("rows.parquet");
        let mut n_refused = 0;
        for at in (4..whole.len()).step_by(397) {
            let mut flipped = whole.clone();
            flipped[at] ^= 0xff;
            std::fs::write(&path, &flipped).unwrap();
            if let Err(error) = Task::open(&spec(&path)) {
                n_refused += 1;
                assert!(error.to_string().contains("hint: "), "{codec}, byte {at}: {error}");
            }
        }
        assert!(n_refused > 0, "{codec}");
    }
}

#[test]
fn corrupt_files_are_errors_not_crashes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("verl.parquet");
    verl_file(&path, 5, Compression::SNAPPY);
    let whole = std::fs::read(&path).unwrap();
    for cut in (0..whole.len()).step_by(19) {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let message = refusal(&spec(&path));
        assert!(message.contains("verl.parquet"), "{message}");
    }
    for at in (0..whole.len()).step_by(3) {
        let mut flipped = whole.clone();
        flipped[at] ^= 0xff;
        std::fs::write(&path, &flipped).unwrap();
        if let Err(error) = Task::open(&spec(&path)) {
            assert!(error.to_string().contains("hint: "), "byte {at}: {error}");
        }
    }
}

#[test]
fn a_text_file_is_not_parquet() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), "rows.parquet", "{\"problem\": \"p\", \"answer\": 1}\n");
    assert!(refusal(&spec(&path)).contains("no other file may be called .parquet"));
    assert!(refusal(&spec(folder.path())).contains("is a folder"));
}
