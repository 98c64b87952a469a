//! Files as people have them: formats, compressions, several files, mixtures.

use super::*;
use flate2::write::GzEncoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use std::io::Write;

const LINES: &str =
    "{\"question\": \"1 + 1\", \"answer\": \"2\"}\n\n{\"question\": \"a, b\\nand c\", \"answer\": 7}\n";
const ARRAY: &str =
    "\n [{\"question\": \"1 + 1\", \"answer\": \"2\"},\n {\"question\": \"a, b\\nand c\", \"answer\": 7}]\n";
const TABLE: &str = "question,answer\n1 + 1,2\n\"a, b\nand c\",7\n";

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

fn zstd(text: &str) -> Vec<u8> {
    compress_to_vec(text.as_bytes(), CompressionLevel::Fastest)
}

/// A skippable frame, as parallel compressors write before their data.
fn skippable() -> Vec<u8> {
    [&b"\x5f\x2a\x4d\x18\x03\x00\x00\x00"[..], b"abc"].concat()
}

fn rows(path: impl Into<PathBuf>) -> RowsSpec {
    RowsSpec { held_out_share: 1.0, template: Some("{{ problem }}".into()), ..RowsSpec::new(path) }
}

fn questions(spec: RowsSpec) -> Vec<(String, String)> {
    let task = Task::open(&TaskSpec::File(spec)).unwrap_or_else(|error| panic!("{error}"));
    task.held_out(1000).into_iter().map(|problem| (problem.prompt, problem.reference)).collect()
}

#[test]
fn every_format_gives_the_same_problems() {
    let folder = tempfile::tempdir().unwrap();
    let tabs = "question\tanswer\n1 + 1\t2\n\"a, b\nand c\"\t7\n";
    let marked = format!("\u{feff}{LINES}");
    let halves = LINES.split_at(40);
    let files: Vec<(&str, Vec<u8>)> = vec![
        ("rows.jsonl", LINES.into()),
        ("marked.jsonl", marked.clone().into()),
        ("marked.jsonl.gz", gzip(&marked)),
        ("rows.json", ARRAY.into()),
        ("rows.csv", TABLE.into()),
        ("marked.csv", format!("\u{feff}{TABLE}").into()),
        ("rows.tsv", tabs.into()),
        ("rows.jsonl.gz", gzip(LINES)),
        ("members.jsonl.gz", [gzip(halves.0), gzip(halves.1)].concat()),
        ("rows.jsonl.zst", zstd(LINES)),
        ("frames.jsonl.zst", [skippable(), zstd(halves.0), skippable(), zstd(halves.1)].concat()),
        ("rows.json.zst", zstd(ARRAY)),
        ("rows.csv.gz", gzip(TABLE)),
        ("named_wrongly.txt", ARRAY.into()),
    ];
    let expected = [("1 + 1", "2"), ("a, b\nand c", "7")].map(|(q, a)| (q.to_string(), a.to_string()));
    for (name, content) in files {
        assert_eq!(questions(rows(file(folder.path(), name, content))), expected, "{name}");
    }
}

#[test]
fn bad_files_name_file_row_and_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let cut = |bytes: Vec<u8>| bytes[..bytes.len() - 9].to_vec();
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("rows.json", b"[{\"question\": \"q\", \"answer\": 1}, 2]".to_vec(), "row 2: not a JSON object"),
        ("rows.json", b"[{\"question\": \"q\", \"answer\": 1}, {".to_vec(), "row 2: EOF"),
        (
            "rows.json",
            b"[{\"question\": \"q\", \"answer\": 1}, {\"question\": \"r\"}]".to_vec(),
            "row 2: reference field",
        ),
        ("rows.json", b"[] []".to_vec(), "trailing characters"),
        (
            "rows.csv",
            b"question,answer\na,1\nb,2,3\n".to_vec(),
            "row 2: 3 values, but the first line has 2 names (line 3)",
        ),
        ("rows.csv", b"question,answer\n\xff,1\n".to_vec(), "row 1: "),
        ("rows.csv", b"question,answer\n".to_vec(), "holds no problem"),
        ("rows.jsonl.gz", cut(gzip(LINES)), "rows.jsonl.gz: "),
        ("rows.jsonl.zst", cut(zstd(LINES)), "corrupt Zstandard data"),
        (
            "rows.arrow",
            b"ARROW1\0\0".to_vec(),
            "is an Arrow file, which is not read\nhint: write it as Parquet",
        ),
        ("rows.zip", b"PK\x03\x04".to_vec(), "is a zip archive"),
        (
            "rows.jsonl.xz",
            b"\xfd7zXZ\0".to_vec(),
            "compressed with xz, which is not read\nhint: compress it with gzip or zstd",
        ),
    ];
    for (name, content, expected) in cases {
        let message = refusal(&TaskSpec::File(rows(file(folder.path(), name, content))));
        assert!(message.contains(expected) && message.contains(name), "expected {expected:?} in: {message}");
    }
}

#[test]
fn patterns_and_lists_read_several_files_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let line = |n: u64| format!("{{\"question\": \"q{n}\", \"answer\": {n}}}\n");
    for n in [3, 1, 2] {
        file(folder.path(), &format!("part-{n}.jsonl"), line(n) + &line(10 * n));
    }
    let other = file(folder.path(), "other.csv", "problem,solution\nx,so \\boxed{5}\n");
    let pattern = folder.path().join("part-*.jsonl");
    let answers = |spec: RowsSpec| questions(spec).into_iter().map(|(_, answer)| answer).collect::<Vec<_>>();
    assert_eq!(answers(rows(&pattern)), ["1", "10", "2", "20", "3", "30"]);
    let both = || rows_of(vec![pattern.clone(), other.clone()]);
    assert_eq!(answers(both()), ["1", "10", "2", "20", "3", "30", "5"]);
    assert_eq!(answers(RowsSpec { max_rows: Some(3), ..both() }), ["1", "10", "2", "5"]);
    assert!(
        refusal(&TaskSpec::File(rows(folder.path().join("none-*.jsonl"))))
            .contains("no file has a name of this")
    );
    assert!(refusal(&TaskSpec::File(RowsSpec { max_rows: Some(0), ..both() })).contains("max_rows: 0 rows"));

    let read =
        TaskSpec::read("task", toml::toml! { kind = "file" path = ["a.csv", "b/*.json"] weights = [2, 1] });
    let TaskSpec::File(spec) = read.unwrap() else { panic!("a file") };
    assert_eq!((spec.path.entries().len(), &spec.weights[..]), (2, &[2.0, 1.0][..]));
    let refused = TaskSpec::read("task", toml::toml! { kind = "file" path = 3 }).unwrap_err().to_string();
    assert!(refused.contains("a path, a pattern, or a list of these"), "{refused}");
}

fn rows_of(paths: Vec<PathBuf>) -> RowsSpec {
    RowsSpec { path: paths.into_iter().collect(), ..rows("") }
}

#[test]
fn rows_of_files_with_one_name_have_different_ids() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["a", "b"].map(|name| {
        let inside = folder.path().join(name);
        std::fs::create_dir(&inside).unwrap();
        file(&inside, "train.jsonl", format!("{{\"question\": \"{name}\", \"answer\": 1}}\n"))
    });
    let task = Task::open(&TaskSpec::File(rows_of(paths.to_vec()))).unwrap();
    let ids: Vec<String> = task.held_out(9).into_iter().map(|problem| problem.id).collect();
    assert_eq!(ids, ["train-1", "train.2-1"]);
}

#[test]
fn a_mixture_has_its_weights_in_every_block_and_covers_each_source() {
    let folder = tempfile::tempdir().unwrap();
    let source = |name: &str, n_rows: usize| {
        let line = |n| format!("{{\"id\": \"{name}{n}\", \"question\": \"{name} {n}\", \"answer\": {n}}}\n");
        file(folder.path(), &format!("{name}.jsonl"), (0..n_rows).map(line).collect::<String>())
    };
    let paths = vec![source("small", 10), source("large", 5000)];
    let spec = |weights: &[f64]| {
        let spec = RowsSpec { weights: weights.to_vec(), held_out_share: 0.0, ..rows_of(paths.clone()) };
        TaskSpec::File(spec)
    };
    let task = Task::open(&spec(&[3.0, 1.0])).unwrap();
    let draw = |seed: u64, from: u64| -> Vec<String> {
        (from..from + 1000).map(|at| task.problem(seed, Split::Train, at).unwrap().id).collect()
    };
    let first = draw(7, 0);
    let small: Vec<&String> = first.iter().filter(|id| id.starts_with("small")).collect();
    assert_eq!(small.len(), 750);
    // 75 whole epochs of the small source.
    for n in 0..10 {
        assert_eq!(small.iter().filter(|id| **id == &format!("small{n}")).count(), 75, "small{n}");
    }
    let is_large = |id: &&String| id.starts_with("large");
    let large: std::collections::HashSet<String> =
        (0..20).flat_map(|block| draw(7, 1000 * block)).filter(|id| is_large(&id)).collect();
    assert_eq!(large.len(), 5000, "the first epoch of the large source has each of its problems once");
    assert_eq!(draw(7, 0), first);
    assert_ne!(draw(8, 0), first);

    assert!(refusal(&spec(&[1.0])).contains("1 weights for 2 entries of path"));
    assert!(refusal(&spec(&[1.0, 0.0])).contains("0 is no weight"));
    assert!(refusal(&spec(&[1e6, 1.0])).contains("less than a thousandth"));
}

#[test]
fn conversations_of_sharegpt_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let row = |last: &str| {
        format!(
            "{{\"conversations\": [{{\"from\": \"system\", \"value\": \"be brief\"}}, {{\"from\": \"human\", \"value\": \"hi\"}}, {{\"from\": \"gpt\", \"value\": \"hello\"}}, {{\"from\": \"{last}\", \"value\": \"1 + 1?\"}}], \"answer\": 2}}"
        )
    };
    let spec = rows(file(folder.path(), "chat.jsonl", row("human")));
    let problem = Task::open(&TaskSpec::File(spec)).unwrap().held_out(1).remove(0);
    let roles: Vec<&str> = problem.earlier_turns.iter().map(|turn| turn.role.as_str()).collect();
    assert_eq!((problem.prompt.as_str(), &roles[..]), ("1 + 1?", &["system", "user", "assistant"][..]));
    let message = refusal(&TaskSpec::File(rows(file(folder.path(), "chat.jsonl", row("martian")))));
    assert!(message.contains("message 4 is from \"martian\", expected one of human, user, gpt"), "{message}");
}
