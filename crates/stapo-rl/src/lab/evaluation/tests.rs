use super::*;
use serde_json::json;
use stapo_core::record::FileHash;
use stapo_core::{ProgramEnd, ProgramRun};
use stapo_model::{CpuOptions, Device};

fn builtin() -> LoadedModel {
    let device = Device::cpu(CpuOptions { threads: 2, ..CpuOptions::from_env().unwrap() });
    LoadedModel::open(&crate::plan::config::ModelSource::Builtin, &device).unwrap()
}

fn slice(name: &str, n_questions: usize, n_samples: usize) -> Benchmark {
    let mut benchmark =
        Benchmark::open(name, std::path::Path::new("nowhere"), QuestionStyle::default()).unwrap();
    benchmark.problems.truncate(n_questions);
    benchmark.n_samples = n_samples;
    benchmark
}

fn all(model: &LoadedModel, benchmarks: &[Benchmark], decoding: &str, done: &Done) -> Vec<EvalRecord> {
    let mut records = Vec::new();
    let decodings = Decoding::parse(decoding).unwrap();
    let style = PromptStyle::default();
    let sampling = EvalSampling {
        seed: 0,
        max_tokens: 64,
        style: &style,
        kv_bytes: 32 << 20,
        step_rows: 1024,
        share: (0, 1),
        step: None,
        episode: &EpisodeConfig::default(),
    };
    let evaluation = Evaluation { model, benchmarks, decodings: &decodings, sampling, done };
    let take = |event| {
        if let EvalEvent::Finished(record) = event {
            records.push(*record);
        }
        Ok(true)
    };
    evaluation.run(&mut EngineMemory::new(), take).unwrap();
    records.sort_by_key(sample_key);
    records
}

#[test]
fn samples_do_not_depend_on_company_or_interruption() {
    let model = builtin();
    let both = [slice("arithmetic", 6, 3), slice("countdown", 4, 2)];
    let whole = all(&model, &both, "paper", &Done::new());
    assert_eq!(whole.len(), 2 * (6 * 3 + 4 * 2));
    // A key of other parts would give another sample.
    let first = &whole[0];
    assert_eq!(
        (first.benchmark.as_str(), first.decoding.as_str(), first.sample_idx),
        ("arithmetic", "T=0.7 p=0.9", 0)
    );
    assert_eq!([&first.problem_id, &first.text], ["(9+7-7)*6", r"so (16-7)*6, now 9*6, now \boxed{54}"]);
    let alone = all(&model, &both[1..], "0.7:0.9", &Done::new());
    let same: Vec<EvalRecord> =
        whole.iter().filter(|r| r.benchmark == "countdown" && r.decoding == "T=0.7 p=0.9").cloned().collect();
    assert_eq!(alone, same);
    let mut renamed = slice("countdown", 4, 2);
    renamed.name = "other".into();
    let texts = |records: &[EvalRecord]| records.iter().map(|r| r.text.clone()).collect::<Vec<_>>();
    let renamed = all(&model, &[renamed], "0.7:0.9", &Done::new());
    assert_ne!(texts(&renamed), texts(&alone), "the name of a benchmark is part of a sample's key");
    // Every third sample is done.
    let done: Done = whole.iter().step_by(3).map(sample_key).collect();
    let rest = all(&model, &both, "paper", &done);
    let missing: Vec<EvalRecord> = whole.iter().filter(|r| !done.contains(&sample_key(r))).cloned().collect();
    assert_eq!(rest, missing);
}

#[test]
fn a_question_without_room_is_not_answered_and_says_why() {
    let model = builtin();
    let mut benchmark = slice("arithmetic", 2, 2);
    benchmark.problems[0].prompt = "1+".repeat(200);
    let unanswered = benchmark.problems[0].id.clone();
    let mut records = all(&model, &[benchmark], "greedy", &Done::new());
    assert_eq!(records.len(), 4, "the next question is asked");
    records.retain(|record| record.problem_id == unanswered);
    assert_eq!(records.len(), 2);
    assert!(
        records.iter().all(|r| r.verdict == Verdict::NoAnswer && r.reason.contains("400 tokens")),
        "{records:?}"
    );
    let row = &rows(&records).unwrap()[0];
    assert_eq!((row.truncated_share, row.no_answer_share, row.response_tokens_mean), (0.0, 1.0, 0.0));
}

fn record(problem: &str, sample: usize, answer: Option<&str>, verdict: Verdict, cut: bool) -> EvalRecord {
    EvalRecord {
        schema: SCHEMA,
        benchmark: "b".into(),
        decoding: "greedy".into(),
        step: None,
        problem_id: problem.into(),
        reference: "7".into(),
        sample_idx: sample,
        text: String::new(),
        tokens: vec![1; 10],
        n_tokens: 10,
        finish: if cut { Finish::LengthLimit } else { Finish::Stop { token: 0 } },
        answer: answer.map(str::to_owned),
        verdict,
        reason: String::new(),
        program: None,
        episode: None,
        extra: Extra::new(),
    }
}

#[test]
fn tables_count_what_the_records_say() {
    let records = [
        record("x", 0, Some("7"), Verdict::Right, false),
        record("x", 1, Some("7"), Verdict::Right, false),
        record("x", 2, Some("8"), Verdict::Wrong, false),
        record("x", 3, None, Verdict::NoAnswer, true),
        record("y", 0, Some("1"), Verdict::Wrong, false),
        record("y", 1, Some("1"), Verdict::Wrong, false),
        record("y", 2, Some("7"), Verdict::Right, false),
        record("y", 3, Some("??"), Verdict::Unparsable, false),
    ];
    let table = rows(&records).unwrap();
    let row = &table[0];
    assert_eq!(row.n_left_to_grader, 0);
    assert!(serde_json::to_value(row).unwrap().get("n_left_to_grader").is_none());
    let mut undone = records.clone();
    undone[0].text = r"\boxed{3 + 4}".into();
    undone[1].text = r"\boxed{7}".into();
    undone[2].text = r"\boxed{4 + 4}".into();
    let undone = rows(&undone).unwrap();
    assert_eq!((undone[0].n_left_to_grader, undone[0].avg), (1, row.avg), "the score is the rule's");
    assert_eq!(serde_json::to_value(&undone[0]).unwrap()["n_left_to_grader"], 1);
    assert_eq!((table.len(), row.n_questions, row.n_samples), (1, 2, 4));
    assert!((row.avg.value - 0.375).abs() < 1e-12);
    assert_eq!(row.pass.iter().map(|(k, _)| *k).collect::<Vec<_>>(), [1, 2, 4]);
    assert_eq!(row.pass[2].1.value, 1.0);
    assert_eq!(row.maj.unwrap().value, 0.5, "7 wins x, 1 wins y");
    assert_eq!((row.truncated_share, row.no_answer_share, row.unjudged_share), (0.125, 0.125, 0.125));
    let same = compare(&records, &records).unwrap();
    assert_eq!(same[0].paired.difference, 0.0);
    assert!(!same[0].is_detectable());
}

#[test]
fn programs_are_counted_by_how_they_ended_and_have_no_majority() {
    let ends = [ProgramEnd::Passed, ProgramEnd::TimeOut, ProgramEnd::Passed, ProgramEnd::NoProgram];
    let records = ends.map(|end| {
        let verdict = match end {
            ProgramEnd::Passed => Verdict::Right,
            ProgramEnd::TimeOut => Verdict::OverBudget,
            _ => Verdict::NoAnswer,
        };
        let run = ProgramRun {
            source: "x = 1".into(),
            end,
            failing_test: None,
            printed: String::new(),
            cpu_seconds: 0.1,
        };
        EvalRecord {
            program: Some(Box::new(run)),
            text: r"\boxed{3 + 4}".into(),
            ..record("p", 0, None, verdict, false)
        }
    });
    let row = &rows(&records).unwrap()[0];
    let expected = [(ProgramEnd::Passed, 2), (ProgramEnd::TimeOut, 1), (ProgramEnd::NoProgram, 1)];
    assert_eq!(row.programs, Some(expected.into()));
    assert_eq!((row.maj, row.unjudged_share, row.no_answer_share), (None, 0.0, 0.25));
    assert_eq!((row.avg.value, row.n_left_to_grader), (0.5, 0));
}

#[test]
fn decodings_are_read_and_refused() {
    let name = |text: &str| Decoding::parse(text).unwrap().into_iter().map(|d| d.name).collect::<Vec<_>>();
    assert_eq!(name("paper"), ["T=1.0 p=1.0", "T=0.7 p=0.9"]);
    assert_eq!(name("0.6"), ["T=0.6 p=1.0"]);
    for bad in ["hot", "0:1", "1:1.5", "1:0", "nan", "1e-300", "1e300"] {
        assert!(Decoding::parse(bad).unwrap_err().contains("expected paper, greedy"), "{bad}");
    }
}

#[test]
fn unknown_and_absent_benchmarks_name_the_remedy() {
    let open =
        |name: &str| match Benchmark::open(name, std::path::Path::new("nowhere"), QuestionStyle::default()) {
            Ok(_) => panic!("{name}"),
            Err(error) => error.to_string(),
        };
    assert!(open("aime26").contains("one of all, aime24"));
    assert!(open("aime24").contains("stapo fetch benchmarks"));
    assert!(open("questions.jsonl").contains("questions.jsonl"));
}

/// Tables and comparisons against `SciPy`; `tests/goldens/make_evaluation.py` writes the numbers.
#[test]
fn tables_and_comparisons_agree_with_scipy() {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("../../../tests/goldens/evaluation.json")).unwrap();
    let records = |side: &str| -> Vec<EvalRecord> {
        let benchmarks = golden[side].as_object().unwrap().iter();
        let samples = benchmarks.flat_map(|(name, questions)| {
            questions.as_array().unwrap().iter().enumerate().flat_map(move |(question, samples)| {
                let samples = samples.as_array().unwrap().iter().enumerate();
                samples.map(move |(sample, answer)| (name, question, sample, answer.as_str()))
            })
        });
        samples
            .map(|(name, question, sample, answer)| {
                let verdict = match answer {
                    None => Verdict::NoAnswer,
                    Some("7") => Verdict::Right,
                    Some(_) => Verdict::Wrong,
                };
                EvalRecord {
                    benchmark: name.clone(),
                    ..record(&question.to_string(), sample, answer, verdict, false)
                }
            })
            .collect()
    };
    let near = |found: f64, expected: &serde_json::Value, what: &str| {
        let expected = expected.as_f64().unwrap();
        assert!((found - expected).abs() < 1e-12, "{what}: {found}, expected {expected}");
    };
    let (a, b) = (records("a"), records("b"));
    let table = rows(&a).unwrap();
    assert_eq!(table.len(), golden["rows"].as_object().unwrap().len());
    for row in table {
        let expected = &golden["rows"][&row.benchmark];
        let estimates = row.pass.iter().map(|(k, found)| (found, &expected["pass"][k.to_string()]));
        for (found, expected) in
            estimates.chain([(&row.avg, &expected["avg"]), (row.maj.as_ref().unwrap(), &expected["maj"])])
        {
            let interval = found.interval.unwrap();
            let numbers = [found.value, found.standard_error.unwrap(), interval.low, interval.high];
            for (number, expected) in numbers.into_iter().zip(expected.as_array().unwrap()) {
                near(number, expected, &row.benchmark);
            }
        }
        near(row.no_answer_share, &expected["no_answer_share"], &row.benchmark);
        assert_eq!((row.pass.len(), row.truncated_share), (3, 0.0));
    }
    let compared = compare(&a, &b).unwrap();
    assert_eq!(compared.len(), 3);
    for row in compared {
        let expected = &golden["compared"][&row.benchmark];
        let paired = &row.paired;
        near(row.a, &expected["a"], "a");
        near(row.b, &expected["b"], "b");
        near(paired.difference, &expected["difference"], "difference");
        near(paired.interval.low, &expected["interval"][0], "low");
        near(paired.interval.high, &expected["interval"][1], "high");
        near(paired.p_permutation, &expected["p"], "p");
        near(row.p_adjusted, &expected["p_adjusted"], &row.benchmark);
        assert_eq!(row.is_detectable(), expected["p_adjusted"].as_f64().unwrap() < 0.05);
    }
}

/// What a resumed evaluation says, by the program and device that began it and what it had recorded.
#[test]
fn a_resumed_evaluation_tells_of_another_program_and_refuses_another_device() {
    let inputs = [FileHash { name: "weights".into(), n_bytes: 1, sha256: "a".into() }];
    let writer = crate::run::this_process("2 (new)", "cpu");
    let resumed = |program: &str, device: &str, recorded: &[FileHash]| {
        let plan = json!({"schema": 1, "model": "builtin", "weights": inputs, "benchmarks": [], "data": "d",
            "decodings": [], "n_samples": null, "limit": null, "max_tokens": 8, "template": null, "chat": false,
            "seed": 0, "kv_mib": 1, "inputs": recorded, "device": device, "program": program});
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("eval");
        drop(EvalFolder::create(&path, &serde_json::from_value(plan).unwrap(), &writer).unwrap());
        let resumed = InterruptedEval::open(&path).unwrap().resume(&inputs, "cpu", false, &writer);
        resumed.map(|(_, _, _, warnings)| warnings).map_err(|error| error.to_string())
    };
    assert_eq!(resumed("2 (new)", "cpu", &inputs), Ok(vec![]));
    assert_eq!(resumed("", "", &inputs), Ok(vec![]));
    let warning = "the evaluation was begun by stapo 1 (old), this is stapo 2 (new)".to_string();
    assert_eq!(resumed("1 (old)", "cpu", &inputs), Ok(vec![warning]));
    let said = resumed("2 (new)", "cuda", &inputs).unwrap_err();
    assert!(said.contains("device: was cuda, is cpu"), "{said}");
    let warnings = resumed("2 (new)", "cpu", &[]).unwrap();
    assert!(warnings.len() == 1 && warnings[0].contains("recorded only the weights"), "{warnings:?}");
    let other = [FileHash { sha256: "b".into(), ..inputs[0].clone() }];
    let said = resumed("2 (new)", "cpu", &other).unwrap_err();
    assert!(said.contains("weights: was b, is a"), "{said}");
}

#[test]
fn questions_of_one_side_alone_are_counted_and_left_out() {
    let side = |questions: &[&str]| -> Vec<EvalRecord> {
        let right = |question: &&str| record(question, 0, Some("7"), Verdict::Right, false);
        questions.iter().map(right).collect()
    };
    let compared = compare(&side(&["a", "b", "c", "d"]), &side(&["b", "c", "e"])).unwrap();
    assert_eq!((compared.len(), compared[0].paired.n_questions, compared[0].n_unshared), (1, 2, 3));
    assert!(compare(&side(&["a", "b"]), &side(&["b", "c"])).unwrap().is_empty(), "one shared question");
}

/// The table of `docs/evaluation.md`, which has the questions and samples of the papers.
#[test]
fn known_benchmarks_have_the_questions_and_samples_of_the_documentation() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/evaluation.md");
    let page = std::fs::read_to_string(page).unwrap();
    let table = page.split("## Benchmarks").nth(1).unwrap().split("\n\n").next().unwrap();
    let mut found = Vec::new();
    for line in table.lines().filter(|line| line.starts_with("| `")) {
        let columns: Vec<&str> = line.trim_matches('|').split('|').collect();
        let names: Vec<&str> = columns[0].split('`').skip(1).step_by(2).collect();
        let number = |text: &str| {
            let digits: String = text.trim().chars().take_while(char::is_ascii_digit).collect();
            digits.parse::<usize>().ok()
        };
        let questions = columns[1].split(',').map(number);
        found.extend(names.into_iter().zip(questions).filter_map(|(name, n_questions)| {
            Some((name.to_string(), n_questions?, number(columns[2]).unwrap()))
        }));
    }
    let known: Vec<(String, usize, usize)> =
        KNOWN.iter().map(|known| (known.name.to_string(), known.n_questions, known.n_samples)).collect();
    assert_eq!(found, known);
    assert_eq!(SIX.to_vec(), KNOWN[..6].iter().map(|known| known.name).collect::<Vec<_>>());
    assert!(table.contains(&format!("its rows | {OTHER_SAMPLES} |")));
}
