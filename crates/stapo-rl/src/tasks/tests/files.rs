use super::*;
use std::collections::{HashMap, HashSet};

fn open(path: PathBuf, held_out_share: f64) -> Task {
    Task::open(&TaskSpec::Jsonl(RowsSpec { held_out_share, ..RowsSpec::new(path) })).unwrap()
}

fn one_row(row: &str) -> Problem {
    let folder = tempfile::tempdir().unwrap();
    open(file(folder.path(), "rows.jsonl", row), 1.0).held_out(1).remove(0)
}

/// `n` rows `{"problem": "what is i+i", "answer": 2i}`.
fn many_rows(n: usize) -> String {
    let row = |i: usize| format!("{{\"problem\": \"what is {i}+{i}\", \"answer\": {}}}\n", 2 * i);
    (0..n).map(row).collect::<Vec<_>>().concat()
}

#[test]
fn common_layouts_are_recognised() {
    for (row, id, reference) in [
        (r#"{"id": "a-1", "problem": "1+1?", "answer": "2"}"#, "a-1", "2"),
        (r#"{"id": 7, "problem": "1+1?", "answer": 2}"#, "7", "2"),
        (r#"{"question": "1+1?", "answer": "One and one.\n<<1+1=2>>\n#### 2"}"#, "rows-1", "2"),
        (
            r#"{"problem": "1+1?", "solution": "It is $\\boxed{2}$.", "level": "Level 1", "unique_id": "m/1"}"#,
            "m/1",
            "2",
        ),
        (r#"{"problem": "1+1?", "answer": "2", "solution": "It is $\\boxed{3}$."}"#, "rows-1", "2"),
        (
            r#"{"prompt": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "1+1?"}],
                "reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"index": "v-3"}}"#,
            "v-3",
            "2",
        ),
        (
            r#"{"prompt": [{"role": "user", "content": "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n1+1?\n\nRemember to put your answer on its own line after \"Answer:\"."}],
                "reward_model": {"ground_truth": "2"}, "extra_info": {"index": "u"}}"#,
            "u",
            "2",
        ),
        (r#"{"prompt": "1+1?", "ground_truth": "2"}"#, "rows-1", "2"),
    ] {
        let problem = one_row(&row.replace('\n', " "));
        assert_eq!((problem.id.as_str(), problem.reference.as_str()), (id, reference), "{row}");
        let expected = "1+1?\n\nPlease reason step by step, and put your final answer within \\boxed{}.";
        assert_eq!(problem.prompt, expected, "{row}");
    }
}

#[test]
fn fields_templates_and_rules_can_be_given() {
    let folder = tempfile::tempdir().unwrap();
    let path =
        file(folder.path(), "x.jsonl", r#"{"q": ["a", "b"], "r": {"a.b": 4}, "k": "n1", "hint": "add"}"#);
    let spec = RowsSpec {
        problem_field: Some("q[1]".into()),
        answer_field: Some("k".into()),
        id_field: Some("#row".into()),
        held_out_share: 1.0,
        template: Some("{{ hint }}: {{ problem }} ({{ r['a.b'] }}, {{ id }})".into()),
        verifier: VerifierSpec::Rule(RuleSpec { mode: Mode::Exact, ..RuleSpec::default() }),
        ..RowsSpec::new(path)
    };
    let task = Task::open(&TaskSpec::Jsonl(spec)).unwrap();
    let problem = task.held_out(1).remove(0);
    assert_eq!(problem.prompt, "add: b (4, x-1)");
    assert_eq!(
        verdicts(&task, &[(&problem, r"\boxed{n1}"), (&problem, "N1")]),
        [Verdict::Right, Verdict::Wrong]
    );
}

#[test]
fn an_epoch_is_a_permutation_and_the_next_one_another() {
    let folder = tempfile::tempdir().unwrap();
    for n in [1, 2, 3, 7, 64, 65, 1000] {
        let task = open(file(folder.path(), "rows.jsonl", many_rows(n)), 0.0);
        let epoch = |seed: u64, epoch: u64| -> Vec<String> {
            let positions = epoch * n as u64..(epoch + 1) * n as u64;
            positions.map(|at| task.problem(seed, Split::Train, at).unwrap().id).collect()
        };
        let first = epoch(0, 0);
        assert_eq!(first.iter().collect::<HashSet<_>>().len(), n, "{n} rows");
        assert_eq!(first, epoch(0, 0));
        if n >= 64 {
            assert_ne!(first, epoch(0, 1));
            assert_ne!(first, epoch(1, 0));
            let n_fixed =
                first.iter().enumerate().filter(|(i, id)| **id == format!("rows-{}", i + 1)).count();
            assert!(n_fixed < 10, "{n_fixed} of {n} stay in place");
        }
    }
}

#[test]
fn every_row_reaches_every_place_about_equally_often() {
    let folder = tempfile::tempdir().unwrap();
    let task = open(file(folder.path(), "rows.jsonl", many_rows(5)), 0.0);
    let mut counts: HashMap<(u64, String), u32> = HashMap::new();
    for seed in 0..2000 {
        for at in 0..5 {
            *counts.entry((at, task.problem(seed, Split::Train, at).unwrap().id)).or_default() += 1;
        }
    }
    for (place, count) in &counts {
        assert!((300..500).contains(count), "{place:?}: {count} of 2000, expected about 400");
    }
}

#[test]
fn copies_of_a_problem_are_left_out_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let rows = many_rows(200)
        + "{\"problem\": \" what  is\\n3+3\", \"answer\": 6}\n"
        + "{\"problem\": \"what is 4+4\", \"answer\": 9}\n";
    let task = open(file(folder.path(), "rows.jsonl", rows), 0.2);
    let census = task.census().unwrap();
    assert_eq!((census.n_rows, census.n_duplicates, census.n_conflicts), (202, 2, 1));
    assert_eq!(census.n_train + census.n_held_out, 200);
    assert!((20..60).contains(&census.n_held_out), "{census:?}");
    let held_out: HashSet<String> = task.held_out(1000).into_iter().map(|problem| problem.prompt).collect();
    assert!((0..400).all(|at| !held_out.contains(&task.problem(3, Split::Train, at).unwrap().prompt)));
}

#[test]
fn the_split_does_not_depend_on_order_or_company() {
    let folder = tempfile::tempdir().unwrap();
    let side = |rows: String| -> HashSet<String> {
        let task = open(file(folder.path(), "rows.jsonl", rows), 0.3);
        task.held_out(1000).into_iter().map(|problem| problem.prompt).collect()
    };
    let all = side(many_rows(100));
    let backwards = many_rows(100).lines().rev().collect::<Vec<_>>().join("\n");
    assert_eq!(all, side(backwards));
    assert!(side(many_rows(50)).is_subset(&all));
}

#[test]
fn unreadable_references_are_counted_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let by_letter = |rows: &str| RowsSpec {
        held_out_share: 1.0,
        verifier: VerifierSpec::Rule(RuleSpec { mode: Mode::MultipleChoice, ..RuleSpec::default() }),
        ..RowsSpec::new(file(folder.path(), "rows.jsonl", rows))
    };
    let mixed = "{\"problem\": \"p\", \"answer\": \"B\"}\n{\"problem\": \"q\", \"answer\": \"17\"}\n";
    let task = Task::open(&TaskSpec::Jsonl(by_letter(mixed))).unwrap();
    let census = task.census().unwrap();
    assert_eq!(census.n_unreadable, 1, "{census:?}");
    let first = census.first_unreadable.as_ref().unwrap();
    assert!(first.contains("problem \"rows-2\": reference \"17\""), "{first}");
    let message = refusal(&TaskSpec::Jsonl(by_letter(&many_rows(5))));
    assert!(message.contains("can read none of its references; problem \"rows-1\""), "{message}");
    // An answer that is written as the reference is right, also where neither can be read.
    let formulas = |rows: &str| {
        TaskSpec::Jsonl(RowsSpec {
            held_out_share: 1.0,
            ..RowsSpec::new(file(folder.path(), "rows.jsonl", rows))
        })
    };
    let broken = "{\"problem\": \"p\", \"answer\": \"\\\\frac{\"}\n";
    let whole = "{\"problem\": \"q\", \"answer\": \"\\\\frac{1}{2}\"}\n{\"problem\": \"r\", \"answer\": \"Monday\"}\n";
    let task = Task::open(&formulas(&format!("{whole}{broken}"))).unwrap();
    assert_eq!(task.census().unwrap().n_unreadable, 1);
    let [said] = &task.warnings()[..] else { panic!("{:?}", task.warnings()) };
    assert!(said.starts_with("1 of 3 problems have a reference that the verifier cannot read"), "{said}");
    let message = refusal(&formulas(broken));
    assert!(message.contains("can read none of its references"), "{message}");
}

#[test]
fn a_number_whose_digits_were_lost_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let spec = |answer: &str| {
        let row = format!("{{\"problem\": \"p\", \"answer\": {answer}}}\n");
        TaskSpec::Jsonl(RowsSpec {
            held_out_share: 1.0,
            ..RowsSpec::new(file(folder.path(), "rows.jsonl", row))
        })
    };
    for answer in ["18446744073709551616", "1180591620717411303424", "-2e30"] {
        let said = refusal(&spec(answer));
        assert!(said.contains("not all digits were read") && said.contains("in quotes"), "{answer}: {said}");
    }
    for (answer, reference) in [
        ("18446744073709551615", "18446744073709551615"),
        ("0.5", "0.5"),
        ("\"1180591620717411303424\"", "1180591620717411303424"),
    ] {
        assert_eq!(Task::open(&spec(answer)).unwrap().held_out(1)[0].reference, reference);
    }
}

#[test]
fn rows_without_an_answer_are_dropped_only_when_asked() {
    let folder = tempfile::tempdir().unwrap();
    let rows = many_rows(3) + "{\"problem\": \"p\", \"answer\": \"\"}\n{\"problem\": \"q\"}\n";
    let spec = RowsSpec { held_out_share: 1.0, ..RowsSpec::new(file(folder.path(), "rows.jsonl", rows)) };
    let message = refusal(&TaskSpec::Jsonl(spec.clone()));
    assert!(message.contains("line 4") && message.contains("missing_answers = \"drop\""), "{message}");
    let task =
        Task::open(&TaskSpec::Jsonl(RowsSpec { missing_answers: MissingAnswers::Drop, ..spec })).unwrap();
    let census = task.census().unwrap();
    assert_eq!((census.n_rows, census.n_without_answer, census.n_held_out), (5, 2, 3));
}

#[test]
fn bad_files_are_refused_by_line_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let good = "{\"id\": \"a\", \"problem\": \"p\", \"answer\": \"1\"}\n";
    let deep = format!("{{\"problem\": {}", "[".repeat(100_000));
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"".to_vec(), "holds no problem"),
        (b"\n \n\r\n".to_vec(), "holds no problem"),
        (b"\xff\xfe{\x00".to_vec(), "line 1"),
        (b"PAR1\x00\x00".to_vec(), "parquet"),
        (deep.into_bytes(), "line 1: recursion limit"),
        (format!("{good}not json").into_bytes(), "line 2: expected"),
        (format!("{good}[1, 2]").into_bytes(), "line 2: not a JSON object"),
        (format!("{good}{{\"id\": \"b\", \"problem\": \"q\"}}").into_bytes(), "line 2: reference field \"answer\": no field"),
        (format!("{good}\n{{\"id\": \"b\", \"problem\": \"q\", \"answer\": \" \"}}").into_bytes(), "line 3: reference field"),
        (format!("{good}{{\"id\": \"b\", \"problem\": null, \"answer\": 1}}").into_bytes(), "line 2: problem field"),
        (format!("{good}{{\"id\": \"b\", \"problem\": [1], \"answer\": 1}}").into_bytes(), "message 1 has no content"),
        (format!("{good}{{\"id\": \"a\", \"problem\": \"q\", \"answer\": 1}}").into_bytes(), "is that of line 1"),
        (b"{\"text\": \"q\", \"answer\": 1}".to_vec(), "no field for the problem is recognised"),
        (b"{\"question\": \"q\", \"label\": 1}".to_vec(), "no field for the answer is recognised"),
        (b"{\"question\": \"q\", \"solution\": \"so it is 4\"}".to_vec(), "holds no reference answer"),
        (b"{\"question\": \"q\", \"answer\": \"work ####\"}".to_vec(), "holds no reference answer"),
        (
            b"{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}], \"answer\": 1, \"problem\": null}".to_vec(),
            "line 1: problem field \"prompt\": the last message is of role \"assistant\"",
        ),
        (b"{\"prompt\": [], \"answer\": 1}".to_vec(), "line 1: problem field \"prompt\": empty"),
        (
            b"{\"messages\": [{\"content\": \"a\"}, {\"role\": \"user\", \"content\": \"b\"}], \"answer\": 1}".to_vec(),
            "line 1: problem field \"messages\": message 1 has no role",
        ),
    ];
    for (content, expected) in cases {
        let path = file(folder.path(), "rows.jsonl", &content);
        let message = refusal(&TaskSpec::Jsonl(RowsSpec { held_out_share: 1.0, ..RowsSpec::new(path) }));
        assert!(message.contains(expected), "expected {expected:?} in: {message}");
        assert!(message.contains("rows.jsonl"), "{message}");
    }
}

#[test]
fn missing_files_folders_and_bad_settings_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), "rows.jsonl", many_rows(3));
    let base = || RowsSpec::new(&path);
    for (spec, expected) in [
        (RowsSpec::new(folder.path().join("none.jsonl")), "none.jsonl: No such file"),
        (RowsSpec::new(folder.path()), "is a folder"),
        (RowsSpec { held_out_share: -0.1, ..base() }, "held_out_share: -0.1"),
        (
            RowsSpec { held_out_share: 1e-9, ..base() },
            "held_out_share 0.000000001 of its 3 problems is less than one problem",
        ),
        (RowsSpec { problem_field: Some("a..b".into()), ..base() }, "empty name"),
        (RowsSpec { problem_field: Some("a[".into()), ..base() }, "not closed"),
        (RowsSpec { answer_field: Some("a[x]".into()), ..base() }, "[x]"),
        (RowsSpec { answer_field: Some("reply".into()), ..base() }, "no field \"reply\""),
        (RowsSpec { id_field: Some("uid".into()), ..base() }, "no field \"uid\""),
        (
            RowsSpec { template: Some("{{ question }}".into()), ..base() },
            "variables of problem \"rows-1\": answer, id, problem",
        ),
    ] {
        let message = refusal(&TaskSpec::Jsonl(spec));
        assert!(message.contains(expected), "expected {expected:?} in: {message}");
    }
    let task = open(path, 1.0);
    assert_eq!(task.n_problems(Split::Train), Some(0));
    assert!(
        task.problem(0, Split::Train, 0).unwrap_err().to_string().contains("train split holds no problem")
    );
    let problem = task.held_out(1).remove(0);
    assert!(task.solution(&problem, &Mistakes::NONE).unwrap_err().to_string().contains("the task is a file"));
}

#[test]
fn worked_solutions_of_a_file_are_read_from_the_field_that_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let rows = r#"{"id": "a", "problem": "1+1?", "answer": "2", "work": {"text": "one and one"}}
{"id": "b", "problem": "2+2?", "answer": "4", "work": {"text": "two and two"}}"#;
    let path = file(folder.path(), "x.jsonl", rows);
    let spec = |field: Option<&str>| RowsSpec {
        held_out_share: 1.0,
        solution_field: field.map(str::to_string),
        ..RowsSpec::new(&path)
    };
    let task = Task::open(&TaskSpec::Jsonl(spec(Some("work.text")))).unwrap();
    let solutions: Vec<String> =
        task.held_out(2).iter().map(|problem| task.solution(problem, &Mistakes::NONE).unwrap()).collect();
    assert_eq!(solutions, ["one and one", "two and two"]);
    let without = Task::open(&TaskSpec::Jsonl(spec(None))).unwrap();
    let said = without.solution(&without.held_out(1)[0], &Mistakes::NONE).unwrap_err().to_string();
    assert!(said.contains("solution_field"), "{said}");
    let said = Task::open(&TaskSpec::Jsonl(spec(Some("worked")))).err().unwrap().to_string();
    assert!(said.contains("line 1: solution field \"worked\""), "{said}");
}

/// A row whose prompt is a conversation.
fn conversation_row(turns: &[(&str, &str)]) -> String {
    let messages: Vec<_> =
        turns.iter().map(|(role, content)| serde_json::json!({"role": role, "content": content})).collect();
    serde_json::json!({"prompt": messages, "answer": "4"}).to_string()
}

fn turns(problem: &Problem) -> Vec<(&str, &str)> {
    problem.earlier_turns.iter().map(|turn| (turn.role.as_str(), turn.content.as_str())).collect()
}

#[test]
fn conversations_keep_every_turn_and_their_own_system_message() {
    let folder = tempfile::tempdir().unwrap();
    let whole = [("system", " Be brief. "), ("user", "1+1?"), ("assistant", "2"), ("user", "and 2+2?")];
    let rows = [conversation_row(&whole), conversation_row(&whole[1..]), conversation_row(&whole[3..])];
    let spec = RowsSpec {
        held_out_share: 1.0,
        system: Some("Be kind.".into()),
        template: Some("{{ problem }}".into()),
        ..RowsSpec::new(file(folder.path(), "rows.jsonl", rows.join("\n")))
    };
    let problems = Task::open(&TaskSpec::Jsonl(spec.clone())).unwrap().held_out(9);
    assert!(problems.iter().all(|problem| problem.prompt == "and 2+2?"), "{problems:?}");
    assert_eq!(turns(&problems[0]), whole[..3], "the row's system message stays, as it is");
    assert_eq!(turns(&problems[1]), [("system", "Be kind."), whole[1], whole[2]]);
    assert_eq!(turns(&problems[2]), [("system", "Be kind.")]);
    // A path to the user's message alone names a text.
    let alone = RowsSpec { problem_field: Some("prompt[].content".into()), system: None, ..spec.clone() };
    let message = refusal(&TaskSpec::Jsonl(alone.clone()));
    assert!(message.contains("4 elements, 2 of them the user's"), "{message}");
    let path = file(folder.path(), "last.jsonl", conversation_row(&[whole[0], whole[3]]));
    let problem =
        Task::open(&TaskSpec::Jsonl(RowsSpec { path: path.into(), ..alone })).unwrap().held_out(1).remove(0);
    assert_eq!((problem.prompt.as_str(), turns(&problem)), ("and 2+2?", vec![]));
}

#[test]
fn a_question_is_on_one_side_of_the_split_under_every_system_message() {
    let folder = tempfile::tempdir().unwrap();
    let row = |system: &str, i: usize| {
        conversation_row(&[("system", system), ("user", &format!("what is {i}+{i}"))])
    };
    let side = |system: &str| -> HashSet<String> {
        let rows: Vec<String> = (0..100).map(|i| row(system, i)).collect();
        let task = open(file(folder.path(), "rows.jsonl", rows.join("\n")), 0.3);
        task.held_out(1000).into_iter().map(|problem| problem.prompt).collect()
    };
    assert_eq!(side("Be brief."), side("Be kind."));
    // The same question under two system messages is two problems.
    let both = format!("{}\n{}", row("Be brief.", 1), row("Be kind.", 1));
    assert_eq!(open(file(folder.path(), "both.jsonl", both), 1.0).held_out(9).len(), 2);
}

#[test]
fn the_instruction_of_the_default_template_is_for_rules_alone() {
    let path = PathBuf::from("rows.jsonl");
    let rule = RowsSpec::new(&path);
    assert_eq!(
        rule.template(),
        "{{ problem }}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    );
    let command = VerifierSpec::Command(CommandSpec::new("./judge"));
    assert_eq!(RowsSpec { verifier: command, ..rule.clone() }.template(), "{{ problem }}");
    assert_eq!(RowsSpec { template: Some("x".into()), ..rule }.template(), "x");
}
