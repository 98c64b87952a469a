//! Tests on the real data sets, for machines that have these next to the repository.

use super::*;

fn data() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    if !path.is_dir() {
        println!("skipped: no ../shared/data beside the repository");
        return None;
    }
    Some(path)
}

fn open(path: &Path, held_out_share: f64) -> Task {
    let rows = RowsSpec { held_out_share, missing_answers: MissingAnswers::Drop, ..RowsSpec::new(path) };
    let is_parquet = path.extension().is_some_and(|extension| extension == "parquet");
    let spec = if is_parquet { TaskSpec::Parquet(rows) } else { TaskSpec::Jsonl(rows) };
    Task::open(&spec).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn benchmarks_open_whole() {
    let Some(data) = data() else { return };
    for (name, n_rows) in [
        ("aime24.jsonl", 30),
        ("aime25.jsonl", 30),
        ("aime25.parquet", 30),
        ("amc23.jsonl", 40),
        ("math500.jsonl", 500),
        ("minerva.jsonl", 272),
        ("olympiad.jsonl", 674),
        ("gsm8k.jsonl", 1319),
    ] {
        let task = open(&data.join("benchmarks").join(name), 1.0);
        let census = task.census().unwrap();
        assert_eq!(census.n_rows, n_rows, "{name}");
        assert!(census.n_unreadable * 50 <= n_rows, "{name}: {census:?}");
    }
}

#[test]
fn training_sets_open_and_agree_between_formats() {
    let Some(data) = data() else { return };
    let train = data.join("train");
    for (name, n_rows) in [("gsm8k.jsonl", 7473), ("math.jsonl", 7474)] {
        let task = open(&train.join(name), 0.05);
        let census = task.census().unwrap();
        assert_eq!((census.n_rows, census.n_unreadable), (n_rows, 0));
    }
    let (lines, columns) =
        (open(&train.join("dapo-math-17k.jsonl"), 0.02), open(&train.join("dapo_math_17k.parquet"), 0.02));
    let census = lines.census().unwrap();
    // The file has 17,290 different texts; 102 of these differ from another text by white space alone.
    assert_eq!((census.n_rows, census.n_duplicates), (17_917, 17_917 - 17_188));
    println!("{census:?}");
    let (from_lines, from_columns) = (lines.held_out(usize::MAX), columns.held_out(usize::MAX));
    assert_eq!(from_lines.len(), from_columns.len());
    for (line, column) in from_lines.iter().zip(&from_columns) {
        assert_eq!((&line.prompt, &line.reference), (&column.prompt, &column.reference));
    }
}
